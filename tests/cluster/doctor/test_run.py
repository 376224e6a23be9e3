"""Checks of a run on its host: configuration, data, run folder, memory and disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmscale.cluster.doctor import run as run_checks
from llmscale.cluster.doctor.report import CheckRow, ProbeRequest
from llmscale.cluster.doctor.run import check_ds_config, check_run, read_run
from llmscale.cluster.launch.ranks import Gpu

GIB = 2**30


def test_all_problems_of_a_ds_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimisation": {"stage": 2}, "gradient_clipping": "much"}))
    wrong = [row for row in check_ds_config(path) if row.status == "fail"]
    assert len(wrong) == 2
    assert any("'zero_optimization'" in f"{row.found} {row.fix}" for row in wrong)
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "sub_group_size": 100}}))
    (_, idle) = check_ds_config(path)
    assert idle.status == "warn" and "sub_group_size has no effect at stage 2" in idle.found
    (missing,) = check_ds_config(tmp_path / "no.json")
    assert "does not exist" in missing.found


def flags_of(data: Path, run: Path, *more: str) -> list[str]:
    return ["--ds", "ds_configs/zero2.json", "--data", str(data), "--run", str(run), "--model", "tiny-1m", *more]


def check(flags: list[str]) -> list[CheckRow]:
    return [*check_run(read_run(flags), ProbeRequest(hosts={"here": 2}, host="here", port=0))]


def test_a_run_as_train_would_find_it(tiny_set: Path, tmp_path: Path) -> None:
    rows = check(flags_of(tiny_set, tmp_path / "r", "--global-batch-size", "8"))
    assert {row.status for row in rows} == {"ok"}
    assert {"run config", "run folder", "disk"} <= {row.name for row in rows}
    assert not (tmp_path / "r").exists()


def test_a_run_that_train_would_refuse(tiny_set: Path, tmp_path: Path) -> None:
    (row,) = [
        row for row in check(flags_of(tiny_set, tmp_path / "r", "--global-batch-size", "1")) if row.status == "fail"
    ]
    assert row.name == "run config"
    assert "fewer sequences than there are ranks" in row.found


def test_a_dataset_with_a_missing_shard(tiny_set: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "set"
    shutil.copytree(tiny_set, damaged)
    shard = next(damaged.glob("train/*.mds"))
    shard.unlink()
    faults = {row.name: row for row in check(flags_of(damaged, tmp_path / "r")) if row.status == "fail"}
    assert shard.name in faults["data"].found


def test_a_missing_dataset_is_one_row(tmp_path: Path) -> None:
    (row,) = [row for row in check(flags_of(tmp_path / "none", tmp_path / "r")) if row.status == "fail"]
    assert row.name == "data"


@pytest.mark.parametrize(("memory_gib", "status"), [(80, "ok"), (1, "fail")])
def test_the_estimate_and_the_smallest_gpu(
    memory_gib: int, status: str, tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(i, "NVIDIA H100 80GB HBM3", size * GIB, 0, "570") for i, size in enumerate((80, memory_gib))]
    monkeypatch.setattr(run_checks, "list_gpus", lambda timeout_s: (gpus, None))
    (row,) = [row for row in check(flags_of(tiny_set, tmp_path / "r")) if row.name == "memory"]
    assert row.status == status
    assert f"of {memory_gib}.00 GiB on NVIDIA H100 80GB HBM3" in row.found
    if status == "fail":
        assert row.fix
