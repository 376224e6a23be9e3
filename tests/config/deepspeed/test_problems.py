"""All that is wrong with a ds_config is said at once."""

from __future__ import annotations

from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.rules import find_problems


def problems_of(config: dict[str, object]) -> list[str]:
    return [problem.text for problem in find_problems(read_foreign(config))]


def test_a_section_that_is_none_hides_no_other_problem() -> None:
    problems = problems_of({"zero_optimization": 3, "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert problems[0].startswith("zero_optimization = 3: must be an object {...}.")
    assert "bf16 and fp16 are both enabled" in "\n".join(problems)


def test_what_is_given_is_left_as_it_is() -> None:
    config: dict[str, object] = {"zero_optimization": {"stage": 1, "nothing": 1}}
    problems_of(config)
    assert config == {"zero_optimization": {"stage": 1, "nothing": 1}}
