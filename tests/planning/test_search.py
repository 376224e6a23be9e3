"""The largest micro-batch that fits: maximal, legal, and resolved as train.py resolves it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from llmscale.architecture.hf_config import load_hf_model
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import divisors
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import resolve_step
from llmscale.dry_run.on_demand import with_recordings
from llmscale.errors import ConfigError
from llmscale.memory.estimate import estimate_memory
from llmscale.planning.scaling import WIDTH_MULTIPLE, interpolated_shape, scaling_family
from llmscale.planning.search import (
    MARGIN,
    PROCESS_BYTES,
    Candidate,
    Job,
    LongestSequences,
    Machines,
    Strategy,
    build_strategy,
    cheapest_sizes,
    find_fits,
    find_hf_configs,
    find_largest_fit,
    find_largest_models,
    find_longest,
    fit_at,
    most_room,
)
from tests.planning.conftest import search

GIB = 2**30
SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, seq_len=1024)
MACHINES = Machines(num_nodes=1, gpus_per_node=8, gpu_bytes=24 * GIB)


def config(stage: int, offload_optimizer: dict[str, object] | None = None, **sections: object) -> DsConfig:
    zero = {"stage": stage} | ({"offload_optimizer": offload_optimizer} if offload_optimizer else {})
    return parse_ds_config({"zero_optimization": zero, "bf16": {"enabled": True}, **sections}, "test")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gib", [4, 8, 24, 80])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_next_larger_micro_batch_does_not_fit(stage: int, gib: int, mode: str) -> None:
    job = Job(SHAPE, 8 * 60, replace(MACHINES, gpu_bytes=gib * GIB))
    found = find_largest_fit(config(stage), job, mode)  # type: ignore[arg-type]
    fitting = [size for size in divisors(60) if fit_at(config(stage), job, mode, size).has_gpu_margin]  # type: ignore[arg-type]
    assert found.has_gpu_margin == bool(fitting)
    assert found.plan.micro_batch_size == max(fitting, default=1)


def test_without_accumulation_a_larger_batch_may_fit_where_a_smaller_one_does_not() -> None:
    """A micro-batch that is a rank's whole share needs no sum of gradients from one micro-step to the next."""
    ds = config(1, offload_optimizer={"device": "cpu"})
    job = Job(GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=512, seq_len=8), 2, Machines(1, 1, 80 * GIB))
    half, whole = (fit_at(ds, job, "full", size).estimate.total_bytes for size in (1, 2))
    assert whole < half
    between = replace(job, machines=replace(job.machines, gpu_bytes=(half + whole) // 2))
    found = find_largest_fit(ds, between, "full")
    assert found.fits
    assert found.plan.micro_batch_size == 2


def test_a_row_is_the_estimate_of_what_train_py_would_resolve() -> None:
    job = Job(SHAPE, 64, MACHINES)
    fit = find_largest_fit(config(2), job, "selective")
    assert fit.plan.global_batch_size == 64
    assert fit.step == resolve_step(config(2), SHAPE, fit.plan, "selective")
    assert fit.estimate == estimate_memory(fit.step)


def test_nothing_fits_gives_the_smallest_and_what_is_missing() -> None:
    job = Job(SHAPE, 64, replace(MACHINES, gpu_bytes=2 * GIB))
    fit = find_largest_fit(config(0), job, "none")
    assert not fit.fits
    assert fit.plan.micro_batch_size == 1
    assert fit.spare_bytes == 2 * GIB - fit.estimate.total_bytes < 0


def test_host_memory_is_counted_per_node_and_checked_when_it_is_known() -> None:
    ds = parse_ds_config(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}, "test"
    )
    fit = find_largest_fit(ds, Job(SHAPE, 64, MACHINES), "none")
    assert fit.host_bytes_per_node == 8 * fit.estimate.host_bytes
    assert fit.host_bytes_per_node >= 12 * SHAPE.num_parameters
    assert fit.host_spare_bytes is None
    small = Job(SHAPE, 64, replace(MACHINES, host_bytes=GIB))
    assert not find_largest_fit(ds, small, "none").fits


@pytest.mark.parametrize(
    ("keys", "micro_batch_size"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, 2),
        ({"gradient_accumulation_steps": 2}, 4),
        ({"train_micro_batch_size_per_gpu": "auto"}, 8),
    ],
)
def test_a_batch_size_in_the_file_is_kept(keys: dict[str, object], micro_batch_size: int) -> None:
    fit = find_largest_fit(config(2, **keys), Job(SHAPE, 64, MACHINES), "full")
    assert fit.plan.micro_batch_size == micro_batch_size


