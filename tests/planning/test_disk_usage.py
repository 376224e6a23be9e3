from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.run_config import RunConfig
from llmscale.planning.disk_usage import estimate_disk

SHAPE = GPTShape(12, 12, 768, 50257, 1024)


def test_a_checkpoint_is_three_numbers_in_fp32_per_parameter() -> None:
    disk = estimate_disk(SHAPE, 1000, 1e9, RunConfig())
    assert disk.checkpoint_bytes == 12 * SHAPE.num_parameters
    assert disk.weights_bytes == 2 * SHAPE.num_parameters


def test_a_new_checkpoint_is_written_beside_the_old() -> None:
    disk = estimate_disk(SHAPE, 1000, 1e9, RunConfig(keep_last=3))
    assert disk.checkpoints_bytes == (3 + 1 + 1) * disk.checkpoint_bytes, "the best, and the one being written"
    assert disk.total_bytes == disk.checkpoints_bytes + disk.data_bytes + disk.weights_bytes


def test_keep_every_adds_checkpoints_for_ever() -> None:
    assert estimate_disk(SHAPE, 1000, 1e9, RunConfig(keep_last=2, keep_every=300)).kept_checkpoints == 2 + 1 + 3


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(65536, 2), (65537, 4)])
def test_tokens_take_two_bytes_up_to_a_vocabulary_of_2_to_the_16(vocab_size: int, token_bytes: int) -> None:
    disk = estimate_disk(replace(SHAPE, vocab_size=vocab_size), 1, 1024 * 1000, RunConfig())
    assert disk.data_bytes == 1000 * (1025 * token_bytes + 4)


def test_it_is_what_a_prepared_set_takes(tiny_set: Path) -> None:
    from llmscale.data.shards.manifest import load_manifest as load_set

    manifest = load_set(tiny_set)
    split = manifest.splits["train"]
    shape = GPTShape(1, 1, 128, manifest.vocab_size, manifest.seq_len)
    expected = estimate_disk(shape, 1, split.num_samples * manifest.seq_len, RunConfig()).data_bytes
    on_disk = sum(file.stat().st_size for file in (tiny_set / "train").rglob("*.mds"))
    assert on_disk == pytest.approx(expected, rel=0.05)
