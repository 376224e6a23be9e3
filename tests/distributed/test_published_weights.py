"""Training goes on from published weights, at every stage, world size and precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.published_models import CONFIGS, VOCAB_SIZE, save_model

JOB = REPOSITORY / "tests" / "distributed" / "published_weights_job.py"
SEQ_LEN = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per family, with what transformers computes beside it."""
    folder = tmp_path_factory.mktemp("models")
    tokens = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(3))
    for name in CONFIGS:
        model = save_model(folder / name, name, shard_size="30KB")
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.save({"tokens": tokens, "loss": loss}, folder / name / "expected.pt")
    return {name: folder / name for name in CONFIGS}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_stage_has_the_bits_of_the_files_and_the_loss_of_transformers(
    models: dict[str, Path], tiny_set: Path, ranks: Callable, world_size: int
) -> None:
    job = ranks([str(JOB), str(tiny_set), *map(str, models.values())], world_size)
    output = job.wait()[0]
    assert job.exit_codes == [0] * world_size, output
    assert output.count("ok ") == 4 * len(models) + 2 * 5, output
