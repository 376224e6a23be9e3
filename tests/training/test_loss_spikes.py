from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.engine.train_step import PhaseTimer
from llmscale.training import session as session_module
from llmscale.training.loss_spikes import QUIET_STEPS, Spike, SpikeDetector, rollback_advice
from llmscale.training.sample_stream import Skip
from llmscale.training.step_metrics import StepMeter
from tests.conftest import read_events, read_losses, run_ranks


def curve(steps: int, seed: int = 0) -> list[float]:
    """As a loss falls, with the noise of small batches."""
    draw = random.Random(seed)
    return [3 + 4 / (1 + step / 50) + draw.gauss(0, 0.1) for step in range(steps)]


def found(losses: list[float], norms: list[float | None] | None = None) -> list[Spike]:
    detector = SpikeDetector()
    norms = norms or [None] * len(losses)
    spikes = [detector.add(step, loss, norm) for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)]
    return [spike for spike in spikes if spike is not None]


def test_a_falling_noisy_loss_is_none() -> None:
    for seed in range(20):
        assert found(curve(1000, seed)) == []
    assert found([2.0] * 500) == [], "nor one that does not vary at all"


def test_a_leap_is_one_from_its_first_step() -> None:
    losses = curve(300)
    for step in (199, 200, 201):
        losses[step] += 3
    (spike,) = found(losses)
    assert (spike.step, spike.loss) == (200, losses[199])
    assert spike.loss_z > 8
    assert spike.grad_norm_z is None


