"""What was decided and not asked for is said, and what was asked for is not."""

from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.describe_defaults import (
    describe_batch,
    describe_gradients,
    describe_optimizer,
    describe_preset,
    describe_steps,
    warn_of_learning_rate,
    warn_of_router,
)
from llmscale.config.presets import PRESETS, nominal_parameters
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import RunConfig, build_run_config


def config_of(**keys: object) -> RunConfig:
    return build_run_config({"model": "gpt2-124m", **keys})


def resolved(num_samples: int = 1000, **keys: object) -> tuple[RunConfig, ResolvedRun]:
    config = config_of(**{"global_batch_size": 16, **keys})
    return config, resolve_run(config, parse_ds_config({}, "test"), SetFacts(4096, 256, num_samples, eot_token=4095), 2)


def test_a_preset_that_the_data_reshapes() -> None:
    config, run = resolved()
    assert describe_preset(config.model, run.shape) == (
        "gpt2-124m with the dataset's vocabulary of 4,096 and a context of 256: 88.4M parameters, not 124M"
    )
    config, run = resolved(n_layer=6)
    assert "gpt2-124m with n_layer 6, the dataset's vocabulary" in (describe_preset(config.model, run.shape) or "")


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_a_preset_as_published_is_what_its_name_says(name: str) -> None:
    preset = PRESETS[name]
    shape = preset.shape(preset.vocab_size)
    assert describe_preset(name, shape) is None
    assert nominal_parameters(name) == pytest.approx(shape.num_parameters, rel=0.05)


@pytest.mark.parametrize(
    ("num_samples", "keys", "words"),
    [
        (1000, {}, "one pass over the data, of which the last 8 samples fill no batch and are not seen"),
        (992, {}, "one pass over the data"),
        (10, {}, "the 10 samples are less than one batch: 6 are seen again"),
        (1000, {"steps": 5}, None),
        (1000, {"tokens": 10_000}, "--tokens 10,000 rounded up to whole steps"),
        (1000, {"tokens": 8192}, None),
    ],
)
def test_what_the_default_steps_leave_unseen(num_samples: int, keys: dict, words: str | None) -> None:
    config, run = resolved(num_samples, **keys)
    assert describe_steps(config, run, num_samples) == words


def test_sizes_that_were_given_are_not_explained() -> None:
    empty = parse_ds_config({}, "test")
    written = parse_ds_config({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}, "test")
    assert list(describe_batch(config_of(global_batch_size=8, micro_batch_size=1), empty)) == []
    assert list(describe_batch(config_of(), written)) == []
    assert list(describe_batch(config_of(), empty)) == [
        "the global batch is gpt2-124m's",
        "the micro-batch the largest within 16,384 tokens that needs the fewest fillers",
    ]


def test_types_in_which_gradients_are_added() -> None:
    ds = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}
    _, run = resolved(micro_batch_size=2)
    assert describe_gradients(run.plan, ds) == "summed over 4 micro-steps in fp32, reduced over 2 ranks in bf16"
    _, run = resolved(micro_batch_size=8)
    assert describe_gradients(run.plan, ds) == "reduced over 2 ranks in bf16"


def test_defaults_of_the_optimizer_are_written_out() -> None:
    config, run = resolved(16_000)
    assert describe_optimizer(config, run.schedule, 1.0) == (
        "adamw, learning rate 6.00e-04 (gpt2-124m's), 10 warm-up steps, cosine to 6.00e-05 by step 1,000, weight decay "
        "0.1, betas 0.9 and 0.95, clipping at 1, dropout 0"
    )
    config, run = resolved(16_000, lr=1e-3, schedule="constant", dropout=0.1)
    words = describe_optimizer(config, run.schedule, 0.0)
    assert "learning rate 1.00e-03, 10 warm-up steps, constant, " in words
    assert words.endswith("no clipping, dropout 0.1")


def test_adafactor_s_weight_decay_is_the_one_that_it_uses() -> None:
    config, run = resolved(optimizer="adafactor")
    assert ", weight decay 0.002 (0.1 / 50), clipping" in describe_optimizer(config, run.schedule, 1.0)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("muon", "muon, learning rate 6.00e-04 (gpt2-124m's for AdamW, whose size of updates it has), "),
        (
            "adafactor",
            "adafactor, learning rate 3.00e-02 (gpt2-124m's for AdamW, divided by the weights' first root mean square "
            "of 0.02, as it is relative to theirs), ",
        ),
    ],
)
def test_every_optimizer_says_where_its_rate_comes_from(optimizer: str, words: str) -> None:
    config, run = resolved(optimizer=optimizer)
    assert describe_optimizer(config, run.schedule, 1.0).startswith(words)


def test_another_optimizer_than_the_preset_s_names_the_preset_of_its_rate() -> None:
    config, run = resolved(model="tiny-muon-1m", optimizer="adamw")
    words = "adamw, learning rate 1.00e-03 (tiny-1m's, the preset nearest in size), "
    assert describe_optimizer(config, run.schedule, 1.0).startswith(words)


def test_trained_weights_and_a_rate_for_new_ones_are_warned_of_once() -> None:
    config, run = resolved(init_from="runs/other")
    assert warn_of_learning_rate(config, run.schedule) == (
        "the weights are trained, and the peak learning rate of 6.00e-04 is gpt2-124m's, for training from scratch. "
        "Continue with less, such as --lr 6.0e-05, or keep it with --lr 6.0e-04"
    )
    for keys in ({"init_from": "runs/other", "lr": 6e-4}, {}):
        config, run = resolved(**keys)
        assert warn_of_learning_rate(config, run.schedule) is None


def test_a_router_without_a_gradient_is_named() -> None:
    shape = GPTShape(1, 2, 16, 64, 20, num_experts=4, experts_per_token=1, bias=False)
    assert (text := warn_of_router(shape)) is not None and "--no-normalize-router" in text
    for changes in ({"normalize_router": False}, {"experts_per_token": 2}, {"num_experts": 0}):
        assert warn_of_router(shape.changed(changes)) is None
