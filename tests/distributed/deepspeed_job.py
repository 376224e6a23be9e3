"""Rank script of test_deepspeed_checkpoints.py: DeepSpeed's checkpoints into engines of these ranks.

A cell is {"do": ..., ...}; its answer has `losses` of the steps after the load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmscale import api
from llmscale.checkpoint.convert import open_portable
from llmscale.checkpoint.deepspeed_write import write_native, write_universal
from llmscale.engine.process_group import World
from tests.awkward_module import build_engine, train
from tests.rank_end import answer_cells

STEPS = 3
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLIENT_STATE = {"mine": [1, 2], "tensor": torch.arange(3)}


def load(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Load a checkpoint of DeepSpeed by llmscale."""
    engine = build_engine(cell["stage"], cell["precision"], seed=7, **cell.get("built", {}))
    loaded = api.load_deepspeed(engine, cell["folder"], **cell.get("arguments", {}))
    assert loaded.step == STEPS
    return {"losses": train(engine, STEPS, 2 * STEPS), "changes": loaded.changes}


def load_imported(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Import a checkpoint of DeepSpeed, and load llmscale's."""
    engine = build_engine(cell["stage"], cell["precision"], seed=7)
    loaded = api.Checkpoints(engine, cell["folder"]).load()
    assert loaded is not None
    return {"losses": train(engine, STEPS, 2 * STEPS), "changes": loaded.changes}


def load_by_deepspeed(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Load what was resharded, or a universal folder, by DeepSpeed alone."""
    sections = {"checkpoint": {"load_universal": True}} if cell["universal"] else {}
    # Its load_universal leaves frozen weights and buffers as the script made them.
    engine = build_engine(cell["stage"], cell["precision"], seed=0 if cell["universal"] else 7, **sections)
    path, client_state = engine.load_checkpoint(cell["folder"])
    assert path is not None
    assert client_state["mine"] == CLIENT_STATE["mine"]
    return {"losses": train(engine, STEPS, 2 * STEPS)}


def write(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Save by DeepSpeed, as a loop does."""
    engine = build_engine(cell["stage"], cell["precision"], **cell.get("built", {}))
    train(engine, 0, STEPS)
    engine.save_checkpoint(cell["folder"], client_state=CLIENT_STATE, **cell.get("arguments", {}))
    return {"losses": train(engine, STEPS, 2 * STEPS)}


def elastic(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Save and load by DeepSpeed's own methods within elastic_checkpoints, twice into the same engine."""
    lines: list[str] = []
    with api.elastic_checkpoints(verified=cell["verified"], report=lines.append):
        if cell["saves"]:
            engine = build_engine(cell["stage"], cell["precision"])
            train(engine, 0, STEPS)
            engine.save_checkpoint(cell["folder"], client_state=CLIENT_STATE)
            return {"losses": train(engine, STEPS, 2 * STEPS)}
        engine = build_engine(cell["stage"], cell["precision"], seed=7)
        path, client_state = engine.load_checkpoint(cell["folder"])
        assert path is not None
        assert client_state["mine"] == CLIENT_STATE["mine"]
        assert torch.equal(client_state["tensor"], CLIENT_STATE["tensor"])
        losses = train(engine, STEPS, 2 * STEPS)
        engine.load_checkpoint(cell["folder"])
        assert train(engine, STEPS, 2 * STEPS) == losses
        weights = build_engine(cell["stage"], cell["precision"], seed=7)
        weights.load_checkpoint(cell["folder"], load_module_only=True)
        assert abs(train(weights, STEPS, STEPS + 1)[0] - losses[0]) < 1e-6
        assert weights.global_steps == 1
    return {"losses": losses, "changes": lines}


def refuse(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the error of a load, and whether a weight changed."""
    engine = build_engine(cell["stage"], cell["precision"], seed=7, **cell.get("built", {}))
    before = train(engine, 0, 1)
    engine = build_engine(cell["stage"], cell["precision"], seed=7, **cell.get("built", {}))
    try:
        api.load_deepspeed(engine, cell["folder"], **cell.get("arguments", {}))
    except api.LlmscaleError as error:
        return {"error": str(error), "is_unchanged": train(engine, 0, 1) == before}
    return {"error": None}


def _import(folder: Path, out: Path) -> None:
    """Import in a process of its own, which is no rank."""
    command = [sys.executable, "-m", "llmscale", "checkpoint", "import", str(folder), "--to", str(out)]
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    subprocess.run(command, check=True, env=environment, capture_output=True)


def convert(cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Write what other cells load, on rank 0: `reshard`, `universal` or `import`."""
    if world.is_main:
        folder = Path(cell["folder"])
        out = Path(cell["out"])
        if cell["to"] == "native":
            write_native(open_portable(folder), out, ranks=world.world_size, stage=cell["stage"])
        elif cell["to"] == "universal":
            write_universal(open_portable(folder), out)
        else:
            _import(folder, out)
    dist.barrier()
    return {"losses": []}


def answer(cell: dict[str, Any], world: World) -> dict[str, Any]:
    return {**globals()[cell["do"]](cell, world), "cell": cell["name"]}


if __name__ == "__main__":
    answer_cells(answer)
