"""The family's shapes, and the largest of them that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.planning.largest_micro_batch import Job, Machines, fit_at
from llmscale.planning.largest_model import WIDTH_MULTIPLE, find_largest_models, interpolated_shape, scaling_family
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


@pytest.mark.parametrize("name", [name for name in PRESETS if scaling_family(name) != "gpt3"])
def test_a_family_with_sizes_of_its_own_goes_through_its_presets(name: str) -> None:
    """From whichever of them the user named."""
    family, wanted = scaling_family(name), PRESETS[name].shape(50257, 2048)
    for other in (other for other in PRESETS if scaling_family(other) == family):
        like = PRESETS[other].shape(50257, 2048).changed({"dropout": 0.1})
        found = interpolated_shape(wanted.n_embd, like, family)
        assert replace(found, dropout=0.0) == replace(wanted, norm_eps=found.norm_eps, rope_theta=found.rope_theta)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "smollm2"])
def test_shapes_between_and_beyond_a_family_s_presets_can_be_built(family: str) -> None:
    names = [name for name in PRESETS if scaling_family(name) == family]
    like = PRESETS[names[0]].shape(50257, 2048)
    widths = range(WIDTH_MULTIPLE, 20_000, WIDTH_MULTIPLE)
    shapes = [interpolated_shape(width, like, family) for width in widths]
    sizes = [shape.num_parameters for shape in shapes]
    assert sizes == sorted(sizes)
    assert {shape.head_dim for shape in shapes} == {PRESETS[name].shape(50257).head_dim for name in names}
    wide = shapes[-1]
    assert wide.n_embd / wide.n_layer == pytest.approx(PRESETS[names[-1]].n_embd / PRESETS[names[-1]].n_layer, rel=0.01)


def test_a_choice_of_the_user_holds_at_every_size() -> None:
    like = PRESETS["llama3-8b"].shape(50257, 2048).changed({"tied": True, "norm": "layernorm"})
    assert {interpolated_shape(width, like, "llama3").tied for width in (2048, 4096, 16384)} == {True}
    assert interpolated_shape(16384, like, "llama3").norm == "layernorm"


def test_presets_of_gpt_2s_sizes_go_on_as_gpt_3() -> None:
    assert {scaling_family(name) for name in ("gpt2-124m", "gpt-modern-1.5b", "tiny-1m", "hf:some/folder", None)} == {
        "gpt3"
    }


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
