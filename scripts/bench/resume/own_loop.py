"""Time llmscale.api's checkpoints of any module beside DeepSpeed's and torch's DCP: one engine, one run. Linux.

    python -m scripts.bench.resume.own_loop

The first of --worlds saves and loads with one engine, in turn: `api.Checkpoints`, DeepSpeed's save_checkpoint and
load_checkpoint, and DCP with the same tensors. The second number of ranks loads what the first saved: DeepSpeed by
ds_to_universal and load_checkpoint, DCP not at all beside ours, whose fragments it needs. After every load the next
step's loss is compared. Ours hashes, syncs and renames a save, and verifies every byte of a load; DeepSpeed does
neither, so a sync of its files is timed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.harness import (
    describe_circumstances,
    describe_machine,
    folder_bytes,
    free_port,
    machine_line,
    median_and_range,
    output_file,
    python_environment,
    save_result,
    show_range,
    whole_number,
)

SETTINGS = ("stage", "worlds", "layers", "width", "rounds")
SAMPLES = 12
LENGTH = 32
VOCAB = 2048
MIB = 2**20
TIMED = ("save ours", "save DeepSpeed", "sync DeepSpeed", "save DCP", "load ours", "load DeepSpeed", "load DCP")
FOLDERS = {"ours": "ours", "DeepSpeed": "deepspeed", "its universal copy": "universal", "DCP": "dcp-0"}


def main() -> int:
    args = parse_arguments()
    if args.job:
        run_rank(args)
        return 0
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        first, second = args.worlds
        saved = start_ranks(args, Path(folder), "save", first)
        began = time.perf_counter()
        convert(Path(folder))
        saved["DeepSpeed converts"] = [time.perf_counter() - began]
        sizes = {path.name: folder_bytes(path) for path in Path(folder).iterdir() if path.is_dir()}
        loaded = start_ranks(args, Path(folder), "load", second)
    report(args, saved, loaded, sizes)
    print(machine_line(machine))
    result = {"saved": saved, "loaded": loaded, "bytes": sizes}
    save_result(args.json, describe_circumstances(machine, args, SETTINGS) | result)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO stage; default: %(default)s")
    parser.add_argument("--worlds", type=whole_number, nargs=2, default=(2, 3), help="ranks; default: 2 3")
    parser.add_argument("--layers", type=whole_number, default=6, help="layers; default: %(default)s")
    parser.add_argument("--width", type=whole_number, default=512, help="width; default: %(default)s")
    parser.add_argument("--rounds", type=whole_number, default=3, help="repetitions; default: %(default)s")
    parser.add_argument("--json", type=output_file, help="file for the raw measurements")
    parser.add_argument("--job", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def start_ranks(args: argparse.Namespace, folder: Path, job: str, world_size: int) -> dict[str, Any]:
    """Run one job of `world_size` ranks; return what rank 0 prints last. Exits with its output if it fails."""
    port = str(free_port())
    sizes = [f"--{name}={getattr(args, name)}" for name in ("stage", "layers", "width", "rounds")]
    command = [sys.executable, "-m", "scripts.bench.resume.own_loop", *sizes, "--job", job, "--folder", str(folder)]
    ranks = []
    for rank in range(world_size):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environment = python_environment(**places, **address, LOCAL_SIZE=str(world_size))
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(outputs))
    return dict(json.loads(outputs[0].splitlines()[-1]))


def convert(folder: Path) -> None:
    """Convert DeepSpeed's checkpoint to its universal format."""
    tag = (folder / "deepspeed" / "latest").read_text().strip()
    command = ["deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder / "deepspeed" / tag)]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--output_folder", str(folder / "universal" / tag), "--inject_missing_state"],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (folder / "universal" / "latest").write_text(tag)
    (folder / "universal" / "latest_universal").write_text(tag)


