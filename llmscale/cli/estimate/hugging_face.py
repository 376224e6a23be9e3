"""`llmscale estimate --hf`: the model states of a transformers model, and the room they leave for its activations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from llmscale.architecture.hf_config import HFModel, load_hf_model
from llmscale.cli.estimate.as_json import estimate_as_dict, strategy_as_dict
from llmscale.cli.estimate.request import read_gpu, read_hf_precision, read_machines
from llmscale.cli.estimate.rows import EXIT_NOTHING_FITS
from llmscale.cli.estimate.table import CATEGORIES, align, breakdown_cells, gib
from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.deepspeed.resolve import resolve_ds_config
from llmscale.config.deepspeed.sections import Precision
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.errors import ConfigError
from llmscale.memory.format_bytes import format_size
from llmscale.memory.hf_states import HFStates, estimate_hf_states
from llmscale.memory.zero_settings import EngineLayout, build_layout
from llmscale.planning.largest_micro_batch import Machines
from llmscale.planning.strategy import Strategy, all_strategies, build_strategy


@dataclass(frozen=True)
class _Row:
    strategy: Strategy
    states: HFStates
    room_bytes: int
    """For activations; negative: missing."""
    layout: EngineLayout

    @property
    def fits(self) -> bool:
        return self.room_bytes > 0


def run(args: argparse.Namespace) -> int:
    """0 when the states fit somewhere, 1 when they fit nowhere."""
    gpu = read_gpu(args)
    machines, precision = read_machines(args, gpu), read_hf_precision(args, gpu)
    _check_flags(args)
    model = load_hf_model(args.hf)
    rows = _rows(model, machines, precision, args.global_batch_size)
    if args.json:
        print(json.dumps(_as_dict(model, machines, rows), indent=1))
    else:
        print(f"{model.name}: {model.num_parameters:,} parameters ({model.family}), model states only")
        print(f"on {machines.in_words(f'{gpu.name} ({gpu.memory_gib:g} GiB)')}, {precision}")
        print()
        for line in _lines(rows, machines):
            print(line)
        print()
        print("GiB per GPU at the peak of parameters, gradients, optimizer states, buffers and temporaries.")
        print(_accumulation(args.global_batch_size, rows[0]))
        print(
            "room: what is left for activations, logits and loss when the backward pass begins, after the allocator's"
        )
        print(f"reserve and the context, both assumed. {model.unknown[0].upper()}{model.unknown[1:]}.")
        print()
        print(_verdict(rows))
    return 0 if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def _rows(model: HFModel, machines: Machines, precision: Precision, global_batch_size: int | None) -> list[_Row]:
    ranks = ParallelLayout(machines.world_size)
    # Only whether there is accumulation matters to the states; most runs have it.
    plan = build_batch_plan(
        global_batch_size=global_batch_size or 2 * ranks.data_parallel_size, ranks=ranks, seq_len=1, micro_batch_size=1
    )
    rows = []
    for strategy in all_strategies():
        ds = build_strategy(strategy, precision) if strategy.checkpointing == "none" else None
        if ds is None:
            continue
        layout = build_layout(resolve_ds_config(ds, model, plan), ranks)
        states = estimate_hf_states(model, layout)
        spare = machines.gpu_bytes - states.estimate.total_bytes
        room = min(states.room_bytes(machines.gpu_bytes), spare) if spare < 0 else states.room_bytes(machines.gpu_bytes)
        rows.append(_Row(strategy, states, room, layout))
    return rows


def _accumulation(global_batch_size: int | None, row: _Row) -> str:
    """Whether gradients are summed over micro-steps was decided here, where the batch was not given."""
    if row.layout.gradient_accumulation_steps == 1:
        return "one micro-step per step, as --global-batch-size has one sequence per GPU: no gradients are summed."
    why = "" if global_batch_size else " (assumed: --global-batch-size says how many)"
    return f"gradients of several micro-steps{why} are summed in {row.layout.grad_accum_dtype}."


def _lines(rows: list[_Row], machines: Machines) -> Iterator[str]:
    head = ["", "ZeRO", "offload", *CATEGORIES, "allocated", "peak in", "  room", "host", "NVMe"]
    kept = [index for index, name in enumerate(head) if name not in ("activ", "logits")]
    table: list[list[str]] = []
    for row in rows:
        estimate = row.states.estimate
        cells = ["", str(row.strategy.zero_stage), row.strategy.offload, *breakdown_cells(estimate.peak)]
        room = gib(row.room_bytes) if row.fits else f"no, {gib(-row.room_bytes)} over"
        cells += [gib(estimate.allocated_bytes), estimate.peak_moment, f"  {room}"]
        cells += [gib(size * machines.gpus_per_node) for size in (estimate.host_bytes, estimate.nvme_bytes)]
        table.append([cells[index] for index in kept])
    yield from align([head[index] for index in kept], table)


def _verdict(rows: list[_Row]) -> str:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        nearest = max(rows, key=lambda row: row.room_bytes)
        return (
            f"Nothing fits, not even without activations: ZeRO stage {nearest.strategy.zero_stage} misses least, by "
            f"{format_size(-nearest.room_bytes)} per GPU. More GPUs, or another card."
        )
    on_gpu = [row for row in fitting if row.strategy.offload == "-"] or fitting
    most = max(on_gpu, key=lambda row: row.room_bytes)
    where = f"ZeRO stage {most.strategy.zero_stage}" + (
        f" with offload ({most.strategy.offload})" if most.strategy.offload != "-" else " without offload"
    )
    room = format_size(most.room_bytes)
    return f"{len(fitting)} of {len(rows)} rows fit; {where} leaves most room for activations: {room}."


def _as_dict(model: HFModel, machines: Machines, rows: list[_Row]) -> dict[str, object]:
    return {
        "model": {"name": model.name, "family": model.family, "num_parameters": model.num_parameters},
        "unknown": model.unknown,
        "gpu_bytes": machines.gpu_bytes,
        "rows": [
            {
                "strategy": strategy_as_dict(row.strategy),
                "estimate": estimate_as_dict(row.states.estimate),
                "room_for_activations_bytes": row.room_bytes,
                "fits": row.fits,
            }
            for row in rows
        ],
    }


def _check_flags(args: argparse.Namespace) -> None:
    """Flags that only our own model's activations need say nothing here. Raises ConfigError."""
    for flag in ("seq_len", "micro_batch_size", "activation_checkpointing", "dropout", "activation", "bias"):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} does not go with --hf, which knows a model's states, not its activations."
            )
