"""Run `data clean` on a Ray cluster whose machines share a disk: split the input, run the tasks, join their files."""

from __future__ import annotations

import itertools
import os
import pickle
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import llmscale
from llmscale.config.bundled_files import install_command
from llmscale.data.clean.annotate import CleanOptions
from llmscale.data.clean.duplicates import index_bytes_per_document
from llmscale.data.clean.job import CleanJob, CleanResult, version_of, write_manifest
from llmscale.data.clean.stages import PartedWork, Stage, join_parts, join_rejected, plan_stages, read_position
from llmscale.data.prepare.output_folder import open_work_folder, put_in_place, rejected_path, sync_tree
from llmscale.data.prepare.sources.file_source import ConcatSource
from llmscale.data.prepare.sources.source import Source
from llmscale.errors import DataError, LlmscaleError, MachineError
from llmscale.suggestions import did_you_mean
from llmscale.terminal.progress import Progress, count_words, show_progress
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_yaml

_MOST_PARTS = 256
#: Tries of a task whose process or machine dies.
_MOST_TRIES = 3
_CONNECT_S, _SHOW_S = 10.0, 0.5
_LEGAL = ("address", "memory_gb")
_RunStages = Callable[[PartedWork, Progress], Iterator[Stage]]


@dataclass(frozen=True)
class RayCluster:
    """A running Ray cluster, and how much of it to use."""

    address: str = ""
    """HOST:PORT; if empty, RAY_ADDRESS or the cluster on this machine."""
    memory_gb: int = 4
    """Memory that Ray reserves for a task, GiB. A task has one core."""
    num_parts: int | None = None
    """Parts of the input; None for one per file, at most `_MOST_PARTS`."""
    at_once: int | None = None
    """Tasks that run at the same time; None for as many as the cluster has room for."""


def read_cluster(path: Path | None, num_parts: int | None, at_once: int | None) -> RayCluster:
    """Return the cluster that the YAML of --executor-options describes. Raises DataError."""
    values: dict[str, object] = {}
    where = f"--executor-options {path}"
    try:
        values |= load_yaml(path, Rules(DataError, max_bytes=CONFIG_MAX_BYTES), where) if path else {}
    except OSError as error:
        raise DataError(f"{where}: {error.strerror}.") from None
    for key in values:
        if key not in _LEGAL:
            raise DataError(
                f"{where}: unknown option '{str(key)[:80]}'.{did_you_mean(str(key), _LEGAL)} Legal: "
                f"{', '.join(_LEGAL)}."
            )
    address, memory_gb = values.get("address", ""), values.get("memory_gb", RayCluster.memory_gb)
    if not isinstance(address, str):
        raise DataError(f"{where}: address is {str(address)[:80]!r}, and must be 'HOST:PORT' in quotes.")
    if type(memory_gb) is not int or not 0 < memory_gb <= 1_000_000:
        raise DataError(f"{where}: memory_gb is {str(memory_gb)[:80]!r}, and must be an integer from 1 to 1,000,000.")
    return RayCluster(address, memory_gb, num_parts, at_once)


def clean_on_ray(job: CleanJob, cluster: RayCluster) -> CleanResult:
    """Clean as a local run does: the same documents in the same order, but files end where parts end.

    Finished tasks of a run that fails or is killed are kept in a hidden folder beside `job.out`, for the next run of
    the same job. Raises DataError when the cluster or the input cannot be used; MachineError when a task fails.
    """
    job = replace(job, out=Path(os.path.abspath(job.out)))
    parts = cut(job.source, cluster.num_parts or _MOST_PARTS)
    request = {**job.request, "tasks": len(parts), "llmscale": llmscale.__version__}
    name, options = job.source.name, job.options
    with (
        _connected(cluster) as run_stages,
        open_work_folder(job.out, request, "clean") as folder,
        show_progress(f"Cleaning {name}", words=count_words("tasks")) as progress,
    ):
        folder.save_state({}, {})  # from now on the folder survives an error
        work = PartedWork(folder.path, parts, options, job.ngrams, job.max_rejected, job.shard_bytes)
        progress.say(_describe_plan(cluster, len(parts), options))
        for stage in run_stages(work, progress):
            num_rejected = 0
            if stage.name == "1-annotate":
                num_rejected = sum(read_position(work, part)[0].num_rejected for part in range(len(parts)))
            if num_rejected > job.max_rejected:
                raise DataError(
                    f"{name} has {num_rejected:,} malformed records, more than --max-rejected {job.max_rejected}. "
                    "Raise it to skip them."
                )
        result = join_parts(work, folder.set_folder)
        result.check_anything_left(name)
        facts = {"executor": "ray", "tasks": len(parts), "ray": version_of("ray")}
        write_manifest(folder.set_folder, result, job, facts)
        sync_tree(folder.set_folder)
        # Until here the records beside `out` are those of the folder that it holds.
        join_rejected(work, rejected_path(job.out))
        put_in_place(folder.set_folder, job.out, replace=job.overwrite)
        return result


