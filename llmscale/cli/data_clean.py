"""`llmscale data clean`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from llmscale.cli import data_source
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.config.user_paths import check_output_folder
from llmscale.errors import DataError
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:  # imported when a command runs
    from collections.abc import Callable, Iterator

    from llmscale.data.clean.annotate import CleanOptions, TokenizerName
    from llmscale.data.clean.job import CleanResult
    from llmscale.data.clean.on_ray import RayCluster
    from llmscale.data.clean.pipeline import DocumentCounts, StepReport

#: The steps of llmscale.data.clean.annotate, which --help must not import.
_STEPS = "exact,language,gopher-repetition,gopher-quality,c4,fineweb,near,decontaminate"
#: Steps that remove most of code, tables and lists.
_FOR_PROSE = ("gopher-repetition", "gopher-quality", "c4", "fineweb")


def add_parser(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `clean`."""
    parser = commands.add_parser(
        "clean", help="remove duplicates, text of low quality or in other languages, and evaluation text"
    )
    data_source.add_arguments(parser)
    parser.add_argument(
        "--out",
        type=flag_type.path,
        required=True,
        metavar="DIR",
        help="folder of the result, for prepare --input",
    )
    parser.add_argument(
        "--steps",
        type=flag_type.name,
        metavar="NAME,NAME",
        help=f"steps, in this order (default: {_STEPS}, without those whose input is not given). The quality filters "
        "are for prose; for code or lists use exact,near",
    )
    _add_step_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        type=flag_type.path_or_url,
        metavar="gpt2|bytes|FILE.tiktoken|FOLDER|NAME",
        help="count this tokenizer's tokens at every step, as prepare will pack them (default: only words)",
    )
    parser.add_argument(
        "--eot-token",
        type=flag_type.name,
        metavar="TEXT",
        help="the tokenizer's end-of-text token, if its files do not name it, as for prepare",
    )
    parser.add_argument(
        "--shard-mb",
        type=flag_type.whole(1, 4095),
        default=64,
        metavar="MIB",
        help="size of a result file, in MiB of text before compression (default: 64)",
    )
    parser.add_argument(
        "--workers",
        type=flag_type.whole(1, limits.MAX_WORKERS),
        metavar="N",
        help="processes (default: one per core); the result is the same for any number. ray: tasks at once "
        "(default: as many as fit)",
    )
    _add_cluster_arguments(parser)
    data_source.add_max_rejected(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace text that was cleaned differently")
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
    """Return a check that the arguments name the step, or no steps."""
    return lambda args: args.steps is None or step in _listed(args.steps)


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("local", "slurm", "ray"),
        default="local",
        help="local: this machine; ray: the machines of a Ray cluster that share a disk, on Slurm by "
        "scripts/slurm/clean.sbatch (default: local)",
    )
    parser.add_argument(
        "--tasks",
        type=flag_type.whole(1, 100_000),
        metavar="N",
        help="ray: parts of the input, each of one or more files (default: one per file, at most 256)",
    )
    parser.add_argument(
        "--executor-options",
        type=flag_type.path,
        metavar="FILE.yaml",
        help="ray: address and memory_gb",
    )


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--languages", type=flag_type.name, metavar="CODE,CODE", help="language: those to keep, ISO 639 such as en"
    )
    parser.add_argument(
        "--min-confidence",
        type=flag_type.number(0, 1),
        default=0.5,
        metavar="P",
        help="language: lowest probability of the language (default: 0.5)",
    )
    parser.add_argument(
        "--terminal-punctuation",
        action="store_true",
        help="c4: remove lines that do not end in . ? ! \" or ', as C4 did and FineWeb did not",
    )
    for flag, kind, default, metavar, about in (
        ("--permutations", flag_type.whole(1, 1024), 128, "N", "minima per sketch"),
        ("--bands", flag_type.whole(1, 1024), 25, "N", "bands that the minima are split into"),
        ("--similarity", flag_type.number(0, 1, above=True), 0.6, "S", "lowest Jaccard similarity of a copy"),
        ("--shingle-words", flag_type.whole(1, 100), 3, "N", "words per shingle"),
        ("--seed", flag_type.whole(0, limits.MAX_SEED), 0, "N", "seed of the permutations"),
    ):
        parser.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"near: {about} (default: {default})"
        )
    parser.add_argument(
        "--decontaminate",
        type=flag_type.path,
        action="append",
        default=[],
        metavar="FILE",
        help="decontaminate: evaluation text, as JSON or JSON lines (every string in them) or text, also compressed; "
        "repeatable",
    )
    parser.add_argument(
        "--max-ngram-documents",
        type=flag_type.whole(1, 10**12),
        default=10,
        metavar="N",
        help="decontaminate: ignore 13-grams in more documents than this (default: 10, as GPT-3)",
    )


