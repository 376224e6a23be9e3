"""A stage of the work as datatrove's executors run it: a block, so many tasks, and what became of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.errors import DataError, LlmscaleError, MachineError
from llmscale.files.atomic_write import write_durably


class StageBlock(PipelineStep):
    """A task of a stage, all of it."""

    type = "llmscale data clean"

    def __init__(self, stage: Stage, files: WorkFiles) -> None:
        self.name = stage.name
        super().__init__()
        self._work, self._files = stage.work, files
        # Where the paths that the user gave begin.
        self._directory = Path.cwd()

    def run(self, data: None = None, rank: int = 0, world_size: int = 1) -> None:
        """Raises whatever the work raises, and keeps it for whoever waits."""
        os.chdir(self._directory)
        try:
            self.stat_update("documents", value=self._work(rank))
        except Exception as error:
            kind = "data" if isinstance(error, DataError) else "machine"
            record = {"kind": kind, "what": str(error) or type(error).__name__}
            if not isinstance(error, LlmscaleError):
                record["what"] = f"{type(error).__name__}: {record['what']}"
            self._files.errors.mkdir(exist_ok=True)
            write_durably(self._files.error(self.name, rank), json.dumps(record))
            raise


def count_done(executors: Sequence[PipelineExecutor]) -> int:
    """Tasks that are completed. Raises OSError."""
    return sum(executor.world_size - len(executor.get_incomplete_ranks()) for executor in executors)


def check_none_failed(executors: Sequence[PipelineExecutor], files: WorkFiles) -> None:
    """Raises what a task that is not completed has left: DataError for a fault of the input, else MachineError."""
    for executor in executors:
        [block] = executor.pipeline
        for task in executor.get_incomplete_ranks():
            try:
                record = json.loads(files.error(block.name, task).read_bytes())
            except FileNotFoundError:
                continue
            if record["kind"] == "data":
                raise DataError(record["what"])
            raise MachineError(
                f"Task {task} of the stage {block.name} failed: {record['what']}. Logs: {files.logs}. The same command "
                "goes on from what is done."
            )


def check_complete(executors: Sequence[PipelineExecutor], files: WorkFiles) -> None:
    """Raises DataError for a fault of the input, MachineError when a task failed or died otherwise."""
    check_none_failed(executors, files)
    for executor in executors:
        if missing := executor.get_incomplete_ranks():
            [block] = executor.pipeline
            raise MachineError(
                f"{len(missing)} of {executor.world_size} tasks of the stage {block.name} ended without a word, the "
                f"first of them task {missing[0]}: most likely of too little memory (memory_gb in --executor-options) "
                f"or time. Logs: {files.logs}. The same command goes on from what is done."
            )