def run_rank(args: argparse.Namespace) -> None:
    """Do one job as one rank, and print what it took as the last line of rank 0."""
    import torch.distributed as dist

    from llmscale import api

    world = api.join_ranks()
    taken = save_and_load(args) if args.job == "save" else load_elsewhere(args)
    if world.is_main:
        print(json.dumps(taken), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort the process on the interpreter's own way out


def build(args: argparse.Namespace, **more: object) -> Any:
    """Build a module that is no GPT of llmscale, with torch's AdamW in bf16."""
    import torch
    from torch import nn

    from llmscale import api

    ranks = int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SAMPLES // ranks,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 8, 4 * args.width, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCAB, args.width), nn.TransformerEncoder(layer, args.layers), nn.Linear(args.width, VOCAB)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return api.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_step(engine: Any, step: int) -> float:
    """Take one step of the same samples at any number of ranks; return its loss."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=draw)
    total = torch.zeros(())
    for row in rows.split(SAMPLES // dist.get_world_size())[dist.get_rank()]:
        loss = functional.cross_entropy(engine(row[None, :-1])[0].float(), row[1:])
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / SAMPLES


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def save_and_load(args: argparse.Namespace) -> dict[str, list[float]]:
    """Save and load in turn with one engine."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from llmscale import api
    from llmscale.checkpoint.tensor_files import FragmentSavePlanner, engine_fragments
    from scripts.bench.resume.checkpoint_rank import FragmentLoadPlanner

    engine, folder = build(args), args.folder
    losses = [train_step(engine, step) for step in range(2)]
    checkpoints = api.Checkpoints(engine, folder / "ours", keep_last=1)
    gloo = dist.new_group(backend="gloo")
    taken: dict[str, list[float]] = {}

    def note(what: str, action: Callable[[], object]) -> None:
        taken.setdefault(what, []).append(timed(action))

    for number in range(args.rounds):
        note("save ours", lambda number=number: checkpoints.save(2 + number))
        note("save DeepSpeed", lambda: engine.save_checkpoint(str(folder / "deepspeed"), tag="saved"))
        note("sync DeepSpeed", os.sync)
        place = folder / f"dcp-{number}"
        writer = dcp.FileSystemWriter(place, single_file_per_rank=True, sync_files=True)
        note(
            "save DCP",
            lambda writer=writer: dcp.save(
                engine_fragments(engine), storage_writer=writer, planner=FragmentSavePlanner(), process_group=gloo
            ),
        )
    after = train_step(engine, 2)
    for number in range(args.rounds):
        reader = dcp.FileSystemReader(folder / f"dcp-{number}")
        note("load ours", checkpoints.load)
        taken.setdefault("difference ours", []).append(abs(train_step(engine, 2) - after))
        note("load DeepSpeed", lambda: engine.load_checkpoint(str(folder / "deepspeed"), tag="saved"))
        taken.setdefault("difference DeepSpeed", []).append(abs(train_step(engine, 2) - after))
        note(
            "load DCP",
            lambda reader=reader: dcp.load(
                engine_fragments(engine), storage_reader=reader, planner=FragmentLoadPlanner(), process_group=gloo
            ),
        )
        note("export", lambda number=number: _export(folder, number))
    return taken | {"losses": [*losses, after]}


def _export(folder: Path, number: int) -> None:
    import torch.distributed as dist

    from llmscale import api

    if dist.get_rank() == 0:
        api.export_weights(folder / "ours", folder / f"safetensors-{number}")


def load_elsewhere(args: argparse.Namespace) -> dict[str, list[float]]:
    """Load on another number of ranks what the first ones saved."""
    from llmscale import api

    taken: dict[str, list[float]] = {}
    ours = api.Checkpoints(build(args), args.folder / "ours", keep_last=1)
    taken["load ours"] = [timed(ours.load) for _ in range(args.rounds)]
    taken["losses"] = [train_step(ours.engine, 2)]
    engine = build(args, checkpoint={"load_universal": True})
    place = str(args.folder / "universal")
    taken["load DeepSpeed"] = [timed(lambda: engine.load_checkpoint(place)) for _ in range(args.rounds)]
    taken["losses"].append(train_step(engine, 2))
    return taken


def report(args: argparse.Namespace, saved: dict[str, Any], loaded: dict[str, Any], sizes: dict[str, int]) -> None:
    """Print the table."""
    first, second = args.worlds
    print(f"ZeRO-{args.stage}, bf16, {args.layers} layers of width {args.width}; medians (smallest-largest) in seconds")
    for name in (
        "save ours",
        "save DeepSpeed",
        "sync DeepSpeed",
        "save DCP",
        "load ours",
        "load DeepSpeed",
        "load DCP",
    ):
        print(f"  x{first} {name:<16} {show_range(median_and_range(saved[name]))}")
    print(f"  x{first} read and write as safetensors {show_range(median_and_range(saved['export']))}")
    print(f"  DeepSpeed converts to universal {saved['DeepSpeed converts'][0]:.2f}")
    for name in ("load ours", "load DeepSpeed"):
        print(f"  x{second} {name:<16} {show_range(median_and_range(loaded[name]))}")
    for name, folder in FOLDERS.items():
        print(f"  {name:<20} {sizes[folder] / MIB:8.1f} MiB on disk")
    expected = saved["losses"][-1]
    off = {f"x{first} {name}": max(saved[f"difference {name}"]) for name in ("ours", "DeepSpeed")}
    off |= {f"x{second} ours": abs(loaded["losses"][0] - expected)}
    off |= {f"x{second} DeepSpeed": abs(loaded["losses"][1] - expected)}
    listed = ", ".join(f"{name} {value:.1e}" for name, value in off.items())
    print(f"  next loss {expected:.6f}; off after a load: {listed}")


if __name__ == "__main__":
    sys.exit(main())
