"""`llmscale data inspect` and `llmscale data verify`: what a prepared set holds, and whether it is whole."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config import flag_type
from llmscale.terminal.announcer import SOON_S, announced
from llmscale.terminal.progress import show_progress
from llmscale.terminal.table import output_width, wrap_line
from llmscale.untrusted.terminal import make_visible, print_visible

if TYPE_CHECKING:  # the real imports wait until a command runs: --help must not load torch
    from collections.abc import Iterator

    from llmscale.config.flag_parser import FlagParser
    from llmscale.data.shards.cache import SetLocation
    from llmscale.data.shards.manifest import Manifest
    from llmscale.data.tokenizers.tokenizer import Tokenizer

_EXAMPLE_CHARACTERS = 400


def add_parsers(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add both to `llmscale data`."""
    inspect = commands.add_parser("inspect", help="what a prepared set holds, with a few decoded samples")
    inspect.add_argument("folder", type=flag_type.path_or_url, help="the prepared set, local or a URL")
    inspect.add_argument(
        "--samples",
        type=flag_type.whole(0, 10_000),
        default=2,
        metavar="N",
        help="samples to decode per split (default: 2)",
    )
    inspect.add_argument(
        "--windows",
        type=flag_type.whole(0, 10_000_000),
        default=2000,
        metavar="N",
        help="samples per split, out of eight shards, that copies, undecodable text and lengths are counted over "
        "(default: 2000)",
    )
    inspect.set_defaults(handler=_inspect)
    verify = commands.add_parser("verify", help="check the hash of every shard; exit status 1 when one is damaged")
    verify.add_argument("folder", type=flag_type.path_or_url, help="the prepared set, local or a URL")
    verify.set_defaults(handler=_verify)


def _inspect(args: argparse.Namespace) -> int:
    from llmscale.data.shards.cache import fetch_tokenizer, open_set
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer

    location = open_set(args.folder)
    fetch_tokenizer(location)
    tokenizer = load_set_tokenizer(location.folder, location.manifest)
    print_manifest(location.manifest, args.folder)
    for split in location.manifest.splits:
        if args.windows:
            _print_statistics(location, split, tokenizer, args.windows)
    for split in location.manifest.splits:
        _print_examples(location, split, tokenizer, args.samples)
    return 0


def print_manifest(manifest: Manifest, folder: str) -> None:
    """What a set says of itself, in a few lines."""
    _print_fitting(
        f"{folder}: {manifest.source}, tokenizer {manifest.tokenizer} ({manifest.vocab_size:,} tokens), "
        f"seq_len {manifest.seq_len}, {manifest.dtype}, fingerprint {manifest.fingerprint[:12]}"
    )
    for name, split in manifest.splits.items():
        _print_fitting(
            f"  {name:5} {split.num_documents:,} documents, {split.num_tokens:,} tokens, {split.num_samples:,} "
            f"samples (+ {split.tail_tokens:,} tail tokens), {len(split.shards)} shards, "
            f"{split.bytes_per_token:.2f} bytes/token, unigram entropy {split.unigram_entropy_nats:.3f} nats"
        )
    if not manifest.is_shuffled:
        print("  windows of train in the order of the text")
    if manifest.skipped_documents or manifest.empty_documents:
        print_visible(
            f"  left out: {manifest.skipped_documents} undecodable or no documents, "
            f"{manifest.empty_documents} empty documents"
        )


def _print_fitting(line: str) -> None:
    for part in wrap_line(line, output_width()):
        print_visible(part)


def _print_statistics(location: SetLocation, split: str, tokenizer: Tokenizer, num_windows: int) -> None:
    from llmscale.data.set_statistics import choose_windows, document_lengths, draw_lengths, read_statistics
    from llmscale.data.shards.token_shards import TokenShards

    manifest = location.manifest
    shards = TokenShards(location, split)
    if not len(shards):
        return
    with announced(f"reading samples of {split}", after_s=SOON_S, on_terminal_only=True):
        found = read_statistics(shards, choose_windows(shards.samples_per_shard, num_windows), tokenizer.decode)
    most = f", of sample {found.most_copied[0]:,} alone {found.most_copied[1]:,}" if found.most_copied else ""
    print()
    _print_fitting(
        f"{split}, {found.num_windows:,} of {len(shards):,} samples: {found.num_copies:,} are copies of another"
        f"{most}; {found.num_undecodable:,} hold replacement characters (U+FFFD)"
    )
    if split == "train" and manifest.is_shuffled:
        return
    lines = draw_lengths(document_lengths(shards, num_windows, manifest.eot_token))
    if lines:
        print_visible("\n".join([f"{split}, documents by their tokens:", *(f"  {line}" for line in lines)]))


