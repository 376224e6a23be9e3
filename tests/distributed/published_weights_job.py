"""Rank script of test_published_weights.py: fill engines of every stage from folders of transformers.

`published_weights_job.py DATA FOLDER...`: each FOLDER has a model's files and `expected.pt`: tokens, and the loss that
transformers has for them. Every element that this rank owns must have the bits of the files, and the loss be theirs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from llmscale.checkpoint.initial_weights import load_published_weights
from llmscale.config.run_config import RunConfig
from llmscale.engine.deepspeed_engine import build_engine
from llmscale.engine.process_group import World, join_world
from llmscale.engine.zero_shards import state_views
from llmscale.training.start import Start, prepare_start
from tests.rank_end import end_rank

FP32 = [("zero0", "fp32"), ("zero1", "fp32"), ("zero2", "fp32"), ("zero3", "fp32")]
OTHERS = [("zero2_offload", "fp32"), ("zero3_offload", "fp32"), ("zero1", "bf16"), ("zero3", "bf16"), ("zero0", "bf16")]


def whole_parameters(folder: Path, run: Start) -> dict[str, Tensor]:
    """Our parameters made of their whole tensors, padding rows of zeros behind them."""
    assert run.weights is not None
    theirs = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    ours = {p.name: torch.zeros(p.parameter.shape) for p in run.resolved.shape.tensors.all}
    for tensor in run.weights.model.tensors:
        values = theirs[tensor.name]
        values = (values.t() if tensor.transposed else values)[tensor.skipped_rows :]
        if tensor.parameter not in ours:  # a router's bias
            ours[tensor.parameter] = torch.zeros(values.shape)
        target = ours[tensor.parameter].view(-1, *values.shape[1:])[tensor.first_row :][: len(values)]
        target.copy_(values[: len(target)])
    return ours


def check(world: World, data: Path, folder: Path, ds: str, precision: str) -> None:
    config = RunConfig(
        **{"data": str(data), "run": Path(tempfile.gettempdir()) / "never-made", "init_from": f"hf:{folder}"},
        **{"ds": Path(f"ds_configs/{ds}.json"), "precision": precision, "global_batch_size": 4, "steps": 1},
    )
    run = prepare_start(config, world.world_size).on_cpu()
    assert run.weights is not None and run.weights.pieces is not None
    engine = build_engine(run.config, run.resolved)
    load_published_weights(engine, run.weights, world.control, progress=int)
    wanted = whole_parameters(folder, run)
    views = state_views(engine).items()
    views = {key.partition("/")[2]: view for key, view in views if key.startswith(("master/", "buffer/"))}
    assert views.keys() == wanted.keys(), views.keys() ^ wanted.keys()
    for name, view in views.items():
        part = wanted[name].view(-1)[view.start : view.start + view.local.numel()]
        assert torch.equal(view.local, part), name
    expected = torch.load(folder / "expected.pt", weights_only=True)
    with torch.no_grad():
        loss = float(engine(expected["tokens"][:, :-1], expected["tokens"][:, 1:]))
    error = abs(loss - float(expected["loss"]))
    assert error < (1e-5 if precision == "fp32" else 0.05), (folder.name, ds, precision, error)
    engine.destroy()
    if world.is_main:
        print(f"ok {folder.name} {ds} {precision}: loss off by {error:.1e}", flush=True)


if __name__ == "__main__":
    here = join_world()
    models = [Path(name) for name in sys.argv[2:]]
    for number, model in enumerate(models):
        # Whole rows or columns, cut anywhere: stages differ in that alone, so two families see all of them.
        for name, kind in (FP32 + OTHERS) if number < 2 else FP32[3:]:
            check(here, Path(sys.argv[1]), model, name, kind)
    end_rank()
