"""One cell of gpu.py: start its process, watch its steps, and end it when enough of them have been seen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paced_ranks import REPOSITORY

#: Steps that are not counted: allocators settle and the compiler works in the first two.
WARM_STEPS = 3
_WORDS_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Step:
    """What a process reports of one optimizer step."""

    seconds: float
    peak_bytes: int | None = None
    """Of tensors on the device, so far."""
    passes_s: float | None = None
    """Forward and backward passes alone."""


@dataclass(frozen=True)
class Watched:
    """How a process went."""

    steps: list[Step]
    problem: str | None
    """Why there are none that count; None: there are, fewer than wanted where the time was up."""


@dataclass(frozen=True)
class Enough:
    """When a process has been watched for long enough."""

    measure_s: float
    least_steps: int = 2

    def reached(self, steps: Sequence[Step]) -> bool:
        counted = steps[WARM_STEPS:]
        return len(counted) >= self.least_steps and sum(step.seconds for step in counted) >= self.measure_s


def watch(
    command: Sequence[str],
    cwd: Path,
    log: Path,
    read_steps: Callable[[], list[Step]],
    enough: Enough,
    limit_s: float,
    environment: Mapping[str, str],
) -> Watched:
    """Run `command` until it has reported enough steps, then end it with all its children; it saves nothing."""
    end = time.monotonic() + limit_s
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        while not enough.reached(steps := read_steps()):
            if process.poll() is not None:
                steps = read_steps()
                return Watched(steps, None if enough.reached(steps) else why_it_ended(log, process.returncode))
            if time.monotonic() > end:
                late = f"not done after {limit_s:.0f} s, {len(steps)} steps"
                return Watched(steps, None if len(steps) > WARM_STEPS else late)
            time.sleep(0.2)
        return Watched(steps, None)
    finally:
        # Its compiler's workers too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def why_it_ended(log: Path, status: int) -> str:
    """Out of memory, or the last error line of what the process printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if any(words in line for line in lines for words in _WORDS_OF_MEMORY):
        return "out of memory"
    errors = [line for line in lines if re.match(r"(error|\w*Error|\w*Exception)\b", line)]
    return f"ended with status {status}: {(errors or lines or ['it printed nothing'])[-1][:200]}"


def cell_environment(compiled: Path) -> dict[str, str]:
    """This process's, without what a launcher may have left in it; the compiler's caches in the folder `compiled`."""
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in places}
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"), "TRITON_CACHE_DIR": str(compiled / "triton")}
    said = {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **said, **caches}


def read_train_steps(run: Path, tokens_per_step: int) -> list[Step]:
    """From train.py's metrics.jsonl, where every step was logged. The file may end within a line."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return [
        Step(
            tokens_per_step / record["tokens_per_second"],
            record["peak_memory_bytes"],
            record["forward_backward_s"],
        )
        for record in records
    ]


def run_train(
    arguments: Sequence[str],
    tokens_per_step: int,
    place: Path,
    enough: Enough,
    limit_s: float,
    environment: Mapping[str, str],
) -> Watched:
    """train.py itself; `place` is empty, and the run folder within it."""
    command = [sys.executable, str(REPOSITORY / "llmscale" / "train.py"), *arguments]

    def read_steps() -> list[Step]:
        return read_train_steps(place / "run", tokens_per_step)

    return watch(command, REPOSITORY, place / "log", read_steps, enough, limit_s, environment)
