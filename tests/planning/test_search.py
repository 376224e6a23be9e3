"""The largest micro-batch, model and sequence that fit: maximal, legal, and resolved as train.py resolves them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import divisors
from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.config.hardware import get_gpu
from llmscale.config.optimizers import get_optimizer
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.memory.estimate import estimate_memory
from llmscale.planning.scaling import WIDTH_MULTIPLE, interpolated_shape, scaling_family
from llmscale.planning.search import (
    MARGIN,
    PROCESS_BYTES,
    LargestModel,
    LongestSequences,
    Strategy,
    Trial,
    cheapest_sizes,
    evaluate,
    find_largest_fit,
    find_largest_models,
    find_longest,
    try_strategies,
    with_inputs_on_host,
    with_micro_batch,
)
from tests.planning.conftest import cluster_of, ds_of, step_on, strategies_on

GIB = 2**30
SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, seq_len=1024)
CLUSTER = cluster_of()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gib", [4, 8, 24, 80])
def test_the_next_larger_micro_batch_does_not_fit(stage: int, gib: int) -> None:
    cluster = cluster_of(gib)
    step = step_on(cluster, ds_of(stage), SHAPE, 8 * 60, "full")
    largest = find_largest_fit(Trial(step), cluster)
    fitting = [size for size in divisors(60) if evaluate(with_micro_batch(step, size), cluster).has_gpu_margin]
    assert largest.has_gpu_margin == bool(fitting)
    assert largest.plan.micro_batch_size == max(fitting, default=1)


def test_without_accumulation_a_larger_batch_may_fit_where_a_smaller_one_does_not() -> None:
    """A micro-batch that is a rank's whole share needs no sum of gradients from one micro-step to the next."""
    shape, cluster = GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=512, seq_len=8), cluster_of(80, 1)
    step = step_on(cluster, ds_of(1, offload_optimizer={"device": "cpu"}), shape, 2, "full")
    half, complete = (evaluate(with_micro_batch(step, size), cluster).estimate.total_bytes for size in (1, 2))
    assert complete < half
    between = cluster_of((half + complete) / 2 / GIB / (1 - MARGIN), 1)
    largest = find_largest_fit(Trial(step), between)
    assert (largest.fits, largest.plan.micro_batch_size) == (True, 2)


def test_a_row_is_the_estimate_of_what_train_py_would_resolve() -> None:
    step = step_on(CLUSTER, ds_of(2), SHAPE, 64, "selective")
    fit = find_largest_fit(Trial(step), CLUSTER)
    assert fit.step == step_on(CLUSTER, ds_of(2), SHAPE, 64, "selective", fit.plan.micro_batch_size)
    assert fit.estimate == estimate_memory(fit.step)
    small = find_largest_fit(Trial(step), cluster_of(2))
    assert not small.fits
    assert small.plan.micro_batch_size == 1
    assert small.spare_bytes == 2 * GIB - small.estimate.total_bytes < 0


def test_host_memory_is_counted_per_node_and_checked_when_it_is_known() -> None:
    trial = Trial(step_on(CLUSTER, ds_of(2, offload_optimizer={"device": "cpu"}), SHAPE, 64))
    fit = find_largest_fit(trial, CLUSTER)
    assert fit.host_bytes_per_node == 8 * fit.estimate.host_bytes >= 12 * SHAPE.num_parameters
    assert fit.host_spare_bytes is None
    assert not find_largest_fit(trial, replace(CLUSTER, host_bytes=GIB)).fits


def test_the_copy_of_a_checkpoint_is_in_the_hosts_memory() -> None:
    two = cluster_of(80, 6, 2)
    states = 12 * SHAPE.num_parameters

    def copy_bytes(ds: DsConfig) -> int:
        return evaluate(step_on(two, ds, SHAPE, 60), two).save_bytes_per_node

    assert copy_bytes(ds_of(2, offload_optimizer={"device": "cpu"})) == states // 2
    # From a GPU it is page-locked, in powers of two: whole tensors below stage 3, and there a rank's part of each.
    # Every rank of stage 0 copies the complete states.
    elements = [tensor.elements for tensor in step_on(two, ds_of(0), SHAPE, 60).tensors.trainable]
    for stage, copies, parts in ((0, 6, 1), (1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 12)):
        sizes = [4 * number / parts for number in elements]
        locked = [2 ** math.ceil(math.log2(size)) for size in sizes]
        assert copy_bytes(ds_of(stage)) == pytest.approx(copies * states * sum(locked) / sum(sizes), rel=1e-6), stage


