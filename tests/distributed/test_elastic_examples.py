"""Examples with the Trainer and with accelerate are killed, and continue on other ranks at another ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.convert import open_portable
from tests.conftest import REPOSITORY, run_ranks

RUNNER = Path(__file__).parent / "on_cpu.py"
#: Micro-batches of 5 steps of 3, on 2 ranks, and one more.
KILL_AFTER = 16
STEPS = 12
KILLED = -9


def run_example(name: str, out: Path, *, ranks: int, stage: int, kill_after: int = 0) -> str:
    command = [str(RUNNER), str(REPOSITORY / "examples" / name), str(kill_after), str(out), str(stage)]
    return run_ranks(command, ranks, expect=KILLED if kill_after else 0)


def assert_same_masters(one: Path, other: Path) -> None:
    """Both checkpoints hold the same fp32 weights, but for rounding in another order."""
    here = open_portable(one)
    there = open_portable(other)
    assert here.step == there.step == STEPS
    assert here.tensors.keys() == there.tensors.keys()
    for _, name, tensor in here.parts("master"):
        torch.testing.assert_close(tensor.read([-1]), there.tensors[f"master/{name}"].read([-1]), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_trainer_of_transformers_continues(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    run_example("trainer.py", straight, ranks=2, stage=2)
    # With use_cpu the Trainer would ignore DeepSpeed, and there were no such folder.
    last = straight / f"checkpoint-{STEPS}"
    assert (last / f"global_step{STEPS}").is_dir()
    run_example("trainer.py", killed, ranks=2, stage=2, kill_after=KILL_AFTER)
    assert (killed / "checkpoint-4" / "global_step4").is_dir()
    assert not (killed / "checkpoint-8").exists()
    output = run_example("trainer.py", killed, ranks=3, stage=3)
    assert "ZeRO stage 2 -> 3" in output
    assert "ranks 2 -> 3" in output
    assert_same_masters(last, killed / last.name)


@pytest.mark.slow
def test_a_loop_by_accelerate_continues(tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    run_example("accelerate_loop.py", straight, ranks=2, stage=2)
    run_example("accelerate_loop.py", killed, ranks=2, stage=2, kill_after=KILL_AFTER)
    # The 9 micro-batches of 3 steps are not a whole number of steps on the ranks below.
    assert sorted(folder.name for folder in killed.iterdir()) == ["step-3"]
    for ranks, stage in ((3, 3), (1, 0)):
        for later in killed.glob("step-*"):
            if later.name != "step-3":
                later.rename(tmp_path / f"{ranks}-{stage}-{later.name}")
        output = run_example("accelerate_loop.py", killed, ranks=ranks, stage=stage)
        assert f"ranks 2 -> {ranks}" in output
        if stage:  # stage 0 saves no names
            assert_same_masters(straight / f"step-{STEPS}", killed / f"step-{STEPS}")
