"""Stages on a Ray cluster that is running, by datatrove's executor."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from ray.exceptions import RayError, RayTaskError
from ray.job_config import JobConfig

import llmscale
from llmscale.data.clean.cluster.blocks import StageBlock, check_complete, count_done
from llmscale.data.clean.cluster.settings import RaySettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress

_SHOW_S, _ANSWER_S = 0.5, 10.0
#: Of a task whose process or machine is gone.
_MOST_TRIES = 3


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
                job_config=_JobConfig(),
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
            _Executor(
                [StageBlock(stage, files)],
                tasks=stage.num_tasks,
                workers=self._at_once or -1,
                logging_dir=str(files.logs / stage.name),
                mem_per_cpu_gb=self._settings.memory_gb,
            )
            for stage in stages
        ]
        files.forget_failed()
        with _shown(executors, progress):
            for executor in executors:
                executor.run()
                check_complete([executor], files)

    def close(self) -> None:
        """Leave the cluster; it goes on."""
        ray.shutdown()


class _JobConfig(JobConfig):
    def _runtime_env_has_working_dir(self) -> bool:
        """Return True: without a folder of its own, Ray lets workers import from the one that the driver stands in."""
        return True


class _Executor(RayPipelineExecutor):
    """datatrove's own has a task run in a child of Ray's process, and waits for ever when the kernel kills that."""

    def run(self) -> None:
        """All tasks that are not completed; those that fail stay so."""
        this = ray.put(self)
        options = {"num_cpus": self.cpus_per_task, "memory": int(self.mem_per_cpu_gb) << 30}
        # A process for each, which takes its memory with it.
        run_task = ray.remote(max_retries=0, max_calls=1, **options)(_run_task)
        waiting = deque(self.get_incomplete_ranks())
        num_tries: Counter[int] = Counter()
        running: dict[ray.ObjectRef, int] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                task = waiting.popleft()
                num_tries[task] += 1
                running[run_task.remote(this, task)] = task
            for ended in ray.wait(list(running))[0]:
                task = running.pop(ended)
                try:
                    ray.get(ended)
                except RayTaskError:
                    pass  # the block has kept what it says
                except RayError:  # its process or its machine is gone
                    if num_tries[task] < _MOST_TRIES:
                        waiting.append(task)


def _run_task(executor: _Executor, task: int) -> None:
    # The one of RayPipelineExecutor logs to the machine's own disk, and copies that at the end of a task that has one.
    PipelineExecutor._run_for_rank(executor, task)


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
