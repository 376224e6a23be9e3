"""One cell of memory_grid.py: `memory_grid_rank.py gpu|dry-run CELL_AS_JSON` prints peak and estimates as JSON."""

from __future__ import annotations

import json
import os
import sys

from memory_cells import VOCAB_SIZE, Cell
from memory_peers import accelerate_bytes, cookbook_bytes, deepspeed_bytes

from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.presets import get_preset
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.engine.device_settings import set_allocator_default
from llmscale.memory.estimate import estimate_memory

#: Memory settles with the second step, ZeRO-3's with the third.
STEPS = 4


def main() -> None:
    how, cell = sys.argv[1], Cell(**json.loads(sys.argv[2]))
    config, run = resolve(cell)
    measured = measure_on_gpu(cell, config, run) if how == "gpu" else measure_dry(run)
    estimate = estimate_memory(run)
    estimates = {
        "llmscale": estimate.peak.total_bytes,
        "deepspeed": deepspeed_bytes(cell, run.shape),
        "cookbook": cookbook_bytes(cell, run.shape),
        "accelerate": accelerate_bytes(cell, run.shape),
    }
    print(json.dumps({**measured, "estimates": estimates}))


def resolve(cell: Cell) -> tuple[RunConfig, ResolvedRun]:
    config = RunConfig(
        model=cell.model,
        global_batch_size=cell.micro_batch_size * cell.gradient_accumulation_steps,
        micro_batch_size=cell.micro_batch_size,
        activation_checkpointing=cell.checkpointing,
        steps=STEPS,
    )
    ds = parse_ds_config(cell.ds_config(), cell.name)
    seq_len = cell.seq_len or get_preset(cell.model).seq_len
    return config, resolve_run(config, ds, SetFacts(VOCAB_SIZE, seq_len, 1000, 0), world_size=1)


def measure_on_gpu(cell: Cell, config: RunConfig, run: ResolvedRun) -> dict[str, object]:
    """Train STEPS steps on random tokens. Bytes that CUDA's allocator had handed out and held, and the GPU's."""
    # As train.py does, and before torch is imported.
    set_allocator_default(os.environ)
    import torch

    from llmscale.engine.deepspeed_engine import build_engine
    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.engine.train_step import PhaseTimer, train_step

    world = join_world()
    engine = build_engine(config, run)
    timer = PhaseTimer(world.device)
    shape = (cell.micro_batch_size, run.shape.seq_len + 1)
    for _ in range(STEPS):
        micro_batches = [torch.randint(VOCAB_SIZE, shape) for _ in range(cell.gradient_accumulation_steps)]
        train_step(engine, micro_batches, world.device, timer)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    result = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_torch_bytes": total - free - reserved,
        "device": world.device_name,
    }
    leave_world()
    return result


def measure_dry(run: ResolvedRun) -> dict[str, object]:
    """The engine on tensors without storage."""
    from llmscale.dry_run.engine import dry_run

    result = dry_run(run)
    peak = max(moment.total_bytes for moment in (result.forward, result.backward, result.step))
    return {"peak_bytes": peak, "least_gpu_bytes": result.least_gpu_bytes, "seconds": result.seconds}


if __name__ == "__main__":
    main()
