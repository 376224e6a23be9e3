"""api.check_numerics: right engines of any module are found right and train on as they would; wrong ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_cells

JOB = Path(__file__).with_name("own_engine_job.py")
#: Parameters of tests/own_module.py that the optimizer has not, or that no step uses.
LINKS = ["norm", "reduce", "update", "weights"]


def check(*cells: dict[str, Any], ranks: int = 2) -> list[dict[str, Any]]:
    return run_cells(JOB, [{"do": "check", **cell} for cell in cells], ranks)


def test_an_engine_is_right_and_trains_on_as_if_nobody_had_watched() -> None:
    engine = {"stage": 2, "precision": "fp32", "optimizer": "nesterov"}
    checked, plain = run_cells(JOB, [{"do": "check", "engine": engine}, {"do": "plain", "engine": engine}], 2)
    assert checked["wrong"] is None, checked["said"]
    assert checked["said"].startswith("RIGHT: ")
    assert checked["links"] == LINKS
    assert checked["unwatched"] == ["unused.bias", "unused.weight"]
    assert checked["after"] == plain["after"]


def test_deepspeeds_step_within_initialize_is_found_and_api_initialize_has_none() -> None:
    """At stage 0 in bf16 the master weights have decayed before the first step."""
    engine = {"stage": 0, "precision": "bf16"}
    by_deepspeed, by_api = check({"engine": engine, "as_deepspeed_does": True}, {"engine": engine})
    step, link, _, rank = by_deepspeed["wrong"]
    assert (step, link, rank) == (0, "weights", None)
    assert "the forward pass does not compute with the rounded master weights" in by_deepspeed["said"]
    assert by_api["wrong"] is None, by_api["said"]


def test_a_rank_that_steps_wrongly_is_named() -> None:
    (wrong,) = check({"engine": {"stage": 3, "precision": "fp32"}, "fault": "gradients"})
    step, link, _, rank = wrong["wrong"]
    assert (step, link, rank) == (0, "update", 1)
    assert "Only rank 1 is wrong." in wrong["said"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_right_engines_of_every_stage_and_precision(ranks: int) -> None:
    engines = [{"stage": stage, "precision": precision} for stage in range(4) for precision in ("fp32", "bf16")]
    engines += [{"stage": stage, "precision": "fp32", "offload": True} for stage in (2, 3)]
    for engine, answer in zip(engines, check(*({"engine": engine} for engine in engines), ranks=ranks), strict=True):
        assert answer["wrong"] is None, (engine, answer["said"])
        assert answer["links"] == LINKS or (engine["stage"], engine["precision"]) == (0, "bf16"), engine


@pytest.mark.slow
def test_any_optimizer_is_judged() -> None:
    engines = [
        {"stage": stage, "optimizer": name}
        for name in ("sgd", "nesterov", "rmsprop", "nadam")
        for stage in ((0, 1, 3) if name == "sgd" else (0, 2, 3))
    ]
    for engine, answer in zip(engines, check(*({"engine": engine} for engine in engines)), strict=True):
        assert answer["wrong"] is None, (engine, answer["said"])


@pytest.mark.slow
def test_planted_faults_are_found_and_named() -> None:
    expected = {"gradients": ("update", 1), "rate": ("update", None), "moments": ("update", None)}
    cells = [
        {"engine": {"stage": stage, "precision": precision}, "fault": fault}
        for stage in (0, 2, 3)
        for precision in ("fp32", "bf16")
        for fault in expected
    ]
    for cell, answer in zip(cells, check(*cells), strict=True):
        _, link, _, rank = answer["wrong"]
        assert (link, rank) == expected[cell["fault"]], cell
    (answer,) = check({"engine": {"stage": 2, "precision": "fp32"}, "fault": "reduction"})
    assert answer["wrong"] is None or answer["wrong"][1] in ("reduce", "norm")
