"""Stages on a Ray cluster that is running, by datatrove's executor."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from datatrove.executor.ray import RayPipelineExecutor

import llmscale
from llmscale.data.clean.cluster.blocks import StageBlock, check_complete, count_done
from llmscale.data.clean.cluster.settings import RaySettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress

_SHOW_S, _ANSWER_S = 0.5, 10.0


class OnRay:
    """A connection to the cluster."""

    def __init__(self, settings: RaySettings, at_once: int | None) -> None:
        """Raises DataError when there is no cluster, or no room in it for a task."""
        self._settings, self._at_once = settings, at_once
        address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
        paths = [str(Path(llmscale.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            _check_answers(address)
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="error",
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            where = "runs on this machine" if address == "auto" else f"answers at {address}"
            raise DataError(
                f"--executor ray: no Ray cluster {where} ({reason}). Start one with `ray start --head`, and name it as "
                "HOST:PORT in RAY_ADDRESS or as `address` in --executor-options."
            ) from None
        needed = settings.memory_gb << 30
        sizes = [node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]]
        if max(sizes, default=0) < needed:
            ray.shutdown()
            raise DataError(
                f"--executor ray: a task asks for {settings.memory_gb} GiB, and no machine of the cluster has more "
                f"than {max(sizes, default=0) / 2**30:.1f} GiB. Set memory_gb in --executor-options."
            )

    def check_free(self) -> None:
        """Tasks end with the command that sent them."""

    def run(self, stages: Sequence[Stage], files: WorkFiles, progress: Progress) -> None:
        """Raises DataError, MachineError when a task fails."""
        executors = [
            RayPipelineExecutor(
                [StageBlock(stage, files)],
                tasks=stage.num_tasks,
                workers=self._at_once or -1,
                logging_dir=str(files.logs / stage.name),
                mem_per_cpu_gb=self._settings.memory_gb,
            )
            for stage in stages
        ]
        with _shown(executors, progress):
            for executor in executors:
                executor.run()
                check_complete([executor], files)

    def close(self) -> None:
        """Leave the cluster; it goes on."""
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes. Raises OSError, ValueError."""
    if address != "auto":
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if not port.isdecimal():
            raise ValueError("that is not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


@contextmanager
def _shown(executors: Sequence[RayPipelineExecutor], progress: Progress) -> Iterator[None]:
    is_over = threading.Event()
    total = sum(executor.world_size for executor in executors)

    def show() -> None:
        while not is_over.wait(_SHOW_S):
            done = count_done(executors)
            progress.show(done, done, total)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
