"""Rank script of test_own_loop.py: train, save and continue a module of one's own, at any stage.

A cell is {"do": a function here without its first letter, ...}: its other values are the function's arguments.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmscale import api
from llmscale.engine.deepspeed_engine import release_engine
from llmscale.engine.process_group import World
from llmscale.engine.zero_shards import group_scalars, state_views
from llmscale.errors import LlmscaleError
from tests.own_module import Net, NetTurned, NetWithout, build, divide, train
from tests.rank_end import answer_cells


def write(folder: str, engine: dict[str, Any], samples: int) -> dict[str, object]:
    """Train two steps, save, and train three more, which a continuation must repeat."""
    made = build(**engine, samples=samples)
    checkpoints = api.Checkpoints(made, folder)
    losses = train(made, 0, 2)
    checkpoints.save(2, {"losses": losses, "at": (1, 2)})
    after = train(made, 2, 5)
    checkpoints.close()
    release_engine(made)
    return {"after": after}


def read(folder: str, engine: dict[str, Any], samples: int) -> dict[str, object]:
    """Continue the three steps with an engine that began with other weights."""
    made = build(**engine, samples=samples, seed=1)
    checkpoints = api.Checkpoints(made, folder)
    loaded = checkpoints.load()
    assert loaded is not None
    after = train(made, 2, 5)
    checkpoints.close()
    release_engine(made)
    return {"after": after, "step": loaded.step, "at": loaded.extra["at"], "changes": loaded.changes}


def outcome(action: Callable[[], object]) -> str:
    try:
        return f"{action()}"
    except LlmscaleError as error:
        return f"{type(error).__name__}: {error}"


def edges(folder: str) -> dict[str, object]:
    """What is refused, passed over, or begins again."""
    outcomes: dict[str, object] = {}
    engine = build(2)
    run = Path(folder)
    checkpoints = api.Checkpoints(engine, run)
    outcomes["empty"] = outcome(checkpoints.load)
    checkpoints.save(0)
    train(engine, 0, 1)
    checkpoints.save(1, {"note": "first"})
    tokens = torch.ones(1, 8, dtype=torch.long)
    engine.backward(engine(tokens, tokens))
    engine.step()
    outcomes["within a step"] = outcome(lambda: checkpoints.save(2))
    outcomes["load within a step"] = outcome(checkpoints.load)
    for _ in range(engine.gradient_accumulation_steps() - 1):
        engine.backward(engine(tokens, tokens))
        engine.step()
    outcomes["tensor"] = outcome(lambda: checkpoints.save(2, {"t": torch.ones(2)}))
    checkpoints.save(2)
    train(engine, 2, 3)
    checkpoints.save(3)
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    outcomes["kept"] = names
    outcomes["other engine, not loaded"] = outcome(lambda: api.Checkpoints(engine, run).save(3))
    loaded = checkpoints.load(2)
    outcomes["back"] = loaded.step if loaded else None
    train(engine, 2, 3)
    checkpoints.save(3, {"again": True})
    newest = api.Checkpoints(engine, run).load()
    outcomes["newest"] = newest.extra if newest else None
    path = run / "checkpoints" / "step-00000003" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcomes["weights of a damaged one"] = outcome(lambda: api.read_weights(run))
    damaged = api.Checkpoints(engine, run).load()
    outcomes["damaged"] = damaged.step if damaged else None
    for name, other in {
        "other model": build(2, kind=NetWithout),
        "other shape": build(2, kind=NetTurned),
        "other optimizer": build(2, optimizer="nesterov"),
        "no states": build(2, optimizer="sgd"),
        "joined groups": build(2, groups=join),
    }.items():
        before = {key: view.local.clone() for key, view in state_views(other).items()}
        outcomes[name] = outcome(api.Checkpoints(other, run).load)
        assert all(torch.equal(view.local, before[key]) for key, view in state_views(other).items() if key in before)
    return outcomes


def join(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [param for group in divide(net) for param in group["params"]]}]


def turned(folder: str) -> dict[str, object]:
    """Groups in another order, names of torch.compile, a first step of momentum."""
    engine = build(2)
    checkpoints = api.Checkpoints(engine, folder)
    train(engine, 0, 2)
    checkpoints.save(2)
    after = train(engine, 2, 4)
    outcomes: dict[str, object] = {}
    for name, options in {
        "order": {"groups": lambda net: divide(net)[::-1]},
        "compiled": {"wrap": lambda net: torch.compile(net, backend="eager")},
    }.items():
        other = build(2, seed=1, **options)
        api.Checkpoints(other, folder).load()
        outcomes[name] = max(abs(a - b) for a, b in zip(train(other, 2, 4), after, strict=True))
    return outcomes


def weights(folder: str, stage: int) -> dict[str, object]:
    """Weights without an engine, as they are in the module."""
    engine = build(stage)
    checkpoints = api.Checkpoints(engine, folder)
    train(engine, 0, 2)
    checkpoints.save(2)
    read_back = api.read_weights(folder)
    own = engine.module.state_dict() if stage != 3 else None
    net = Net()
    net.load_state_dict(read_back)
    differ = [name for name in own or {} if not torch.equal(own[name], read_back[name])] if own else []
    shared = read_back["embedding.weight"].data_ptr() == read_back["head.weight"].data_ptr()
    names = sorted(read_back.keys() ^ net.state_dict().keys())
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        files = api.export_weights(folder, Path(folder) / "out", shard_bytes=4000)
        exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
        differ += [name for name, tensor in exported.items() if not torch.equal(tensor, read_back[name])]
        names += sorted(exported.keys() ^ (read_back.keys() - {"head.weight"}))
        assert len(files) > 1
    dist.barrier()
    return {"differ": differ, "names": names, "shared": shared}


def first_step(precision: str) -> dict[str, object]:
    """The masters of stage 0 before training, which must be the first weights."""
    engine = build(0, precision)
    masters = {key: view.local for key, view in state_views(engine).items() if key.startswith("master/")}
    torch.manual_seed(0)
    first = {f"master/{name}": param for name, param in Net().named_parameters()}
    off = max(float((first[key].detach().bfloat16().flatten() - value).abs().max()) for key, value in masters.items())
    return {"off": off, "scalars": group_scalars(engine)}


def fused(folder: str) -> dict[str, object]:
    """FusedAdam at stage 0 in 16 bit, whose masters are one flat tensor a group; torch's AdamW stands for it."""
    import deepspeed.runtime.engine

    before = deepspeed.runtime.engine.FusedAdam
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    try:
        engine = build(0, "bf16", kind=NetUsed)
        assert type(engine.optimizer).__name__ == "FP16_Optimizer"
        checkpoints = api.Checkpoints(engine, folder)
        train(engine, 0, 2)
        checkpoints.save(2)
        after = train(engine, 2, 4)
        other = build(0, "bf16", kind=NetUsed, seed=1)
        api.Checkpoints(other, folder).load()
        again = train(other, 2, 4)
    finally:
        deepspeed.runtime.engine.FusedAdam = before
    divided = build(2, "bf16", kind=NetUsed, seed=1)
    api.Checkpoints(divided, folder).load()
    return {"after": after, "again": again, "divided": train(divided, 2, 4)}


