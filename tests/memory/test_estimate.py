"""States and activations together: against a dry run of the real engine, and properties of every estimate."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.cli.estimate_details import compare_with_dry_run
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.optimizers import ADAFACTOR, ADAMW
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import ResolvedStep
from llmscale.dry_run.engine import dry_run
from llmscale.errors import ConfigError
from llmscale.memory import gathers
from llmscale.memory.breakdown import Breakdown, allocated_bytes
from llmscale.memory.estimate import (
    CONTEXT_BYTES,
    PHASES,
    MemoryEstimate,
    estimate_memory,
    step_activations,
)
from llmscale.memory.layers import most_rows
from llmscale.memory.zero_setup import zero_setup
from llmscale.memory.zero_stages import zero_states
from llmscale.planning.search import Candidate, evaluate
from tests.planning.conftest import cluster_of, ds_of, step_on

GIB = 2**30
#: Tolerated relative difference from the dry run in a phase.
TOLERANCE = 0.03
#: How much too low and too high the peak may be: stage 3 counts a block's gathered parameters and gradients together.
PEAK_TOO_LOW, PEAK_TOO_HIGH = 0.01, 0.02

#: Where the peak lies differs: in the loss, in the blocks, in the optimizer step.
SHAPES = {
    "large vocabulary": GPTShape(n_layer=2, n_head=4, n_embd=256, vocab_size=20_000, seq_len=128, dropout=0.1),
    "long sequences": GPTShape(n_layer=3, n_head=4, n_embd=256, vocab_size=300, seq_len=256),
    "many parameters": GPTShape(n_layer=3, n_head=4, n_embd=512, vocab_size=1000, seq_len=32, bias=False),
}


#: Another width than that of the heads together, which share keys; an MLP of its own width.
ODD = {
    **{"n_layer": 3, "n_head": 6, "n_kv_head": 2, "head_dim": 48, "n_embd": 320, "mlp_width": 704},
    **{"vocab_size": 1000, "seq_len": 104},
}
LLAMA = {"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
FAMILIES = {
    name: build_shape({**ODD, **block})
    for name, block in {
        "opt": {"activation": "relu", "n_kv_head": 6},
        "llama": {**LLAMA, "tied": False},
        "mistral": {**LLAMA, "tied": False, "sliding_window": 30},
        "qwen2": {**LLAMA, "attention_bias": "qkv"},
        "qwen3": {**LLAMA, "qk_norm": "head", "tied": False},
        "olmo2": {**LLAMA, "qk_norm": "width", "norm_placement": "post", "tied": False},
        "gpt-modern": {**LLAMA, "qk_norm": "head", "n_kv_head": 6},
    }.items()
}


def config(stage: int, precision: Precision, **zero: object) -> DsConfig:
    section = (
        {} if precision == "fp32" else {{"autocast": "torch_autocast"}.get(precision, precision): {"enabled": True}}
    )
    return parse_ds_config({"zero_optimization": {"stage": stage, **zero}, **section}, "test")


def fit(
    ds: DsConfig,
    shape: GPTShape,
    mode: CheckpointingMode,
    world_size: int = 8,
    accumulation: int = 2,
    size: int = 4,
    gpu: str = "a100-80gb",
) -> Candidate:
    cluster = cluster_of(80, world_size, gpu=gpu)
    return evaluate(step_on(cluster, ds, shape, size * accumulation * world_size, mode, size), cluster)


def peak_of_dry_run(fit: Candidate) -> dict[str, Breakdown]:
    result = compare_with_dry_run(fit).dry_run
    return {"forward": result.forward, "backward": result.backward, "step": result.step}


def check(ds: DsConfig, shape: GPTShape, mode: CheckpointingMode, world_size: int = 8, accumulation: int = 2) -> None:
    check_fit(fit(ds, shape, mode, world_size, accumulation))


def check_fit(candidate: Candidate) -> None:
    counted = peak_of_dry_run(candidate)
    for phase, breakdown in counted.items():
        assert candidate.estimate.phase(phase).total_bytes == pytest.approx(breakdown.total_bytes, rel=TOLERANCE), phase
    peak = max(breakdown.total_bytes for breakdown in counted.values())
    assert 1 - PEAK_TOO_LOW <= candidate.estimate.allocated_bytes / peak <= 1 + PEAK_TOO_HIGH


#: One of everything, each with the shape that it matters most for.
SAMPLE: list[tuple[int, Precision, CheckpointingMode, str, int, int]] = [
    (0, "fp32", "full", "many parameters", 1, 1),
    (1, "bf16", "selective", "long sequences", 8, 2),
    (1, "autocast", "none", "large vocabulary", 8, 1),
    (2, "bf16", "none", "many parameters", 8, 2),
    (2, "fp16", "full", "long sequences", 64, 1),
    (3, "bf16", "none", "many parameters", 8, 2),
    (3, "bf16", "full", "long sequences", 8, 2),
    (3, "autocast", "none", "large vocabulary", 64, 1),
]


@pytest.mark.parametrize(("stage", "precision", "mode", "shape", "world_size", "accumulation"), SAMPLE)
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_is_that_of_the_dry_run(
    stage: int, precision: Precision, mode: CheckpointingMode, shape: str, world_size: int, accumulation: int
) -> None:
    check(config(stage, precision), SHAPES[shape], mode, world_size, accumulation)


@pytest.mark.usefixtures("libraries_are_frozen")
def test_the_peak_with_masks_in_blocks_is_that_of_the_dry_run() -> None:
    windows = {"sliding_window": 200, "window_pattern": "LG", "document_end": 0}
    shape = GPTShape(2, 4, 128, 1000, 1024, n_kv_head=2, positions="rotary", **windows)
    flex, dense = (fit(config(2, "bf16"), replace(shape, attention_kernel=one), "none") for one in ("auto", "sdpa"))
    for found in (flex, dense):
        peak = max(breakdown.total_bytes for breakdown in peak_of_dry_run(found).values())
        assert found.estimate.allocated_bytes == pytest.approx(peak, rel=2e-3)
    assert flex.estimate.allocated_bytes < 0.9 * dense.estimate.allocated_bytes


@pytest.mark.parametrize(
    ("stage", "precision", "mode", "family"),
    [
        (0, "bf16", "selective", "opt"),
        (1, "fp32", "none", "gpt-modern"),
        (2, "bf16", "full", "mistral"),
        (3, "bf16", "selective", "qwen2"),
        (3, "bf16", "none", "llama"),
        (3, "autocast", "none", "olmo2"),
        (3, "bf16", "full", "qwen3"),
    ],
)
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_of_every_family_is_that_of_the_dry_run(
    stage: int, precision: Precision, mode: CheckpointingMode, family: str
) -> None:
    check(config(stage, precision), FAMILIES[family], mode)


@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_on_a_gpu_without_flash_attention_is_that_of_the_dry_run() -> None:
    check_fit(fit(config(2, "fp16"), FAMILIES["llama"], "none", gpu="t4"))


EIGHT = cluster_of(80)
EXPERTS: dict[str, object] = {**LLAMA, "tied": False, "num_experts": 8, "expert_width": 352}
SPARSE = {
    "mixtral": build_shape({**ODD, **EXPERTS}),
    "dots": build_shape(
        {
            **{**ODD, **EXPERTS, "n_kv_head": 6, "n_layer": 4, "qk_norm": "head", "dense_layers": 1},
            **{"router_score": "sigmoid", "router_scale": 2.5, "router_bias": True, "shared_expert_width": 200},
        }
    ),
}


@pytest.mark.parametrize(
    ("stage", "precision", "mode", "family"),
    [
        (2, "bf16", "none", "dots"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                *((0, "fp32", "none", "mixtral"), (1, "bf16", "selective", "mixtral"), (3, "bf16", "none", "dots")),
                *((3, "bf16", "full", "mixtral"), (3, "autocast", "none", "mixtral")),
            )
        ),
    ],
)
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_with_experts_is_that_of_the_dry_run(
    stage: int, precision: Precision, mode: CheckpointingMode, family: str
) -> None:
    check_fit(fit(config(stage, precision), SPARSE[family], mode))


def test_blocks_without_experts_are_counted_as_those_of_a_dense_model() -> None:
    mixed = SPARSE["dots"]
    dense = build_shape({**ODD, **LLAMA, "tied": False, "n_kv_head": 6, "n_layer": 4, "qk_norm": "head"})
    sparse = replace(mixed, dense_layers=0)
    first, *others = step_activations(fit(config(2, "bf16"), mixed, "none").step).blocks
    assert first == step_activations(fit(config(2, "bf16"), dense, "none").step).blocks[0]
    assert set(map(id, others)) == {id(others[0])}
    assert others[0] == step_activations(fit(config(2, "bf16"), sparse, "none").step).blocks[0]


def divided_experts(stage: int, size: int) -> ResolvedStep:
    """Return a step of 8 ranks of which `size` divide the experts."""
    return step_on(EIGHT, config(stage, "bf16"), SPARSE["mixtral"], 64, "none", 4, experts=size)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 4), (3, 4), (3, 8)])
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_with_divided_experts_is_that_of_the_dry_run(stage: int, size: int) -> None:
    check_fit(evaluate(divided_experts(stage, size), EIGHT))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [(1, 2), (3, 4)])
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_of_a_gpu_that_gets_all_tokens_of_its_group_is_that_of_the_dry_run(stage: int, size: int) -> None:
    step = divided_experts(stage, size)
    estimated, simulated = estimate_memory(step, worst_load=True), dry_run(step, worst_load=True)
    for phase in PHASES:
        counted = getattr(simulated, phase).total_bytes
        assert estimated.phase(phase).total_bytes == pytest.approx(counted, rel=TOLERANCE), phase
    assert estimated.phase("backward").total_bytes > 1.1 * estimate_memory(step).phase("backward").total_bytes


def test_a_rank_receives_no_more_rows_than_its_experts_can_take() -> None:
    shape = SPARSE["mixtral"]  # 8 experts, of which a token takes 2
    assert [most_rows(shape, 100, ParallelLayout(8, 1, size)) for size in (2, 4, 8)] == [200, 400, 400]


def test_divided_experts_have_a_part_of_the_parameters_and_as_many_states() -> None:
    shape = SPARSE["mixtral"]
    steps = [divided_experts(1, size) for size in (1, 4)]
    undivided, part = (zero_states(step.rank_tensors, zero_setup(step)).resident for step in steps)
    experts = sum(tensor.elements for tensor in shape.tensors.all if tensor.parameter.is_stacked)
    assert undivided.parameters_bytes - part.parameters_bytes == pytest.approx(2 * experts * 3 / 4, rel=1e-3)
    assert part.optimizer_bytes == pytest.approx(undivided.optimizer_bytes, rel=1e-3)
    with pytest.raises(ConfigError, match=r"cannot divide experts .* stage 0"):
        divided_experts(0, 4)


#: Stage, checkpointing, family, ranks that divide a sequence, and tokens of an MLP's tile.
SPLIT_CELLS: list[tuple[int, CheckpointingMode, str, int, int]] = [
    (1, "none", "opt", 2, 0),
    (2, "full", "llama", 2, 0),
    (3, "selective", "qwen2", 6, 0),
    (3, "full", "qwen3", 3, 0),
    (3, "none", "olmo2", 6, 0),
    (2, "full", "llama", 1, 100),
    (3, "full", "qwen2", 2, 64),
    (3, "full", "opt", 1, 150),
]


def fit_divided(stage: int, mode: CheckpointingMode, shape: GPTShape, size: int, ranks: int) -> Candidate:
    """Return the estimate where `size` of the ranks divide a sequence."""
    cluster = cluster_of(80, ranks)
    return evaluate(step_on(cluster, config(stage, "bf16"), shape, 4 * ranks // size, mode, 4, split=size), cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode", "family", "size", "tile"), SPLIT_CELLS)
@pytest.mark.usefixtures("libraries_are_frozen")
def test_every_phase_of_a_divided_sequence_is_that_of_the_dry_run(
    stage: int, mode: CheckpointingMode, family: str, size: int, tile: int
) -> None:
    """Key-value heads are divided, repeated, and repeated for each query head; three ranks do not divide the tokens."""
    shape = replace(FAMILIES[family], mlp_tile_tokens=tile)
    check_fit(fit_divided(stage, mode, shape, size, 12))


@pytest.mark.slow
def test_activations_fall_with_the_ranks_that_divide_a_sequence() -> None:
    shape = build_shape({**LLAMA, **ODD, "n_head": 8, "n_kv_head": 8, "seq_len": 65536})
    fits = [fit_divided(2, "full", shape, size, 8) for size in (1, 2, 4, 8)]
    peaks = [fit.estimate.phase("backward").activations_bytes for fit in fits]
    assert all(later == pytest.approx(earlier / 2, rel=0.07) for earlier, later in itertools.pairwise(peaks))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.usefixtures("libraries_are_frozen")
def test_optimizer_offload_is_that_of_the_dry_run(stage: int) -> None:
    """DeepSpeed frees the buffers of a gradient's copy to the host before the block's activations peak."""
    ds, shape = config(stage, "bf16", offload_optimizer={"device": "cpu"}), SHAPES["many parameters"]
    check_fit(fit(ds, shape, "full", world_size=1, size=64))


SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, seq_len=1024)


def test_every_moment_is_there_and_the_peak_is_the_largest() -> None:
    estimate = fit(config(2, "bf16"), SHAPE, "none").estimate
    assert list(estimate.moments) == [moment for moments in PHASES.values() for moment in moments]
    totals = {name: moment.total_bytes for name, moment in estimate.moments.items()}
    assert estimate.allocated_bytes == max(totals.values()) == totals[estimate.peak_moment]
    assert estimate.peak == estimate.moments[estimate.peak_moment]
    assert Breakdown(1, 2, 4, 8, 16, 32, 64).total_bytes == 127


@pytest.mark.parametrize(("elements", "width", "expected"), [(0, 4, 0), (1, 4, 512), (128, 4, 512), (129, 4, 1024)])
def test_allocations_are_multiples_of_512_bytes(elements: int, width: int, expected: int) -> None:
    assert allocated_bytes(elements, width) == expected


def test_what_is_assumed_is_kept_apart() -> None:
    estimate = MemoryEstimate({"only": Breakdown(parameters_bytes=10 * GIB)}, host_bytes=1, nvme_bytes=2)
    assert estimate.allocated_bytes == 10 * GIB
    assert estimate.reserved_bytes == 11 * GIB
    assert estimate.context_bytes == CONTEXT_BYTES == GIB
    assert estimate.total_bytes == 12 * GIB


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_of_anything_needs_more(stage: int) -> None:
    ds = config(stage, "bf16")

    def total(shape: GPTShape, mode: CheckpointingMode = "none", size: int = 4) -> int:
        return fit(ds, shape, mode, size=size).estimate.total_bytes

    base = total(SHAPE)
    assert total(SHAPE, size=8) > base
    assert total(replace(SHAPE, n_layer=24)) > base
    assert total(replace(SHAPE, dropout=0.1)) > base
    assert total(replace(SHAPE, seq_len=2048)) > base
    assert total(SHAPE, "full") < total(SHAPE, "selective") < base


def test_a_higher_stage_holds_less_in_the_forward_pass() -> None:
    """Stage 3 has more live in small models: what it gathers, and its bucket."""
    forward = [fit(config(s, "bf16"), SHAPE, "full").estimate.moments["forward"].total_bytes for s in range(3)]
    assert forward == sorted(forward, reverse=True)


def test_what_hpz_keeps_from_earlier_micro_steps_is_there_when_a_later_one_begins() -> None:
    """hpZ's copies of all released parameters count, not only those of the earlier blocks."""
    shape = SHAPES["many parameters"]
    one, two = (
        fit(config(3, "bf16", zero_hpz_partition_size=2), shape, "none", accumulation=steps).estimate
        for steps in (1, 2)
    )
    copies = 2 * shape.num_parameters // 2
    added = two.moments["loss forward"].parameters_bytes - one.moments["loss forward"].parameters_bytes
    assert 0.2 * copies < added < copies
    plain = [fit(config(3, "bf16"), shape, "none", accumulation=steps).estimate for steps in (1, 2)]
    assert plain[0].moments == plain[1].moments


