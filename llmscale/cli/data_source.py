"""What `llmscale data clean`, `prepare` and `train-tokenizer` read: the flags, and what is said of it afterwards."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from llmscale.config import flag_type
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:  # the real imports wait until a command runs: --help must not load torch
    from collections import Counter
    from collections.abc import Iterator
    from pathlib import Path

    from llmscale.data.prepare.sources.source import Source


def add_arguments(parser: FlagParser) -> None:
    """Add --input and how it is read."""
    parser.needs = [
        Need("hf_split", "an --input hf:NAME", lambda args: any(spec.startswith("hf:") for spec in args.input))
    ]
    parser.add_argument(
        "--input",
        type=flag_type.path_or_url,
        required=True,
        action="append",
        metavar="PATH|PATTERN|URL|-|hf:NAME[:CONFIG]|python-stdlib",
        help="text (one document a file), .jsonl, .parquet or a .tar of them, also .gz/.zst/.bz2/.xz; a folder, or a "
        "pattern such as 'crawl/*.jsonl.zst' or 's3://bucket/crawl/*.jsonl.zst' (gs, az, "
        "hf://datasets/); tokens: .bin of nanoGPT or llm.c, or a folder of MDS shards; stdin; a Hugging "
        "Face data set; or the sources and docs of this Python's standard library; as often as needed, in this order",
    )
    parser.add_argument(
        "--text-field",
        type=flag_type.name,
        metavar="NAME",
        help="field of JSON, Parquet, MDS and hf (default: text)",
    )
    parser.add_argument(
        "--hf-split",
        type=flag_type.name,
        default="train",
        metavar="NAME",
        help="split of a hf: data set (default: train)",
    )
    parser.add_argument(
        "--glob", type=flag_type.name, metavar="PATTERN", help="which of a folder's files, for example '*.py'"
    )
    parser.add_argument("--skip-undecodable", action="store_true", help="skip and count text files that are not UTF-8")


def add_max_rejected(parser: argparse.ArgumentParser) -> None:
    """--max-rejected."""
    parser.add_argument(
        "--max-rejected",
        type=flag_type.whole(0, 10**12),
        default=0,
        metavar="N",
        help="records that are not JSON, not UTF-8, without text or too long: set up to N of them aside in "
        "OUT.rejected.jsonl (default: 0, the first one is an error)",
    )


def open_source_of(args: argparse.Namespace) -> Source:
    """Open what --input names, apart from --out. Raises DataError."""
    from llmscale.data.prepare.sources.open_source import check_apart, check_data_sets, open_source

    check_apart(args.input, args.out)
    source = open_source(
        *args.input,
        text_field=args.text_field,
        hf_split=args.hf_split,
        glob=args.glob,
        skip_undecodable=args.skip_undecodable,
        out=args.out,
    )
    check_data_sets(args.input)
    if source.left_out:
        print_visible(source.left_out, file=sys.stderr)
    return source


def describe_reading(passed_over: Counter[str], out: Path, num_rejected: int, num_cut: int) -> Iterator[str]:
    """What was read otherwise than one might think; `passed_over` are files by suffix."""
    from llmscale.data.prepare.output_folder import rejected_path
    from llmscale.data.prepare.sources.formats import MAX_TEXT_BYTES

    if num_rejected:
        yield f"Set aside {num_rejected:,} records that are no documents: {rejected_path(out)}."
    if num_cut:
        yield f"{num_cut:,} texts of more than {MAX_TEXT_BYTES >> 20} MiB became documents of about 1 MiB."
    if passed_over:
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in passed_over.most_common(6))
        yield f"Passed over {passed_over.total():,} files that are not known to be text ({kinds}); --glob chooses."