def test_a_second_one_is_news_when_all_was_quiet_in_between() -> None:
    losses = curve(300)
    for step in (150, 150 + QUIET_STEPS // 2, 250):
        losses[step] += 8
    assert [spike.step for spike in found(losses)] == [151, 251]


def test_a_small_leap_counts_with_a_large_gradient() -> None:
    losses, norms = (
        [3 + 0.1 * math.sin(step) for step in range(200)],
        [1 + 0.05 * math.sin(step) for step in range(200)],
    )
    losses[150] = 3.7
    assert found(losses, [*norms]) == []
    norms[150] = 9.0
    (spike,) = found(losses, [*norms])
    assert spike.step == 151
    assert spike.grad_norm_z is not None and spike.grad_norm_z > 8
    norms[180] = 50.0
    assert len(found(losses, [*norms])) == 1, "a norm alone is none: it is clipped"


def test_what_is_no_number_is_passed_over() -> None:
    losses = curve(200)
    losses[100], losses[101] = math.nan, math.inf
    norms: list[float | None] = [1.0] * 200
    norms[120] = math.inf
    assert found(losses, norms) == []


JOB = str(Path(__file__).with_name("fault_job.py"))
SPIKE, LAST = 33, 44
STEPS = ("--steps", str(LAST), "--schedule", "constant", "--lr", "3e-3", "--warmup-steps", "0", "--precision", "fp32")
SAVES = ("--save-every", "10", "--keep-last", "1")


def test_a_spike_is_recorded_and_a_stop_says_how_to_go_on(train_command: Callable, tmp_path: Path) -> None:
    """Beside the last checkpoint, which retention keeps, the one before the spike stays."""
    run, flags = tmp_path / "run", (*STEPS, *SAVES, "--log-every", "4")
    stop = ("--on-spike", "stop", "--notify", f"cat >> {tmp_path}/told")
    output = run_ranks([JOB, f"noise:{SPIKE}", *train_command(*flags, *stop)[1:]], 1)
    (spike,) = read_events(run, "loss_spike")
    assert spike["step"] == SPIKE, "by its own step, though the next logged one is 36"
    assert spike["loss_z"] > 4
    assert spike["checkpoint"] == str(run / "checkpoints/step-00000030")
    assert spike["samples"] == [f"llmscale data which {run} --step {SPIKE}"]
    (last, before) = [path.name for path in list_checkpoints(run)]
    assert last > before == "step-00000030"
    assert f"WARNING: step {SPIKE}: the loss leaps" in output
    records = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [record["event"] for record in records] == ["spike", "stopped"]
    assert (records[0]["step"], records[0]["loss"]) == (SPIKE, spike["loss"])
    assert f"stopped by --on-spike stop: the loss spike at step {SPIKE}" in output
    advice = next(line for line in output.splitlines() if line.startswith("to continue without its batches"))
    words = advice.partition(": ")[2].split()[-4:]
    assert words == ["--resume", str(run / "checkpoints/step-00000030"), "--skip-steps", "32:34"]
    output = run_ranks([JOB, f"noise:{SPIKE}", *train_command(*flags, *words)[1:]], 1)
    assert f"finished at step {LAST} of {LAST}" in output and read_events(run, "loss_spike") == [spike]


def test_a_spike_that_no_checkpoint_precedes_stops_and_one_at_the_last_step_is_left_out(
    train_command: Callable, tmp_path: Path
) -> None:
    def train(*flags: str) -> str:
        command = train_command(*STEPS, "--on-spike", "skip", *flags)
        return run_ranks([JOB, f"noise:{SPIKE}", *command[1:]], 1)

    output = train("--save-every", "0", "--run", str(tmp_path / "unsaved"))
    assert "start again with the same command, another --run and --skip-steps 32:34" in output
    assert max(read_losses(tmp_path / "unsaved")) < LAST
    output = train(*SAVES, "--steps", str(SPIKE))
    (back,) = read_events(tmp_path / "run", "go_back")
    assert (back["step"], back["to_step"], back["skip_steps"]) == (SPIKE, 30, "32:34")
    assert output.splitlines()[-1].startswith(f"finished at step {SPIKE} of {SPIKE}")


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [*(pytest.param(*of, marks=pytest.mark.slow) for of in ((0, 1), (1, 2), (2, 1), (2, 3))), (3, 2)],
)
def test_skip_goes_on_as_a_new_start_from_that_checkpoint_would(
    stage: int, world_size: int, ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    """Bit for bit: weights, optimizer, samples and learning rates are those of a start without the batches."""
    flags = ("--ds", f"ds_configs/zero{stage}.json", *STEPS, *SAVES, "--on-spike", "skip")
    job = ranks([JOB, f"noise:{SPIKE}", *train_command(*flags)[1:]], world_size)
    outputs = job.wait()
    assert job.exit_codes == [0] * world_size, outputs
    (back,) = read_events(tmp_path / "run", "go_back")
    assert (back["to_step"], back["spike"], back["skip_steps"]) == (30, SPIKE, "32:34")
    alone = tmp_path / "alone"
    start = ("--run", str(alone), "--resume", str(tmp_path / "run/checkpoints/step-00000030"), "--skip-steps", "32:34")
    by_hand = ranks(train_command("--ds", f"ds_configs/zero{stage}.json", *STEPS, *start), world_size)
    outputs = by_hand.wait()
    assert by_hand.exit_codes == [0] * world_size, outputs
    losses, expected = read_losses(tmp_path / "run"), read_losses(alone)
    assert {step: losses[step] for step in expected} == expected
    assert sorted(expected) == list(range(31, LAST + 1))


def test_a_second_spike_at_the_same_step_gets_a_range_of_another_name() -> None:
    """A range of the same name means samples that are skipped already: the run would come back forever."""
    run = SimpleNamespace(stream=SimpleNamespace(skips=(Skip("32:34", 64, 68), Skip("32:35", 68, 74))))
    assert rollback_advice(run, None, (33, 33)).endswith(" --skip-steps 32:36")  # type: ignore[arg-type]
    assert rollback_advice(run, None, (40, 42)).endswith(" --skip-steps 39:43")  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [True, False])
def test_going_back_is_a_start_for_the_clock_and_the_supervisor(outcome: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    meter = StepMeter(PhaseTimer(torch.device("cpu")))

    def note(session: Any) -> bool:
        seen.append(meter.pausing_for)
        return outcome

    monkeypatch.setattr(session_module, "_roll_back", note)
    session: Any = SimpleNamespace(engine=SimpleNamespace(meter=meter), io=SimpleNamespace(publisher=None))
    heartbeat: Any = SimpleNamespace(beat=lambda phase: seen.append(f"beat {phase}"))
    assert session_module.roll_back(session, heartbeat) is outcome
    assert seen == ["beat starting", "starting", "beat starting"]
    assert meter.spent_s["starting"] > 0
