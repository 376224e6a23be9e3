"""Cog's training: prepare the text, train with DeepSpeed on all GPUs, return an archive that predict.py loads."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path as LocalPath

from cog import BaseModel, Input, Path

ROOT = LocalPath(__file__).resolve().parents[2]
# Cog copies the repository without installing it.
sys.path.insert(0, str(ROOT))

from llmscale.checkpoint.inventory import find_checkpoint  # noqa: E402
from llmscale.data.mixture import KEPT_NAME  # noqa: E402


class TrainingOutput(BaseModel):
    """Result that Replicate stores and passes to Predictor.setup."""

    weights: Path


def train(
    text: Path = Input(description="Text, JSONL or Parquet, also .gz or .zst"),  # noqa: B008  Cog reads it
    model: str = Input(description="Preset, tiny-1m to gpt3-175b", default="tiny-10m"),
    tokenizer: str = Input(description="bytes needs no download", default="gpt2", choices=["gpt2", "bytes"]),
    seq_len: int = Input(description="Context length in tokens", default=256, ge=8),
    steps: int = Input(description="Optimizer steps", default=1000, ge=1),
    global_batch_size: int = Input(description="Sequences per step", default=64, ge=1),
    zero: str = Input(description="ds_configs/NAME.json", default="zero2", choices=["zero1", "zero2", "zero3"]),
) -> TrainingOutput:
    """Prepare the text and train. Raises CalledProcessError if a step fails; the log has the reason."""
    work = LocalPath(tempfile.mkdtemp(prefix="llmscale-"))
    _run(
        [
            sys.executable,
            "-m",
            "llmscale.cli.main",
            "data",
            "prepare",
            "--input",
            str(text),
            "--out",
            "data",
            "--tokenizer",
            tokenizer,
            "--seq-len",
            str(seq_len),
        ],
        work,
    )
    _run(
        [
            sys.executable,
            "-m",
            "llmscale",
            "train",
            "--ds",
            str(ROOT / "ds_configs" / f"{zero}.json"),
            "--data",
            "data",
            "--run",
            "run",
            "--model",
            model,
            "--steps",
            str(steps),
            "--global-batch-size",
            str(global_batch_size),
        ],
        work,
    )
    return TrainingOutput(weights=Path(pack_weights(work)))


def pack_weights(work: LocalPath) -> LocalPath:
    """Pack the newest checkpoint of `work/run` and the run's tokenizer into an archive, and return its path."""
    names = [find_checkpoint(work / "run").relative_to(work), LocalPath("run") / KEPT_NAME]
    archive = work / "weights.tar"
    with tarfile.open(archive, "w") as tar:
        for name in names:
            tar.add(work / name, arcname=str(name))
    return archive


def _run(command: Sequence[str], folder: LocalPath) -> None:
    """Run a command in `folder` with this repository importable; output goes to Cog's log."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True)