@pytest.mark.parametrize("limit", [{}, {"stage3_max_live_parameters": 10**7}, {"zero_hpz_partition_size": 2}])
@pytest.mark.parametrize("model", ["gpt3-175b", "llama3-8b"])
def test_equal_blocks_of_a_deep_model_are_followed_once(model: str, limit: dict[str, object]) -> None:
    step = step_on(cluster_of(), ds_of(3, **limit), PRESETS[model].shape(50257), 8, "full")
    tensors, setup = step.rank_tensors, zero_setup(step)
    assert gathers._blocks_to_follow(tensors, setup) < step.shape.n_layer
    repeated = gathers.follow_gathers(tensors, setup, recomputes=True)
    assert repeated == gathers._follow(tensors, setup, recomputes=True)


def test_a_frozen_table_is_gathered_for_the_heads_backward_pass() -> None:
    shape = PRESETS["gpt2-124m"].shape(50257).changed({"n_layer": 2, "seq_len": 128})
    step = step_on(cluster_of(), ds_of(3), shape, 8)
    frozen = step.changed(optimizer=ADAMW.with_rules([], ["wte*"], shape.tensors.all))
    plain, beside = (estimate_memory(one).moments["loss backward"].parameters_bytes for one in (step, frozen))
    assert plain == beside > 2 * shape.architecture.token_embedding.elements


