"""`llmscale data`: clean, prepare, train-tokenizer, inspect, verify, which."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli import data_clean, data_prepare
from llmscale.cli.data_prepare import print_manifest, print_visible_fitting
from llmscale.cli.flags import add_own_data
from llmscale.config.command_line import FlagParser, Need, flag, path_or_url, run_place, whole_number
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.progress import show_progress
from llmscale.terminal.status_line import show_if_slow
from llmscale.untrusted.terminal import make_visible, print_visible

if TYPE_CHECKING:  # imported when a command runs: --help must not load torch
    from collections.abc import Iterator

    from llmscale.data.shards.cache import SetLocation
    from llmscale.data.shards.manifest import Manifest
    from llmscale.data.shards.token_shards import Marked
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.training.sample_stream import StepSample

_EXAMPLE_CHARACTERS = 400
_TEXT_CHARACTERS = 100


def add_parser(subparsers: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `data` with its subcommands."""
    parser = subparsers.add_parser("data")
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    data_clean.add_parser(commands)
    data_prepare.add_prepare(commands)
    data_prepare.add_train_tokenizer(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_which(commands)


def _add_inspect(commands: argparse._SubParsersAction[FlagParser]) -> None:
    text = "describe a dataset, with a few decoded samples"
    parser = commands.add_parser("inspect", help=text, example="llmscale data inspect data/mine")
    parser.add_argument("folder", type=path_or_url, help="the dataset, a folder or a URL")
    flag(parser, "--samples N", "samples to decode per split", whole_number(0, 10_000), 2)
    text = "samples per split, from eight shards, in which copies, undecodable text and lengths are counted"
    flag(parser, "--windows N", text, whole_number(1, 10_000_000), 2000)
    parser.set_defaults(handler=_inspect)


def _add_verify(commands: argparse._SubParsersAction[FlagParser]) -> None:
    text = "check the hash of every shard; exit status 1 if one is damaged"
    parser = commands.add_parser("verify", help=text, example="llmscale data verify data/mine")
    parser.add_argument("folder", type=path_or_url, help="the dataset, a folder or a URL")
    parser.set_defaults(handler=_verify)


def _add_which(commands: argparse._SubParsersAction[FlagParser]) -> None:
    text = "list the samples of a step: dataset, shard, index, text"
    example = "llmscale data which runs/default --step 100"
    parser = commands.add_parser("which", help=text, example=example)
    parser.add_argument("run", type=run_place, metavar="RUN|CHECKPOINT", help="run folder, or one checkpoint")
    add_own_data(parser)
    flag(parser, "--step N", "the step, as printed in the log", whole_number(1, limits.MAX_STEPS), required=True)
    flag(parser, "--samples K", "samples to show", whole_number(0, limits.MAX_BATCH), 16)
    flag(parser, "--json", "print one JSON object per sample of the step, with the complete text")
    parser.needs = [Need("samples", "with --json", lambda args: not args.json)]
    parser.set_defaults(handler=_which)


def _inspect(args: argparse.Namespace) -> int:
    from llmscale.data.shards.cache import fetch_tokenizer, open_set
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer

    location = open_set(args.folder)
    fetch_tokenizer(location)
    tokenizer = load_set_tokenizer(location.folder, location.manifest)
    print_manifest(location.manifest, args.folder)
    for split in location.manifest.splits:
        _print_statistics(location, split, tokenizer, args.windows)
    for split in location.manifest.splits:
        _print_examples(location, split, tokenizer, args.samples)
    return 0


def _print_statistics(location: SetLocation, split: str, tokenizer: Tokenizer, num_windows: int) -> None:
    from llmscale.data.set_statistics import choose_windows, document_lengths, draw_lengths, read_statistics
    from llmscale.data.shards.token_shards import TokenShards

    manifest = location.manifest
    shards = TokenShards(location, split)
    if not len(shards):
        return
    with show_if_slow(f"reading samples of {split}"):
        statistics = read_statistics(shards, choose_windows(shards.samples_per_shard, num_windows), tokenizer.decode)
    most = ""
    if statistics.most_copied is not None:
        most = ", of sample {:,} alone {:,}".format(*statistics.most_copied)
    print()
    print_visible_fitting(
        f"{split}, {statistics.num_windows:,} of {len(shards):,} samples: {statistics.num_copies:,} are copies of "
        f"another{most}; {statistics.num_undecodable:,} hold replacement characters (U+FFFD)"
    )
    if manifest.chat is not None or (split == "train" and manifest.is_shuffled):
        return
    lines = draw_lengths(document_lengths(shards, num_windows, manifest.eot_token))
    if lines:
        print_visible("\n".join([f"{split}, documents by their tokens:", *(f"  {line}" for line in lines)]))


def _print_examples(location: SetLocation, split: str, tokenizer: Tokenizer, num_samples: int) -> None:
    import numpy as np

    from llmscale.data.shards.token_shards import TokenShards

    shards = TokenShards(location, split)
    if num_samples:
        ids = np.unique(np.linspace(0, len(shards) - 1, num_samples).astype(np.int64))
    else:
        ids = np.empty(0, int)
    for sample_id, window in zip(ids, shards.read_marked(ids), strict=True):
        text = _decode_documents(window, tokenizer, location.manifest)
        most = _EXAMPLE_CHARACTERS * (5 if location.manifest.chat else 1)
        if len(text) > most:
            more = f" ... ({len(text):,} characters)"
        else:
            more = ""
        excerpt = text[:most] + more
        print_visible(f"\n--- {split} sample {sample_id} ---\n{excerpt}")


def _decode_documents(window: Marked, tokenizer: Tokenizer, manifest: Manifest) -> str:
    """Decode marked tokens, with a separate line at the end of each document, and targets of conversations in >> <<."""
    import numpy as np

    from llmscale.data.shards.token_shards import are_targets, ids_of

    ids = ids_of(window)
    targets = are_targets(window)
    end = manifest.eot_token
    if manifest.chat is None:
        breaks = np.flatnonzero(ids == end)
        return "\n[end of document]\n".join(
            tokenizer.decode(part[part != end].tolist()) for part in np.split(ids, breaks)
        )
    others = np.flatnonzero((ids != end) | targets)
    # The first end-of-text token after the last conversation is its end.
    length = min(len(ids), others[-1] + 2 if len(others) else 0)
    runs = np.split(np.arange(length), np.flatnonzero(targets[1:length] != targets[: length - 1]) + 1)
    texts = [tokenizer.decode(ids[run].tolist()) for run in runs]
    marked = "".join(f">>{text}<<" if targets[run[0]] else text for run, text in zip(runs, texts, strict=True))
    left = len(ids) - length
    return marked + (f"\n[{left} tokens of padding]" if left else "")


def _verify(args: argparse.Namespace) -> int:
    """Read every shard; those of a remote dataset are downloaded again, into a small temporary cache."""
    from llmscale.data.shards.cache import open_set
    from llmscale.data.shards.manifest import load_manifest
    from llmscale.data.shards.verify_shards import find_damage
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer

    if "://" in args.folder:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="llmscale-verify-") as cache:
            location = open_set(args.folder, Path(cache))
            return _report(args.folder, location.manifest, _find_remote_damage(location))
    manifest = load_manifest(args.folder)
    folder = Path(args.folder)
    load_set_tokenizer(folder, manifest)
    checked = (
        (file.bytes, damage) for split in manifest.splits for file, damage in find_damage(folder, split, manifest)
    )
    return _report(args.folder, manifest, checked)


