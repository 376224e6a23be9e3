"""Run the tasks of `data clean` on a Ray cluster whose machines share a disk."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

import llmscale
from llmscale.config.bundled_files import import_extra
from llmscale.data.clean.stages import CleanJob, Stage, plan_stages
from llmscale.data.prepare.sources.file_source import ConcatSource
from llmscale.data.prepare.sources.source import Source
from llmscale.errors import DataError, LlmscaleError, MachineError
from llmscale.terminal.progress import Progress
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, build, load_settings

_MOST_PARTS = 256
#: Tries of a task whose process or machine dies.
_MOST_TRIES = 3
_CONNECT_S = 10.0
_SHOW_S = 0.5
#: Runs the stages, and yields each when it is complete.
RunStages = Callable[[CleanJob, Progress], Iterator[Stage]]


@dataclass(frozen=True)
class _Options:
    """Contents of --executor-options."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    address: str = ""
    """HOST:PORT; if empty, RAY_ADDRESS or the cluster on this machine."""
    memory_gb: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Memory that Ray reserves for a task, GiB. A task has one core."""


@dataclass(frozen=True)
class RayCluster(_Options):
    """A running Ray cluster, and how much of it to use."""

    num_parts: int | None = None
    """Parts of the input; None for one per file, at most `_MOST_PARTS`."""
    at_once: int | None = None
    """Tasks that run at the same time; None for as many as the cluster has room for."""


def read_cluster(path: Path | None, num_parts: int | None, at_once: int | None) -> RayCluster:
    """Return the cluster that the YAML of --executor-options describes. Raises DataError."""
    options = _Options()
    where = f"--executor-options {path}"
    if path:
        values = load_settings(path, Rules(DataError, max_bytes=CONFIG_MAX_BYTES), where)
        options = build(_Options, values, Rules(DataError), where)
    return RayCluster(options.address, options.memory_gb, num_parts, at_once)


def cut(source: Source, num_parts: int | None) -> list[Source]:
    """Return at most `num_parts` sources that hold its documents in order, as equal in bytes as its files allow.

    Raises DataError for a source that other machines cannot read.
    """
    parts = source.parts()
    try:
        pickle.dumps(parts)
    except Exception:  # pickle raises many kinds
        raise DataError(
            f"--input {source.name} cannot be read from other machines. Write it to files that they share."
        ) from None
    most = num_parts or _MOST_PARTS
    if len(parts) <= most:
        return parts
    sizes = [part.total_bytes or 1 for part in parts]
    ends = list(itertools.accumulate(sizes))
    groups = itertools.groupby(
        range(len(parts)), lambda index: (ends[index] - sizes[index] // 2 - 1) * most // ends[-1]
    )
    chosen = [[parts[index] for index in group] for _, group in groups]
    return [group[0] if len(group) == 1 else ConcatSource(group) for group in chosen]


@contextmanager
def connected(cluster: RayCluster) -> Iterator[RunStages]:
    """Connect to the cluster; yield a function that runs the stages and yields each when it is complete.

    Raises DataError when Ray is missing, no cluster answers, or no machine has room for a task.
    """
    ray = import_extra("ray", "--executor ray", "data,clean,clean-cluster", DataError)
    from ray.job_config import JobConfig

    address = cluster.address or os.environ.get("RAY_ADDRESS") or "auto"
    job_config = JobConfig()
    # Without a working directory, Ray lets workers import modules from the folder that this process runs in.
    job_config._runtime_env_has_working_dir = lambda: True
    paths = [str(Path(llmscale.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
    try:
        _check_answers(address)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            job_config=job_config,
            runtime_env={"env_vars": variables},
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        where = "runs on this machine" if address == "auto" else f"answers at {address}"
        raise DataError(
            f"--executor ray: no Ray cluster {where} ({reason}). Start one with `ray start --head`, and name it as "
            "HOST:PORT in RAY_ADDRESS or as `address` in --executor-options."
        ) from None
    try:
        largest = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if largest < cluster.memory_gb << 30:
            raise DataError(
                f"--executor ray: a task asks for {cluster.memory_gb} GiB, and no machine of the cluster has more "
                f"than {largest / 2**30:.1f} GiB. Set memory_gb in --executor-options."
            )
        yield functools.partial(_run_stages, cluster)
    finally:
        ray.shutdown()  # disconnects; the cluster keeps running


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError at once where Ray itself would retry for minutes."""
    if address != "auto":
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if not port.isdecimal():
            raise ValueError("that is not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def _run_stages(cluster: RayCluster, job: CleanJob, progress: Progress) -> Iterator[Stage]:
    """Run the tasks that are not complete; yield each stage when it is. Raises DataError, MachineError."""
    import ray
    from ray.exceptions import RayError

    # Each task has a process of its own, and frees its memory with it.
    remote = ray.remote(max_retries=0, max_calls=1, num_cpus=1, memory=cluster.memory_gb << 30)(_run_task)
    shared = ray.put(job)
    stages = plan_stages(len(job.parts))
    left = [deque(task for task in range(stage.num_tasks) if not stage.result(job, task).exists()) for stage in stages]
    total = sum(stage.num_tasks for stage in stages)
    done = total - sum(map(len, left))
    for stage, waiting in zip(stages, left, strict=True):
        running: dict[ray.ObjectRef, int] = {}
        num_tries: Counter[int] = Counter()
        failure: LlmscaleError | None = None
        while waiting or running:
            while waiting and len(running) < (cluster.at_once or total):
                task = waiting.popleft()
                running[remote.remote(shared, stage.run, task, Path.cwd())] = task
            progress.show(done, done, total)
            for ended in ray.wait(list(running), timeout=_SHOW_S)[0]:
                task = running.pop(ended)
                num_tries[task] += 1
                try:
                    message = ray.get(ended)
                    if message is None:
                        done += 1
                    elif message[0]:
                        failure = DataError(message[1])
                    else:
                        failure = MachineError(
                            f"Stage {stage.name}: task {task} failed: {message[1]}. Run the same command again; "
                            "finished tasks are kept."
                        )
                except RayError as error:  # its process or its machine died
                    if num_tries[task] < _MOST_TRIES:
                        waiting.append(task)
                        continue
                    failure = MachineError(
                        f"Stage {stage.name}: task {task} died {_MOST_TRIES} times ({type(error).__name__}), probably "
                        "out of memory. Raise memory_gb in --executor-options and run the same command again; finished "
                        "tasks are kept."
                    )
            if failure:
                waiting.clear()  # tasks that run finish
        if failure:
            raise failure
        yield stage


def _run_task(
    job: CleanJob, run: Callable[[CleanJob, int], None], task: int, directory: Path
) -> tuple[bool, str] | None:
    """Run a task in a worker; return whether its error is a DataError, and the message, or None."""
    os.chdir(directory)  # where relative paths of the input begin
    try:
        run(job, task)
    except LlmscaleError as error:
        return isinstance(error, DataError), str(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return None
