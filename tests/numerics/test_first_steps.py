"""`train --check-numerics`: the first steps of real runs, and of one with a rank that computes wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llmscale.numerics.probe import choose_strides
from tests.conftest import read_losses, run_ranks
from tests.runs_in_turn import train_in_turn

WRONG_RANK = Path(__file__).with_name("wrong_rank.py")
RIGHT = re.compile(r"numbers: steps (\d+) to (\d+) are right on 2 ranks; shares of what rounding explains: (.*)")


def right_steps(output: str) -> tuple[int, int]:
    text = " ".join(output.split())
    match = RIGHT.search(text)
    assert match, output
    return int(match[1]), int(match[2])


@pytest.mark.parametrize(
    "flags",
    [
        ("--ds", "zero2", "--precision", "bf16", "--global-batch-size", "7", "--micro-batch-size", "1"),
        pytest.param(("--ds", "zero3", "--precision", "fp32", "--optimizer", "muon"), marks=pytest.mark.slow),
        pytest.param(("--ds", "zero1", "--precision", "bf16", "--document-mask"), marks=pytest.mark.slow),
        pytest.param(("--ds", "zero0", "--optimizer", "adafactor"), marks=pytest.mark.slow),
    ],
)
def test_a_check_finds_a_run_right_and_changes_no_loss(
    train_command: Callable[..., list[str]], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """After a resume too."""
    command = partial(train_command, *flags, "--schedule", "constant", "--steps")
    plain = str(tmp_path / "plain")
    checked, _, resumed = train_in_turn(
        [command("3", "--check-numerics"), command("6", "--run", plain), command("6", "--check-numerics")], 2
    )
    assert (right_steps(checked), right_steps(resumed)) == ((1, 2), (4, 5))
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "plain")


def test_a_rank_that_computes_wrongly_is_named(train_command: Callable[..., list[str]]) -> None:
    words = train_command("--ds", "zero2", "--precision", "fp32", "--steps", "2", "--check-numerics")
    text = " ".join(run_ranks([str(WRONG_RANK), *words[1:]], 2).split())
    assert "WARNING: the numbers of step 1 are wrong: the optimizer's step is not that of the plain optimizer" in text
    assert "Only rank 1 is wrong." in text


def test_copies_keep_to_their_budget() -> None:
    elements = {"large": 10**9, "small": 768}
    strides = choose_strides(elements, 10, 2**30)
    assert strides["small"] == 1 and strides["large"] % 2 == 1
    assert 4 * 10 * sum(count / strides[name] for name, count in elements.items()) <= 2**30
    assert choose_strides(elements, 10, 2**40)["large"] == 1
