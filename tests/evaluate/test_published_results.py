from __future__ import annotations

from llmscale.config.presets import get_preset
from llmscale.evaluate.tasks import comparable_results


def test_a_model_stands_beside_those_of_its_size() -> None:
    shape = get_preset("gpt2-124m").shape(50257, 1024)
    assert [result.model for result in comparable_results(shape.num_parameters)] == ["GPT-2 124M", "GPT-3 125M"]
    assert comparable_results(10_000_000) == []