def cut(source: Source, most: int) -> list[Source]:
    """Return at most `most` sources that hold its documents in order, as equal in bytes as its files allow.

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
    sizes = [part.total_bytes or 1 for part in parts]
    ends = list(itertools.accumulate(sizes))
    groups = itertools.groupby(
        range(len(parts)), lambda index: (ends[index] - sizes[index] // 2 - 1) * most // ends[-1]
    )
    chosen = [[parts[index] for index in group] for _, group in groups]
    return [group[0] if len(group) == 1 else ConcatSource(group) for group in chosen]


def _describe_plan(cluster: RayCluster, num_parts: int, options: CleanOptions) -> str:
    line = f"{num_parts} parts" if num_parts > 1 else "1 part"
    if num_parts < (cluster.num_parts or 2):
        line += f", not {cluster.num_parts or 'more'}, because files are not split"
    per_document = index_bytes_per_document(options.steps, options.near)
    if per_document:
        line += f"; the task that finds duplicates takes up to {per_document} bytes of memory per document kept"
    return f"{line}."


@contextmanager
def _connected(cluster: RayCluster) -> Iterator[_RunStages]:
    """Connect to the cluster; yield a function that runs the stages and yields each when it is complete.

    Raises DataError when Ray is missing, no cluster answers, or no machine has room for a task.
    """
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError:
        raise DataError(f"--executor ray needs Ray: `{install_command('data,clean,clean-cluster')}`.") from None
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
        yield lambda work, progress: _run_stages(cluster, work, progress)
    finally:
        ray.shutdown()  # disconnects; the cluster keeps running


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError at once where Ray itself would retry for minutes."""
    if address != "auto":
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if not port.isdecimal():
            raise ValueError("that is not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def _run_stages(cluster: RayCluster, work: PartedWork, progress: Progress) -> Iterator[Stage]:
    """Run the tasks that are not complete; yield each stage when it is. Raises DataError, MachineError."""
    import ray
    from ray.exceptions import RayError

    # Each task has a process of its own, and frees its memory with it.
    remote = ray.remote(max_retries=0, max_calls=1, num_cpus=1, memory=cluster.memory_gb << 30)(_run_task)
    shared = ray.put(work)
    stages = plan_stages(len(work.parts))
    left = [deque(task for task in range(stage.num_tasks) if not stage.result(work, task).exists()) for stage in stages]
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
                    else:
                        failure = _to_error(stage, task, *message)
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
    work: PartedWork, run: Callable[[PartedWork, int], None], task: int, directory: Path
) -> tuple[bool, str] | None:
    """Run a task in a worker; return whether its error is a DataError, and the message, or None."""
    os.chdir(directory)  # where relative paths of the input begin
    try:
        run(work, task)
    except LlmscaleError as error:
        return isinstance(error, DataError), str(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return None


def _to_error(stage: Stage, task: int, is_data_error: bool, message: str) -> LlmscaleError:
    if is_data_error:
        return DataError(message)
    return MachineError(
        f"Stage {stage.name}: task {task} failed: {message}. Run the same command again; finished tasks are kept."
    )
