"""The family's shapes, and the largest of them that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.planning.largest_micro_batch import Job, Machines, fit_at
from llmscale.planning.largest_model import WIDTH_MULTIPLE, find_largest_models, interpolated_shape
from llmscale.planning.strategy import Strategy, build_strategy
from tests.planning.conftest import search

GIB = 2**30
LIKE = GPTShape(n_layer=1, n_head=1, n_embd=64, vocab_size=50257, seq_len=2048, dropout=0.1)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt3-")])
def test_the_family_goes_through_gpt3s_table(name: str) -> None:
    preset = PRESETS[name]
    shape = interpolated_shape(preset.n_embd, LIKE)
    assert shape.n_layer == preset.n_layer
    assert shape.n_embd == preset.n_embd
    assert (shape.vocab_size, shape.seq_len, shape.dropout) == (50257, 2048, 0.1)


def test_wider_is_always_larger_and_heads_divide() -> None:
    shapes = [interpolated_shape(width, LIKE) for width in range(WIDTH_MULTIPLE, 20_000, WIDTH_MULTIPLE)]
    sizes = [shape.num_parameters for shape in shapes]
    assert sizes == sorted(sizes)
    assert {shape.head_dim for shape in shapes} == {64, 128}


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(LIKE, 64, Machines(1, 8, 40 * GIB))


def test_the_next_width_does_not_fit(job: Job) -> None:
    models = find_largest_models(search(job, modes=("full",)))
    assert len(models) == 9
    for model in models:
        assert model.shape is not None
        assert model.fit is not None
        assert model.fit.fits
        wider = interpolated_shape(model.shape.n_embd + WIDTH_MULTIPLE, LIKE)
        ds = build_strategy(model.strategy, "bf16")
        assert ds is not None
        assert not fit_at(ds, replace(job, shape=wider), "full", 1).fits


def test_sharding_and_offload_make_room_for_more(job: Job) -> None:
    models = {model.strategy: model.shape for model in find_largest_models(search(job, modes=("full",)))}
    order = [
        *(Strategy(stage, "none", "none", "full") for stage in (0, 1, 2, 3)),
        Strategy(3, "cpu", "none", "full"),
        Strategy(3, "cpu", "cpu", "full"),
    ]
    sizes = [shape.num_parameters for strategy in order if (shape := models[strategy]) is not None]
    assert len(sizes) == len(order)
    assert sizes == sorted(sizes)


def test_the_preset_named_is_not_larger(job: Job) -> None:
    for model in find_largest_models(search(job, modes=("full",))):
        assert model.shape is not None
        assert model.preset is not None
        preset = PRESETS[model.preset]
        like = replace(LIKE, n_layer=preset.n_layer, n_head=preset.n_head, n_embd=preset.n_embd)
        assert like.num_parameters <= model.shape.num_parameters


def test_nothing_fits_a_card_that_is_too_small(job: Job) -> None:
    tiny = replace(job, machines=replace(job.machines, gpu_bytes=GIB))
    assert all(model.shape is None and model.fit is None for model in find_largest_models(search(tiny)))
