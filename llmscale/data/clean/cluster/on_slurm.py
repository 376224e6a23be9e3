"""Stages as Slurm's job arrays, by datatrove's executor; the jobs go on when the command that sent them ends."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from datatrove.executor.slurm import SlurmPipelineExecutor

import llmscale
from llmscale.data.clean.cluster.blocks import StageBlock, check_complete, check_none_failed, count_done
from llmscale.data.clean.cluster.settings import SlurmSettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.errors import DataError, MachineError
from llmscale.terminal.progress import Progress

_PROGRAMS = ("sbatch", "squeue", "sinfo")
_LOOK_S, _QUEUE_S = 1.0, 10.0
#: Looks at the queue that find nothing, before tasks that are not done count as lost: their word may be on its way.
_MOST_EMPTY_LOOKS = 2
#: Of a partition that has none.
_DEFAULT_HOURS = 24.0
_ANSWER_S = 60.0


class OnSlurm:
    """What `sbatch` is told."""

    def __init__(self, settings: SlurmSettings, at_once: int | None, out: Path) -> None:
        """Raises DataError when there is no Slurm, no such partition, or `out` cannot stand in a script."""
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise DataError(
                f"--executor slurm: there is no `{missing[0]}` on this machine. Give the command on a login node of "
                "the cluster."
            )
        if "SLURM_ARRAY_TASK_ID" in os.environ:
            raise DataError("--executor slurm: this is a task of a job array. Give the command on a login node.")
        if not re.fullmatch(r"[\w./+@=,:~-]+", str(out)):
            raise DataError(
                f"--executor slurm: --out {out} has letters that Slurm's scripts do not take. Legal: A-Z a-z 0-9 . / + "
                "@ = , : ~ - _"
            )
        self._settings, self._at_once = settings, at_once
        self._partition, self._time = _choose_partition(settings)
        self._job_name = f"llmscale-clean-{hashlib.sha256(str(out).encode()).hexdigest()[:10]}"

    def check_free(self) -> None:
        """Raises DataError when jobs that write the same set are in the queue."""
        if self._is_queued():
            raise DataError(
                "--executor slurm: jobs of another command that writes the same --out are in the queue. Give that "
                f"command again, or end them: scancel --name={self._job_name}"
            )

    def run(self, stages: Sequence[Stage], files: WorkFiles, progress: Progress) -> None:
        """Send the jobs, unless an earlier command has and they are in the queue still, and wait for them.

        Raises DataError, MachineError when a task fails.
        """
        executors = [self._executor(stage, files) for stage in stages]
        for before, executor in itertools.pairwise(executors):
            executor.depends = before
        total = sum(executor.world_size for executor in executors)
        if self._is_queued():
            progress.say(f"Jobs of an earlier command are in Slurm's queue; waiting for them: {self._job_name}.")
            self._wait(executors, progress)
            check_none_failed(executors, files)
        # Of the jobs that were waited for some may be missing: that command ended before it had sent all.
        if count_done(executors) < total:
            self._send(executors[-1], files, progress)
            self._wait(executors, progress)
        check_complete(executors, files)

    def close(self) -> None:
        """Nothing is held."""

    def _send(self, last: SlurmPipelineExecutor, files: WorkFiles, progress: Progress) -> None:
        """Jobs for what is not done of the last stage, and of those that it depends on. Raises MachineError."""
        files.forget_failed()
        try:
            last.run()
        except subprocess.CalledProcessError as error:
            raise MachineError(
                f"sbatch refused a job (exit status {error.returncode}); what it said stands above. Jobs that it took "
                "go on; the same command sends the others."
            ) from None
        progress.say(
            f"Sent to Slurm, partition {self._partition}: {self._job_name}. The jobs go on without this command; "
            "given again, it waits for them."
        )

    def _executor(self, stage: Stage, files: WorkFiles) -> SlurmPipelineExecutor:
        settings = self._settings
        return _Executor(
            [StageBlock(stage, files)],
            tasks=stage.num_tasks,
            time=self._time,
            partition=self._partition,
            mem_per_cpu_gb=settings.memory_gb,
            workers=self._at_once or -1,
            job_name=self._job_name,
            qos=settings.qos,
            env_command=_environment(settings.setup),
            sbatch_args={
                **settings.sbatch,
                **({"account": settings.account} if settings.account else {}),
                # A stage whose predecessor failed would wait for ever.
                "kill-on-invalid-dep": "yes",
            },
            max_array_size=settings.max_array_size,
            logging_dir=str(files.logs / stage.name),
        )

    def _wait(self, executors: Sequence[SlurmPipelineExecutor], progress: Progress) -> None:
        """Until all tasks are done, or no job is left that could do them."""
        total = sum(executor.world_size for executor in executors)
        looked_s, empty_looks = time.monotonic(), 0
        while (done := count_done(executors)) < total:
            progress.show(done, done, total)
            time.sleep(_LOOK_S)
            if time.monotonic() - looked_s >= _QUEUE_S:
                looked_s = time.monotonic()
                empty_looks = 0 if self._is_queued() else empty_looks + 1
                if empty_looks == _MOST_EMPTY_LOOKS:
                    return
        # The last ones have still to write their ends.
        end_s = time.monotonic() + _ANSWER_S
        while self._is_queued() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def _is_queued(self) -> bool:
        return bool(_ask("squeue", "--noheader", f"--name={self._job_name}", "--format=%i").strip())


class _Executor(SlurmPipelineExecutor):
    """A stage, as one array or, where Slurm takes no array that long, several one after the other."""

    def launch_job(self) -> None:
        """datatrove lets the next stage depend on the last array alone. Raises CalledProcessError."""
        self._job_ids: list[str] = []
        self.job_id_retriever = self._keep_id
        super().launch_job()
        if self._job_ids:
            self.job_id = ":".join(self._job_ids)

    def _keep_id(self, said: str) -> str:
        self._job_ids.append(said.split()[self.job_id_position])
        return self._job_ids[-1]

    def launch_merge_stats(self) -> None:
        """Not in a job of its own, which would outlive its folder."""


def _environment(setup: str) -> str:
    """Return shell commands that give a job this Python and this llmscale, from the shared disk."""
    folders = {"PATH": Path(sys.executable).parent, "PYTHONPATH": Path(llmscale.__file__).parents[1]}
    # Without the colon where there is nothing after it: an empty entry is the folder that the job stands in.
    exports = [f'export {name}={shlex.quote(str(folder))}"${{{name}:+:${name}}}"' for name, folder in folders.items()]
    return "\n".join([*filter(None, [setup.strip()]), *exports, "export PYTHONSAFEPATH=1"])


def _choose_partition(settings: SlurmSettings) -> tuple[str, str]:
    """The name of a partition, and the time limit of its jobs. Raises DataError."""
    limits: dict[str, str] = {}
    default = ""
    for line in _ask("sinfo", "--noheader", "--format=%R|%P|%l").splitlines():
        name, marked, limit = [*line.split("|"), "", ""][:3]
        limits[name] = limit.strip()
        default = name if marked.strip().endswith("*") else default
    chosen = settings.partition or default
    legal = f"Legal: {', '.join(sorted(limits)) or 'none'}."
    if not chosen:
        raise DataError(
            f"--executor slurm: the cluster has no default partition. Name one as `partition` in --executor-options. "
            f"{legal}"
        )
    if chosen not in limits:
        raise DataError(f"--executor slurm: there is no partition '{chosen}'. {legal}")
    if settings.time_hours:
        return chosen, _clock(settings.time_hours)
    return chosen, limits[chosen] if limits[chosen][:1].isdigit() else _clock(_DEFAULT_HOURS)


def _clock(hours: float) -> str:
    """As sbatch takes it."""
    seconds = max(60, round(hours * 3600))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _ask(*command: str) -> str:
    """What a program of Slurm's prints. Raises MachineError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"`{shlex.join(command)}` does not answer: {error}.") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:200]
        raise MachineError(f"`{shlex.join(command)}` failed (exit status {done.returncode}): {said}")
    return done.stdout
