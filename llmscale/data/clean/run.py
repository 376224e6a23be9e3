"""Run `data clean`: the stages in processes or on a Ray cluster, a manifest, and a folder that appears atomically."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import llmscale
from llmscale.config.bundled_files import import_extra
from llmscale.data.clean.annotate import CleanOptions, Counts, start_workers
from llmscale.data.clean.decontaminate import read_evaluation_text
from llmscale.data.clean.duplicates import index_bytes_per_document
from llmscale.data.clean.filters import check_languages
from llmscale.data.clean.on_ray import RayCluster, connected, cut
from llmscale.data.clean.stages import (
    AnnotatedBatch,
    CleanJob,
    CleanResult,
    Stage,
    annotate_batch,
    join_parts,
    join_rejected,
    plan_stages,
    read_annotated,
)
from llmscale.data.prepare.output_folder import (
    describe_differences,
    open_work_folder,
    put_in_place,
    recover,
    rejected_path,
    remove_finished,
    sync_tree,
)
from llmscale.data.prepare.sources.clean_folder import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    load_clean_manifest,
    request_of,
)
from llmscale.data.prepare.sources.source import Source
from llmscale.data.prepare.tokenise import Batch, ReadPosition, ordered_parallel_map
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress, bytes_words, count_words, show_progress


def clean(
    source: Source,
    out: Path,
    options: CleanOptions,
    *,
    num_workers: int | None = None,
    shard_bytes: int = 64 << 20,
    overwrite: bool = False,
    max_rejected: int = 0,
    cluster: RayCluster | None = None,
) -> CleanResult:
    """Write the documents that are kept to `out`, or find that it has them already.

    The result does not depend on `num_workers`, the processes of this machine; a `cluster` ignores them, and its files
    end where parts of the input end. A failed or killed run leaves a hidden folder beside `out`, from which the next
    run of the same job resumes after the last complete task.

    Raises DataError when `out` holds something else, when the source or evaluation text cannot be read, when nothing is
    left, when the disk is full, or when no cluster answers; `out` is then unchanged. Raises MachineError when a worker
    or a task dies.
    """
    if "language" in options.steps:
        check_languages(options.languages)
    if "near" in options.steps:
        import_extra("rensa", "The step near", "data,clean", DataError)
    if "decontaminate" in options.steps:
        ngrams = read_evaluation_text(options.decontaminate)
    else:
        ngrams = None
    request = _describe_request(source, options, shard_bytes)
    recover(out)
    if _is_already_there(out, request, overwrite=overwrite):
        remove_finished(out, "clean")
        return CleanResult(Counts(), Counts(), [], ReadPosition(), reused=True)
    source.check()
    parts = [source]
    executor = _run_here(num_workers or len(os.sched_getaffinity(0)))
    if cluster is not None:
        parts = cut(source, cluster.num_parts)
        executor = connected(cluster)
    own_request = {**request, "tasks": len(parts), "llmscale": llmscale.__version__}
    if cluster:
        words = count_words("tasks")
    else:
        words = bytes_words
    with (
        executor as run_stages,
        open_work_folder(out, own_request, "clean") as folder,
        show_progress(f"Cleaning {source.name}", words=words) as progress,
    ):
        folder.save_state({})  # from now on the folder survives an error
        job = CleanJob(Path(os.path.abspath(folder.path)), parts, options, ngrams, max_rejected, shard_bytes)
        progress.say(_describe_plan(job, cluster))
        try:
            for stage in run_stages(job, progress):
                if stage.name == "1-annotate":
                    _check_rejected(job, source.name)
            result = join_parts(job, folder.set_folder)
            result.check_anything_left(source.name)
        except DataError:
            folder.begin_anew()  # resuming would fail in the same way
            raise
        _write_manifest(folder.set_folder, result, job, request, cluster)
        sync_tree(folder.set_folder)
        # Until here the records beside `out` are those of the folder that it holds.
        join_rejected(job, rejected_path(out))
        put_in_place(folder.set_folder, out, replace=overwrite)
        return result


def _run_here(num_workers: int) -> AbstractContextManager[Callable[[CleanJob, Progress], Iterator[Stage]]]:
    """Return a function that runs the stages, and annotates in `num_workers` processes."""

    def run_stages(job: CleanJob, progress: Progress) -> Iterator[Stage]:
        for stage in plan_stages(1, functools.partial(_annotate_here, job, num_workers, progress)):
            if not stage.result(job, 0).exists():
                stage.run(job, 0)
            yield stage

    return nullcontext(run_stages)


def _annotate_here(
    job: CleanJob, num_workers: int, progress: Progress, batches: Iterable[Batch]
) -> Iterator[AnnotatedBatch]:
    [source], hashes_path = job.parts, None
    if job.ngrams is not None:
        hashes_path = job.folder / "evaluation.npy"  # processes map it into memory
        np.save(hashes_path, job.ngrams.hashes)
    num_documents = num_bytes = 0
    with start_workers(job.options, hashes_path, num_workers) as annotate:
        work = functools.partial(annotate_batch, annotate=annotate)
        with closing(ordered_parallel_map(batches, work, num_workers, weigh=lambda batch: batch.weight)) as annotated:
            for batch, texts, annotations in annotated:
                num_documents += len(texts)
                num_bytes += sum(document.sizes[0].bytes for document in annotations.documents)
                read_bytes = batch.mark.read_bytes
                progress.show(num_bytes, read_bytes, source.total_bytes, f"{num_documents:,} documents")
                yield batch, texts, annotations


def _check_rejected(job: CleanJob, name: str) -> None:
    """Raise DataError when the parts together have more malformed records than allowed."""
    num_rejected = sum(read_annotated(job, part)[1].num_rejected for part in range(len(job.parts)))
    if num_rejected > job.max_rejected:
        raise DataError(
            f"{name} has {num_rejected:,} malformed records, more than --max-rejected {job.max_rejected}. Raise it to "
            "skip them."
        )


def _describe_plan(job: CleanJob, cluster: RayCluster | None) -> str:
    per_document = index_bytes_per_document(job.options.steps, job.options.near)
    line = "No step compares documents"
    if per_document:
        line = f"Finding duplicates takes up to {per_document} bytes of memory per document that resembles another"
    num_parts = len(job.parts)
    if cluster is not None:
        line += f"; {num_parts} {'parts' if num_parts > 1 else 'part'}"
        if num_parts < (cluster.num_parts or 2):
            line += f", not {cluster.num_parts or 'more'}, because files are not split"
    return f"{line}."


def _describe_request(source: Source, options: CleanOptions, shard_bytes: int) -> dict[str, object]:
    """Return, by flag, everything that decides the result. Raises DataError."""
    request: dict[str, object] = {
        "--input": source.name,
        "contents of --input": source.fingerprint()[:16],
        "--steps": ",".join(options.steps),
        "--shard-mb": shard_bytes / (1 << 20),
    }
    if options.decontaminate:
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in options.decontaminate))
        request["--decontaminate"] = ", ".join(map(str, options.decontaminate))
        request["contents of --decontaminate"] = digest.hexdigest()[:16]
    if options.tokenizer is not None:
        request["--tokenizer"] = options.tokenizer.spec
        request["contents of --tokenizer"] = options.tokenizer.load().sha256[:16]
    for step in options.steps:
        request |= options.settings_of(step)
    return request


def _is_already_there(out: Path, request: dict[str, object], *, overwrite: bool) -> bool:
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
    # Settings that are not given now count, too.
    if different := describe_differences(there, {**dict.fromkeys(there), **request}):
        raise DataError(
            f"{out} already holds text cleaned differently: {different}. Replace it with --overwrite, or choose "
            "another --out."
        )
    return True


def _write_manifest(
    folder: Path, result: CleanResult, job: CleanJob, request: Mapping[str, object], cluster: RayCluster | None
) -> None:
    """Write clean.json: the request, every step's report, and the files with their hashes. Raises OSError."""
    mark = result.mark
    options = job.options
    ngrams = job.ngrams

    def describe(counts: Counts) -> dict[str, object]:
        facts = counts._asdict()
        if options.tokenizer:
            return facts
        return {name: value for name, value in facts.items() if name != "tokens"}

    manifest: dict[str, object] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "llmscale": llmscale.__version__,
        "packages": {name: _version_of(name) for name in ("rensa", "py3langid")},
    }
    if cluster is not None:
        manifest["cluster"] = {"executor": "ray", "tasks": len(job.parts), "ray": _version_of("ray")}
    manifest |= {
        "request": request,
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


def _version_of(package: str) -> str | None:
    """Return a package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