def _print_examples(location: SetLocation, split: str, tokenizer: Tokenizer, num_samples: int) -> None:
    import numpy as np

    from llmscale.data.shards.token_shards import TokenShards

    shards = TokenShards(location, split)
    ids = np.unique(np.linspace(0, len(shards) - 1, num_samples).astype(np.int64)) if num_samples else np.empty(0, int)
    for sample_id, window in zip(ids, shards.read(ids), strict=True):
        text = _decode_documents(window.tolist(), tokenizer, location.manifest.eot_token)
        more = f" ... ({len(text):,} characters)" if len(text) > _EXAMPLE_CHARACTERS else ""
        shown = text[:_EXAMPLE_CHARACTERS] + more
        print_visible(f"\n--- {split} sample {sample_id} ---\n{shown}")


def _decode_documents(tokens: list[int], tokenizer: Tokenizer, eot_token: int) -> str:
    """The text, with a line of its own where a document ends."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == eot_token:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n[end of document]\n".join(tokenizer.decode(part) for part in parts)


def _verify(args: argparse.Namespace) -> int:
    """Every shard is read; a remote set's go through a cache of a shard or two, so nothing that lies in the usual one
    is believed."""
    from llmscale.data.shards.cache import open_set
    from llmscale.data.shards.manifest import load_manifest

    if "://" in args.folder:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="llmscale-verify-") as cache:
            location = open_set(args.folder, Path(cache))
            return _report(args.folder, location.manifest, _find_remote_damage(location))
    manifest = load_manifest(args.folder)
    return _report(args.folder, manifest, _find_local_damage(Path(args.folder), manifest))


def _find_local_damage(folder: Path, manifest: Manifest) -> Iterator[tuple[int, str]]:
    """Of each file its bytes, and what is wrong with it or an empty string."""
    from llmscale.data.shards.verify_shards import find_damage
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer

    load_set_tokenizer(folder, manifest)
    for split in manifest.splits:
        for file, damage in find_damage(folder, split, manifest):
            yield file.bytes, damage


def _find_remote_damage(location: SetLocation) -> Iterator[tuple[int, str]]:
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.shards.token_shards import TokenShards
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
    from llmscale.errors import DataError, UnreachableError

    fetch_tokenizer(location)
    load_set_tokenizer(location.folder, location.manifest)
    for name, split in location.manifest.splits.items():
        limit_bytes = 2 * max((shard.bytes for shard in split.shards), default=0)
        shards = TokenShards(location, name, cache_limit_bytes=limit_bytes)
        for number, shard in enumerate(split.shards):
            try:
                shards.verify(number)
            except UnreachableError:
                raise
            except DataError as error:
                yield shard.bytes, str(error)
            else:
                yield shard.bytes, ""


def _report(folder: str, manifest: Manifest, found: Iterator[tuple[int, str]]) -> int:
    num_files = num_damaged = num_bytes = 0
    total_bytes = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    # Those of a compressed set are smaller: how much is left is not known.
    with show_progress("Verifying", None if manifest.compression else total_bytes) as progress:
        for file_bytes, damage in found:
            num_files += 1
            num_bytes += file_bytes
            progress.add(file_bytes)
            if damage:
                num_damaged += 1
                progress.say(make_visible(damage))
    _print_fitting(f"{folder}: {num_files} shards, {num_bytes:,} bytes, {num_damaged} damaged.")
    if num_damaged:
        print_visible(
            "To mend it, copy the shards that are named from where the set is whole, or prepare it again from "
            f"{manifest.source} with the same settings and --overwrite: the same input gives the same bytes.",
            file=sys.stderr,
        )
    return 1 if num_damaged else 0