def _find_remote_damage(location: SetLocation) -> Iterator[tuple[int, str]]:
    """Yield the bytes of each file, and its damage or an empty string."""
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


def _report(folder: str, manifest: Manifest, files: Iterator[tuple[int, str]]) -> int:
    num_files = num_damaged = num_bytes = 0
    total_bytes = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    # Compressed shards are smaller, so the total is unknown.
    with show_progress("Verifying", None if manifest.compression else total_bytes) as progress:
        for file_bytes, damage in files:
            num_files += 1
            num_bytes += file_bytes
            progress.add(file_bytes)
            if damage:
                num_damaged += 1
                progress.say(make_visible(damage))
    print_visible_fitting(f"{folder}: {num_files} shards, {num_bytes:,} bytes, {num_damaged} damaged.")
    if num_damaged:
        print_visible(
            "To repair the dataset, copy the named shards from an intact copy, or prepare it again from "
            f"{manifest.source} with the same settings and --overwrite: the same input gives the same bytes.",
            file=sys.stderr,
        )
    return 1 if num_damaged else 0


def _which(args: argparse.Namespace) -> int:
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
    from llmscale.training.sample_stream import find_step_samples

    step = find_step_samples(args.run, args.step, args.data)
    fetch_tokenizer(step.sets.first)
    tokenizer = load_set_tokenizer(step.sets.first.folder, step.sets.manifest)
    if args.json:
        for sample in step.samples:
            print(json.dumps(as_plain_sample(sample, tokenizer)))
        return 0
    counts = Counter(sample.set_name for sample in step.samples)
    first = step.samples[0].position
    last = step.samples[-1].position
    print_visible(
        f"step {args.step:,}: {count_nouns(len(step.samples), 'sample')}, {first:,} to {last:,} of the run: "
        + ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    )
    for sample in step.samples[: args.samples]:
        print_visible(describe_sample(sample, tokenizer))
    left = len(step.samples) - args.samples
    if left > 0:
        print(f"and {left:,} more; --samples {len(step.samples)} shows them, --json the complete texts")
    return 0


def describe_sample(sample: StepSample, tokenizer: Tokenizer) -> str:
    """Return a line with a sample's place and the beginning of its text."""
    text = tokenizer.decode(sample.tokens.tolist())
    return (
        f"{sample.set_name} sample {sample.sample_id:,} ({sample.shard} [{sample.index:,}]): "
        f"{text[:_TEXT_CHARACTERS]!r}{' ...' if len(text) > _TEXT_CHARACTERS else ''}"
    )


def as_plain_sample(sample: StepSample, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a sample's place and complete text as JSON values."""
    return {
        "position": sample.position,
        "set": sample.set_name,
        "sample": sample.sample_id,
        "shard": sample.shard,
        "index": sample.index,
        "text": tokenizer.decode(sample.tokens.tolist()),
    }
