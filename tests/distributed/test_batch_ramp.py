"""Growing batches and sequences: each sample is seen once, at every world size and after every resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from llmscale.training.sample_stream import find_step_samples
from scripts.bench.resume.samples import read_samples
from tests.conftest import build_train_command, forget_after, read_losses, read_records, refusal_of, run_ranks, words

#: Seven steps of 4 sequences, four of 8, two of 12, then of 16.
RAMP = words("--global-batch-size 16 --batch-ramp-from 4 --batch-ramp-tokens 2560 --micro-batch-size 1")
#: Eight steps of 8 tokens, three of 16, then of 32.
LENGTHS = words("--seq-len-ramp-from 8 --seq-len-ramp-tokens 1920 --n-head 4")
FLAGS = words("--precision fp32 --save-every 4 --keep-last 9 --lr 3e-3 --check-every 1 --steps 16")


def command(data: Path, run: Path, stage: str, *flags: str) -> list[str]:
    return build_train_command(data, run, "--ds", stage, *FLAGS, *RAMP, *LENGTHS, *flags)


def train(data: Path, run: Path, stage: str, world_size: int, *flags: str) -> str:
    return run_ranks(command(data, run, stage, *flags), world_size)


def test_growing_sequences_with_document_masks_have_the_losses_of_one_rank(
    short_documents: Path, tmp_path: Path
) -> None:
    for name, world_size, size in (("one", 1, "1"), ("divided", 2, "2")):
        flags = ("--document-mask", "--val-every", "0", "--steps", "12", "--sequence-parallel-size", size)
        train(short_documents, tmp_path / name, "zero2", world_size, *flags)
    assert read_losses(tmp_path / "divided") == pytest.approx(read_losses(tmp_path / "one"), rel=1e-6)


def test_losses_and_samples_are_those_of_one_rank(tiny_set: Path, tmp_path: Path) -> None:
    straight, again, moved = (tmp_path / name for name in ("straight", "again", "moved"))
    output = train(tiny_set, straight, "zero1", 1)
    assert "grown from 4 sequences in 4 sizes by step 14, cut into sequences of 8 to 16 tokens until step 11" in output
    assert [record["seq_len"] for record in read_records(straight, "train")] == [8] * 8 + [16] * 3 + [32] * 5
    sizes = [len(ids) for _, ids in sorted(read_samples(straight).items())]
    assert sizes == [4] * 7 + [8] * 4 + [12] * 2 + [16] * 3
    seen = np.concatenate([*read_samples(straight).values()])
    assert len(seen) == len({*seen.tolist()}) == 132
    for folder in (again, moved):
        shutil.copytree(straight, folder)
    forget_after(again, 8)
    train(tiny_set, again, "zero1", 1)
    assert read_losses(again) == read_losses(straight), "the same bits after a resume within the ramp"
    for step, stage, world_size, split in ((4, "zero3", 4, 4), (10, "zero2_offload", 2, 1)):
        forget_after(moved, step)
        train(tiny_set, moved, stage, world_size, "--sequence-parallel-size", str(split))
        assert read_losses(moved) == pytest.approx(read_losses(straight), rel=1e-6), stage
    assert all(np.array_equal(ids, read_samples(straight)[step]) for step, ids in read_samples(moved).items())
    actual = find_step_samples(moved, 8)
    assert [sample.position for sample in actual.samples] == list(range(28, 36))
    reason = refusal_of(command(tiny_set, moved, "zero0", "--batch-ramp-from", "8", "--steps", "17"))
    assert "global_batch_size was '16, from 4 over 80 samples' and is '16, from 8 over 80 samples'" in reason
