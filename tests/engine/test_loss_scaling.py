"""fp16 with real overflows. Run as a script, this file is train.py on a device that claims to have fp16: the few layers
of a GPT run in fp16 on any CPU, only slowly, so overflow handling can be tested without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.engine.loss_scale import explain_smallest_scale, get_scaler_state, loss_scale, set_scaler_state
from llmscale.errors import TrainingError
from tests.conftest import read_events, read_records, run_ranks


def fp16_config(folder: Path, stage: int, **keys: int) -> str:
    path = folder / f"zero{stage}.json"
    fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1, **keys}
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": fp16}))
    return str(path)


@pytest.mark.parametrize(("stage", "split", "power"), [(3, 2, 32), pytest.param(1, 1, 24, marks=pytest.mark.slow)])
def test_overflows_halve_the_scale_skip_steps_are_reported_and_end(
    stage: int, split: int, power: int, train_command: Callable, tmp_path: Path
) -> None:
    """A search of more than ten steps, too, which end a run otherwise."""
    ds = fp16_config(tmp_path, stage, initial_scale_power=power)
    flags = ("--ds", ds, "--steps", "20", "--schedule", "constant", "--lr", "1e-2", "--warmup-steps", "0")
    flags += ("--sequence-parallel-size", str(split))
    output = run_ranks([__file__, *train_command(*flags)[1:]], 2)
    steps = read_records(tmp_path / "run", "train")
    skipped = [step["skipped_steps"] for step in steps]
    first_good = next(index for index, step in enumerate(steps) if step["grad_norm"] is not None)
    assert power - 22 <= first_good <= power - 12, "some steps overflow, and a smaller scale is found"
    assert read_events(tmp_path / "run", "nonfinite") == []
    assert skipped[:first_good] == list(range(1, first_good + 1))
    assert [step["loss_scale"] for step in steps[:first_good]] == [2.0 ** (power - 1 - i) for i in range(first_good)]
    assert f"scale {2 ** (power - 1):g} | skipped 1 |" in output
    assert max(step["loss_scale"] for step in steps[first_good + 3 :]) > steps[first_good]["loss_scale"], (
        "after a window without overflow the scale grows again"
    )
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    state = json.loads((tmp_path / "run/checkpoints/step-00000020/state.json").read_text())
    assert state["skipped_steps"] == skipped[-1]
    assert state["loss_scaler"]["cur_scale"] == steps[-1]["loss_scale"]


@pytest.mark.slow
def test_timed_steps_find_a_scale_and_leave_the_first_one(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    ds = fp16_config(tmp_path, 1, initial_scale_power=24)
    job = ranks([__file__, *train_command("--ds", ds, "--minutes", "0.001")[1:]], 1)
    output = job.wait()[0]  # which ends in an error: the only step is skipped
    assert "timed and undone" in output
    first = read_records(tmp_path / "run", "train")[0]
    assert (first["skipped_steps"], first["loss_scale"]) == (1, 2**23)


def test_timed_steps_at_the_smallest_scale_are_explained(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    ds = fp16_config(tmp_path, 2, initial_scale_power=28, min_loss_scale=2**27)
    job = ranks([__file__, *train_command("--ds", ds, "--minutes", "0.001")[1:]], 1)
    output = job.wait()[0]
    assert job.exit_codes == [2]
    assert output.startswith("error: step 1: fp16 gradients overflow even at the smallest loss scale")


def test_overflow_at_the_smallest_scale_is_explained_in_one_line_on_every_rank(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    ds = fp16_config(tmp_path, 2, initial_scale_power=28, min_loss_scale=2**27)
    job = ranks([__file__, *train_command("--ds", ds, "--steps", "20", "--save-every", "1")[1:]], 2)
    outputs = job.wait()
    assert job.exit_codes == [2, 2], outputs
    errors = [line for line in "".join(outputs).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outputs
    assert errors[0].startswith("error: step 2: fp16 gradients overflow even at the smallest loss scale")
    assert "--lr" in errors[0]
    assert "--precision bf16" in errors[0]
    assert "Traceback" not in "".join(outputs)


def test_other_failures_are_not_explained_away() -> None:
    with pytest.raises(ValueError, match="something else"), explain_smallest_scale(3):
        raise ValueError("something else")
    with pytest.raises(TrainingError, match=r"^step 4: "), explain_smallest_scale(3):
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")


class EngineWithScaler:
    """The parts of DeepSpeed's engine that hold fp16's scale, stages 1 to 3."""

    def __init__(self, enabled: bool = True, dynamic: bool = True) -> None:
        self._enabled, self._dynamic = enabled, dynamic
        scaler = SimpleNamespace(cur_scale=2.0**16, cur_iter=0, last_overflow_iter=-1, cur_hysteresis=2)
        self.optimizer = SimpleNamespace(loss_scaler=scaler, loss_scale=2.0**16)

    def fp16_enabled(self) -> bool:
        return self._enabled

    def dynamic_loss_scale(self) -> bool:
        return self._dynamic


MEMORY = {"cur_scale": 512.0, "cur_iter": 40, "last_overflow_iter": 31, "cur_hysteresis": 1}


def test_a_scaler_s_memory_goes_into_a_new_engine_and_comes_out_again() -> None:
    engine = EngineWithScaler()
    set_scaler_state(engine, MEMORY)
    assert get_scaler_state(engine) == MEMORY


@pytest.mark.parametrize("engine", [EngineWithScaler(enabled=False), EngineWithScaler(dynamic=False)])
def test_an_engine_without_dynamic_scaling_keeps_what_it_was_configured_with(engine: EngineWithScaler) -> None:
    set_scaler_state(engine, MEMORY)
    assert engine.optimizer.loss_scaler.cur_scale == 2.0**16


def test_other_precisions_have_no_scale() -> None:
    engine = EngineWithScaler(enabled=False)
    assert loss_scale(engine) is None
    assert get_scaler_state(engine) is None
    set_scaler_state(EngineWithScaler(), None)


if __name__ == "__main__":
    from deepspeed.accelerator import get_accelerator

    from llmscale.train import main

    type(get_accelerator()).is_fp16_supported = lambda self: True
    sys.exit(main())