def _options(args: argparse.Namespace) -> CleanOptions:
    from llmscale.data.clean.annotate import CleanOptions, default_steps, parse_steps
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
        tokenizer=_tokenizer(args),
    )


def _tokenizer(args: argparse.Namespace) -> TokenizerName | None:
    from llmscale.data.clean.annotate import TokenizerName

    return None if args.tokenizer is None else TokenizerName(args.tokenizer, args.eot_token or "")


def _cluster(args: argparse.Namespace) -> RayCluster | None:
    from llmscale.data.clean.on_ray import read_cluster
    from llmscale.data.prepare.sources.stdin import STDIN

    if args.executor == "local":
        return None
    if args.executor == "slurm":
        raise DataError(
            "--executor slurm: Ray runs the tasks on Slurm now. Start a Ray cluster in a job, and the command in it: "
            "`sbatch --nodes N scripts/slurm/clean.sbatch --input ... --out ...` (docs/data.md, On many machines)."
        )
    if STDIN in args.input:
        raise DataError("--executor ray: other machines cannot read this one's standard input. Give files.")
    return read_cluster(args.executor_options, args.tasks, args.workers)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _clean(args: argparse.Namespace) -> int:
    from llmscale.data.clean.run import clean

    check_output_folder("--out", args.out)
    options, cluster = _options(args), _cluster(args)
    source = data_source.open_source_of(args)
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
    for line in _describe(result, _Counted(args.tokenizer)):
        print_visible(line)
    taken_in = result.taken_in
    print_visible(
        f"Cleaned in {elapsed_s:.1f} s, {taken_in.documents / elapsed_s:,.0f} documents/s, "
        f"{taken_in.bytes / 1e6 / elapsed_s:,.1f} MB/s. What was removed, and why: {args.out}/removed (zstd -dc)."
    )
    for line in data_source.describe_reading(
        source.passed_over + result.passed_over, args.out, result.mark.num_rejected, result.mark.num_cut
    ):
        print_visible(line, file=sys.stderr)
    return 0


class _Counted:
    """The unit in which text is counted besides documents: words, or tokens of --tokenizer."""

    def __init__(self, tokenizer: str | None) -> None:
        self.name = "words" if tokenizer is None else "tokens"
        self.explanation = "words between whitespace" if tokenizer is None else f"tokens of {tokenizer}"

    def of(self, counts: DocumentCounts) -> int:
        return counts.words if self.name == "words" else counts.tokens


def _describe(result: CleanResult, counted: _Counted) -> Iterator[str]:
    """Yield a table of the steps, then what each removed."""
    yield f"{'step':18}{'documents in':>14}{'removed':>12}{'changed':>12}{counted.name + ' in':>16}{'removed':>16}"
    for report in result.reports:
        taken_in, removed = report.taken_in, report.removed
        yield (
            f"{report.step:18}{taken_in.documents:14,}{_share(removed.documents, taken_in.documents):>12}"
            f"{report.num_changed:12,}{counted.of(taken_in):16,}{_share(counted.of(removed), counted.of(taken_in)):>16}"
        )
    kept, total = counted.of(result.kept), counted.of(result.taken_in)
    yield (
        f"{'left':18}{result.kept.documents:14,}{'':24}{kept:16,}   {kept / max(total, 1):.1%} of the "
        f"{counted.explanation}"
    )
    for report in result.reports:
        yield from _describe_taken(report, counted)
    if result.num_ignored_ngrams:
        yield f"{result.num_ignored_ngrams:,} 13-grams of evaluation text are in too many documents and were ignored."
    if result.num_short_items:
        yield f"{result.num_short_items:,} items of evaluation text have fewer than 13 words and were not searched for."


def _share(number: int, of: int) -> str:
    return f"{number / of:.1%}" if number else "0"


def _describe_taken(report: StepReport, counted: _Counted) -> Iterator[str]:
    if not report.rules:
        return
    rules = ", ".join(f"{rule} {count:,}" for rule, count in report.rules.most_common(6))
    removed = report.removed
    yield f"{report.step}: {removed.documents:,} documents, {counted.of(removed):,} {counted.name}; {rules}"
    for line in report.describe_examples():
        yield f"  {line}"
    if report.step in _FOR_PROSE and report.removed.documents > report.taken_in.documents / 2:
        yield "  That is most of its input. The step is for English prose; leave it out of --steps for anything else."
