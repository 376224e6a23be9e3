"""Checkpoints that releases of DeepSpeed wrote: tests/checkpoint/deepspeed_releases/write.py made them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

_ARCHIVES = Path(__file__).parent / "checkpoint" / "deepspeed_releases"
RELEASES = ("0.14.5", "0.16.9", "0.18.9", "0.19.8")
CELLS = ("zero0-fp32", "zero1-fp32", "zero2-fp32", "zero3-fp32", "zero1-bf16", "zero3-bf16", "zero2-fp16")
TAG = "global_step3"
#: Parameters of each optimizer group of tests/awkward_module.py.
GROUPS = (
    ("up.weight", "up.bias", "down.weight", "down.bias"),
    ("gain", "norm.weight", "norm.bias"),
    ("embedding.weight",),
)


def unpack_release(release: str, out: Path) -> Path:
    """Unpack the checkpoints of a release below `out`; return their folder, which has one for each of `CELLS`."""
    folder = out / release
    with tarfile.open(_ARCHIVES / f"{release}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def losses_after(cell: Path) -> list[float]:
    """Return what the release itself lost in the three steps after its checkpoint."""
    losses: list[float] = json.loads((cell / "losses.json").read_text())
    return losses