@pytest.mark.parametrize(
    ("gpus", "batch", "sizes"), [(7, 64, [1, 2]), (8, 64, [1, 2, 4, 8]), (5, 48, [1, 2]), (7, 7, [1])]
)
def test_only_micro_batches_with_the_fewest_fillers_are_tried(gpus: int, batch: int, sizes: list[int]) -> None:
    cluster = cluster_of(24, gpus)
    step = step_on(cluster, ds_of(2), SHAPE, batch, "full")
    assert cheapest_sizes(step) == sizes
    assert find_largest_fit(Trial(step), cluster).plan.micro_batch_size == sizes[-1]
    assert find_largest_fit(Trial(step, is_fixed=True), cluster).plan.micro_batch_size == 1


def test_every_legal_strategy_is_tried_once() -> None:
    trials = strategies_on(CLUSTER, SHAPE, 64)
    strategies = [evaluate(trial.step, CLUSTER).strategy for trial in trials]
    assert len(set(strategies)) == len(strategies) == 27
    assert {s.zero_stage for s in strategies if s.offload_param != "none"} == {3}
    assert {s.zero_stage for s in strategies if s.offload_optimizer == "cpu"} == {1, 2, 3}
    assert {s.offload for s in strategies} == {"-", "optim cpu", "both cpu", "both nvme"}
    assert {trial.step.zero_stage for trial in strategies_on(CLUSTER, SHAPE, 64, "fp16")} == {1, 2, 3}


def test_strategies_that_train_py_refuses_are_left_out() -> None:
    step = step_on(CLUSTER, ds_of(3), SHAPE, 64)
    frozen = replace(step.optimizer, frozen=("wte*",))
    trials = try_strategies(Trial(step.changed(optimizer=frozen)))
    assert "nvme" not in {trial.step.ds.keys.offload_param_device for trial in trials}
    step = step_on(CLUSTER, ds_of(0), SHAPE, 64).changed(optimizer=get_optimizer("adafactor"))
    assert {trial.step.zero_stage for trial in try_strategies(Trial(step))} == {0}


@pytest.mark.parametrize(
    ("num_nodes", "gpus", "words"),
    [(1, 8, "8 x t4"), (2, 8, "2 nodes x 8 x t4"), (1, 64, "64 x t4 in one node (of several nodes: --num-nodes)")],
)
def test_a_cluster_in_words(num_nodes: int, gpus: int, words: str) -> None:
    assert cluster_of(16, gpus, num_nodes, gpu="t4").in_words() == words


@pytest.mark.parametrize(("name", "like"), [("24gb", "a10g"), ("80gb", "a100-80gb-pcie"), ("16gb", "t4")])
def test_a_size_is_the_slowest_gpu_that_has_it_with_the_least_memory(name: str, like: str) -> None:
    gpu = get_gpu(name)
    assert (gpu.name, gpu.dense_16bit_flops) == (name, get_gpu(like).dense_16bit_flops)
    assert gpu.memory_gib <= get_gpu(like).memory_gib
    with pytest.raises(ConfigError, match="GPU '12gb' is not in the table"):
        get_gpu("12gb")


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
        shape = interpolated_shape(wanted.n_embd, like, family)
        assert replace(shape, dropout=0.0) == replace(wanted, norm_eps=shape.norm_eps, rope_theta=shape.rope_theta)


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


EIGHT = cluster_of(40)


@pytest.fixture(scope="module")
def models() -> list[LargestModel]:
    return find_largest_models(strategies_on(EIGHT, LIKE, 64, modes=("full",)), EIGHT)


