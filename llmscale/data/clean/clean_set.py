"""Text to less text: read, look at it in many processes, decide in the order of the input, put it in place at once."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from llmscale.config.bundled_files import install_command
from llmscale.data.clean import exact
from llmscale.data.clean.clean_manifest import Cleaned, write_manifest
from llmscale.data.clean.clean_request import CleanJob, describe_request, is_already_there
from llmscale.data.clean.cluster.clean_on_cluster import clean_on_cluster
from llmscale.data.clean.cluster.settings import Cluster
from llmscale.data.clean.compare import Comparison
from llmscale.data.clean.decontaminate import read_evaluation_text, save_hashes
from llmscale.data.clean.language import check_languages
from llmscale.data.clean.near import index_bytes_per_document
from llmscale.data.clean.pipeline import Amount, CleanOptions, Look, LookedBatch, Pipeline, start_workers
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
    cluster: Cluster | None = None,
) -> Cleaned:
    """Write what is left of the source to `out`, or find that it is there already. The result does not depend on
    `num_workers`; they are processes of this machine, or with a `cluster` do not count. A killed run leaves nothing but
    a hidden folder, which the next one removes, or on a cluster goes on from.

    Raises DataError when `out` holds something else, when the source or a file of evaluation text cannot be read, when
    nothing is left, when the disk is full, and when there is no such cluster; then `out` is as it was before. Raises
    MachineError when a worker or a task died.
    """
    _check_packages(options)
    ngrams = read_evaluation_text(options.decontaminate) if "decontaminate" in options.steps else None
    request = describe_request(source, options, shard_bytes)
    recover(out)
    if is_already_there(out, request, overwrite=overwrite):
        remove_finished(out, "clean")
        return Cleaned(Amount(), Amount(), [], ReadPosition(), reused=True)
    if find_writer(out) is not None:
        raise DataError(f"Another process writes {out} just now. Wait for it, or choose another --out.")
    job = CleanJob(source, out, options, request, ngrams, shard_bytes, overwrite, max_rejected)
    if cluster is not None:
        return clean_on_cluster(job, cluster)
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


def _clean_here(job: CleanJob, folder: Path, num_workers: int) -> Cleaned:
    options, ngrams = job.options, job.ngrams
    quarantine = RejectedRecords(folder / _SCRATCH_REJECTED, job.max_rejected)
    hashes_path = None
    if ngrams is not None:
        hashes_path = folder / _SCRATCH_HASHES
        save_hashes(ngrams, hashes_path)
    comparison = Comparison(options.near)
    with (
        closing(Pipeline(folder, options, job.shard_bytes, comparison.decide, ngrams)) as pipeline,
        show_progress(f"Cleaning {job.source.name}") as progress,
    ):
        with start_workers(options, hashes_path, num_workers) as look:
            mark = _pass_all(job.source, pipeline, comparison, quarantine, look, num_workers, options, progress)
        documents, removed = pipeline.finish()
    cleaned = Cleaned(
        pipeline.taken_in,
        pipeline.kept,
        pipeline.reports,
        mark,
        documents,
        removed,
        pipeline.num_ignored_ngrams,
        ngrams.num_short if ngrams else 0,
    )
    cleaned.check_anything_left(job.source.name)
    if hashes_path is not None:
        hashes_path.unlink()
    write_manifest(folder, cleaned, options, job.request, ngrams, {})
    # Only now: until here the records beside `out` are those of the set that is there.
    rejected_path(job.out).unlink(missing_ok=True)
    if quarantine.num_records:
        quarantine.path.rename(rejected_path(job.out))
    return cleaned


def _pass_all(
    source: Source,
    pipeline: Pipeline,
    comparison: Comparison,
    quarantine: RejectedRecords,
    look: Look,
    num_workers: int,
    options: CleanOptions,
    progress: Progress,
) -> ReadPosition:
    """Every document of the source. Raises DataError, OSError, MachineError."""

    def work(batch: Batch) -> tuple[Batch, list[str], LookedBatch]:
        texts = [document for document in batch.documents if isinstance(document, str)]
        return batch, texts, look(texts)

    mark = ReadPosition()
    batches = gather(source, None, mark)
    with closing(ordered_parallel_map(batches, work, num_workers, weigh=lambda batch: batch.weight)) as looked_at:
        for batch, texts, looked in looked_at:
            is_first = mark == ReadPosition()
            comparison.begin_batch(looked.exact_keys, looked.sketches)
            pipeline.add(texts, looked.documents)
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