def test_the_flag_wins_over_the_search() -> None:
    fit = find_largest_fit(config(2), Job(SHAPE, 64, MACHINES, micro_batch_size=2), "none")
    assert fit.plan.micro_batch_size == 2


def test_an_accumulation_that_does_not_divide_gives_way_to_the_batch_of_a_flag_only() -> None:
    ds = config(2, gradient_accumulation_steps=3)
    fit = find_largest_fit(ds, Job(SHAPE, 64, MACHINES), "none")
    assert fit.plan.global_batch_size == 64
    assert ds.batch_notices(fit.plan)
    fit = find_largest_fit(ds, Job(SHAPE, 64, MACHINES, is_default_batch=True), "none")
    assert (fit.plan.global_batch_size % 3, fit.plan.gradient_accumulation_steps) == (0, 3)


@pytest.mark.parametrize(
    ("gpus", "batch", "sizes"), [(7, 64, [1, 2]), (8, 64, [1, 2, 4, 8]), (5, 48, [1, 2]), (7, 7, [1])]
)
def test_only_micro_batches_with_the_fewest_fillers_are_tried(gpus: int, batch: int, sizes: list[int]) -> None:
    job = Job(SHAPE, batch, replace(MACHINES, num_nodes=1, gpus_per_node=gpus))
    assert cheapest_sizes(job) == sizes
    assert {fit.plan.micro_batch_size for fit in find_fits(search(job))} <= set(sizes)
    assert find_largest_fit(config(2), job, "full").plan.micro_batch_size == sizes[-1]


def test_more_gpus_than_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 6 has fewer sequences than there are ranks"):
        cheapest_sizes(Job(SHAPE, 6, MACHINES))


def test_every_legal_strategy_is_a_row_once() -> None:
    fits = find_fits(search(Job(SHAPE, 64, MACHINES)))
    strategies = [fit.strategy for fit in fits]
    assert len(set(strategies)) == len(strategies) == 27
    assert {s.zero_stage for s in strategies if s.offload_param != "none"} == {3}
    assert {s.zero_stage for s in strategies if s.offload_optimizer == "cpu"} == {1, 2, 3}
    assert {s.offload for s in strategies} == {"-", "optim cpu", "both cpu", "both nvme"}


def test_fp16_has_no_row_at_stage_0() -> None:
    fits = find_fits(search(Job(SHAPE, 64, MACHINES), "fp16"))
    assert {fit.strategy.zero_stage for fit in fits} == {1, 2, 3}
    assert {fit.step.precision for fit in fits} == {"fp16"}


@pytest.mark.parametrize(
    ("num_nodes", "gpus", "words"),
    [(1, 8, "8 x t4"), (2, 8, "2 nodes x 8 x t4"), (1, 64, "64 x t4 in one node (of several nodes: --num-nodes)")],
)
def test_machines_in_words(num_nodes: int, gpus: int, words: str) -> None:
    assert Machines(num_nodes, gpus, 16 * GIB).in_words("t4") == words


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
        assert model.fit.has_margin
        wider = interpolated_shape(model.shape.n_embd + WIDTH_MULTIPLE, LIKE)
        ds = build_strategy(model.strategy, "bf16")
        assert ds is not None
        assert not fit_at(ds, replace(job, shape=wider), "full", 1).has_margin


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


LLAMA_8B = PRESETS["llama3-8b"].shape(128256)


@pytest.fixture(scope="module")
def longest() -> list[LongestSequences]:
    return find_longest(search(Job(LLAMA_8B, 1, Machines(1, 1, 80 * GIB))), [1])


