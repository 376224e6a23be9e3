"""Runs that diverge end with one line. Run as a script, this file is one of two ranks that lose steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmscale.architecture.shape import build_shape
from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.engine.compilation import BlockCompiler
from llmscale.errors import TrainingError
from llmscale.model.gpt import GPT
from llmscale.report.run_list import read_run
from llmscale.training.live_run import StepResult
from llmscale.training.loss_spikes import (
    LossScaleHistory,
    NonfiniteCounter,
    NonfiniteSearch,
    StopOnNonfinite,
    check_weights,
)
from tests import warm_start
from tests.conftest import REPOSITORY, read_events, run_ranks

FAULT_JOB = str(Path(__file__).with_name("fault_job.py"))
FP32 = ("--precision", "fp32", "--warmup-steps", "0", "--steps", "40")


def raises(action: Callable[[], None]) -> bool:
    try:
        action()
    except TrainingError:
        return True
    return False


def one_rank() -> list[int]:
    """Return the bad steps in a row after each of some, and which checks of weights end the run on this rank."""
    dist.init_process_group("gloo")
    group, rank, here = dist.group.WORLD, dist.get_rank(), Path("run")
    assert group is not None
    counter = NonfiniteCounter(torch.device("cpu"))
    seen: list[int] = []
    fine, broken = torch.tensor(1.0), torch.tensor(float("nan"))

    def add(loss: torch.Tensor, *, skipped: bool = False, norm: float | None = None) -> None:
        counter.add(StepResult(1, [], loss, skipped, norm), skipped=skipped)
        seen.append(counter.max_consecutive())

    add(broken if rank else fine)
    add(torch.tensor(float("inf")) if rank else fine)
    add(fine)
    add(fine, skipped=True, norm=float("inf"))
    add(fine, norm=float("inf"))
    add(fine, norm=2.0)
    weights = [torch.ones(3), torch.tensor([1.0, float("nan") if rank else 1.0]), torch.empty(0)]
    seen.append(raises(lambda: check_weights(weights, group, 1, here)))
    seen.append(raises(lambda: check_weights([torch.ones(3), torch.empty(0)], group, 1, here)))
    dist.destroy_process_group()
    return seen


def test_all_ranks_judge_alike_by_the_rank_that_fares_worst(ranks: Callable) -> None:
    job = ranks([__file__], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert [json.loads(output) for output in outputs] == [[1, 2, 0, 1, 2, 0, True, False]] * 2


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


def test_weights_that_are_nan_are_never_saved(train_command: Callable, tmp_path: Path) -> None:
    output = run_ranks(
        train_command("--ds", "ds_configs/zero0.json", *FP32, "--lr", "1e30", "--save-every", "3"), 1, expect=2
    )
    assert output.splitlines()[-1].startswith("error: step 3: the weights are NaN or infinite, and are not saved.")
    assert list_checkpoints(tmp_path / "run") == []


def test_a_search_goes_with_the_session_that_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stays, and must not keep its hooks."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    model = torch.nn.Linear(2, 2)
    window = SimpleNamespace(steps=[SimpleNamespace(step=1, loss=float("nan"))])
    run: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")), resolved=SimpleNamespace(total_steps=9)
    )
    engine: Any = SimpleNamespace(
        deepspeed=SimpleNamespace(module=model, fp16_enabled=lambda: False),
        compiler=None,
        recent=SimpleNamespace(window=window),
        skipped_steps=0,
    )
    guard = StopOnNonfinite(run, engine, SimpleNamespace(), judges_at=lambda step: True)  # type: ignore[arg-type]
    guard.run(StepResult(1, [], torch.tensor(1.0), was_skipped=False))
    assert model._forward_hooks
    guard.close()
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("stage", "world_size"), [(0, 1), *(pytest.param(stage, 2, marks=pytest.mark.slow) for stage in (1, 2)), (3, 2)]
)
def test_the_first_parameters_are_named_at_every_stage(
    stage: int, world_size: int, train_command: Callable, tmp_path: Path
) -> None:
    """Block 1's MLP puts out infinity on the last rank alone."""
    fault = f"nan:5:{world_size - 1}:30"
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--steps", "40", "--log-every", "3")
    output = run_ranks([FAULT_JOB, fault, *train_command(*flags)[1:]], world_size, expect=2)
    (event,) = read_events(tmp_path / "run", "nonfinite")
    assert (event["step"], event["cause"], event["pass"]) == (5, "loss", "forward")
    assert event["ranks"] in ([world_size - 1], list(range(world_size))), "at stage 0 the weights are lost everywhere"
    if stage:
        assert event["parameters"][0].startswith("blocks.1.mlp."), event
    assert "It began in " in output.splitlines()[-1]


def test_one_lost_step_is_said_and_survived(train_command: Callable, tmp_path: Path) -> None:
    flags = ("--ds", "ds_configs/zero2.json", "--precision", "bf16", "--steps", "20", "--log-every", "4")
    output = run_ranks([FAULT_JOB, "nan:6:0:1", *train_command(*flags)[1:]], 1)
    (event,) = read_events(tmp_path / "run", "nonfinite")
    assert (event["step"], event["cause"], event["parameters"]) == (6, "loss", [])
    assert "gone at the next step" in output