class NetUsed(Net):
    """FP16_Optimizer wants a gradient of every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Identity()


def buffers(folder: str) -> dict[str, object]:
    """Buffers that differ between ranks."""
    engine = build(2)
    train(engine, 0, 1)
    lines: list[str] = []
    api.Checkpoints(engine, folder, report=lines.append).save(1)
    own = engine.module.norm.running_mean.clone()
    dist.broadcast(own, 0)
    stored = api.read_weights(folder)["norm.running_mean"]
    return {"lines": lines, "is_of_rank_0": bool(torch.equal(own, stored))}


def disks(folder: str) -> dict[str, object]:
    """Nodes without a shared disk: every rank has a folder of its own."""
    own = Path(folder) / f"node-{dist.get_rank()}"
    engine = build(2)
    checkpoints = api.Checkpoints(engine, own)
    train(engine, 0, 2)
    checkpoints.save(2)
    after = train(engine, 2, 4)
    files = sorted(path.name for path in (own / "checkpoints" / "step-00000002").glob("*.distcp"))
    other = build(3, seed=1)
    loaded = api.Checkpoints(other, own).load()
    assert loaded is not None
    again = train(other, 2, 4)
    return {"files": files, "off": max(abs(a - b) for a, b in zip(after, again, strict=True))}


#: Holds the lock of a folder until its input ends.
HOLD = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, 2); print('held', flush=True); input()"


def refused(folder: str) -> dict[str, object]:
    """An engine, a place and a folder that cannot be used."""
    engine = build(2)
    run = Path(folder) / "held"
    run.mkdir()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run / ".lock")], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        held = outcome(lambda: api.Checkpoints(engine, run))
        holder.communicate(b"\n")
    return {
        "fp16": outcome(lambda: build(0, "fp16")),
        "store": outcome(lambda: api.Checkpoints(engine, "s3://bucket/run")),
        "held": held,
    }


def answer(cell: dict[str, Any], world: World) -> dict[str, object]:
    arguments = {key: value for key, value in cell.items() if key != "do"}
    return dict(globals()[cell["do"]](**arguments))


if __name__ == "__main__":
    answer_cells(answer)
