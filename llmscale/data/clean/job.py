"""A job of `data clean`: what is asked for, whether a folder already has it, and the manifest of the result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import llmscale
from llmscale.data.clean.annotate import CleanOptions
from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.pipeline import DocumentCounts, FileFacts, StepReport
from llmscale.data.prepare.sources.clean_folder import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    load_clean_manifest,
    request_of,
)
from llmscale.data.prepare.sources.source import PassedOver, Source
from llmscale.data.prepare.tokenise import ReadPosition
from llmscale.errors import DataError


@dataclass(frozen=True)
class CleanJob:
    """Everything that decides the result, wherever the job runs."""

    source: Source
    out: Path
    options: CleanOptions
    request: dict[str, object]
    ngrams: EvaluationNgrams | None
    """N-grams of evaluation text, for the step decontaminate."""
    shard_bytes: int
    overwrite: bool
    max_rejected: int


def describe_request(source: Source, options: CleanOptions, shard_bytes: int) -> dict[str, object]:
    """Return, by flag, everything that decides the result. Raises DataError."""
    request: dict[str, object] = {
        "--input": source.name,
        "contents of --input": source.fingerprint()[:16],
        "--steps": ",".join(options.steps),
        "--shard-mb": shard_bytes / (1 << 20),
    }
    if options.decontaminate:
        request["--decontaminate"] = ", ".join(map(str, options.decontaminate))
        request["contents of --decontaminate"] = _hash_files(options.decontaminate)
    if options.tokenizer is not None:
        request["--tokenizer"] = options.tokenizer.spec
        request["contents of --tokenizer"] = options.tokenizer.load().sha256[:16]
    for step in options.steps:
        request |= options.settings_of(step)
    return request


def _hash_files(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def is_already_there(out: Path, request: dict[str, object], *, overwrite: bool) -> bool:
    """Return whether `out` holds the result of the request. Raises DataError when it holds anything else."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = load_clean_manifest(out)
    if manifest is None:
        raise DataError(
            f"{out} exists and was not written by `llmscale data clean`, so it will not be replaced. Choose another "
            "--out."
        )
    if overwrite:
        return False
    there = request_of(manifest)
    names = ("--input", "--decontaminate", "--tokenizer")  # their contents are compared instead
    different = [
        f"{key} {there.get(key)!r} there, {request.get(key)!r} now"
        for key in {**there, **request}
        if key not in names and there.get(key) != request.get(key)
    ]
    if different:
        raise DataError(
            f"{out} already holds text cleaned differently: {'; '.join(different)}. Replace it with --overwrite, or "
            "choose another --out."
        )
    return True


@dataclass(frozen=True)
class CleanResult:
    """Counts, reports and files of a finished job."""

    taken_in: DocumentCounts
    kept: DocumentCounts
    reports: list[StepReport]
    mark: ReadPosition
    """Reader position after the last record, with the counts of empty and rejected records."""
    documents: Sequence[FileFacts] = ()
    """Files of the documents that were kept."""
    removed: Sequence[FileFacts] = ()
    """Files of the text that was removed."""
    num_ignored_ngrams: int = 0
    """N-grams of evaluation text that occur in too many documents."""
    num_short_items: int = 0
    """Items of evaluation text with too few words to look for."""
    passed_over: set[PassedOver] = field(default_factory=set)
    """Files that other machines skipped."""
    reused: bool = False
    """True where the folder existed already and nothing was done."""

    def check_anything_left(self, name: str) -> None:
        """Raise DataError when no document of the source `name` was kept."""
        if self.kept.documents:
            return
        if not self.taken_in.documents:
            raise DataError(f"{name} has no text.")
        worst = max(self.reports, key=lambda report: report.removed.documents)
        rules = ", ".join(f"{rule} {count:,}" for rule, count in worst.rules.most_common(3))
        raise DataError(
            f"{name}: nothing is left of {self.taken_in.documents:,} documents. The step {worst.step} took "
            f"{worst.removed.documents:,} of them ({rules}). Leave it out of --steps, or change its settings."
        )


def write_manifest(folder: Path, result: CleanResult, job: CleanJob, cluster: Mapping[str, object] | None) -> None:
    """Write clean.json: the request, every step's report, and the files with their hashes. Raises OSError."""
    mark, options, ngrams = result.mark, job.options, job.ngrams

    def describe(counts: DocumentCounts) -> dict[str, object]:
        facts = asdict(counts)
        return facts if options.tokenizer else {name: value for name, value in facts.items() if name != "tokens"}

    manifest: dict[str, object] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "llmscale": llmscale.__version__,
        "packages": {name: version_of(name) for name in ("rensa", "py3langid")},
        **({"cluster": cluster} if cluster else {}),
        "request": job.request,
        "taken_in": {
            **describe(result.taken_in),
            "empty": mark.num_empty,
            "rejected": mark.num_rejected,
            "skipped": mark.num_skipped,
            "cut": mark.num_cut,
        },
        "kept": describe(result.kept),
        "steps": [
            {
                "step": report.step,
                "settings": options.settings_of(report.step),
                "taken_in": describe(report.taken_in),
                "removed": describe(report.removed),
                "documents_changed": report.num_changed,
                "rules": dict(sorted(report.rules.items())),
            }
            for report in result.reports
        ],
        "documents": [asdict(facts) for facts in result.documents],
        "removed": [asdict(facts) for facts in result.removed],
    }
    if ngrams is not None:
        manifest["evaluation_text"] = {
            "ngrams": len(ngrams.hashes),
            "items": len(ngrams.labels),
            "items_too_short": ngrams.num_short,
            "ngrams_ignored": result.num_ignored_ngrams,
        }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def version_of(package: str) -> str | None:
    """Return a package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
