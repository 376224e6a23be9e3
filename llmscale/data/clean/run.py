"""Run `data clean`: filter documents in workers, remove duplicates in input order, publish the folder atomically."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from llmscale.config.bundled_files import install_command
from llmscale.data.clean.annotate import Annotate, Annotations, CleanOptions, start_workers
from llmscale.data.clean.decontaminate import read_evaluation_text, save_hashes
from llmscale.data.clean.duplicates import Comparison, index_bytes_per_document
from llmscale.data.clean.filters import check_languages
from llmscale.data.clean.job import CleanJob, CleanResult, describe_request, is_already_there, write_manifest
from llmscale.data.clean.on_ray import RayCluster, clean_on_ray
from llmscale.data.clean.pipeline import DocumentCounts, Pipeline
from llmscale.data.prepare.output_folder import (
    RejectedRecords,
    find_writer,
    new_folder,
    recover,
    rejected_path,
    remove_finished,
)
from llmscale.data.prepare.sources.source import Source
from llmscale.data.prepare.tokenise import Batch, ReadPosition, gather, ordered_parallel_map
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress, show_progress

_SCRATCH_HASHES, _SCRATCH_REJECTED = "evaluation.npy", "rejected.jsonl"


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

    The result does not depend on `num_workers`, the processes of this machine; a `cluster` ignores them. A killed run
    leaves only a hidden folder: the next run removes it, or on a cluster resumes from it.

    Raises DataError when `out` holds something else, when the source or evaluation text cannot be read, when nothing is
    left, when the disk is full, or when no cluster answers; `out` is then unchanged. Raises MachineError when a worker
    or a task dies.
    """
    _check_packages(options)
    ngrams = read_evaluation_text(options.decontaminate) if "decontaminate" in options.steps else None
    request = describe_request(source, options, shard_bytes)
    recover(out)
    if is_already_there(out, request, overwrite=overwrite):
        remove_finished(out, "clean")
        return CleanResult(DocumentCounts(), DocumentCounts(), [], ReadPosition(), reused=True)
    if find_writer(out) is not None:
        raise DataError(f"Another process is writing {out}. Wait for it, or choose another --out.")
    job = CleanJob(source, out, options, request, ngrams, shard_bytes, overwrite, max_rejected)
    if cluster is not None:
        return clean_on_ray(job, cluster)
    with new_folder(out, replace=overwrite) as folder:
        return _clean_here(job, folder, num_workers or len(os.sched_getaffinity(0)))


def _check_packages(options: CleanOptions) -> None:
    if "language" in options.steps:
        check_languages(options.languages)
    if "near" in options.steps:
        try:
            import rensa  # noqa: F401
        except ImportError:
            raise DataError(f"The step near needs rensa: `{install_command('data,clean')}`.") from None


def _clean_here(job: CleanJob, folder: Path, num_workers: int) -> CleanResult:
    options, ngrams = job.options, job.ngrams
    rejected = RejectedRecords(folder / _SCRATCH_REJECTED, job.max_rejected)
    hashes_path = None
    if ngrams is not None:
        hashes_path = folder / _SCRATCH_HASHES
        save_hashes(ngrams, hashes_path)
    comparison = Comparison(options.near)
    with (
        closing(Pipeline(folder, options, job.shard_bytes, comparison.decide, ngrams)) as pipeline,
        show_progress(f"Cleaning {job.source.name}") as progress,
    ):
        with start_workers(options, hashes_path, num_workers) as annotate:
            mark = _clean_batches(job, pipeline, comparison, rejected, annotate, num_workers, progress)
        documents, removed = pipeline.finish()
    result = CleanResult(
        pipeline.taken_in,
        pipeline.kept,
        pipeline.reports,
        mark,
        documents,
        removed,
        pipeline.num_ignored_ngrams,
        ngrams.num_short if ngrams else 0,
    )
    result.check_anything_left(job.source.name)
    if hashes_path is not None:
        hashes_path.unlink()
    write_manifest(folder, result, job, cluster=None)
    # Until here the records beside `out` are those of the folder that it holds.
    rejected_path(job.out).unlink(missing_ok=True)
    if rejected.num_records:
        rejected.path.rename(rejected_path(job.out))
    return result


def _clean_batches(
    job: CleanJob,
    pipeline: Pipeline,
    comparison: Comparison,
    rejected: RejectedRecords,
    annotate: Annotate,
    num_workers: int,
    progress: Progress,
) -> ReadPosition:
    """Clean every document; return the position after the last. Raises DataError, OSError, MachineError."""

    def work(batch: Batch) -> tuple[Batch, list[str], Annotations]:
        texts = [document for document in batch.documents if isinstance(document, str)]
        return batch, texts, annotate(texts)

    mark, source = ReadPosition(), job.source
    batches = gather(source, None, mark)
    with closing(ordered_parallel_map(batches, work, num_workers, weigh=lambda batch: batch.weight)) as annotated:
        for batch, texts, annotations in annotated:
            is_first = mark == ReadPosition()
            comparison.begin_batch(annotations.exact_keys, annotations.sketches)
            pipeline.add(texts, annotations.documents)
            rejected.add(batch.rejected)
            mark = batch.mark
            taken_in, kept = pipeline.taken_in, pipeline.kept
            if is_first:
                progress.say(_describe_index(job.options, taken_in.documents, mark.read_bytes, source.total_bytes))
            progress.show(
                taken_in.bytes,
                mark.read_bytes,
                source.total_bytes,
                f"{taken_in.documents:,} documents, {kept.documents:,} kept",
            )
    return mark


def _describe_index(options: CleanOptions, num_documents: int, read_bytes: int, total_bytes: int | None) -> str:
    """Announce the memory that grows with the input, extrapolated from the first batch."""
    per_document = index_bytes_per_document(options.steps, options.near)
    if not per_document:
        return "No step compares documents: memory does not grow with the input."
    line = f"Index: {per_document} bytes of memory per document kept"
    if total_bytes and read_bytes and num_documents:
        expected = max(num_documents, round(num_documents * total_bytes / read_bytes))
        line += f"; for all of about {expected:,}, {expected * per_document / 2**20:,.1f} MiB"
    return f"{line}."
