"""Processes of gpu.sh's cells: start train.py or nanoGPT's train.py, watch its steps, kill it when enough are seen."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.bench.harness import REPOSITORY, python_path

#: Steps that are not counted: allocators settle and the compiler works in the first two.
WARM_STEPS = 3
OUT_OF_MEMORY = "out of memory"
_WORDS_OF_MEMORY = (OUT_OF_MEMORY, "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Step:
    """A process's report of one optimizer step."""

    seconds: float
    peak_bytes: int | None = None
    """Peak bytes of tensors on the device so far."""
    passes_s: float | None = None
    """Seconds of forward and backward passes."""


@dataclass(frozen=True)
class Watched:
    """Steps of a process, or its problem."""

    steps: list[Step]
    problem: str | None
    """Reason why no step counts; None if some do."""


@dataclass(frozen=True)
class Enough:
    """Condition for the end of a measurement."""

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
    """Run `command` until it has reported enough steps, then kill it with all its children."""
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
        # The group includes the compiler's workers.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def why_it_ended(log: Path, status: int) -> str:
    """Return "out of memory", or the last error line that the process printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if any(words in line for line in lines for words in _WORDS_OF_MEMORY):
        return OUT_OF_MEMORY
    errors = [line for line in lines if re.match(r"(error|\w*Error|\w*Exception)\b", line)]
    return f"ended with status {status}: {(errors or lines or ['it printed nothing'])[-1][:200]}"


def cell_environment(compiled: Path) -> dict[str, str]:
    """Return the environment of a cell: no launcher's variables, compiler caches in the folder `compiled`."""
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in places}
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"), "TRITON_CACHE_DIR": str(compiled / "triton")}
    settings = {"PYTHONPATH": python_path(REPOSITORY), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**inherited, **settings, **caches}


def read_train_steps(run: Path, tokens_per_step: int) -> list[Step]:
    """Read train.py's metrics.jsonl, where every step is logged. The file may end within a line."""
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
    """Run train.py; `place` is an empty folder for its run and log."""
    command = [sys.executable, str(REPOSITORY / "llmscale" / "train.py"), *arguments]

    def read_steps() -> list[Step]:
        return read_train_steps(place / "run", tokens_per_step)

    return watch(command, REPOSITORY, place / "log", read_steps, enough, limit_s, environment)


URL = "https://github.com/karpathy/nanoGPT"
COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"


def find_nanogpt(given: Path | None, device_kind: str, folder: Path) -> Path | str:
    """Return the given folder or a clone, or the reason why it is missing."""
    if given:
        return given.absolute()
    if device_kind == "cpu":
        return "no --nanogpt FOLDER, and a CPU's run fetches nothing"
    place = folder / "nanoGPT"
    try:
        for command in (
            ["git", "clone", "--quiet", URL, str(place)],
            ["git", "-C", str(place), "checkout", "--quiet", COMMIT],
        ):
            subprocess.run(
                command, check=True, capture_output=True, timeout=60, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"}
            )
    except (OSError, subprocess.SubprocessError):
        return f"{URL} could not be cloned; give --nanogpt FOLDER"
    return place


def read_nanogpt_steps(log: Path) -> list[Step]:
    """Read the lines that nanoGPT's train.py prints for every iteration."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [Step(float(ms) / 1000) for ms in re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms, mfu", text, re.M)]


def run_nanogpt(
    folder: Path,
    options: Mapping[str, object],
    place: Path,
    enough: Enough,
    limit_s: float,
    environment: Mapping[str, str],
) -> Watched:
    """Run nanoGPT's train.py, copied to `place`, where it reads data/bench."""
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(folder / name, place)
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in options.items())]
    # Without this repository it imports nanoGPT's model.py and no module of ours.
    theirs = {**environment, "PYTHONPATH": python_path()}
    log = place / "log"
    return watch(command, place, log, lambda: read_nanogpt_steps(log), enough, limit_s, theirs)


def nanogpt_options(
    *,
    device: str,
    compiled: bool,
    n_layer: int,
    n_head: int,
    n_embd: int,
    seq_len: int,
    micro_batch: int,
    micro_steps: int,
) -> dict[str, object]:
    """Return nanoGPT's settings for a step like ours: biases, every step's time printed, no checkpoint."""
    return {
        "dataset": "bench", "device": device, "compile": compiled,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": seq_len, "bias": True,
        "batch_size": micro_batch, "gradient_accumulation_steps": micro_steps, "log_interval": 1,
        "eval_interval": 10**9, "eval_iters": 1, "always_save_checkpoint": False, "max_iters": 10**9,
        "warmup_iters": 10,
    }  # fmt: skip


def save_nanogpt_data(windows: NDArray[np.integer], folder: Path, vocab_size: int) -> None:
    """Write `windows` [samples, tokens] like nanoGPT's prepare.py: uint16 in two files, and the padded vocabulary."""
    folder.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        windows.astype("uint16").tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