def test_offload_moves_bytes_to_the_host() -> None:
    on_gpu = fit(config(2, "bf16"), SHAPE, "full").estimate
    offloaded = fit(config(2, "bf16", offload_optimizer={"device": "cpu"}), SHAPE, "full").estimate
    assert on_gpu.host_bytes == 0
    assert offloaded.host_bytes >= 12 * SHAPE.num_parameters / 8
    assert offloaded.moments["forward"].optimizer_bytes == 0
    assert on_gpu.moments["forward"].optimizer_bytes > 0


def test_checkpoints_on_the_host_are_counted_there() -> None:
    sections = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    on_gpu, on_host = (
        fit(
            parse_ds_config({**sections, "activation_checkpointing": {"cpu_checkpointing": on}}, "t"),
            *(SHAPE, "full"),
            size=16,
        )
        for on in (False, True)
    )
    assert on_host.estimate.host_bytes > 0 == on_gpu.estimate.host_bytes
    assert on_host.estimate.allocated_bytes < on_gpu.estimate.allocated_bytes


def test_adafactors_states_are_those_of_a_real_step() -> None:
    from llmscale.engine.optimizers import build_optimizer
    from llmscale.model.gpt import GPT

    shape = build_shape({**ODD, **LLAMA, "num_experts": 4, "experts_per_token": 2, "expert_width": 64})
    model = GPT(shape, seed=0)
    optimizer = build_optimizer(
        model, shape.tensors.kinds, ADAFACTOR, lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(value.nbytes for states in optimizer.state.values() for name, value in states.items() if name != "step")
    assert ADAFACTOR.state_bytes(shape.architecture) - 4 * shape.num_parameters == held
