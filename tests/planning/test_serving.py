from __future__ import annotations

import pytest

from llmscale.config.hardware import get_gpu
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.serving import break_even_share, estimate_serving, owning_usd_per_gpu_hour

H100 = get_gpu("h100-80gb")
LLAMA = PRESETS["llama3-8b"].shape(128256, 8192)


def test_a_small_batch_is_bound_by_reading_the_weights() -> None:
    """By hand: 8.03e9 weights of 2 bytes, 131,072 bytes of cache a token, 3.35 TB/s."""
    serving = estimate_serving(LLAMA, H100, 1, 7000, 1000)
    assert serving is not None and serving.is_memory_bound
    free = 0.9 * 79.10 * 2**30 - 2 * LLAMA.num_parameters
    assert serving.num_sequences == int(free // (131072 * 8000)) == 57
    step_s = (2 * LLAMA.num_parameters + 57 * 7500 * 131072) / (0.6 * 3.35e12)
    assert serving.output_tokens_per_s == pytest.approx(57 / step_s)
    flops = 2 * LLAMA.num_parameters + 4 * 32 * 3500 * 4096
    assert serving.prompt_tokens_per_s == pytest.approx(0.5 * 989e12 / flops)
    seconds = 7000 / serving.prompt_tokens_per_s + 1000 / serving.output_tokens_per_s
    assert serving.requests_per_s == pytest.approx(1 / seconds)
    priced = serving.with_prices(2.5)
    assert priced.usd_per_day == pytest.approx(60)
    prompt, output = priced.usd_per_million_prompt_tokens, priced.usd_per_million_output_tokens
    assert prompt is not None and output is not None
    # A day of nothing but output costs what its tokens cost.
    assert output * serving.output_tokens_per_s * 86400 / 1e6 == pytest.approx(60)
    assert prompt < output / 5


def test_a_model_that_does_not_fit_one_gpu_takes_more_or_none() -> None:
    large = PRESETS["gpt3-175b"].shape(50257, 2048)
    serving = estimate_serving(large, H100, 8, 1000, 250)
    assert serving is not None and serving.num_gpus == 8
    assert estimate_serving(large, H100, 2, 1000, 250) is None
    with pytest.raises(ConfigError, match=r"2,500 tokens, and the model's context has 2,048"):
        estimate_serving(large, H100, 8, 2000, 500)


def test_buying_pays_off_above_a_share_of_work() -> None:
    owning = owning_usd_per_gpu_hour(usd_per_gpu=35_064, years=4, electricity_usd=0.1)
    assert owning == pytest.approx(1.1)
    assert break_even_share(owning, 0.1, rent_usd=2.1) == pytest.approx(0.5)
    # Half of the time the bought one works, all of it is paid: as much as half of the time of a rented one.
    assert pytest.approx(0.5 * 2.1) == 1.0 + 0.5 * 0.1
    assert break_even_share(owning, 0.1, rent_usd=1.0) is None
    assert break_even_share(owning, 0.1, rent_usd=0.05) is None
