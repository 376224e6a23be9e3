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

if TYPE_CHECKING:  # the real imports wait until a command runs
    from collections.abc import Callable, Iterator

    from llmscale.data.clean.clean_manifest import Cleaned
    from llmscale.data.clean.cluster.settings import Cluster
    from llmscale.data.clean.pipeline import Amount, CleanOptions, StepReport, TokenizerName

#: As in llmscale.data.clean.pipeline, which --help must not load.
_STEPS = "exact,language,gopher-repetition,gopher-quality,c4,fineweb,near,decontaminate"
#: Whose rules take most of code, tables and lists.
_FOR_PROSE = ("gopher-repetition", "gopher-quality", "c4", "fineweb")


def add_parser(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `clean`."""
    parser = commands.add_parser(
        "clean", help="take out duplicates, text of low quality or in other languages, and evaluation text"
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
        help=f"what is done, in this order (default: {_STEPS}, without those that nothing is given for). The "
        "filters of quality are for prose; of code or lists take exact,near",
    )
    _add_step_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        type=flag_type.path_or_url,
        metavar="gpt2|bytes|FILE.tiktoken|FOLDER|NAME",
        help="count this tokenizer's tokens at every step, as prepare will pack them (default: words alone)",
    )
    parser.add_argument(
        "--eot-token",
        type=flag_type.name,
        metavar="TEXT",
        help="the tokenizer's end-of-text token, where its files leave that open, as for prepare",
    )
    parser.add_argument(
        "--shard-mb",
        type=flag_type.whole(1, 4095),
        default=64,
        metavar="MIB",
        help="text in a file of the result, in MiB before compression (default: 64)",
    )
    parser.add_argument(
        "--workers",
        type=flag_type.whole(1, limits.MAX_WORKERS),
        metavar="N",
        help="processes (default: one per core); the result is the same for any number. On a cluster, tasks at once "
        "(default: all)",
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
        Need("tasks executor_options", "--executor slurm or ray", lambda args: args.executor != "local"),
    ]
    parser.set_defaults(handler=_clean)


def _does(step: str) -> Callable[[argparse.Namespace], bool]:
    """Return whether the arguments name the step, or leave all to the default."""
    return lambda args: args.steps is None or step in _listed(args.steps)


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("local", "slurm", "ray"),
        default="local",
        help="where: this machine, or many that share a disk with it, through datatrove (default: local)",
    )
    parser.add_argument(
        "--tasks",
        type=flag_type.whole(1, 100_000),
        metavar="N",
        help="slurm, ray: parts of the input, of whole files (default: one per file, at most 256)",
    )
    parser.add_argument(
        "--executor-options",
        type=flag_type.path,
        metavar="FILE.yaml",
        help="slurm: partition, time_hours, memory_gb, account, qos, setup, max_array_size, sbatch; ray: address, "
        "memory_gb",
    )


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--languages", type=flag_type.name, metavar="CODE,CODE", help="language: those that stay, ISO 639 such as en"
    )
    parser.add_argument(
        "--min-confidence",
        type=flag_type.number(0, 1),
        default=0.5,
        metavar="P",
        help="language: how sure it must be (default: 0.5)",
    )
    parser.add_argument(
        "--terminal-punctuation",
        action="store_true",
        help="c4: take out lines that end in none of . ? ! \" ', as C4 did and FineWeb did not",
    )
    for flag, kind, default, metavar, about in (
        ("--permutations", flag_type.whole(1, 1024), 128, "N", "minima of a sketch"),
        ("--bands", flag_type.whole(1, 1024), 25, "N", "bands that they are cut into"),
        ("--similarity", flag_type.number(0, 1, above=True), 0.6, "S", "Jaccard similarity from which on a copy goes"),
        ("--shingle-words", flag_type.whole(1, 100), 3, "N", "words of a shingle"),
        ("--seed", flag_type.whole(0, limits.MAX_SEED), 0, "N", "of the permutations"),
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
        help="decontaminate: evaluation text, JSON or JSON lines (every string in them) or text, also .gz, .zst, ...; "
        "as often as needed",
    )
    parser.add_argument(
        "--max-ngram-documents",
        type=flag_type.whole(1, 10**12),
        default=10,
        metavar="N",
        help="decontaminate: ignore 13-grams that stand in more documents (default: 10, as GPT-3)",
    )


def _options(args: argparse.Namespace) -> CleanOptions:
    from llmscale.data.clean.pipeline import CleanOptions, default_steps, parse_steps
    from llmscale.data.clean.sketches import NearSettings

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
    from llmscale.data.clean.pipeline import TokenizerName

    return None if args.tokenizer is None else TokenizerName(args.tokenizer, args.eot_token or "")


def _cluster(args: argparse.Namespace) -> Cluster | None:
    from llmscale.data.clean.cluster.settings import Cluster, read_settings
    from llmscale.data.prepare.sources.file_source import STDIN

    if args.executor == "local":
        return None
    if STDIN in args.input:
        raise DataError(f"--executor {args.executor}: no other machine can read this one's standard input. Give files.")
    return Cluster(read_settings(args.executor, args.executor_options), args.tasks, args.workers)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _clean(args: argparse.Namespace) -> int:
    from llmscale.data.clean.clean_set import clean

    check_output_folder("--out", args.out)
    options, cluster = _options(args), _cluster(args)
    source = data_source.open_source_of(args)
    start_s = time.monotonic()
    cleaned = clean(
        source,
        args.out,
        options,
        num_workers=args.workers,
        shard_bytes=args.shard_mb << 20,
        overwrite=args.overwrite,
        max_rejected=args.max_rejected,
        cluster=cluster,
    )
    if cleaned.reused:
        print_visible(f"Already cleaned: {args.out}. Nothing to do.")
        return 0
    elapsed_s = time.monotonic() - start_s
    for line in _describe(cleaned, _Counted(args.tokenizer)):
        print_visible(line)
    taken_in = cleaned.taken_in
    print_visible(
        f"Cleaned in {elapsed_s:.1f} s, {taken_in.documents / elapsed_s:,.0f} documents/s, "
        f"{taken_in.bytes / 1e6 / elapsed_s:,.1f} MB/s. What was removed, and why: {args.out}/removed (zstd -dc)."
    )
    for line in data_source.describe_reading(
        source.passed_over + cleaned.passed_over, args.out, cleaned.mark.num_rejected, cleaned.mark.num_cut
    ):
        print_visible(line, file=sys.stderr)
    return 0


class _Counted:
    """What is shown of an amount besides documents."""

    def __init__(self, tokenizer: str | None) -> None:
        self.name = "words" if tokenizer is None else "tokens"
        self.explanation = "words between whitespace" if tokenizer is None else f"tokens of {tokenizer}"

    def of(self, amount: Amount) -> int:
        return amount.words if self.name == "words" else amount.tokens


def _describe(cleaned: Cleaned, counted: _Counted) -> Iterator[str]:
    """A table of the steps, then what each took."""
    yield f"{'step':18}{'documents in':>14}{'removed':>12}{'changed':>12}{counted.name + ' in':>16}{'removed':>16}"
    for report in cleaned.reports:
        taken_in, removed = report.taken_in, report.removed
        yield (
            f"{report.step:18}{taken_in.documents:14,}{_share(removed.documents, taken_in.documents):>12}"
            f"{report.num_changed:12,}{counted.of(taken_in):16,}{_share(counted.of(removed), counted.of(taken_in)):>16}"
        )
    kept, whole = counted.of(cleaned.kept), counted.of(cleaned.taken_in)
    yield (
        f"{'left':18}{cleaned.kept.documents:14,}{'':24}{kept:16,}   {kept / max(whole, 1):.1%} of the "
        f"{counted.explanation}"
    )
    for report in cleaned.reports:
        yield from _describe_taken(report, counted)
    if cleaned.num_ignored_ngrams:
        yield f"{cleaned.num_ignored_ngrams:,} 13-grams of evaluation text are in too many documents and were ignored."
    if cleaned.num_short_items:
        yield f"{cleaned.num_short_items:,} items of evaluation text have fewer than 13 words and cannot be looked for."


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
        yield "  That is most of what it saw. It is made for English prose; leave it out of --steps for anything else."
