"""The closed form of DeepSpeed's own memory against the real engine on fake tensors, and against the ZeRO paper."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.presets import get_preset
from llmscale.config.resolve import resolve_step
from llmscale.memory.estimate import estimate_states
from llmscale.memory.states.state_memory import ZeroSetup, zero_setup
from tests import warm_start

SCRIPT = Path(__file__).with_name("dry_run_cells.py")
NUM_PARAMETERS = GPTShape(n_layer=3, n_head=4, n_embd=384, vocab_size=1200, seq_len=8).num_parameters
LARGEST_MATRIX = 4 * 384 * 384

#: Tolerated relative difference between the closed form and the real engine in a moment's addition.
TOLERANCE = 0.02

#: Buckets of a third of the largest matrix, of a few matrices, and DeepSpeed's rule: the whole model.
SMALL, MEDIUM = 200_000, 1_000_000
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}
TIGHT = {
    "stage3_prefetch_bucket_size": 500_000,
    "stage3_max_live_parameters": 1_500_000,
    "stage3_max_reuse_distance": 1_000_000,
    "stage3_param_persistence_threshold": 1_000,
    "sub_group_size": 100_000,
}


def cell(stage: int, precision: str, ranks: int, accumulation: int, sums: str | None = None, **zero: object) -> dict:
    """Describe a cell; `sums`: grad_accum_dtype."""
    top = {"data_types": {"grad_accum_dtype": sums}} if sums else {}
    checkpointing = zero.pop("checkpointing", "none")
    communication = zero.pop("communication", None)
    if communication:
        top["communication_data_type"] = communication
    optimizer, freeze = zero.pop("optimizer", "adamw"), zero.pop("freeze", ())
    if zero.pop("immediate", False):
        top["bf16"] = {"enabled": True, "immediate_grad_update": True}
    return {
        "stage": stage,
        "precision": precision,
        "ranks": ranks,
        "accumulation": accumulation,
        "checkpointing": checkpointing,
        "optimizer": optimizer,
        "freeze": freeze,
        "zero": zero,
        "top": top,
    }


#: One of each kind, so that whatever DeepSpeed changes turns one of them red.
KINDS = [
    cell(0, "bf16", 2, 2),
    cell(0, "autocast", 1, 2),
    cell(1, "bf16", 64, 2, "bf16", reduce_bucket_size=SMALL),
    cell(1, "bf16", 2, 2),
    cell(1, "bf16", 2, 2, "fp32", immediate=True),
    cell(1, "fp16", 8, 2, "fp32", reduce_bucket_size=MEDIUM),
    cell(1, "fp32", 2, 2, overlap_comm=True, reduce_bucket_size=SMALL),
    cell(1, "autocast", 8, 1),
    cell(1, "bf16", 8, 2, "bf16", contiguous_gradients=False),
    cell(1, "bf16", 8, 2, **OFFLOAD),
    cell(2, "bf16", 64, 2, "bf16", reduce_bucket_size=SMALL, overlap_comm=True),
    cell(2, "fp16", 2, 2, "fp32", reduce_bucket_size=MEDIUM, round_robin_gradients=True),
    cell(2, "fp32", 64, 1, reduce_bucket_size=SMALL),
    cell(3, "bf16", 8, 1, zero_hpz_partition_size=4),
    cell(3, "fp32", 8, 2, zero_hpz_partition_size=2, checkpointing="full", **TIGHT),
    cell(2, "autocast", 8, 2),
    cell(2, "bf16", 8, 2, reduce_scatter=False, communication="fp32"),
    cell(2, "fp32", 8, 2, contiguous_gradients=False, reduce_bucket_size=SMALL),
    cell(2, "bf16", 8, 2, contiguous_gradients=False, reduce_bucket_size=MEDIUM, overlap_comm=True),
    cell(2, "bf16", 2, 2, "bf16", reduce_bucket_size=SMALL, **OFFLOAD),
    cell(2, "bf16", 8, 2),
    cell(3, "bf16", 64, 1, reduce_bucket_size=MEDIUM, checkpointing="full", **TIGHT),
    cell(3, "fp16", 2, 2, "fp16", reduce_bucket_size=MEDIUM, **TIGHT),
    cell(3, "fp32", 1, 1),
    cell(3, "bf16", 2, 2, **OFFLOAD),
    cell(3, "autocast", 8, 1, reduce_bucket_size=MEDIUM),
    cell(3, "autocast", 2, 2, reduce_bucket_size=SMALL, checkpointing="full", **TIGHT),
    cell(3, "autocast", 8, 2, communication="fp32"),
    cell(2, "autocast", 8, 1, reduce_bucket_size=SMALL, **OFFLOAD),
    cell(3, "bf16", 8, 2, reduce_scatter=False, reduce_bucket_size=MEDIUM),
    cell(3, "fp16", 8, 2, reduce_bucket_size=SMALL, checkpointing="full", **OFFLOAD_ALL),
    cell(0, "fp32", 2, 1, optimizer="muon"),
    cell(1, "bf16", 2, 2, optimizer="muon"),
    cell(2, "bf16", 8, 1, "bf16", optimizer="muon", reduce_bucket_size=SMALL),
    cell(2, "bf16", 2, 1, optimizer="muon", reduce_bucket_size=SMALL, **OFFLOAD),
    cell(3, "bf16", 8, 1, optimizer="muon", reduce_bucket_size=MEDIUM, **TIGHT),
    cell(3, "bf16", 2, 1, optimizer="muon", **OFFLOAD),
    {**cell(2, "fp16", 1, 1, optimizer="muon", reduce_bucket_size=SMALL), "capability": (7, 0)},
    {**cell(3, "fp16", 2, 1, optimizer="muon", reduce_bucket_size=SMALL), "capability": (7, 0)},
]

FIRST = ("w[tp]e*", "blocks.0.*")
#: Frozen parameters, at each stage.
FROZEN = [
    cell(3, "bf16", 8, 2, reduce_bucket_size=MEDIUM, checkpointing="full", freeze=FIRST, **TIGHT),
    cell(2, "bf16", 2, 2, "bf16", freeze=FIRST, reduce_bucket_size=SMALL, **OFFLOAD),
    cell(0, "bf16", 2, 2, freeze=("*.attn.*", "*ln_*")),
    cell(1, "bf16", 2, 2, freeze=("wte*", "blocks.2.*")),
    cell(1, "fp32", 8, 1, freeze=("blocks.1.mlp.*", "*.bias")),
    cell(3, "autocast", 2, 1, freeze=("blocks.*",)),
    cell(3, "fp16", 8, 2, freeze=("*.attn.*",), **OFFLOAD_ALL),
    cell(2, "bf16", 8, 1, "bf16", optimizer="muon", freeze=FIRST),
    cell(3, "bf16", 8, 1, optimizer="muon", freeze=("wte*", "blocks.1.*"), **TIGHT),
]

#: Cells of the default suite. `-m slow` runs them all.
CELLS = [*KINDS[::4], *FROZEN[:2]]

#: More cells of these kinds.
MORE_CELLS = [
    cell(0, "fp32", 8, 1),
    cell(0, "bf16", 2, 2, "bf16"),
    cell(1, "bf16", 8, 1),
    cell(1, "fp16", 8, 2),
    cell(2, "bf16", 8, 1),
    cell(2, "bf16", 1, 1, "bf16"),
    cell(2, "bf16", 8, 1, **OFFLOAD),
    cell(2, "fp16", 8, 2, **OFFLOAD),
    cell(2, "fp32", 8, 1, contiguous_gradients=False),
    cell(2, "bf16", 8, 1, "bf16", contiguous_gradients=False, reduce_bucket_size=SMALL),
    cell(2, "autocast", 2, 2, contiguous_gradients=False, reduce_bucket_size=SMALL, overlap_comm=True),
    cell(2, "fp16", 64, 2, contiguous_gradients=False),
    cell(3, "bf16", 8, 1),
    cell(3, "bf16", 8, 2),
]


def all_cells() -> list[dict]:
    """KINDS, MORE_CELLS, and stages x precisions x accumulation x type of the sums x bucket sizes x ranks."""
    found = [*KINDS, *FROZEN, *MORE_CELLS]
    for stage, precision in product(range(4), ("fp32", "bf16", "fp16", "autocast")):
        model = "fp32" if precision == "autocast" else precision
        if (stage, precision) == (0, "fp16"):  # refused by the configuration
            continue
        for accumulation, sums, ranks in product((1, 3), sorted({model, "fp32"}), (1, 2, 8, 64)):
            for bucket in (None,) if stage == 0 else (None, SMALL, MEDIUM):
                zero = {"reduce_bucket_size": bucket} if bucket else {}
                found.append(cell(stage, precision, ranks, accumulation, sums, **zero))
                if bucket != MEDIUM:
                    found.append(cell(stage, precision, ranks, accumulation, sums, optimizer="muon", **zero))
    return found


def name_of(wanted: dict) -> str:
    extras = [str(value) for value in (*wanted["top"].values(), *wanted["zero"].items())]
    extras += [wanted["checkpointing"], wanted["optimizer"], *wanted["freeze"]]
    parts = (f"stage{wanted['stage']}", wanted["precision"], f"N{wanted['ranks']}", f"acc{wanted['accumulation']}")
    return "-".join((*parts, *extras))


def run_cells(cells: list[dict]) -> list[dict]:
    """Run in two processes, because the simulation is single-threaded."""
    halves = (cells[0::2], cells[1::2])
    results: list[dict] = [{}] * len(cells)
    with ThreadPoolExecutor(len(halves)) as pool:
        for start, found in enumerate(pool.map(_run_in_a_process, halves)):
            results[start::2] = found
    return results


def _run_in_a_process(cells: list[dict]) -> list[dict]:
    done = warm_start.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=SCRIPT.parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"dry_run"')]


def check(wanted: dict, result: dict) -> None:
    """Compare every moment's addition within 2 %, a few scalars and casts that count as activations apart."""
    simulated, calculated = result["dry_run"], result["closed_form"]
    assert calculated["resident"] == pytest.approx(simulated["resident"], rel=0.002)
    slack = 0.02 * NUM_PARAMETERS
    if wanted["precision"] == "autocast":  # one matrix's gradient in 16 bit on its way to fp32, and its cast
        slack += 6 * LARGEST_MATRIX
    for moment in ("forward", "backward", "step"):
        assert calculated[moment] == pytest.approx(simulated[moment], rel=TOLERANCE, abs=slack), moment
    if not wanted["zero"].get("offload_param"):  # those are always page-locked, which rounds up
        assert calculated["host"] == pytest.approx(simulated["host"], rel=0.002, abs=10_000)


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_cells(CELLS)