def test_the_next_width_does_not_fit(models: list[LargestModel]) -> None:
    assert len(models) == 9
    for model in models:
        assert model.shape is not None and model.fit is not None and model.fit.has_margin
        wider = interpolated_shape(model.shape.n_embd + WIDTH_MULTIPLE, LIKE)
        assert not evaluate(model.fit.step.changed(shape=wider), EIGHT).has_margin
        assert model.preset is not None
        preset = PRESETS[model.preset]
        like = replace(LIKE, n_layer=preset.n_layer, n_head=preset.n_head, n_embd=preset.n_embd)
        assert like.num_parameters <= model.shape.num_parameters


def test_sharding_and_offload_make_room_for_more(models: list[LargestModel]) -> None:
    of_strategy = {model.strategy: model.num_parameters or 0 for model in models}
    order = [
        *(Strategy(stage, "none", "none", "full") for stage in (0, 1, 2, 3)),
        Strategy(3, "cpu", "none", "full"),
        Strategy(3, "cpu", "cpu", "full"),
    ]
    sizes = [of_strategy[strategy] for strategy in order]
    assert sizes == sorted(sizes)


def test_nothing_fits_a_card_that_is_too_small() -> None:
    tiny = cluster_of(1)
    assert all(model.fit is None for model in find_largest_models(strategies_on(tiny, LIKE, 64), tiny))


LLAMA_8B = PRESETS["llama3-8b"].shape(128256)
ONE = cluster_of(80, 1)


@pytest.fixture(scope="module")
def longest() -> list[LongestSequences]:
    trials = [*with_inputs_on_host(strategies_on(ONE, LLAMA_8B, 1), "/local_nvme")]
    return find_longest(trials, ONE, [1])


def test_the_longest_sequence_fits_and_the_next_length_does_not(longest: list[LongestSequences]) -> None:
    assert {row.fits[1] is None for row in longest} == {True, False}
    for row in longest:
        if fit := row.fits[1]:
            length = fit.plan.seq_len
            assert fit.fits and length % 1024 == 0
            shape = replace(fit.step.shape, seq_len=length + 1024)
            longer = fit.step.changed(shape=shape, plan=replace(fit.plan, seq_len=length + 1024))
            assert not evaluate(longer, ONE).has_margin, row


def test_every_mode_of_checkpointing_makes_room_for_longer_sequences(longest: list[LongestSequences]) -> None:
    lengths = {
        (row.strategy.zero_stage, row.strategy.offload, row.checkpointing): row.seq_len[1] or 0
        for row in longest
        if row.seq_len[1] or row.strategy.offload != "-"
    }
    assert len(lengths) == 5 * 4, "with offload, blocks' inputs are tried on the host too"
    for stage, offload in {key[:2] for key in lengths}:
        of_modes = [lengths[stage, offload, mode] for mode in ("-", "selective", "full", "full, host")]
        assert all(longer > 1.5 * shorter for shorter, longer in itertools.pairwise(of_modes))


def test_host_memory_bounds_the_longest() -> None:
    on_host, lengths = {"activation_checkpointing": {"cpu_checkpointing": True}}, []
    for host_bytes in (None, 280 * GIB):
        cluster = cluster_of(80, 1, host_bytes=host_bytes)
        ds = ds_of(3, sections=on_host, offload_optimizer={"device": "cpu"})
        (row,) = find_longest([Trial(step_on(cluster, ds, LLAMA_8B, 1, "full"))], cluster, [1])
        fit = row.fits[1]
        assert fit is not None
        lengths.append(fit.plan.seq_len)
    assert lengths[0] > 1.5 * lengths[1]
    counted = fit.host_bytes_per_node + fit.save_bytes_per_node + PROCESS_BYTES
    assert counted <= (1 - MARGIN) * 280 * GIB < counted + 32 * 1024 * 4096 * 2


def test_the_longest_sequence_grows_with_the_gpus_that_divide_it_and_with_tiles() -> None:
    cluster, lengths = cluster_of(80), []
    for tile in (0, 4096):
        step = step_on(cluster, ds_of(3), replace(LLAMA_8B, mlp_tile_tokens=tile), 8, "full")
        (row,) = find_longest([Trial(step)], cluster, (1, 2, 8))
        lengths.append([row.seq_len[size] or 0 for size in (1, 2, 8)])
        assert lengths[-1] == sorted(lengths[-1])
        assert lengths[-1][-1] > 6 * lengths[-1][0]
    assert all(tiled > without for without, tiled in zip(*lengths, strict=True))
