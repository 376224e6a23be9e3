"""Recognise models and checkpoints of other programs by their names and first bytes, and say how to bring them here.

Nothing is unpickled: of a torch file only the list of its parts and the text of its `data.pkl` are looked at.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Bytes of a `data.pkl` that are searched for names.
_PICKLE_BYTES = 1 << 20
#: Largest config.json that is looked into.
_CONFIG_BYTES = 1 << 20
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
#: Beginnings of the names of weights of transformers.
_WEIGHTS = ("model.safetensors", "model-0", "pytorch_model.bin", "pytorch_model-0")
_TO_HUGGING_FACE = "Convert it to a folder of transformers (config.json, model.safetensors) and give hf:FOLDER"


def describe_stranger(path: Path, *, flag_value: bool = True) -> str:
    """Return a sentence on what a file or folder of another program is and what to do; empty for anything else.

    `flag_value`: hf:FOLDER can be given in place of `path`.
    """
    with suppress(OSError):
        if path.is_file():
            return _describe_file(path)
        if path.is_dir():
            return _describe_folder(path, flag_value)
    return ""


def _describe_folder(folder: Path, flag_value: bool, depth: int = 1) -> str:
    names = {entry.name for entry in folder.iterdir()}
    is_transformers = _is_transformers(folder)
    has_weights = any(name.startswith(_WEIGHTS) for name in names)
    if flag_value and is_transformers and has_weights:
        return f" It is a folder of transformers. Did you mean 'hf:{folder}'?"
    if sharded := _find_deepspeed(folder, names):
        return sharded
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return (
            " It is a checkpoint of torch.distributed.checkpoint: `python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {folder} OUT.pt` makes one file of it. {_TO_HUGGING_FACE}."
        )
    if "latest_checkpointed_iteration.txt" in names or any(name.startswith("mp_rank_") for name in names):
        return f" It is a checkpoint of Megatron-LM. {_TO_HUGGING_FACE}, with Megatron's tools/checkpoint/convert.py."
    if "params.json" in names and any(name.startswith("consolidated.") for name in names):
        return f" It holds Meta's own files of Llama. {_TO_HUGGING_FACE}, with convert_llama_weights_to_hf.py."
    if "adapter_config.json" in names:
        return " It is an adapter (peft), not a model: merge it into its model (merge_and_unload) and give that folder."
    if is_transformers:
        if flag_value:
            return f" It is a folder of transformers. Did you mean 'hf:{folder}'?"
        return ""
    for name in sorted(name for name in names if name.endswith((*_TORCH_SUFFIXES, ".gguf"))):
        if known := _describe_file(folder / name):
            return f" It holds {name}.{known}"
    if has_weights:
        return " It holds weights without their config.json: put the model's config.json and tokenizer beside them."
    # checkpoint-1000 comes after checkpoint-500.
    steps = sorted((name for name in names if re.search("[0-9]$", name)), key=lambda name: (len(name), name))
    if depth and steps and (folder / steps[-1]).is_dir():
        inner = _describe_folder(folder / steps[-1], True, depth - 1)
        return f" It holds {steps[-1]}.{inner}" if inner else ""
    return ""


def _find_deepspeed(folder: Path, names: set[str]) -> str:
    """Return a sentence if a folder, or its newest `global_step*`, holds the files of a DeepSpeed engine."""
    steps = [folder / name for name in names if name.startswith("global_step")]
    for place in [folder, *steps]:
        if place.is_dir() and any(entry.name.endswith("_states.pt") for entry in place.iterdir()):
            root = folder if steps else folder.parent
            return (
                f" {'It is' if place == folder else 'It holds'} a checkpoint of DeepSpeed's engine, with weights in "
                f"pieces. `python -m deepspeed.utils.zero_to_fp32 {root} OUT` (its zero_to_fp32.py) joins them. Copy "
                "config.json and the tokenizer to OUT and give hf:OUT; the optimizer's state is not taken over."
            )
    return ""


def _describe_file(path: Path) -> str:
    if path.name.endswith("_states.pt"):
        return _find_deepspeed(path.parent, {path.name})
    with path.open("rb") as file:
        head = file.read(4)
    if head == b"GGUF":
        return " It is a GGUF file of llama.cpp, usually quantised. Give hf:NAME of the model that it was made from."
    if path.suffix == ".safetensors":
        return f" It is a file of weights: give its folder, with its config.json, as hf:{path.parent}."
    if path.suffix not in _TORCH_SUFFIXES:
        return ""
    names = b" ".join(_pickled(path))
    if b"model_args" in names and b"iter_num" in names:
        return (
            " It is a checkpoint of nanoGPT. Put its weights into transformers' GPT2LMHeadModel (strip _orig_mod.; "
            "transpose attn.c_attn, attn.c_proj, mlp.c_fc and mlp.c_proj), save_pretrained it, and give hf:FOLDER."
        )
    if b"pytorch-lightning_version" in names:
        return f" It is a checkpoint of PyTorch Lightning. {_TO_HUGGING_FACE}."
    is_torch = bool(names) or head[:2] == b"\x80\x02"
    return f" It is a file of torch.save. {_TO_HUGGING_FACE}." if is_torch else ""


def _pickled(path: Path) -> Iterator[bytes]:
    """Yield the first bytes of a torch file's `data.pkl`, not loaded."""
    with suppress(zipfile.BadZipFile, RuntimeError, NotImplementedError), zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if part.filename.endswith("/data.pkl"):
                with archive.open(part) as pickled:
                    yield pickled.read(_PICKLE_BYTES)


def _is_transformers(folder: Path) -> bool:
    """Return whether a folder has a config.json of transformers; that of a run folder has no model_type."""
    config = folder / "config.json"
    if not config.is_file() or config.stat().st_size > _CONFIG_BYTES:
        return False
    with suppress(ValueError, RecursionError):
        entries = json.loads(config.read_bytes())
        return isinstance(entries, dict) and "model_type" in entries
    return False