@pytest.mark.parametrize("index", range(len(CELLS)), ids=[name_of(wanted) for wanted in CELLS])
def test_closed_form_is_what_the_engine_allocates(index: int, results: list[dict]) -> None:
    check(CELLS[index], results[index])


def test_categories_of_resident_memory(results: list[dict]) -> None:
    for wanted, result in zip(CELLS, results, strict=True):
        simulated, calculated = result["categories"]["dry_run"], result["categories"]["closed_form"]
        for category in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buckets_bytes"):
            assert calculated[category] == pytest.approx(simulated[category], rel=0.01, abs=30_000), name_of(wanted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_closed_form_over_the_whole_grid() -> None:
    cells = all_cells()
    wrong = []
    for wanted, result in zip(cells, run_cells(cells), strict=True):
        try:
            check(wanted, result)
        except AssertionError as error:
            wrong.append(f"{name_of(wanted)}: {error}")
    assert not wrong, "\n".join(wrong)


def setup_of(shape: GPTShape, stage: int, ranks: int, accumulation: int = 1, **zero: object) -> ZeroSetup:
    config = {
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    plan = BatchPlan(ranks * accumulation, 1, accumulation, ParallelLayout(ranks), shape.seq_len)
    return zero_setup(resolve_step(parse_ds_config(config, "test"), shape, plan, "none"))


@pytest.mark.parametrize(("stage", "published_gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_table_of_the_zero_paper(stage: int, published_gb: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs, mixed-precision Adam (K = 12)."""
    shape = GPTShape(n_layer=36, n_head=32, n_embd=4096, vocab_size=50257, seq_len=1024)
    states = estimate_states(shape.tensors, setup_of(shape, stage, ranks=64, accumulation=2))
    gradients = states.resident.gradients_bytes or states.forward[0].gradients_bytes
    model_states = states.resident.parameters_bytes + states.resident.optimizer_bytes + gradients
    assert model_states / shape.num_parameters * 7.5 == pytest.approx(published_gb, rel=0.02)


def test_follows_the_passes_block_by_block() -> None:
    shape = GPTShape(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, seq_len=64)
    states = estimate_states(
        shape.tensors, setup_of(shape, stage=3, ranks=8, reduce_bucket_size=300_000), recomputes=True
    )
    assert len(states.forward) == shape.n_layer + 3
    done = states.parameters_done
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, shape.num_parameters)


def test_gpt3_175b_is_instant_at_every_stage() -> None:
    preset = get_preset("gpt3-175b")
    shape = preset.shape(50257, 2048)
    setups = [setup_of(shape, stage, ranks=1024) for stage in range(4)]
    begin = time.process_time()
    residents = [estimate_states(shape.tensors, setup, recomputes=True).resident.total_bytes for setup in setups]
    assert time.process_time() - begin < 2
    assert residents == sorted(residents, reverse=True)


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    shape = GPTShape(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, seq_len=64)
    pageable, pinned = (
        estimate_states(shape.tensors, setup_of(shape, 2, 8, offload_optimizer={"device": "cpu", "pin_memory": pin}))
        for pin in (False, True)
    )
    assert pageable.host_bytes < pinned.host_bytes < 2 * pageable.host_bytes
    assert pageable.resident == pinned.resident


def test_nvme_holds_what_the_step_reads() -> None:
    shape = GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=50257, seq_len=1024)
    device = {"device": "nvme", "nvme_path": "/nvme"}
    setup = setup_of(
        shape, 3, 8, offload_optimizer=device, offload_param={**device, "max_in_cpu": 0}, sub_group_size=10_000_000
    )
    states = estimate_states(shape.tensors, setup)
    share = shape.num_parameters / 8
    # Master weight, gradient and two moments in fp32, and the weight in bf16; groups below 1 MiB stay in memory.
    assert states.nvme_bytes == pytest.approx(18 * share, rel=0.01)
    assert states.resident.optimizer_bytes == 0
    buffers = 4 * 4 * 10_000_000 + 5 * 100_000_000 * 2
    assert buffers < states.host_bytes < buffers + 8 * share + 10_000_000 * 8
