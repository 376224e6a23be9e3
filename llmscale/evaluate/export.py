"""A trained model as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from llmscale.checkpoint.hf_folder import WEIGHTS_NAME
from llmscale.checkpoint.hf_weights import hf_config, to_hf_state_dict
from llmscale.data.prepare.atomic_folder import new_folder
from llmscale.data.tokenizers.save_for_transformers import save_for_transformers
from llmscale.errors import ConfigError, MachineError
from llmscale.evaluate.load_model import TrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_model(trained: TrainedModel, out: Path, dtype: str, *, overwrite: bool) -> int:
    """Write config.json, model.safetensors and the tokenizer to `out`, all of it or nothing. Returns the number
    of weights. `overwrite` replaces the folder, which was checked (checkpoint/hf_folder.py).

    Every tensor is read back and compared. Raises ConfigError for weights that `dtype`, a key of DTYPES, cannot hold,
    DataError when `out` cannot be written, MachineError when the disk returns something else than was written.
    """
    config = hf_config(trained.model.shape, trained.tokenizer.eot_token, DTYPES[dtype])
    state = {name: _converted(name, tensor, dtype) for name, tensor in to_hf_state_dict(trained.model).items()}
    with new_folder(out, replace=overwrite) as folder:
        config.save_pretrained(folder)
        save_for_transformers(trained.tokenizer, folder)
        _save_weights(state, folder / WEIGHTS_NAME)
    return sum(tensor.numel() for tensor in state.values())


def _converted(name: str, tensor: Tensor, dtype: str) -> Tensor:
    if not tensor.isfinite().all():
        raise ConfigError(
            f"'{name}' holds NaN or infinity: training diverged before this checkpoint. Name another one."
        )
    converted = tensor.to("cpu", DTYPES[dtype])
    if not converted.isfinite().all():
        largest = tensor.abs().max().item()
        raise ConfigError(f"{dtype} cannot hold the {largest:g} in '{name}'. Legal here: --dtype fp32 or bf16.")
    return converted


def _save_weights(state: dict[str, Tensor], path: Path) -> None:
    """Write the file, and read it back. Raises OSError, MachineError."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        # transformers refuses a file that does not say which library's tensors it holds.
        save_file(state, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # safetensors lets nobody else read what it writes.
    path.chmod((path.parent / "config.json").stat().st_mode & 0o777)
    with safe_open(path, framework="pt") as file:
        for name, tensor in state.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise MachineError(f"{path.parent} was read back with another '{name}' than was written. Try again.")
