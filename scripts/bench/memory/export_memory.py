"""How much host memory `llmscale export` takes: the peak of exporting a checkpoint of random weights.

    python -m scripts.bench.memory.export_memory [--model gpt2 | llama] [--dtype bf16] [--shard-size 5GB]

The checkpoint has the fp32 masters of about 10^9 parameters, cut as ZeRO-3 cuts them over --world-size ranks. Both it
and its export are written to a temporary folder (--work): 9 GB. A process of its own verifies and exports it; beside
its peak resident memory stands the memory before it begins, with torch imported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmscale.architecture.hf_config import family_of
from llmscale.architecture.shape import GPTShape
from llmscale.terminal.human_numbers import parse_bytes
from scripts.bench.harness import GIB, describe_machine, machine_line, status_bytes

SHAPES = {
    "gpt2": GPTShape(18, 16, 2048, 50_257, 1024, activation="gelu_tanh"),
    "llama": GPTShape(
        14,
        32,
        2048,
        128_256,
        8192,
        **{"n_kv_head": 8, "mlp_width": 8192, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"},
        **{"bias": False, "activation": "silu", "rope_theta": 500_000.0},
    ),
}


def write_checkpoint(folder: Path, shape: GPTShape, world_size: int) -> None:
    """Write random masters, one rank's file after the other, with a manifest."""
    import torch

    from llmscale.checkpoint.manifest import CheckpointManifest, hash_file, save_manifest

    generator = torch.Generator().manual_seed(0)
    tensors = shape.tensors.all
    index: dict[str, dict] = {
        f"master/{tensor.name}": {"dtype": "float32", "size": tensor.elements, "chunks": []} for tensor in tensors
    }
    folder.mkdir()
    for rank in range(world_size):
        name = f"__{rank}_0.distcp"
        with (folder / name).open("wb") as file:
            for tensor in tensors:
                per_rank = -(-tensor.elements // world_size)
                begin = min(rank * per_rank, tensor.elements)
                elements = min(per_rank, tensor.elements - begin)
                if not elements:
                    continue
                offset = file.tell()
                torch.save(torch.randn(elements, generator=generator) * 0.02, file)
                index[f"master/{tensor.name}"]["chunks"].append([begin, elements, name, offset, file.tell() - offset])
    (folder / "tensors.json").write_text(json.dumps(index))
    (folder / "state.json").write_text("{}")
    files = tuple(hash_file(path) for path in sorted(folder.iterdir()))
    made = "2026-01-01T00:00:00+00:00"
    save_manifest(folder, CheckpointManifest(1, 1, world_size, 3, "fp32", made, files))


def export(folder: Path, out: Path, model: str, dtype: str, shard_bytes: int) -> None:
    """Verify and export, as the command does without dataset and tokenizer; print the numbers."""
    from llmscale.checkpoint.manifest import find_damage
    from llmscale.data.tokenizers.tokenizer import ByteTokenizer
    from llmscale.evaluate.export import ExportedModel, write_model
    from llmscale.evaluate.weights import open_stored

    before = status_bytes("VmHWM") / GIB
    began = time.perf_counter()
    assert find_damage(folder) is None
    verified = time.perf_counter()
    shape = SHAPES[model]
    exported = ExportedModel(shape, family_of(shape), dtype, shard_bytes)  # type: ignore[arg-type]  # argparse's choices
    weights = open_stored(folder, shape, None)
    write_model(weights, exported, ByteTokenizer(), out, card="", overwrite=False)
    done = time.perf_counter()
    largest = max(path.stat().st_size for path in out.glob("*.safetensors"))
    numbers = {
        "model": model,
        "parameters": exported.num_parameters,
        "dtype": dtype,
        "files": len(list(out.glob("*.safetensors"))),
        "largest_file_gib": round(largest / 2**30, 3),
        "largest_tensor_gib": round(max(tensor.elements for tensor in shape.tensors.all) * 4 / 2**30, 3),
        "peak_gib": round(status_bytes("VmHWM") / GIB, 3),
        "of_torch_alone_gib": round(before, 3),
        "verify_s": round(verified - began, 1),
        "export_s": round(done - verified, 1),
    }
    print(json.dumps(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="llama")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--shard-size", default="5GB")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--work", type=Path, default=None, help="where the temporary folder is made")
    parser.add_argument("--export", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.export:
        export(args.export / "step-00000001", args.export / "out", args.model, args.dtype, parse_bytes(args.shard_size))
        return
    work = Path(tempfile.mkdtemp(prefix="export-memory-", dir=args.work))
    try:
        write_checkpoint(work / "step-00000001", SHAPES[args.model], args.world_size)
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--export", str(work)]
        machine = describe_machine()
        subprocess.run(command, check=True)
        print(machine_line(machine))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