NO_NUMBERS = "the last 10 steps had a loss or a gradient that is NaN or infinite. Lower"


@pytest.mark.parametrize(
    ("stage", "steps", "fp16", "error"),
    [
        (1, 30, {"hysteresis": 1000, "initial_scale_power": 30}, f"step 10: {NO_NUMBERS} fp16.hysteresis"),
        (2, 6, {"loss_scale": 2**24}, "nothing was trained"),
        pytest.param(2, 30, {"loss_scale": 2**24}, f"step 10: {NO_NUMBERS} fp16.loss_scale", marks=pytest.mark.slow),
        pytest.param(3, 30, {"loss_scale": 2**22}, f"step 10: {NO_NUMBERS} fp16.loss_scale", marks=pytest.mark.slow),
    ],
)
def test_steps_that_fp16_skips_at_one_scale_end_the_run(
    stage: int, steps: int, fp16: dict, error: str, train_command: Callable, tmp_path: Path
) -> None:
    """Every step was skipped, and the run "finished"."""
    ds = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, **fp16}}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    flags = ("--ds", str(tmp_path / "ds.json"), "--steps", str(steps), "--log-every", "4")
    output = run_ranks([FAULT_JOB, "fp16", *train_command(*flags)[1:]], 1, expect=2)
    assert error in output
    assert next(iter(fp16)) in output.splitlines()[-1]


def test_a_norm_beyond_fp32_is_no_gradient_that_was_gone(train_command: Callable, tmp_path: Path) -> None:
    """Each gradient is finite. The run said "gone at the next step", and trained nothing."""
    output = run_ranks(
        [FAULT_JOB, "huge-gradients:4", *train_command(*FP32, "--ds", "ds_configs/zero2.json")[1:]], 1, expect=2
    )
    assert "step 4: gradients NaN or infinite, and again at the next step, in no gradient of a micro-batch" in output
    assert output.splitlines()[-1].startswith("error: step 13: the last 10 steps"), output


def test_bad_steps_before_the_last_one_end_a_run_that_logs_rarely(train_command: Callable, tmp_path: Path) -> None:
    flags = (*FP32, "--ds", "ds_configs/zero2.json", "--steps", "16", "--log-every", "100")
    output = run_ranks([FAULT_JOB, "nan:3:0:100", *train_command(*flags)[1:]], 1, expect=2)
    assert output.splitlines()[-1].startswith("error: step 16: the last 14 steps"), output


def history(*scales: float | None) -> LossScaleHistory:
    history = LossScaleHistory()
    for step, scale in enumerate(scales, 1):
        history.add(step, scale)
    return history


def test_only_changes_are_remembered() -> None:
    assert [*history(8.0, 8.0, 4.0, 4.0, 8.0)] == [(1, 8.0), (3, 4.0), (5, 8.0)]
    assert not history(None, None)
    assert len(history(*(float(step) for step in range(100)))) == 24


def test_a_collapse_is_low_and_a_fall() -> None:
    assert not history().has_collapsed
    assert not history(65536.0, 32768.0, 1024.0).has_collapsed
    assert history(65536.0, 1024.0, 16.0).has_collapsed
    assert not history(8.0, 4.0).has_collapsed, "it was low from the start"
    assert not history(65536.0, 16.0, 1024.0).has_collapsed, "it has recovered"


SHAPE = build_shape({"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 100, "seq_len": 16})


def take_step(model: GPT) -> None:
    tokens = torch.arange(2 * 17).view(2, 17)
    model(tokens[:, :-1], tokens[:, 1:]).backward()


def spoil(model: GPT) -> str:
    """The name of the parameter that is infinite from now on."""
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.down.weight").fill_(float("inf"))
    return "blocks.1.mlp.down.weight"


def search(model: GPT, compiler: BlockCompiler | None) -> tuple[list[str], list[str]]:
    looking = NonfiniteSearch(SimpleNamespace(module=model), compiler)  # type: ignore[arg-type]
    take_step(model)
    return looking.end()


def test_the_first_parameters_are_those_of_the_module_that_puts_it_out() -> None:
    model = GPT(SHAPE, seed=1)
    assert search(model, None) == ([], [])
    name = spoil(model)
    assert search(model, None)[0][0] == name


def test_compiled_blocks_are_searched_like_others_and_compiled_again_afterwards() -> None:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": str(REPOSITORY)}
    done = warm_start.run([sys.executable, __file__, "compiled"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["forward"][0] == result["spoiled"], result
    assert (result["graphs"], result["is_paused"]) == (1, False)


def search_compiled_blocks() -> None:
    model, compiler = GPT(SHAPE, seed=1), BlockCompiler("aot_eager")
    compiler.compile_blocks(model, zero_stage=0, checkpointing="none")
    take_step(model)
    name = spoil(model)
    ended = search(model, compiler)
    take_step(model)
    values = {"forward": ended[0], "spoiled": name, "graphs": compiler.graphs, "is_paused": compiler.is_paused}
    print(json.dumps(values))


if __name__ == "__main__":
    if sys.argv[1:]:
        search_compiled_blocks()
    else:
        print(json.dumps(one_rank()))
