"""Text to less text: read, look at it in many processes, decide in the order of the input, put it in place at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import llmscale
from llmscale.data.clean import exact
from llmscale.data.clean.cleaned_set import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    load_clean_manifest,
    request_of,
)
from llmscale.data.clean.evaluation_text import EvaluationNgrams, read_evaluation_text, save_hashes
from llmscale.data.clean.jsonl_files import FileFacts
from llmscale.data.clean.language import check_languages
from llmscale.data.clean.look import LookedBatch
from llmscale.data.clean.near import index_bytes_per_document
from llmscale.data.clean.pipeline import Pipeline
from llmscale.data.clean.step_report import Amount, StepReport
from llmscale.data.clean.steps import CleanOptions
from llmscale.data.clean.worker_processes import Look, start_workers
from llmscale.data.prepare.atomic_folder import find_writer, new_folder, recover
from llmscale.data.prepare.batches import Batch, Mark, gather
from llmscale.data.prepare.encode_threads import work_in_order
from llmscale.data.prepare.quarantine import Quarantine, rejected_path
from llmscale.data.prepare.sources.source import Source
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress, show_progress

_SCRATCH_HASHES, _SCRATCH_HELD, _SCRATCH_REJECTED = "evaluation.npy", "held.jsonl", "rejected.jsonl"


@dataclass(frozen=True)
class Cleaned:
    """What `clean` returns."""

    taken_in: Amount
    kept: Amount
    reports: list[StepReport]
    num_rejected: int
    num_ignored_ngrams: int = 0
    """Of evaluation text, found in too many documents."""
    num_short_items: int = 0
    """Of evaluation text, with too few words to be looked for."""
    reused: bool = False
    """The folder was there already and nothing was done."""


def clean(
    source: Source,
    out: Path,
    options: CleanOptions,
    *,
    num_workers: int | None = None,
    shard_bytes: int = 64 << 20,
    overwrite: bool = False,
    max_rejected: int = 0,
) -> Cleaned:
    """Write what is left of the source to `out`, or find that it is there already. The result does not depend on
    `num_workers`. A killed run leaves nothing but a hidden folder, which the next one removes.

    Raises DataError when `out` holds something else, when the source or a file of evaluation text cannot be read, when
    nothing is left, and when the disk is full; then `out` is as it was before. Raises MachineError when a worker died.
    """
    _check_packages(options)
    ngrams = read_evaluation_text(options.decontaminate) if "decontaminate" in options.steps else None
    request = _request(source, options, shard_bytes)
    recover(out)
    if _is_already_there(out, request, overwrite=overwrite):
        return Cleaned(Amount(), Amount(), [], 0, reused=True)
    if find_writer(out) is not None:
        raise DataError(f"Another process writes {out} just now. Wait for it, or choose another --out.")
    with new_folder(out, replace=overwrite) as folder:
        return _write(source, out, folder, options, request, ngrams, num_workers, shard_bytes, max_rejected)


def _check_packages(options: CleanOptions) -> None:
    if "language" in options.steps:
        check_languages(options.languages)
    if "near" in options.steps:
        try:
            import rensa  # noqa: F401
        except ImportError:
            raise DataError("The step near needs rensa: pip install 'llmscale[data,clean]'.") from None


def _request(source: Source, options: CleanOptions, shard_bytes: int) -> dict[str, object]:
    """What makes one result equal to another, by the flag that sets it."""
    request: dict[str, object] = {
        "--input": source.name,
        "contents of --input": source.fingerprint()[:16],
        "--steps": ",".join(options.steps),
        "--shard-mb": shard_bytes / (1 << 20),
    }
    if options.decontaminate:
        request["--decontaminate"] = ", ".join(map(str, options.decontaminate))
        request["contents of --decontaminate"] = _hash_files(options.decontaminate)
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


def _is_already_there(out: Path, request: dict[str, object], *, overwrite: bool) -> bool:
    """Whether `out` answers the request. Raises DataError when it holds anything else."""
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
    names = ("--input", "--decontaminate")  # where equal contents lie does not matter
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


def _write(
    source: Source,
    out: Path,
    folder: Path,
    options: CleanOptions,
    request: dict[str, object],
    ngrams: EvaluationNgrams | None,
    num_workers: int | None,
    shard_bytes: int,
    max_rejected: int,
) -> Cleaned:
    quarantine = Quarantine(folder / _SCRATCH_REJECTED, max_rejected)
    hashes_path = None
    if ngrams is not None:
        hashes_path = folder / _SCRATCH_HASHES
        save_hashes(ngrams, hashes_path)
    workers = num_workers or len(os.sched_getaffinity(0))
    with (
        closing(Pipeline(folder, options, shard_bytes, ngrams, folder / _SCRATCH_HELD)) as pipeline,
        show_progress(f"Cleaning {source.name}") as progress,
    ):
        with start_workers(options, hashes_path, workers) as look:
            mark = _pass_all(source, pipeline, quarantine, look, workers, options, progress)
        documents, removed = pipeline.finish()
        if not pipeline.kept.documents:
            raise DataError(_nothing_left(source, pipeline))
    if hashes_path is not None:
        hashes_path.unlink()
    manifest = _manifest(pipeline, mark, options, request, documents, removed, ngrams)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    # Only now: until here the records beside `out` are those of the set that is there.
    rejected_path(out).unlink(missing_ok=True)
    if quarantine.num_records:
        quarantine.path.rename(rejected_path(out))
    return Cleaned(
        pipeline.taken_in,
        pipeline.kept,
        pipeline.reports,
        mark.num_rejected,
        pipeline.num_ignored_ngrams,
        ngrams.num_short if ngrams else 0,
    )


def _manifest(
    pipeline: Pipeline,
    mark: Mark,
    options: CleanOptions,
    request: dict[str, object],
    documents: Sequence[FileFacts],
    removed: Sequence[FileFacts],
    ngrams: EvaluationNgrams | None,
) -> dict[str, object]:
    """Everything that was done, and the files that it made."""
    manifest: dict[str, object] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "llmscale": llmscale.__version__,
        "packages": {name: _version(name) for name in ("rensa", "py3langid")},
        "request": request,
        "taken_in": {
            **asdict(pipeline.taken_in),
            "empty": mark.num_empty,
            "rejected": mark.num_rejected,
            "skipped": mark.num_skipped,
            "cut": mark.num_cut,
        },
        "kept": asdict(pipeline.kept),
        "steps": [_describe(report, options) for report in pipeline.reports],
        "documents": [asdict(facts) for facts in documents],
        "removed": [asdict(facts) for facts in removed],
    }
    if ngrams is not None:
        manifest["evaluation_text"] = {
            "ngrams": len(ngrams.hashes),
            "items": len(ngrams.labels),
            "items_too_short": ngrams.num_short,
            "ngrams_ignored": pipeline.num_ignored_ngrams,
        }
    return manifest


def _pass_all(
    source: Source,
    pipeline: Pipeline,
    quarantine: Quarantine,
    look: Look,
    num_workers: int,
    options: CleanOptions,
    progress: Progress,
) -> Mark:
    """Every document of the source. Raises DataError, OSError, MachineError."""

    def work(batch: Batch) -> tuple[Batch, list[str], LookedBatch]:
        texts = [document for document in batch.documents if isinstance(document, str)]
        return batch, texts, look(texts)

    mark = Mark()
    with closing(work_in_order(gather(source, None, mark), work, num_workers)) as looked_at:
        for batch, texts, looked in looked_at:
            is_first = mark == Mark()
            pipeline.add(texts, looked)
            quarantine.add(batch.rejected)
            mark = batch.mark
            taken_in, kept = pipeline.taken_in, pipeline.kept
            if is_first:
                progress.say(_describe_index(options, taken_in.documents, mark.read_bytes, source.total_bytes))
            progress.show(
                taken_in.bytes,
                mark.read_bytes,
                source.total_bytes,
                f"{taken_in.documents:,} documents, {kept.documents:,} kept",
            )
    return mark


def _describe_index(options: CleanOptions, num_documents: int, read_bytes: int, total_bytes: int | None) -> str:
    """Memory that grows with the input, before it is taken."""
    per_document = exact.BYTES_PER_DOCUMENT if "exact" in options.steps else 0
    per_document += index_bytes_per_document(options.near) if "near" in options.steps else 0
    if not per_document:
        return "No step compares documents: memory does not grow with the input."
    line = f"Index: {per_document} bytes of memory for each document that stays"
    if total_bytes and read_bytes and num_documents:
        expected = max(num_documents, round(num_documents * total_bytes / read_bytes))
        line += f"; were that all of about {expected:,}, {expected * per_document / 2**20:,.1f} MiB"
    return f"{line}."


def _nothing_left(source: Source, pipeline: Pipeline) -> str:
    if not pipeline.taken_in.documents:
        return f"{source.name} has no text."
    worst = max(pipeline.reports, key=lambda report: report.removed.documents)
    rules = ", ".join(f"{rule} {count:,}" for rule, count in worst.rules.most_common(3))
    return (
        f"{source.name}: nothing is left of {pipeline.taken_in.documents:,} documents. The step {worst.step} took "
        f"{worst.removed.documents:,} of them ({rules}). Leave it out of --steps, or change its settings."
    )


def _describe(report: StepReport, options: CleanOptions) -> dict[str, object]:
    return {
        "step": report.step,
        "settings": options.settings_of(report.step),
        "taken_in": asdict(report.taken_in),
        "removed": asdict(report.removed),
        "documents_changed": report.num_changed,
        "rules": dict(sorted(report.rules.items())),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
