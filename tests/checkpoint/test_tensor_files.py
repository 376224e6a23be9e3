from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.tensor_files import StoredWeights
from llmscale.errors import CheckpointError
from tests.checkpoint.written import write_tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_range_of_a_tensor_is_read_however_it_was_cut(dtype: torch.dtype, world_size: int, tmp_path: Path) -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    few = torch.tensor([1.0, 2.0])
    tensors = {"master/w": weights, "exp_avg/w": weights * 2, "frozen/few": few, "buffer/b": few * 3}
    stored = StoredWeights(write_tensors(tmp_path / "step-00000003", tensors, world_size))
    assert stored.sizes == {"w": 1000, "few": 2, "b": 2}
    draw = random.Random(0)
    for _ in range(50):
        start = draw.randrange(1000)
        elements = draw.randrange(1, 1001 - start)
        read = stored.read("w", start, elements)
        assert read.dtype == torch.float32
        assert torch.equal(read, weights[start : start + elements].float())
    assert torch.equal(stored.read("few", 0, 2), few)


def test_a_checkpoint_that_expires_meanwhile_is_said_so(tmp_path: Path) -> None:
    folder = write_tensors(tmp_path / "step-00000003", {"master/w": torch.ones(10)})
    stored = StoredWeights(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read: No such file .* name a newer one"):
        stored.read("w", 0, 10)


def test_weights_that_are_no_numbers_with_a_point_are_refused(tmp_path: Path) -> None:
    folder = write_tensors(tmp_path / "step-00000003", {"master/w": torch.ones(10, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="the weights 'master/w' are int32"):
        StoredWeights(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(200.0)[50:150],
        torch.arange(200.0)[::2],
        torch.arange(100.0).view(10, 10),
        torch.ones(1).expand(100),
        torch.arange(100, dtype=torch.int32),
        torch.nn.Parameter(torch.ones(100)),
        torch.ones(99),
        {"w": torch.ones(100)},
    ],
    ids=["offset", "strided", "matrix", "expanded", "integers", "parameter", "short", "dict"],
)
def test_an_archive_of_anything_but_the_flat_tensor_of_the_index_is_refused(tensor: object, tmp_path: Path) -> None:
    """Its bytes would be read in another order than torch means them to have."""
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    with (folder / "__0_0.distcp").open("wb") as file:
        torch.save(tensor, file)
        num_bytes = file.tell()
    chunks = [[0, 100, "__0_0.distcp", 0, num_bytes]]
    (folder / "tensors.json").write_text(
        json.dumps({"master/w": {"dtype": "float32", "size": 100, "chunks": chunks}}),
    )
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, 'w', (does not hold a flat|holds|has other)"):
        StoredWeights(folder).read("w", 0, 100)
