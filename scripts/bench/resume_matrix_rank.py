"""What one rank of resume_matrix.py does for one cell: train and save, or resume and train."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from llmscale.checkpoint.inventory import find_checkpoint, read_state
from llmscale.checkpoint.load import load_engine
from llmscale.checkpoint.run_state import RunState, parse_run_state
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import engine_fragments
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine, release_engine, set_learning_rate
from llmscale.engine.process_group import World, is_gpu
from llmscale.engine.train_step import PhaseTimer, get_scaler_state, seed_step, set_scaler_state, train_step
from llmscale.engine.zero_shards import group_scalars
from llmscale.training.open_session import open_feed
from llmscale.training.prepare_run import PreparedRun, prepare_run
from llmscale.training.sample_stream import build_stream

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
GLOBAL_BATCH = 8
SAVE_AT = 10


def train(args: argparse.Namespace, config_name: str, world: World, source: Path | None) -> list[float]:
    """Losses of the steps after SAVE_AT: uninterrupted (saving on the way) without `source`, else resumed from it."""
    run = prepare_run(cell_config(args, config_name, world), world.world_size)
    engine = build_engine(run.config, run.resolved if is_gpu() else run.on_cpu().resolved)
    first_step = resume(engine, source, world) if source else 0
    feed = open_feed(run, world, build_stream(run, None), start_sample=first_step * GLOBAL_BATCH)
    losses, timer = [], PhaseTimer(world.device)
    for step in range(first_step, run.resolved.total_steps):
        seed_step(run.config.seed, step, world.rank)
        set_learning_rate(engine, run.resolved.optimizer, run.resolved.schedule.learning_rate(step))
        micro_batches = [next(feed).tokens for _ in range(run.resolved.plan.gradient_accumulation_steps)]
        loss = train_step(engine, micro_batches, world.device, timer) / world.world_size
        dist.all_reduce(loss)
        losses.append(loss.item())
        if source is None and step + 1 == SAVE_AT:
            save(engine, run)
    feed.close()
    release_engine(engine)
    return losses[SAVE_AT - first_step :]


#: Keys of a run; the second has what Llama, Qwen and Mistral have and GPT-2 has not.
BLOCKS: dict[str, dict[str, object]] = {
    "gpt2": {},
    "llama": {
        **{"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True},
        **{"mlp_width": 75, "n_kv_head": 1, "qk_norm": "head", "tied": False, "sliding_window": 12},
    },
}


def cell_config(args: argparse.Namespace, config_name: str, world: World) -> RunConfig:
    return RunConfig(
        ds=DS_CONFIGS / f"{config_name}.json",
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
        run=args.folder / f"run-{config_name}-{world.world_size}",
    )


def resume(engine: DeepSpeedEngine, source: Path, world: World) -> int:
    """Fill the engine from a run's newest checkpoint; returns its step."""
    checkpoint = find_checkpoint(source)
    state = parse_run_state(read_state(checkpoint))
    load_engine(engine, checkpoint, state, world.control)
    set_scaler_state(engine, state.loss_scaler)
    return state.step


def save(engine: DeepSpeedEngine, run: PreparedRun) -> None:
    saver = CheckpointSaver(run.config.run, keep_last=1, keep_every=0, in_background=False, report=end_on_warning)
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
    """A save that fails is only a warning in a run; here it is the end."""
    if line.startswith("WARNING"):
        raise SystemExit(line)
