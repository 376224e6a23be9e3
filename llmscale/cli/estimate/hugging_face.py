"""`llmscale estimate --hf`: the model states of a transformers model, and the room they leave for its activations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from llmscale.architecture.hf_config import HFModel
from llmscale.cli.estimate.as_json import estimate_as_dict, strategy_as_dict
from llmscale.cli.estimate.request import read_gpu, read_hf_precision, read_machines
from llmscale.cli.estimate.rows import EXIT_NOTHING_FITS
from llmscale.cli.estimate.table import CATEGORIES, align, breakdown_cells, gib
from llmscale.memory.format_bytes import format_size
from llmscale.planning.search import HFConfig, Machines, find_hf_configs, most_room


def run(args: argparse.Namespace, model: HFModel) -> int:
    """0 when the states fit somewhere, 1 when they fit nowhere."""
    gpu = read_gpu(args)
    machines, precision = read_machines(args, gpu), read_hf_precision(args, gpu)
    rows = find_hf_configs(model, machines, precision, args.global_batch_size)
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
        print(_summary(rows))
    return 0 if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def _accumulation(global_batch_size: int | None, row: HFConfig) -> str:
    """Whether gradients are summed over micro-steps was decided here, where the batch was not given."""
    if row.ds_config.gradient_accumulation_steps == 1:
        return "one micro-step per step, as --global-batch-size has one sequence per GPU: no gradients are summed."
    why = "" if global_batch_size else " (assumed: --global-batch-size says how many)"
    return f"gradients of several micro-steps{why} are summed in {row.ds_config.grad_accum_dtype}."


def _lines(rows: list[HFConfig], machines: Machines) -> Iterator[str]:
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


def _summary(rows: list[HFConfig]) -> str:
    best, num_fitting = most_room(rows), sum(row.fits for row in rows)
    stage, room = f"ZeRO stage {best.strategy.zero_stage}", format_size(abs(best.room_bytes))
    if not best.fits:
        return (
            f"Nothing fits, not even without activations: {stage} misses least, by {room} per GPU. More GPUs, or "
            "another GPU."
        )
    offload = "without offload" if best.strategy.offload == "-" else f"with offload ({best.strategy.offload})"
    return f"{num_fitting} of {len(rows)} rows fit; {stage} {offload} leaves most room for activations: {room}."


def _as_dict(model: HFModel, machines: Machines, rows: list[HFConfig]) -> dict[str, object]:
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
