"""How much memory `--init-from hf:FOLDER` takes beyond the weights, at ZeRO stage 3.

    python -m scripts.bench.memory.init_from_memory --folder FOLDER [--model llama3-1b] [--ranks 2]

Writes a random model of a preset's shape in bf16 to --folder, unless it exists. Then --ranks processes each fill fp32
shards as stage 3 cuts them, and print how far their resident memory rose above that with the shards in memory:
temporary tensors, and pages of the mapped files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmscale.architecture.hf_config import family_of
from llmscale.checkpoint.hf_read import fill_view, find_weights_files, list_safetensors, match_tensors
from llmscale.config.hf_model import read_published_model
from llmscale.config.presets import get_preset
from llmscale.engine.zero_layout import ShardView
from scripts.bench.harness import describe_machine, machine_line, status_bytes

MIB = 2**20


def write_model(folder: Path, preset: str, shard_bytes: int) -> None:
    """Write random weights, with one file in memory at a time."""
    shape = get_preset(preset).shape(get_preset(preset).vocab_size)
    family = family_of(shape)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for tensor in family.tensors(shape):
        if size and size + 2 * torch.Size(tensor.shape).numel() > shard_bytes:
            files, size = [*files, {}], 0
        files[-1][tensor.name] = tensor.shape
        size += 2 * torch.Size(tensor.shape).numel()
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({key: torch.randn(size).mul_(0.02).bfloat16() for key, size in tensors.items()}, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({**family.write(shape), "model_type": family.model_type}))


def fill_rank(folder: Path, rank: int, ranks: int) -> None:
    """Fill the shards of one rank; print its memory."""
    torch.set_num_threads(1)
    model = read_published_model("--init-from", f"hf:{folder}")
    stored = list_safetensors(find_weights_files(folder))
    pieces = match_tensors(stored, model.tensors, model.source)
    views = {}
    for tensor in model.shape.tensors.all:
        part = -(-tensor.elements // ranks)
        start = min(rank * part, tensor.elements)
        length = min(part, tensor.elements - start)
        views[tensor.name] = ShardView(torch.zeros(length).add_(1), start, tensor.elements)
    before = status_bytes("VmRSS") / MIB
    Path("/proc/self/clear_refs").write_text("5")  # starts a new VmHWM
    began = time.perf_counter()
    for name, view in views.items():
        fill_view(view, pieces[name])
    seconds = time.perf_counter() - began
    most, after = status_bytes("VmHWM") / MIB - before, status_bytes("VmRSS") / MIB - before
    largest = max(2 * torch.Size(tensor.shape).numel() for tensor in stored.values()) / MIB
    shards = sum(view.local.nbytes for view in views.values()) / MIB
    print(
        f"rank {rank} of {ranks}: shards {shards:,.0f} MiB, resident {before:,.0f} MiB before, at most "
        f"{most:,.0f} MiB more while reading, {after:,.0f} MiB after; "
        f"largest tensor {largest:,.0f} MiB in its file; {seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the random model is, or is written")
    parser.add_argument("--model", default="llama3-1b", help="preset whose shape it has")
    parser.add_argument("--shard-gib", type=float, default=1.0, help="size of its files")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if not args.folder.exists():
        write_model(args.folder, args.model, int(args.shard_gib * 2**30))
    machine = describe_machine()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=fill_rank, args=(args.folder, rank, args.ranks)) for rank in range(args.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(machine_line(machine))
    raise SystemExit(max(process.exitcode or 0 for process in processes))


if __name__ == "__main__":
    main()
