"""Runs that diverge end with one line. Run as a script, this file is one of two ranks that lose steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.errors import TrainingError
from llmscale.report.run_list import read_run
from llmscale.training.actions.nonfinite_guard import PATIENCE_STEPS, EndWhenLost, LostSteps, check_weights

FAULT_JOB = str(Path(__file__).parents[1] / "fault_job.py")
FP32 = ("--precision", "fp32", "--warmup-steps", "0", "--steps", "40")


def raises(action: Callable[[], None]) -> bool:
    try:
        action()
    except TrainingError:
        return True
    return False


def one_rank() -> list[bool]:
    """Which of the following checks end the run on this rank."""
    dist.init_process_group("gloo")
    group, rank, here = dist.group.WORLD, dist.get_rank(), Path("run")
    assert group is not None
    lost = LostSteps(torch.device("cpu"))
    seen = []
    fine, broken = torch.tensor(1.0), torch.tensor(float("nan"))
    for _ in range(PATIENCE_STEPS - 1):
        lost.note(broken if rank else fine, skipped=False)
    seen.append(lost.worst_in_a_row() >= PATIENCE_STEPS)
    lost.note(torch.tensor(float("inf")) if rank else fine, skipped=False)
    seen.append(lost.worst_in_a_row() >= PATIENCE_STEPS)
    lost.note(fine, skipped=False)
    seen.append(lost.worst_in_a_row() >= PATIENCE_STEPS)
    for _ in range(PATIENCE_STEPS):
        lost.note(fine, skipped=True)
    seen.append(lost.worst_in_a_row() >= PATIENCE_STEPS)
    weights = [torch.ones(3), torch.tensor([1.0, float("nan") if rank else 1.0]), torch.empty(0)]
    seen.append(raises(lambda: check_weights(weights, group, 1, here)))
    seen.append(raises(lambda: check_weights([torch.ones(3), torch.empty(0)], group, 1, here)))
    dist.destroy_process_group()
    return seen


def test_all_ranks_judge_alike_by_the_rank_that_fares_worst(ranks: Callable) -> None:
    job = ranks([__file__], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert [json.loads(output) for output in outputs] == [[False, True, False, True, True, False]] * 2


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (2, 1)])
def test_a_run_whose_loss_is_nan_ends(
    stage: int, world_size: int, ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    """At stage 0 the weights are NaN after the second step, above it DeepSpeed skips every step from then on."""
    job = ranks(train_command("--ds", f"ds_configs/zero{stage}.json", *FP32, "--lr", "1e30"), world_size)
    outputs = job.wait()
    assert job.exit_codes == [2] * world_size, outputs
    last = outputs[0].splitlines()[-1]
    assert last.startswith("error: step 11: the last 10 steps had a loss or a gradient that is NaN or infinite. Lower")
    assert str(tmp_path / "run" / "checkpoints") in last
    assert "Traceback" not in "".join(outputs)
    assert list_checkpoints(tmp_path / "run") == []
    listed = read_run(tmp_path / "run")
    assert (listed.state, f"error: {listed.error}") == ("failed", last)


def test_weights_that_are_nan_are_never_saved(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks(train_command("--ds", "ds_configs/zero0.json", *FP32, "--lr", "1e30", "--save-every", "3"), 1)
    output = job.wait()[0]
    assert job.exit_codes == [2], output
    assert output.splitlines()[-1].startswith("error: step 3: the weights are NaN or infinite, and are not saved.")
    assert list_checkpoints(tmp_path / "run") == []


def test_a_search_goes_with_the_session_that_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stays, and must not keep its hooks."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    model = torch.nn.Linear(2, 2)
    window = SimpleNamespace(steps=[SimpleNamespace(step=1, loss=float("nan"))])
    live: Any = SimpleNamespace(
        engine=SimpleNamespace(module=model, fp16_enabled=lambda: False),
        compiler=None,
        world=SimpleNamespace(device=torch.device("cpu")),
        run=SimpleNamespace(resolved=SimpleNamespace(precision="fp32")),
        recent=SimpleNamespace(window=window),
        skipped_steps=0,
    )
    guard, done = EndWhenLost(live, judges_at=lambda step: True), SimpleNamespace(step=1, loss=torch.tensor(1.0))
    done.was_skipped = False
    guard.act(done)  # type: ignore[arg-type]
    assert model._forward_hooks
    guard.close()
    assert not model._forward_hooks


if __name__ == "__main__":
    print(json.dumps(one_rank()))


def nonfinite_events(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("event") == "nonfinite"]


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.slow), (2, 2), (3, 2)])
def test_the_first_parameters_are_named_at_every_stage(
    stage: int, world_size: int, ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    """Block 1's MLP puts out infinity on the last rank alone."""
    fault = f"nan:5:{world_size - 1}:30"
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--steps", "40", "--log-every", "3")
    job = ranks([FAULT_JOB, fault, *train_command(*flags)[1:]], world_size)
    outputs = job.wait()
    assert job.exit_codes == [2] * world_size, outputs
    (event,) = nonfinite_events(tmp_path / "run")
    assert (event["step"], event["cause"], event["pass"]) == (5, "loss", "forward")
    assert event["ranks"] in ([world_size - 1], list(range(world_size))), "at stage 0 the weights are lost everywhere"
    if stage:
        assert event["parameters"][0].startswith("blocks.1.mlp."), event
    assert "It began in " in outputs[0].splitlines()[-1]


def test_one_lost_step_is_said_and_survived(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    flags = ("--ds", "ds_configs/zero2.json", "--precision", "bf16", "--steps", "20", "--log-every", "4")
    job = ranks([FAULT_JOB, "nan:6:0:1", *train_command(*flags)[1:]], 1)
    output = job.wait()[0]
    assert job.exit_codes == [0], output
    (event,) = nonfinite_events(tmp_path / "run")
    assert (event["step"], event["cause"], event["parameters"]) == (6, "loss", [])
    assert "gone at the next step" in output