def fit_of_length(row: LongestSequences, fit: Candidate | None, length: int) -> bool:
    """Return whether a sequence of another length fits, of the job of `fit` or of one GPU."""
    machines = fit.machines if fit else Machines(1, 1, 80 * GIB)
    size = fit.plan.ranks.sequence_parallel_size if fit else 1
    shape = replace(fit.step.shape if fit else LLAMA_8B, seq_len=length)
    job = Job(shape, machines.world_size // size, machines, sequence_parallel_size=size)
    return fit_at(row.ds, job, row.strategy.checkpointing, 1).has_margin


def test_the_longest_sequence_fits_and_the_next_length_does_not(longest: list[LongestSequences]) -> None:
    assert {row.fits[1] is None for row in longest} == {True, False}
    for row in longest:
        fit = row.fits[1]
        assert fit is None or fit.fits
        length = fit.plan.seq_len if fit else 0
        assert length % 1024 == 0
        assert not fit_of_length(row, fit, length + 1024), row


def test_every_mode_of_checkpointing_makes_room_for_longer_sequences(longest: list[LongestSequences]) -> None:
    lengths = {
        (row.strategy.zero_stage, row.strategy.offload, row.checkpointing): fit.plan.seq_len if fit else 0
        for row in longest
        if (fit := row.fits[1]) or row.strategy.offload != "-"
    }
    assert len(lengths) == 5 * 4, "with offload, blocks' inputs are tried on the host too"
    for stage, offload in {key[:2] for key in lengths}:
        of_modes = [lengths[stage, offload, mode] for mode in ("-", "selective", "full", "full, host")]
        assert all(longer > 1.5 * shorter for shorter, longer in itertools.pairwise(of_modes))


def test_the_longest_of_a_file_is_the_file_s_and_host_memory_bounds_it() -> None:
    ds, lengths = config(3, {"device": "cpu"}, activation_checkpointing={"cpu_checkpointing": True}), []
    for host_bytes in (None, 200 * GIB):
        job = Job(LLAMA_8B, 1, Machines(1, 1, 80 * GIB, host_bytes))
        (row,) = find_longest(search(job, files=[(ds, "full")]), [1])
        fit = row.fits[1]
        assert row.ds is ds
        assert fit is not None
        lengths.append(fit.plan.seq_len)
    assert lengths[0] > 1.5 * lengths[1]
    counted = fit.host_bytes_per_node + PROCESS_BYTES
    assert counted <= (1 - MARGIN) * 200 * GIB < counted + 32 * 1024 * 4096 * 2


@pytest.mark.slow
def test_the_longest_sequence_grows_with_the_gpus_that_divide_it_and_with_tiles() -> None:
    """Blocks of divided sequences, and with tiles, are recorded on demand."""
    machines, sizes = Machines(1, 8, 80 * GIB), (1, 2, 4, 8)
    lengths = []
    for tile in (0, 4096):
        job = Job(replace(LLAMA_8B, mlp_tile_tokens=tile), 8, machines)
        rows = with_recordings(lambda job=job: find_longest(search(job, modes=("full",)), sizes), "this test")
        for row, size in itertools.product(rows, sizes):
            if fit := row.fits[size]:
                assert fit.fits and fit.plan.ranks.sequence_parallel_size == size
                assert not fit_of_length(row, fit, fit.plan.seq_len + 1024), (row.strategy, size)
        lengths.append([[fit.plan.seq_len if fit else 0 for fit in row.fits.values()] for row in rows])
        for of_row in lengths[-1]:
            assert of_row == sorted(of_row)
            assert of_row[-1] == 0 or of_row[-1] > 6 * of_row[0]
    for without, tiled in zip(*lengths, strict=True):
        assert all(more > less or more == less == 0 for less, more in zip(without, tiled, strict=True))


NEOX_8B = """{"model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
"intermediate_size": 16384, "vocab_size": 50432}"""


def test_room_and_the_layout_that_leaves_most(tmp_path) -> None:
    (tmp_path / "config.json").write_text(NEOX_8B)
    model = load_hf_model(str(tmp_path))
    assert model is not None
    configs = find_hf_configs(model, Machines(1, 8, 80 * GIB), "bf16", None)
    assert [config.strategy.checkpointing for config in configs] == ["none"] * len(configs)
    assert {config.ds_config.gradient_accumulation_steps for config in configs} == {2}, "most runs accumulate"
    best = most_room(configs)
    assert best.fits
    assert (best.strategy.zero_stage, best.strategy.offload) == (3, "-")
    small = find_hf_configs(model, Machines(1, 1, 8 * GIB), "bf16", 1)
    assert {config.ds_config.gradient_accumulation_steps for config in small} == {1}
    missing = [config for config in small if not config.fits]
    assert missing and all(config.room_bytes <= 0 for config in missing)
    assert most_room(missing).room_bytes == max(config.room_bytes for config in missing)
