from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from llmscale.config.optimizers import ADAMW
from llmscale.config.schedule import Schedule
from llmscale.engine.deepspeed_engine import check_precision, clip_gradients, gradient_norm, set_learning_rate
from llmscale.errors import ConfigError
from tests.conftest import read_losses, read_records, run_ranks


def claim(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    monkeypatch.setattr(type(get_accelerator()), "supported_dtypes", lambda self: [torch.float32, *dtypes])


def test_fp16_is_refused_where_there_is_none_and_bf16_named(monkeypatch: pytest.MonkeyPatch) -> None:
    claim(monkeypatch, torch.bfloat16)
    with pytest.raises(ConfigError) as raised:
        check_precision("fp16")
    assert f"this {get_accelerator().device_name()} has no fp16 arithmetic. Use bf16" in str(raised.value)
    assert "--precision bf16" in str(raised.value)
    for precision in ("bf16", "fp32", "autocast"):
        check_precision(precision)


def test_bf16_is_refused_where_there_is_none_and_fp16_named(monkeypatch: pytest.MonkeyPatch) -> None:
    claim(monkeypatch, torch.float16)
    with pytest.raises(ConfigError, match=r"no bf16 arithmetic. Use fp16 \(--ds zero2_fp16\)"):
        check_precision("bf16")
    check_precision("fp16")


def test_the_learning_rate_reaches_every_group_times_its_factor() -> None:
    groups = [{"name": group.name, "lr": 0.0} for group in ADAMW.groups]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    set_learning_rate(engine, ADAMW, 0.25)
    assert [group["lr"] for group in groups] == [0.25, 0.25]
    slower = replace(ADAMW, groups=(ADAMW.groups[0], replace(ADAMW.groups[1], learning_rate_factor=0.5)))
    set_learning_rate(engine, slower, 0.25)
    assert [group["lr"] for group in groups] == [0.25, 0.125]


def test_the_norm_of_large_gradients_is_exact_and_what_is_above_the_limit_is_scaled() -> None:
    """torch's own fp32 norm of the first is off by 7e-5 on a CPU."""
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, 384, generator=draw), torch.randn(384, generator=draw)]
    exact = torch.cat([gradient.double().view(-1) for gradient in gradients]).norm()
    remaining = [gradient.clone() for gradient in gradients]
    assert float(clip_gradients(gradients, 1e9)) == pytest.approx(float(exact), rel=1e-7)
    assert all(torch.equal(old, new) for old, new in zip(remaining, gradients, strict=True))
    clip_gradients(gradients, 0)
    assert all(torch.equal(old, new) for old, new in zip(remaining, gradients, strict=True))
    clip_gradients(gradients, 2.0)
    assert float(torch.cat([gradient.double().view(-1) for gradient in gradients]).norm()) == pytest.approx(2, rel=1e-6)


def test_a_norm_that_was_not_computed_is_none() -> None:
    assert gradient_norm(SimpleNamespace(get_global_grad_norm=lambda: None)) is None
    assert gradient_norm(SimpleNamespace(get_global_grad_norm=lambda: torch.tensor(1.5))) == 1.5


@pytest.mark.skipif(torch.float16 in get_accelerator().supported_dtypes(), reason="this device has fp16")
def test_a_run_in_fp16_on_this_device_ends_in_one_line_and_writes_nothing(
    train_command: Callable, tmp_path: Path
) -> None:
    output = run_ranks(train_command("--ds", "zero2_fp16", "--steps", "2"), 1, expect=2)
    # What it is busy with is said before.
    (error,) = [line for line in output.splitlines() if not line.endswith(" ...") and not line.startswith("still ")]
    assert error.startswith(f"error: this {get_accelerator().device_name()} has no fp16 arithmetic. Use bf16")
    assert not (tmp_path / "run").exists()


def test_two_ranks_log_what_the_schedule_says_and_the_norm_where_nothing_is_clipped(
    ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    """Stage 0 in fp32, where DeepSpeed itself reports no gradient norm."""
    flags = ("--ds", "zero0", "--precision", "fp32", "--steps", "6", "--warmup-steps", "2", "--lr", "1e-2")
    job = ranks(train_command(*flags, "--micro-batch-size", "2", "--gradient-clipping", "0"), 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert outputs[1] == "", "only the main rank speaks"
    assert "norm 2." in outputs[0]
    records = read_records(tmp_path / "run", "train")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["grad_norm"] > 2
    schedule = Schedule("cosine", 1e-2, 2, 6, 6, 0.1)
    for record in records:
        assert math.isfinite(record["grad_norm"]) and record["grad_norm"] > 0
        assert record["tokens_seen"] == record["step"] * 8 * 32
        assert record["lr"] == pytest.approx(schedule.learning_rate(record["step"] - 1))
        assert (record["mfu"], record["loss_scale"], record["skipped_steps"]) == (None, None, 0)


def test_adafactor_trains_at_stage_0(train_command: Callable, tmp_path: Path) -> None:
    flags = ("--optimizer", "adafactor", "--ds", "ds_configs/zero0.json", "--precision", "fp32", "--lr", "3e-2")
    run_ranks(train_command(*flags, "--steps", "12"), 1)
    losses = read_losses(tmp_path / "run")
    assert losses[12] < losses[1] - 0.3
