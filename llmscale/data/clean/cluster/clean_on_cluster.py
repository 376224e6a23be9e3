"""The work of `data clean` in four stages on many machines; this one cuts the input, waits, and joins the parts."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import llmscale
from llmscale.config.bundled_files import install_command
from llmscale.data.clean import exact
from llmscale.data.clean.clean_manifest import Cleaned, version_of, write_manifest
from llmscale.data.clean.clean_request import CleanJob
from llmscale.data.clean.cluster.looked import REJECTED_NAME
from llmscale.data.clean.cluster.parts import join_parts
from llmscale.data.clean.cluster.settings import Cluster, RaySettings
from llmscale.data.clean.cluster.stages import plan_stages
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.data.clean.near import index_bytes_per_document
from llmscale.data.prepare.output_folder import (
    WorkFolder,
    is_begun,
    open_work_folder,
    put_in_place,
    rejected_path,
    sync_tree,
)
from llmscale.data.prepare.sources.file_source import ConcatSource
from llmscale.data.prepare.sources.source import Source
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress, count_words, show_progress

if TYPE_CHECKING:
    from llmscale.data.clean.cluster.on_ray import OnRay
    from llmscale.data.clean.cluster.on_slurm import OnSlurm

#: Where nobody says how many.
_MOST_TASKS = 256


def clean_on_cluster(job: CleanJob, cluster: Cluster) -> Cleaned:
    """As a local run does it, but that files end where tasks end, and documents with evaluation text come last of their
    task's. What a killed run has done is kept in a hidden folder beside `job.out`, and its jobs on Slurm go on.

    Raises DataError when the cluster or the input cannot be used, and for what a task finds wrong with the input;
    MachineError when a task fails otherwise.
    """
    job = replace(job, out=Path(os.path.abspath(job.out)))
    sources = cut(job.source, cluster.tasks or _MOST_TASKS)
    with _connected(cluster, job.out) as executor:
        request = {**job.request, "tasks": len(sources), "llmscale": llmscale.__version__}
        if not is_begun(job.out, request, "clean"):
            executor.check_free()
        with (
            open_work_folder(job.out, request, "clean") as work,
            show_progress(f"Cleaning {job.source.name}", words=count_words("tasks")) as progress,
        ):
            # From here on what is there is worth keeping.
            work.save_state({}, {})
            return _clean(job, cluster, sources, executor, work, progress)


def _clean(
    job: CleanJob,
    cluster: Cluster,
    sources: Sequence[Source],
    executor: OnRay | OnSlurm,
    work: WorkFolder,
    progress: Progress,
) -> Cleaned:
    options, files, num_tasks = job.options, WorkFiles(work.path), len(sources)
    if job.ngrams is not None:
        files.save_ngrams(job.ngrams)
    progress.say(_describe_plan(job, cluster, sources))
    executor.run(list(plan_stages(job, sources, files)), files, progress)
    cleaned = join_parts(files, num_tasks, work.set_folder, options, job.ngrams)
    if cleaned.mark.num_rejected > job.max_rejected:
        raise DataError(
            f"{job.source.name} has {cleaned.mark.num_rejected:,} records that are no documents, more than "
            f"--max-rejected {job.max_rejected}. To set them aside and go on, give as many or more."
        )
    cleaned.check_anything_left(job.source.name)
    datatrove = {"executor": cluster.executor, "tasks": num_tasks, "datatrove": version_of("datatrove")}
    write_manifest(work.set_folder, cleaned, options, job.request, job.ngrams, {"cluster": datatrove})
    sync_tree(work.set_folder)
    # Only now: until here the records beside it are those of the set that is there.
    _join_rejected(files, num_tasks, rejected_path(job.out))
    put_in_place(work.set_folder, job.out, replace=job.overwrite)
    return cleaned


def cut(source: Source, most: int) -> list[Source]:
    """At most so many sources that have its documents one after the other, as equal in bytes as its files allow.

    Raises DataError for a source that other machines cannot read.
    """
    parts = source.parts()
    try:
        pickle.dumps(parts)
    except Exception:  # pickle raises many kinds
        raise DataError(
            f"--input {source.name} cannot be read from other machines. Write it to files that they share."
        ) from None
    if len(parts) <= most:
        return parts
    # Of an unknown size one counts as much as another.
    ends = list(itertools.accumulate(part.total_bytes or 1 for part in parts))
    blocks = itertools.groupby(
        range(len(parts)), lambda place: (ends[place] - (parts[place].total_bytes or 1) // 2 - 1) * most // ends[-1]
    )
    return [_as_one([parts[place] for place in places]) for _, places in blocks]


def _as_one(parts: list[Source]) -> Source:
    return parts[0] if len(parts) == 1 else ConcatSource(parts)


@contextmanager
def _connected(cluster: Cluster, out: Path) -> Iterator[OnRay | OnSlurm]:
    """Raises DataError when a package is missing, or there is no such cluster."""
    settings = cluster.settings
    executor: OnRay | OnSlurm
    try:
        from loguru import logger

        if isinstance(settings, RaySettings):
            from llmscale.data.clean.cluster.on_ray import OnRay

            logger.disable("datatrove")
            executor = OnRay(settings, cluster.at_once)
        else:
            from llmscale.data.clean.cluster.on_slurm import OnSlurm

            logger.disable("datatrove")
            executor = OnSlurm(settings, cluster.at_once, out)
    except ImportError as error:
        raise DataError(
            f"--executor {cluster.executor} needs datatrove's executors, and {error.name} is not installed: "
            f"`{install_command('data,clean,clean-cluster')}`."
        ) from None
    try:
        yield executor
    finally:
        executor.close()
        logger.enable("datatrove")


def _describe_plan(job: CleanJob, cluster: Cluster, sources: Sequence[Source]) -> str:
    options = job.options
    line = f"{len(sources)} tasks" if len(sources) > 1 else "1 task"
    if len(sources) < (cluster.tasks or 2):
        line += f", not {cluster.tasks or 'more'}: a file is not cut"
    per_document = exact.BYTES_PER_DOCUMENT if "exact" in options.steps else 0
    per_document += index_bytes_per_document(options.near) if "near" in options.steps else 0
    if per_document:
        line += f"; the one that compares takes up to {per_document} bytes of memory for each document that stays"
    return f"{line}."


def _join_rejected(files: WorkFiles, num_tasks: int, path: Path) -> None:
    """Raises OSError."""
    path.unlink(missing_ok=True)
    for task in range(num_tasks):
        rejected = files.looked(task) / REJECTED_NAME
        if rejected.exists():
            with rejected.open("rb") as source, path.open("ab") as target:
                shutil.copyfileobj(source, target)
