"""A checkpoint written by hand, its tensors cut wherever a test wants them cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from llmscale.checkpoint.manifest import CheckpointManifest, hash_file, save_manifest
from llmscale.checkpoint.tensor_files import StoredWeights


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], world_size: int = 1) -> Path:
    """Flat tensors by key ('master/wte.weight'), each in `world_size` pieces of which some may be empty, rank by rank
    in the files that DCP writes. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        key: {"dtype": str(tensor.dtype).removeprefix("torch."), "size": tensor.numel(), "chunks": []}
        for key, tensor in tensors.items()
    }
    for rank in range(world_size):
        name = f"__{rank}_0.distcp"
        with (folder / name).open("wb") as file:
            for key, tensor in tensors.items():
                total = tensor.numel()
                begin, end = rank * total // world_size, (rank + 1) * total // world_size
                if begin == end:
                    continue
                offset = file.tell()
                torch.save(tensor.flatten()[begin:end].clone(), file)
                index[key]["chunks"].insert(0, [begin, end - begin, name, offset, file.tell() - offset])
    (folder / "tensors.json").write_text(json.dumps(index))
    return folder


def sign(folder: Path, step: int = 3) -> None:
    """Add a state and the manifest."""
    (folder / "state.json").write_text("{}")
    files = tuple(hash_file(path) for path in sorted(folder.iterdir()))
    save_manifest(folder, CheckpointManifest(step, 100, 1, 2, "fp32", "2026-01-01T00:00:00+00:00", files))


def load_full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint as flat fp32 tensors by parameter name."""
    stored = StoredWeights(folder)
    return {name: stored.read(name, 0, elements) for name, elements in stored.sizes.items()}
