"""`llmscale data`: clean, prepare, train-tokenizer, inspect, verify, which."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.cli import data_clean, data_inspect, data_source, data_which
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.config.user_paths import check_output_folder
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:  # the real imports wait until a command runs: --help must not load torch
    from collections.abc import Iterator

    from llmscale.data.prepare.output_folder import Destination
    from llmscale.data.prepare.prepare_set import Prepared
    from llmscale.data.prepare.sources.source import Source


def add_parser(subparsers: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `data` with its own subcommands."""
    parser = subparsers.add_parser("data")
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    data_clean.add_parser(commands)
    _add_prepare(commands)
    _add_train_tokenizer(commands)
    data_inspect.add_parsers(commands)
    data_which.add_parser(commands)


def _add_prepare(commands: argparse._SubParsersAction[FlagParser]) -> None:
    parser = commands.add_parser("prepare", help="tokenise text into MDS shards with a manifest")
    data_source.add_arguments(parser)
    parser.add_argument(
        "--out",
        type=flag_type.path_or_url,
        required=True,
        metavar="DIR|URL",
        help="folder of the prepared set, or s3://BUCKET/PATH (gs, az, hf://datasets/ORGANISATION/NAME), where shards "
        "are uploaded as they become whole",
    )
    parser.add_argument(
        "--work-dir",
        type=flag_type.path,
        metavar="DIR",
        help="where a set for a URL is prepared: takes the tokens once, while they are shuffled (default: "
        "~/.cache/llmscale/prepare)",
    )
    _add_token_arguments(parser)
    _add_sample_arguments(parser)
    _add_shard_arguments(parser)
    data_source.add_max_rejected(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace a set that was prepared differently")
    parser.needs = [
        *parser.needs,
        Need("work_dir", "an --out that is a URL", lambda args: "://" in args.out),
        Need("seed", "with --no-shuffle and --val-fraction 0", lambda args: not args.no_shuffle or args.val_fraction),
    ]
    parser.set_defaults(handler=_prepare)


def _add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=flag_type.path_or_url,
        default="gpt2",
        metavar="gpt2|bytes|FILE.tiktoken|FOLDER|NAME",
        help="FOLDER holds a model's tokenizer.json, for example to continue its pre-training; NAME is a model's on "
        "the Hugging Face Hub, ORGANISATION/NAME[@REVISION] (default: gpt2)",
    )
    parser.add_argument(
        "--eot-token",
        type=flag_type.name,
        metavar="TEXT",
        help="the model's token that ends a document, for example '<|end_of_text|>' (default: as its files say)",
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="special tokens written out in a text become those tokens (default: they are text)",
    )


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seq-len",
        type=flag_type.whole(1, limits.MAX_SEQ_LEN),
        default=1024,
        metavar="T",
        help="context length in tokens (default: 1024)",
    )
    parser.add_argument(
        "--val-fraction",
        type=flag_type.number(0, 0.5),
        default=0.01,
        metavar="F",
        help="share of documents for validation (default: 0.01)",
    )
    parser.add_argument(
        "--seed",
        type=flag_type.whole(0, limits.MAX_SEED),
        default=0,
        help="decides which documents those are, and the shuffle (default: 0)",
    )
    parser.add_argument(
        "--no-shuffle",
        action="store_true",
        help="leave the training windows in the order of the text (default: every shard is a random part of it)",
    )


def _add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard-mb",
        type=flag_type.whole(1, 4095),
        default=64,
        metavar="MIB",
        help="largest shard in MiB (default: 64)",
    )
    parser.add_argument("--compression", choices=["zstd"], default="", help="compress the shards (default: not)")
    parser.add_argument(
        "--workers",
        type=flag_type.whole(1, limits.MAX_WORKERS),
        metavar="N",
        help="tokenising threads (default: one per core)",
    )
    parser.add_argument(
        "--encoder",
        choices=["auto", "gigatoken", "reference"],
        default="auto",
        help="what encodes: gigatoken, the tokenizer's own library, or auto, the first where it gives the same tokens "
        "(default: auto)",
    )


def _add_train_tokenizer(commands: argparse._SubParsersAction[FlagParser]) -> None:
    parser = commands.add_parser("train-tokenizer", help="train a byte-level BPE tokenizer on text")
    data_source.add_arguments(parser)
    parser.add_argument("--out", type=flag_type.path, required=True, metavar="DIR", help="folder of the tokenizer")
    parser.add_argument(
        "--vocab-size",
        type=flag_type.whole(257, limits.MAX_VOCAB),
        default=32768,
        metavar="N",
        help="tokens to learn (default: 32768)",
    )
    parser.set_defaults(handler=_train_tokenizer)


