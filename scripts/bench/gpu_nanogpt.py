"""nanoGPT's own train.py as gpu.py runs it: where it is from, its settings, its data, and what it prints."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gpu_run import Enough, Step, Watched, watch
from numpy.typing import NDArray

URL = "https://github.com/karpathy/nanoGPT"
COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"


def find_nanogpt(given: Path | None, device_kind: str, folder: Path) -> Path | str:
    """The folder that was given, or a clone; why there is none."""
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
    """From what nanoGPT's train.py prints of every iteration."""
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
    """nanoGPT's own train.py, copied to `place`, whose data/bench it reads."""
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(folder / name, place)
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in options.items())]
    # Their model.py, and no module of the repository.
    theirs = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
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
    """Its settings for a step like ours: GPT-2 with biases, every step's time printed, no checkpoint."""
    return {
        **{"dataset": "bench", "device": device, "compile": compiled},
        **{"dtype": "bfloat16" if device == "cuda" else "float32"},
        **{"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": seq_len, "bias": True},
        **{"batch_size": micro_batch, "gradient_accumulation_steps": micro_steps, "log_interval": 1},
        **{"eval_interval": 10**9, "eval_iters": 1, "always_save_checkpoint": False, "max_iters": 10**9},
        **{"warmup_iters": 10},
    }  # fmt: skip


def save_nanogpt_data(windows: NDArray[np.integer], folder: Path, vocab_size: int) -> None:
    """`windows` [samples, tokens] as nanoGPT's prepare.py leaves its data: uint16 in two files, and the vocabulary,
    padded as ours is."""
    folder.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        windows.astype("uint16").tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
