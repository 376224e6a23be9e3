"""`llmscale data clean`: remove duplicates and text of low quality."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli.data_prepare import (
    TOKENIZER_METAVAR,
    add_input_flags,
    add_max_rejected,
    open_source_of,
)
from llmscale.config.command_line import FlagParser, Need, flag, local_path, nonblank, number, path_or_url, whole_number
from llmscale.config.user_paths import check_output_folder
from llmscale.errors import DataError
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:  # imported when a command runs
    from collections.abc import Callable, Iterator

    from llmscale.data.clean.annotate import CleanOptions
    from llmscale.data.clean.on_ray import RayCluster
    from llmscale.data.clean.stages import CleanResult, StepReport

#: Copy of the names in llmscale.data.clean.annotate, which --help must not import.
_STEPS = "exact,language,gopher-repetition,gopher-quality,c4,fineweb,near,decontaminate"
#: Steps whose rules remove most code, tables and lists.
_FOR_PROSE = ("gopher-repetition", "gopher-quality", "c4", "fineweb")


def add_parser(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `clean`."""
    parser = commands.add_parser(
        "clean",
        help="remove duplicates, text of low quality or in other languages, and evaluation text",
        example="llmscale data clean --input 'crawl/*.jsonl.zst' --out cleaned",
    )
    add_input_flags(parser)
    flag(parser, "--out DIR", "folder of the result, an --input for prepare", local_path, required=True)
    text = (
        f"what to do, in this order; default: {_STEPS}, without steps that need flags that are not given. The quality "
    )
    flag(parser, "--steps NAME,NAME", f"{text}filters are for prose; for code or lists use exact,near", nonblank)
    _add_step_flags(parser)
    text = "count this tokenizer's tokens at every step, as prepare will; default: only words"
    flag(parser, f"--tokenizer {TOKENIZER_METAVAR}", text, path_or_url)
    text = "the tokenizer's end-of-text token, if its files do not specify it, as for prepare"
    flag(parser, "--eot-token TEXT", text, nonblank)
    text = "text in a file of the result, in MiB before compression"
    flag(parser, "--shard-mb MIB", text, whole_number(1, 4095), 64)
    text = (
        "processes, which do not change the result; default: one per core. ray: tasks at once; default: as many as fit"
    )
    flag(parser, "--workers N", text, whole_number(1, limits.MAX_WORKERS))
    _add_cluster_flags(parser)
    add_max_rejected(parser)
    flag(parser, "--overwrite", "replace text that was cleaned differently")
    parser.needs = [
        *parser.needs,
        Need("min_confidence", "--languages CODE"),
        Need("terminal_punctuation", "c4 in --steps", _does("c4")),
        Need("permutations bands similarity shingle_words seed", "near in --steps", _does("near")),
        Need("max_ngram_documents", "--decontaminate FILE"),
        Need("eot_token", "--tokenizer NAME"),
        Need("tasks executor_options", "--executor ray", lambda args: args.executor != "local"),
    ]
    parser.set_defaults(handler=_clean)


def _does(step: str) -> Callable[[argparse.Namespace], bool]:
    """Return whether the arguments name the step, or leave all to the default."""
    return lambda args: args.steps is None or step in _listed(args.steps)


def _add_cluster_flags(parser: FlagParser) -> None:
    text = "this machine, or a Ray cluster with a shared disk (on Slurm: scripts/slurm/clean.sbatch)"
    flag(parser, "--executor", text, default="local", choices=("local", "slurm", "ray"))
    text = "ray: parts of the input, of complete files; default: one per file, at most 256"
    flag(parser, "--tasks N", text, whole_number(1, 100_000))
    flag(parser, "--executor-options FILE.yaml", "ray: address and memory_gb", local_path)


def _add_step_flags(parser: FlagParser) -> None:
    flag(parser, "--languages CODE,CODE", "language: languages to keep, ISO 639 such as en", nonblank)
    flag(parser, "--min-confidence P", "language: least confidence of the classifier", number(0, 1), 0.5)
    text = "c4: remove lines that do not end in . ? ! \" or ', as C4 did and FineWeb did not"
    flag(parser, "--terminal-punctuation", text)
    flag(parser, "--permutations N", "near: minima of a sketch", whole_number(1, 1024), 128)
    flag(parser, "--bands N", "near: bands of a sketch", whole_number(1, 1024), 25)
    text = "near: least Jaccard similarity of a copy to remove"
    flag(parser, "--similarity S", text, number(0, 1, above=True), 0.6)
    flag(parser, "--shingle-words N", "near: words of a shingle", whole_number(1, 100), 3)
    flag(parser, "--seed N", "near: seed of the permutations", whole_number(0, limits.MAX_SEED), 0)
    text = "decontaminate: evaluation text, JSON or JSON lines (every string in them) or text, also .gz, .zst, ...; "
    flag(parser, "--decontaminate FILE", f"{text}may be repeated", local_path, [], action="append")
    text = "decontaminate: ignore 13-grams that occur in more documents (GPT-3 used 10)"
    flag(parser, "--max-ngram-documents N", text, whole_number(1, 10**12), 10)


