"""The work as stages, each of so many tasks; who runs them is another's business."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llmscale.data.clean.clean_request import CleanJob
from llmscale.data.clean.cluster.compared import DecideStage, RepeatStage
from llmscale.data.clean.cluster.looked import LookStage
from llmscale.data.clean.cluster.parts import WriteStage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.data.prepare.sources.source import Source


@dataclass(frozen=True)
class Stage:
    """One of several, each of which begins when the one before is over."""

    name: str
    num_tasks: int
    work: Callable[[int], int]
    """What a task does, by its number; how many documents it found. A pickle of it goes to other machines."""


def plan_stages(job: CleanJob, sources: Sequence[Source], files: WorkFiles) -> Iterator[Stage]:
    """A task of the first and of the last for each of the sources, which are the input one after the other."""
    options, num_tasks = job.options, len(sources)
    yield Stage("1-look", num_tasks, LookStage(files, options, sources, job.max_rejected))
    repeat = RepeatStage(files, options, num_tasks)
    if repeat.num_tasks:
        yield Stage("2-repeated", repeat.num_tasks, repeat)
    yield Stage("3-decide", 1, DecideStage(files, options, num_tasks))
    yield Stage("4-write", num_tasks, WriteStage(files, options, job.shard_bytes))
