"""Test that a resumed run continues as if uninterrupted: save by each (ds_config, world size), resume by each.

    python -m scripts.bench.resume.resume_matrix                          # the full matrix, 18 x 18 cells
    python -m scripts.bench.resume.resume_matrix --configs zero1,zero3 --worlds 1,2
    python -m scripts.bench.resume.resume_matrix --worlds 1,3,5           # with fillers: ranks do not divide the batch
    python -m scripts.bench.resume.resume_matrix --worlds 1,2x2,4,4x2     # 4x2: four ranks, two for each sequence
    python -m scripts.bench.resume.resume_matrix --block experts --configs zero2,zero3 --worlds 1,4x1x2  # 2 for experts

A cell is the largest relative difference of the losses after the resume from those of the uninterrupted run of the
configuration that resumes; `=` means bit-equal. Exit status 1 if a cell exceeds --tolerance, or if a cell of the same
ds_config and world size is not `=`.

In fp32 differences come from sums in another order (another world size, another bucket). In bf16 they begin with the
rounding of one weight or gradient, 2^-9 = 2e-3 relative: use --tolerance 2e-3.

Each world size is one job of real gloo ranks that builds engine after engine on a prepared dataset.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.load import load_engine
from llmscale.checkpoint.run_state import RunState, load_run_state
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import engine_fragments
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine, release_engine, set_learning_rate
from llmscale.engine.loss_scale import get_scaler_state, set_scaler_state
from llmscale.engine.process_group import World, is_gpu, join_world, leave_world
from llmscale.engine.random_numbers import seed_step
from llmscale.engine.train_step import PhaseTimer, train_step
from llmscale.engine.zero_shards import group_scalars
from llmscale.training.inputs import read_inputs
from llmscale.training.session import open_feed
from llmscale.training.start import Start, resolve_start
from scripts.bench.harness import (
    REPOSITORY,
    describe_machine,
    free_port,
    machine_line,
    output_file,
    prepare_small_text,
    rank_environment,
    save_result,
    whole_number,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
GLOBAL_BATCH = 8
SAVE_AT = 10
#: Keys of a run by kind of block; "llama" has the features of Llama, Qwen and Mistral, "experts" DeepSeek V3's router.
BLOCKS: dict[str, dict[str, object]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "bias": False,
        "positions": "rotary",
        "activation": "silu",
        "gated_mlp": True,
        "mlp_width": 75,
        "n_kv_head": 1,
        "qk_norm": "head",
        "tied": False,
        "sliding_window": 12,
    },
    "experts": {
        "num_experts": 4,
        "expert_width": 40,
        "shared_expert_width": 24,
        "dense_layers": 1,
        "balance_loss": 1e-3,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_z_loss": 1e-3,
    },
}


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        run_rank_job(args)
        return 0
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="resume-matrix-") as scratch:
        folder = Path(scratch)
        prepare_small_text(folder)
        for phase in ("save", "resume"):
            for name in args.worlds:
                start_job(args, phase, name, folder)
        results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("losses-*.json"))}
    return report(args, machine, {key: value for losses in results.values() for key, value in losses.items()})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=lambda text: text.split(","), default=list(CONFIGS))
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=["1", "2", "4"])
    parser.add_argument("--world", help=argparse.SUPPRESS)
    parser.add_argument("--block", default="gpt2", choices=[*BLOCKS], help="kind of layers (default: gpt2)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16", "autocast"])
    parser.add_argument("--steps", type=whole_number, default=20, help="steps after the resume (default: 20)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default: 1e-5)")
    parser.add_argument("--json", type=output_file, help="write the cells to this file")
    parser.add_argument("--rank-job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def parse_world(name: str) -> tuple[int, int, int]:
    """Return the ranks of `4x2x1`, how many of them divide a sequence, and how many the experts: 1 if not given."""
    ranks, split, experts = [*map(int, name.split("x")), 1, 1][:3]
    return ranks, split, experts


def start_job(args: argparse.Namespace, phase: str, name: str, folder: Path) -> None:
    """Run a job of the ranks that `name` says, which writes folder/losses-<phase>-<name>.json."""
    port, world_size = free_port(), parse_world(name)[0]
    command = [sys.executable, "-m", __spec__.name, "--rank-job", phase, "--folder", str(folder)]
    command += ["--configs", ",".join(args.configs), "--worlds", ",".join(args.worlds), "--world", name]
    for name in ("block", "precision", "steps", "dropout"):
        command += [f"--{name}", str(getattr(args, name))]
    ranks = [
        subprocess.Popen(command, cwd=REPOSITORY, env=rank_environment(rank, world_size, port))
        for rank in range(world_size)
    ]
    try:
        if any([rank.wait() for rank in ranks]):
            raise SystemExit(f"the {phase} job of {name} ranks failed")
    finally:
        for rank in ranks:
            rank.kill()


def run_rank_job(args: argparse.Namespace) -> None:
    """Train and save as one rank, or resume from every checkpoint."""
    torch.set_num_threads(1)
    world = join_world()
    losses = {}
    for config in args.configs:
        if args.rank_job == "save":
            losses[f"{config}/{args.world}"] = train(args, config, world, None)
            continue
        for saved_config in args.configs:
            for saved_world in args.worlds:
                source = args.folder / f"run-{saved_config}-{saved_world}"
                key = f"{saved_config}/{saved_world} -> {config}/{args.world}"
                losses[key] = train(args, config, world, source)
    if world.is_main:
        path = args.folder / f"losses-{args.rank_job}-{args.world}.json"
        path.write_text(json.dumps(losses))
    leave_world()


def report(args: argparse.Namespace, machine: dict[str, object], losses: dict[str, list[float]]) -> int:
    """Print the matrix; return the exit status."""
    names = [f"{config}/{world}" for config in args.configs for world in args.worlds]
    cells = {}
    for key, resumed in losses.items():
        if " -> " in key:
            straight = losses[key.split(" -> ")[1]]
            cells[key] = max(abs(a - b) / abs(b) for a, b in zip(resumed, straight, strict=True))
    width = max(map(len, names)) + 1
    print(f"{args.precision}, {args.steps} steps after the resume; rows: saved by, columns: resumed by\n")
    print(" " * width + "".join(f"{name:>{width}}" for name in names))
    for saved in names:
        row = [cells[f"{saved} -> {resumed}"] for resumed in names]
        print(f"{saved:<{width}}" + "".join(f"{'=' if cell == 0 else format(cell, '.1e'):>{width}}" for cell in row))
    worst = max(cells, key=lambda key: cells[key])
    unequal = [name for name in names if cells[f"{name} -> {name}"] != 0]
    print(f"\nlargest relative difference: {cells[worst]:.2e} ({worst}); tolerance {args.tolerance:.0e}")
    print(f"same ds_config and world size: {'all bit-equal' if not unequal else f'NOT bit-equal: {unequal}'}")
    print(machine_line(machine))
    save_result(args.json, {"machine": machine, "precision": args.precision, "steps": args.steps, "cells": cells})
    return int(cells[worst] > args.tolerance or bool(unequal))


def train(args: argparse.Namespace, config_name: str, world: World, source: Path | None) -> list[float]:
    """Return the losses after step SAVE_AT: uninterrupted and saving there, or resumed from `source`."""
    # A cell begins at its given place, not where an earlier one has saved.
    inputs = replace(read_inputs(cell_config(args, config_name)), source=None)
    run = resolve_start(inputs, world.world_size)
    engine = build_engine(run.config, run.resolved if is_gpu() else run.on_cpu().resolved)
    first_step = resume(engine, source, world) if source else 0
    feed = open_feed(run, world, start_sample=first_step * GLOBAL_BATCH)
    losses, timer, plan = [], PhaseTimer(world.device), run.resolved.plan
    for step in range(first_step, run.resolved.total_steps):
        seed_step(run.config.seed, step, world.rank)
        set_learning_rate(engine, run.resolved.optimizer, run.resolved.schedule.learning_rate(step))
        batches = [next(feed) for _ in range(plan.gradient_accumulation_steps)]
        weights = [0.0 if batch.is_filler else plan.loss_weight(GLOBAL_BATCH) for batch in batches]
        tokens = [batch.tokens for batch in batches]
        loss = train_step(engine, tokens, world.device, timer, weights=weights) / world.world_size
        dist.all_reduce(loss)
        losses.append(loss.item())
        if source is None and step + 1 == SAVE_AT:
            save(engine, run, world)
    feed.close()
    release_engine(engine)
    return losses[SAVE_AT - first_step :]


def cell_config(args: argparse.Namespace, config_name: str) -> RunConfig:
    _, split, experts = parse_world(args.world)
    return RunConfig(  # type: ignore[call-arg]  # the model's keys are added by pydantic
        ds=REPOSITORY / "ds_configs" / f"{config_name}.json",
        data=str(args.folder / "set"),
        model="tiny-1m",
        n_layer=2,
        n_head=2,
        n_embd=48,
        **BLOCKS[args.block],
        dropout=args.dropout,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=2,
        steps=SAVE_AT + args.steps,
        lr=3e-3,
        precision=args.precision,
        num_workers=0,
        sequence_parallel_size=split,
        expert_parallel_size=experts,
        run=args.folder / f"run-{config_name}-{args.world}",
    )


def resume(engine: DeepSpeedEngine, source: Path, world: World) -> int:
    """Fill the engine from a run's newest checkpoint; return its step."""
    checkpoint = find_checkpoint(source)
    state = load_run_state(checkpoint)
    load_engine(engine, checkpoint, state.optimizer_scalars, world.control, world.disks)
    set_scaler_state(engine, state.loss_scaler)
    return state.step


def save(engine: DeepSpeedEngine, run: Start, world: World) -> None:
    saver = CheckpointSaver(
        run.config.run, keep_last=1, keep_every=0, in_background=False, report=end_on_warning, disks=world.disks
    )
    state = RunState(
        step=SAVE_AT,
        samples_seen=SAVE_AT * GLOBAL_BATCH,
        tokens_seen=0,
        skipped_steps=0,
        identity={},
        precision=run.resolved.precision,
        optimizer_scalars=group_scalars(engine),
        loss_scaler=get_scaler_state(engine),
    )
    fragments = copy_out(engine_fragments(engine))
    saver.save(Snapshot(SAVE_AT, 0, run.resolved.zero_stage, run.resolved.precision, state.as_dict(), fragments))


def end_on_warning(line: str) -> None:
    """Exit on a failed save, which is only a warning in a run."""
    if line.startswith("WARNING"):
        raise SystemExit(line)


if __name__ == "__main__":
    sys.exit(main())
