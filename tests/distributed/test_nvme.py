"""States on NVMe are saved and resumed like any other. Needs libaio; compiles DeepSpeed's async_io on first use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import checkpoint_name, checkpoints_folder
from tests.conftest import REPOSITORY, read_losses, refusal_of, run_ranks, words


def async_io_is_compatible() -> bool:
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible(verbose=False)


@pytest.fixture
def nvme_config(tmp_path: Path) -> Path:
    """ds_configs/zero3_nvme.json with a folder that exists."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    (tmp_path / "nvme").mkdir()
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][name]["nvme_path"] = str(tmp_path / "nvme")
    (tmp_path / "nvme.json").write_text(json.dumps(config))
    return tmp_path / "nvme.json"


def test_a_missing_folder_is_one_clear_error(train_command: Callable) -> None:
    text = "offload_optimizer.nvme_path /local_nvme is not a writable folder on this host"
    assert text in refusal_of(train_command("--ds", "zero3_nvme"))


@pytest.mark.slow
@pytest.mark.skipif(not async_io_is_compatible(), reason="libaio is not installed")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saves_and_resumes_to_and_from_nvme(
    train_command: Callable, nvme_config: Path, tmp_path: Path, optimizer: str
) -> None:
    def train(ds: str, run: str) -> dict[int, float]:
        # Wide enough that a group's states are above the 1 MiB from which DeepSpeed swaps.
        flags = words("--n-layer 4 --n-head 4 --n-embd 128 --precision fp32 --lr 1e-3 --steps 8 --save-every 4")
        run_ranks(train_command("--ds", ds, *flags, "--optimizer", optimizer, "--run", run), 1, timeout_s=900)
        return read_losses(Path(run))

    def forget_the_end(run: str, copy: str) -> str:
        shutil.copytree(run, copy)
        shutil.rmtree(checkpoints_folder(Path(copy)) / checkpoint_name(8))
        return copy

    memory, nvme = str(tmp_path / "memory"), str(tmp_path / "nvme-run")
    reference = train("ds_configs/zero3.json", memory)
    assert train(str(nvme_config), nvme) == pytest.approx(reference, rel=1e-5)
    assert list((tmp_path / "nvme").rglob("*.swp")), "nothing was swapped, so nothing was tested"
    for ds, source in ((str(nvme_config), nvme), ("ds_configs/zero1.json", nvme), (str(nvme_config), memory)):
        run = forget_the_end(source, str(tmp_path / f"{Path(ds).stem}-{Path(source).name}"))
        (Path(run) / "metrics.jsonl").unlink()
        losses = train(ds, run)
        assert losses == pytest.approx({step: reference[step] for step in range(5, 9)}, rel=1e-5)
