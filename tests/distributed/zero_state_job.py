"""Rank script of test_zero_state.py: save a small module's whole state under every stage, load it under every other.

The module has what our GPT has not: a buffer, a frozen parameter, and an optimizer with three moments. After each load
the state is saved again, and both checkpoints must hold the same bits under the same names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmscale.architecture.layers import ParameterKind
from llmscale.checkpoint.load import load_engine
from llmscale.checkpoint.manifest import checkpoint_name, checkpoints_folder
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import (
    Fragment,
    engine_fragments,
    fill_fragments,
    load_index,
)
from llmscale.config.optimizers import ADAMW
from llmscale.engine.collectives import Disks
from llmscale.engine.optimizers import build_parameter_groups
from llmscale.engine.process_group import World, join_world
from llmscale.engine.zero_shards import group_scalars, reset_step_counts
from tests.rank_end import end_rank

STEP = 3
#: Load under each stage only what itself and the stage after it have saved.
IS_SAMPLE = "sample" in sys.argv[2:]


class Small(nn.Module):
    """Odd sizes, so that no rank's share ends where a parameter ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5)
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Linear(13, 13, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.second(torch.tanh(self.frozen(torch.relu(self.first(x))))).float().pow(2).mean()


def build(stage: int, precision: str, offload: bool, optimizer: str) -> deepspeed.DeepSpeedEngine:
    """Build an engine with random weights: a tensor that a load leaves out stays visibly different."""
    config: dict = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}
    config |= {precision: {"enabled": True}} if precision != "fp32" else {}
    if (stage, precision) == (1, "bf16"):  # DeepSpeed's BF16_Optimizer
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["gradient_clipping"] = 0.0
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    context = deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3)
    with context:
        model = Small()
    kinds: dict[str, ParameterKind] = {
        name: "matrix" if len(getattr(p, "ds_shape", p.shape)) > 1 else "vector" for name, p in model.named_parameters()
    }
    groups = [dict(group) for group in build_parameter_groups(model.named_parameters(), kinds, ADAMW, 0.1)]
    made = (
        torch.optim.AdamW(groups, lr=0.0, amsgrad=True)
        if optimizer == "amsgrad"
        else torch.optim.Adafactor(groups, lr=0.0)
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config, dist_init_required=False)
    reset_step_counts(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2
    return engine


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        engine.backward(engine(torch.randn(4, 7).to(dtype)))
        engine.step()


def save(engine: deepspeed.DeepSpeedEngine, run: Path, stage: int) -> Path:
    state = RunState(STEP, 0, 0, 0, {}, "fp32", group_scalars(engine), {})
    disks = Disks((0,) * dist.get_world_size())
    saver = CheckpointSaver(run, keep_last=1, keep_every=0, in_background=False, report=fail_on_warning, disks=disks)
    fragments = copy_out(engine_fragments(engine))
    saver.save(Snapshot(STEP, 0, stage, "fp32", state.as_dict(), fragments))
    return checkpoints_folder(run) / checkpoint_name(STEP)


def fail_on_warning(line: str) -> None:
    assert not line.startswith("WARNING"), line


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    wanted = {
        key: Fragment(torch.empty(entry["size"], dtype=getattr(torch, entry["dtype"])), 0, entry["size"])
        for key, entry in load_index(folder).items()
    }
    fill_fragments(folder, load_index(folder), wanted)
    return {key: fragment.local for key, fragment in wanted.items()}


def check(world: World, folder: Path, precision: str, optimizer: str, stages: list[tuple[int, bool]]) -> None:
    """Save under each of `stages` (stage, offload); load all of that under each, or with IS_SAMPLE two of it."""
    sources = []
    for steps, (stage, offload) in enumerate(stages, start=1):
        torch.manual_seed(steps)
        engine = build(stage, precision, offload, optimizer)
        train(engine, steps)
        source = save(engine, folder / f"{precision}-{optimizer}-{stage}-{offload}", stage)
        sources.append((source, group_scalars(engine), read_all(source)))
        engine.destroy()
        states = {key.partition("/")[0] for key in sources[-1][2]}
        assert states >= {"master", "frozen", "buffer", *needed_states(optimizer)}, states
    for turn, (stage, offload) in enumerate(stages):
        torch.manual_seed(1000 + stage)
        # One engine for all loads: it differs from each in every tensor and step count, by its own or the load before.
        engine = build(stage, precision, offload, optimizer)
        for number, (source, scalars, saved) in enumerate(sources):
            if IS_SAMPLE and (number - turn) % len(sources) > 1:
                continue
            load_engine(engine, source, scalars, world.control, world.disks)
            assert group_scalars(engine) == scalars
            decays = {group["name"]: group["weight_decay"] for group in engine.optimizer.param_groups}
            assert decays == {"decay": 0.1, "no_decay": 0.0}, decays
            again = read_all(save(engine, folder / f"again-{precision}-{optimizer}-{number}-{stage}{offload}", stage))
            assert again.keys() == saved.keys(), again.keys() ^ saved.keys()
            for key in saved:
                assert torch.equal(again[key], saved[key]), f"{source.parent.parent.name} -> stage {stage}: {key}"
        engine.destroy()
        if world.is_main:
            print(f"ok {precision} {optimizer} loaded by stage {stage} offload {offload}", flush=True)


def needed_states(optimizer: str) -> set[str]:
    return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} if optimizer == "amsgrad" else {"row_var", "col_var", "variance"}


if __name__ == "__main__":
    here = join_world()
    target = Path(sys.argv[1])
    every = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
    check(here, target, "fp32", "amsgrad", every)
    check(here, target, "bf16", "amsgrad", [(0, False), (1, False), (2, False), (3, False)])
    check(here, target, "fp32", "adafactor", [(0, False)])
    end_rank()