def _prepare(args: argparse.Namespace) -> int:
    from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
    from llmscale.data.tokenizers.hugging_face import HuggingFaceTokenizer
    from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

    options = PrepareOptions(
        seq_len=args.seq_len,
        val_fraction=args.val_fraction,
        seed=args.seed,
        shuffle=not args.no_shuffle,
        shard_bytes=args.shard_mb << 20,
        compression=args.compression,
        parse_special=args.parse_special_tokens,
    )
    args.out = _check_out(args)
    source = data_source.open_source_of(args)
    destination = _open_destination(args)
    tokenizer = load_tokenizer(args.tokenizer, eot_token=args.eot_token or "", parse_special=args.parse_special_tokens)
    start_s = time.monotonic()
    prepared = prepare(
        source,
        destination,
        tokenizer,
        options,
        num_workers=args.workers,
        encoder=args.encoder,
        max_rejected=args.max_rejected,
    )
    elapsed_s = time.monotonic() - start_s
    data_inspect.print_manifest(prepared.manifest, str(args.out))
    if prepared.reused:
        print_visible("Already prepared: nothing to do.")
    else:
        num_tokens = sum(split.num_tokens for split in prepared.manifest.splits.values())
        print_visible(f"Prepared in {elapsed_s:.1f} s, {num_tokens / elapsed_s:,.0f} tokens/s.")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            print_visible(tokenizer.describe_ends(), file=sys.stderr)
        for line in _choices(prepared, source, destination.beside, args.val_fraction):
            print_visible(line, file=sys.stderr)
    return 0


def _check_out(args: argparse.Namespace) -> Path | str:
    """A folder, or a URL as text. Raises DataError before anything is opened."""
    from llmscale.data.storage.schemes import check_not_forgotten, check_out_url, is_url

    if not is_url(args.out):
        check_not_forgotten(args.out, "--out")
        check_output_folder("--out", Path(args.out))
        return Path(args.out)
    if args.work_dir is not None:
        check_output_folder("--work-dir", args.work_dir)
    return check_out_url(args.out)


def _open_destination(args: argparse.Namespace) -> Destination:
    """Raises DataError: credentials missing, no such bucket."""
    from llmscale.data.prepare.output_folder import LocalFolder
    from llmscale.data.prepare.remote_set import DEFAULT_WORK_DIR, RemoteSet

    if isinstance(args.out, str):
        return RemoteSet(args.out, work_dir=args.work_dir or DEFAULT_WORK_DIR, overwrite=args.overwrite)
    return LocalFolder(args.out, overwrite=args.overwrite)


def _choices(prepared: Prepared, source: Source, beside: Path, val_fraction: float) -> Iterator[str]:
    """What was decided and not asked for."""
    yield from data_source.describe_reading(source.passed_over, beside, prepared.num_rejected, prepared.num_cut)
    splits = prepared.manifest.splits
    num_tokens = sum(split.num_tokens for split in splits.values())
    if "val" not in splits:
        window = prepared.manifest.seq_len + 1
        why = f"the text is too short, {num_tokens:,} tokens: training and validation need a window of {window:,} each"
        yield f"No validation split: {why if val_fraction else 'as --val-fraction 0 says'}."
    elif prepared.note:
        yield prepared.note
    elif splits["val"].num_tokens > max(2 * val_fraction, val_fraction + 0.02) * num_tokens:
        yield (
            f"Validation has {splits['val'].num_tokens / num_tokens:.0%} of the tokens, not {val_fraction:.0%}: "
            f"{splits['val'].num_documents:,} of {sum(split.num_documents for split in splits.values()):,} documents, "
            "which are not cut. Another --seed chooses others."
        )


def _train_tokenizer(args: argparse.Namespace) -> int:
    from llmscale.data.tokenizers.train_tokenizer import train_tokenizer

    check_output_folder("--out", args.out)
    tokenizer = train_tokenizer(data_source.open_source_of(args), args.out, args.vocab_size)
    print_visible(f"Trained {tokenizer.vocab_size:,} tokens into {args.out} (sha256 {tokenizer.sha256[:12]}).")
    return 0
