from __future__ import annotations

import pytest

from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.shape_for_size import nearest_preset, suggest_shape

GPTS = [name for name in PRESETS if name.startswith(("gpt2", "gpt3"))]


@pytest.mark.parametrize("name", GPTS)
def test_a_presets_own_size_is_nearest_to_it_or_to_its_twin(name: str) -> None:
    size = PRESETS[name].shape(50257).num_parameters
    found = PRESETS[nearest_preset(size, 50257)].shape(50257).num_parameters
    assert found == pytest.approx(size, rel=0.01)


def test_chinchilla_is_nearer_to_175b_than_to_13b() -> None:
    assert nearest_preset(70e9, 50257) == "gpt3-175b"


@pytest.mark.parametrize("size", [8e6, 30e6, 124e6, 355e6, 1.3e9, 2.7e9, 7e9, 13e9, 30e9, 72e9, 175e9, 1e12])
def test_shapes_have_the_size_and_sensible_numbers(size: float) -> None:
    shape = suggest_shape(size, 50257, 2048)
    assert shape.num_parameters == pytest.approx(size, rel=0.03)
    assert shape.n_embd % 128 == 0
    assert shape.head_dim in (64, 128)
    assert shape.n_head % 2 == 0
    if size > 5e9:
        # GPT-3's largest four have 128 wide for each layer.
        assert shape.n_head % 4 == 0
        assert 100 < shape.n_embd / shape.n_layer < 150


def test_gpt3_13b_is_found_again() -> None:
    shape = suggest_shape(PRESETS["gpt3-13b"].shape(50257).num_parameters, 50257, 2048)
    assert (shape.n_layer, shape.n_head, shape.n_embd) == (40, 40, 5120)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1M parameters are fewer than the 6,899,584 of one block"):
        suggest_shape(1e6, 50257, 2048)
    with pytest.raises(ConfigError, match=r"1e\+16 parameters are more than the largest shape here has \(26\.4T\)"):
        suggest_shape(1e16, 50257, 2048)


def test_a_presets_context_can_be_changed() -> None:
    assert PRESETS["gpt2-124m"].shape(50257).seq_len == 1024
    assert PRESETS["gpt2-124m"].shape(50257, 4096).seq_len == 4096