def _options(args: argparse.Namespace) -> CleanOptions:
    from llmscale.data.clean.annotate import CleanOptions, TokenizerName, default_steps, parse_steps
    from llmscale.data.clean.duplicates import NearSettings

    languages = tuple(_listed(args.languages or ""))
    steps = default_steps(has_languages=bool(languages), has_evaluation_text=bool(args.decontaminate))
    return CleanOptions(
        steps=parse_steps(_listed(args.steps)) if args.steps is not None else steps,
        languages=languages,
        min_confidence=args.min_confidence,
        terminal_punctuation=args.terminal_punctuation,
        near=NearSettings(args.permutations, args.bands, args.similarity, args.shingle_words, args.seed),
        decontaminate=tuple(args.decontaminate),
        max_ngram_documents=args.max_ngram_documents,
        tokenizer=TokenizerName(args.tokenizer, args.eot_token or "") if args.tokenizer is not None else None,
    )


def _cluster(args: argparse.Namespace) -> RayCluster | None:
    from llmscale.data.clean.on_ray import read_cluster
    from llmscale.data.prepare.sources.file_source import STDIN

    if args.executor == "local":
        return None
    if args.executor == "slurm":
        raise DataError(
            "--executor slurm: on Slurm, Ray runs the tasks. Submit `sbatch --nodes N scripts/slurm/clean.sbatch "
            "--input ... --out ...`, which starts a Ray cluster and the command in it (docs/data.md, On many machines)."
        )
    if STDIN in args.input:
        raise DataError("--executor ray: other machines cannot read this one's standard input. Give files.")
    return read_cluster(args.executor_options, args.tasks, args.workers)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _clean(args: argparse.Namespace) -> int:
    from llmscale.data.clean.run import clean

    check_output_folder("--out", args.out)
    options = _options(args)
    cluster = _cluster(args)
    source = open_source_of(args)
    already_listed = set(source.passed_over)
    start_s = time.monotonic()
    result = clean(
        source,
        args.out,
        options,
        num_workers=args.workers,
        shard_bytes=args.shard_mb << 20,
        overwrite=args.overwrite,
        max_rejected=args.max_rejected,
        cluster=cluster,
    )
    if result.reused:
        print_visible(f"Already cleaned: {args.out}. Nothing to do.")
        return 0
    elapsed_s = time.monotonic() - start_s
    for line in _describe(result, args.tokenizer):
        print_visible(line)
    taken_in = result.taken_in
    print_visible(
        f"Cleaned in {elapsed_s:.1f} s, {taken_in.documents / elapsed_s:,.0f} documents/s, "
        f"{taken_in.bytes / 1e6 / elapsed_s:,.1f} MB/s. Removed text and reasons: {args.out}/removed (zstd -dc)."
    )
    from llmscale.data.prepare.prepare_set import describe_reading

    unread = (source.passed_over | result.passed_over) - already_listed
    for line in describe_reading(unread, args.out, result.mark.num_rejected, result.mark.num_cut):
        print_visible(line, file=sys.stderr)
    return 0


def _describe(result: CleanResult, tokenizer: str | None) -> Iterator[str]:
    """Yield a table of the steps, then the rules that removed most. It counts documents, and words or tokens."""
    unit = "words" if tokenizer is None else "tokens"
    if tokenizer is None:
        explanation = "words between whitespace"
    else:
        explanation = f"tokens of {tokenizer}"
    yield f"{'step':18}{'documents in':>14}{'removed':>12}{'changed':>12}{unit + ' in':>16}{'removed':>16}"
    for report in result.reports:
        taken_in = report.taken_in
        removed = report.removed
        units = getattr(taken_in, unit)
        units_removed = getattr(removed, unit)
        yield (
            f"{report.step:18}{taken_in.documents:14,}{_share(removed.documents, taken_in.documents):>12}"
            f"{report.num_changed:12,}{units:16,}{_share(units_removed, units):>16}"
        )
    units_left = getattr(result.kept, unit)
    units = getattr(result.taken_in, unit)
    yield (
        f"{'left':18}{result.kept.documents:14,}{'':24}{units_left:16,}   {units_left / max(units, 1):.1%} of the "
        f"{explanation}"
    )
    for report in result.reports:
        yield from _describe_removed(report, unit)
    if result.num_ignored_ngrams:
        yield f"{result.num_ignored_ngrams:,} 13-grams of evaluation text occur in too many documents; ignored."
    if result.num_short_items:
        yield f"{result.num_short_items:,} items of evaluation text have fewer than 13 words; not searched for."


def _share(number: int, of: int) -> str:
    return f"{number / of:.1%}" if number else "0"


def _describe_removed(report: StepReport, unit: str) -> Iterator[str]:
    if not report.rules:
        return
    rules = ", ".join(f"{rule} {count:,}" for rule, count in report.rules.most_common(6))
    yield f"{report.step}: {report.removed.documents:,} documents, {getattr(report.removed, unit):,} {unit}; {rules}"
    for line in report.describe_examples():
        yield f"  {line}"
    if report.step in _FOR_PROSE and report.removed.documents > report.taken_in.documents / 2:
        yield "  That is more than half of its input. The step is for English prose: drop it from --steps otherwise."
