"""Export a checkpoint as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, or adapters for peft.

Only the tensor being written is in memory, and for most tensors only a part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.hf_config import family_of, get_family
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_write import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    CARD_NAME,
    CONFIG_NAME,
    GENERATION_NAME,
    POSITIONS,
    ExportDtype,
    check_space,
    dtype_of,
    last_positions,
    plan_files,
    tensor_bytes,
    write_file,
    write_index,
)
from llmscale.checkpoint.peft_files import describe_adapters, peft_tensors
from llmscale.checkpoint.tensor_files import StoredWeights
from llmscale.config.hf_model import PublishedModel
from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.shards.manifest import TOKENIZER_CONFIG_NAME
from llmscale.data.tokenizers.hugging_face import TEMPLATE_NAME
from llmscale.data.tokenizers.save_for_transformers import generation_ids, save_for_transformers
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import ConfigError
from llmscale.evaluate.conversation import open_template
from llmscale.evaluate.weights import Weights
from llmscale.untrusted.documents import Rules, load_json

#: The release whose configuration files these are, unless they are a published model's.
_VERSION = "4.57.6"
#: Weights in memory at a time, for tensors that are written in the order of the checkpoint.
_PART_ELEMENTS = 1 << 22
_TORCH_NAMES: dict[ExportDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_TORCH_DTYPES: dict[ExportDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ExportedModel:
    """A model as transformers will see it."""

    shape: GPTShape
    family: Family
    dtype: ExportDtype
    shard_bytes: int
    """Largest size of a file of weights, unless one tensor is larger."""
    published: PublishedModel | None = None
    """Published model that it was initialised from."""
    last_positions: Tensor | None = None
    """Rows of the position table after the checkpoint's, [rows, n_embd]."""

    @cached_property
    def tensors(self) -> tuple[HFTensor, ...]:
        return tuple(self.family.tensors(self.shape))

    @property
    def num_parameters(self) -> int:
        """Number of parameters without the padding rows of the token table."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor_bytes(tensor, self.dtype) for tensor in self.tensors)


def describe_export(
    trained: GPTShape, published: PublishedModel | None, dtype: ExportDtype, shard_bytes: int
) -> ExportedModel:
    """Return a model as transformers will see it: in the family and with the positions of the published model that it
    was made from. Raises ConfigError, CheckpointError."""
    if published is not None:
        family = get_family(published.entries, published.source)
    else:
        family = None
    if published is None or family is None or family.lost(trained):
        return ExportedModel(trained, family_of(trained), dtype, shard_bytes)
    rows = None
    seq_len = max(trained.seq_len, published.shape.seq_len)
    if trained.positions == "learned":
        rows = last_positions(published, trained.seq_len)
        seq_len = trained.seq_len + (0 if rows is None else len(rows))
    return ExportedModel(replace(trained, seq_len=seq_len), family, dtype, shard_bytes, published, rows)


def write_model(
    weights: Weights,
    model: ExportedModel,
    tokenizer: Tokenizer,
    out: Path,
    *,
    card: str,
    overwrite: bool,
    progress: Callable[[int], object] = lambda num_bytes: None,
    chat_template: str | None = None,
) -> None:
    """Write configurations, weights, tokenizer and the model card `card` to `out`, all of it or nothing.

    A chat template replaces the tokenizer's own, and the token that ends a turn in it ends generated text too.
    `overwrite` replaces the folder, which was checked (checkpoint/hf_write.py). Every file of weights is read back and
    compared. Raises ConfigError for weights that `dtype` cannot hold, DataError when `out` cannot be written,
    MachineError when the disk returns something else than was written.
    """
    files = plan_files(model.tensors, model.dtype, model.shard_bytes)
    check_space(out, model.weight_bytes)
    with new_folder(out, replace=overwrite) as folder:
        read = partial(_parts, weights, model)
        for name, tensors in files.items():
            write_file(folder / name, tensors, model.dtype, read, progress)
        if len(files) > 1:
            write_index(folder, files, model.dtype)
        save_for_transformers(tokenizer, folder)
        if chat_template is not None:
            path = folder / TOKENIZER_CONFIG_NAME
            _write_json(path, {**load_json(path, Rules(ConfigError)), "chat_template": chat_template})
            # A newer transformers would take this file instead.
            (folder / TEMPLATE_NAME).unlink(missing_ok=True)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        config, generation = _configs(model, tokenizer)
        if chat_template is not None and (end := _end_of_turn(tokenizer, chat_template)) is not None:
            ends = _listed(generation.get("eos_token_id"))
            generation |= {} if end in ends else {"eos_token_id": [*ends, end]}
        _write_json(folder / GENERATION_NAME, generation)
        # Last, because a folder without it cannot be loaded.
        _write_json(folder / CONFIG_NAME, config)


def _configs(model: ExportedModel, tokenizer: Tokenizer) -> tuple[dict[str, object], dict[str, object]]:
    """Return config.json and generation_config.json: those of the published model, with what is different now."""
    # Some families take a token of theirs for padding where none is named.
    own = {"transformers_version": _VERSION, "pad_token_id": None, **generation_ids(tokenizer)}
    generation: dict[str, object] = {}
    if model.published is None:
        config = {**model.family.write(model.shape), **own}
    else:
        config = _changed_entries(model.published, model)
        path = (model.published.folder or Path()) / GENERATION_NAME
        if path.is_file():
            generation = load_json(path, Rules(ConfigError))
        else:
            generation = {}
        _check_tokens((config, generation), own, tokenizer.eot_token, model.shape.vocab_size)
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    config.pop("torch_dtype", None)
    config |= {"model_type": model.family.model_type, "architectures": [model.family.architecture]}
    config[dtype] = _TORCH_NAMES[model.dtype]
    return config, generation or {key: config[key] for key in own if config.get(key) is not None}


def _changed_entries(published: PublishedModel, model: ExportedModel) -> dict[str, object]:
    """Return the entries of a published config.json, and the new ones where the run changed the shape."""
    before, now = (model.family.write(shape) for shape in (published.shape, model.shape))
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    gone = changed | ({"rope_parameters"} if changed & {"rope_theta", "rope_scaling"} else set())
    unchanged = {key: value for key, value in published.entries.items() if key not in gone}
    return unchanged | {key: now[key] for key in changed & now.keys()}


def _check_tokens(
    files: Sequence[dict[str, object]], own: Mapping[str, object], eot_token: int, vocab_size: int
) -> None:
    """Replace special tokens that the model does not have, and the end of a text where no file names the run's."""
    for file in files:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if any(type(token) is not int or not 0 <= token < vocab_size for token in _listed(file.get(key))):
                file[key] = own[key]
    ends = [token for file in files for token in _listed(file.get("eos_token_id"))]
    if ends and eot_token not in ends:
        for file in files:
            file |= {"eos_token_id": eot_token} if file else {}


def _end_of_turn(tokenizer: Tokenizer, source: str) -> int | None:
    """Return the token with which turns end in a chat template; None where a text of several tokens ends them."""
    tokenizer, template = open_template(tokenizer, source)
    tokens = tokenizer.encode(template.end_of_turn)
    return tokens[0] if len(tokens) == 1 else None


def _listed(token: object) -> list[object]:
    if isinstance(token, list):
        return token
    if token is None:
        return []
    return [token]


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _parts(stored: Weights, model: ExportedModel, tensor: HFTensor) -> Iterator[Tensor]:
    """Yield consecutive flat parts of one of transformers' tensors, in its dtype."""
    dtype, (rows, columns) = dtype_of(tensor, model.dtype), _as_matrix(tensor)
    last = model.last_positions if tensor.parameter == POSITIONS else None
    zeros = (tensor.skipped_rows if tensor.parameter else rows) * columns
    for done in range(0, zeros, _PART_ELEMENTS):
        yield torch.zeros(min(_PART_ELEMENTS, zeros - done), dtype=_TORCH_DTYPES[dtype])
    if tensor.transposed:
        yield _transposed(stored, dtype, tensor)
        return
    first = tensor.first_row * columns
    count = rows * columns - zeros - (0 if last is None else last.numel())
    for done in range(0, count, _PART_ELEMENTS):
        part = stored.read(tensor.parameter, first + done, min(_PART_ELEMENTS, count - done))
        yield _converted(part, dtype, tensor.name)
    if last is not None:
        yield _converted(last.flatten(), dtype, tensor.name)


def _as_matrix(tensor: HFTensor) -> tuple[int, int]:
    """Return the number of rows, and of elements per row."""
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _transposed(stored: Weights, dtype: ExportDtype, tensor: HFTensor) -> Tensor:
    """Return a tensor that transformers stores transposed, flattened. A few rows of ours are read at a time."""
    columns, rows = _as_matrix(tensor)
    theirs = torch.empty(columns, rows, dtype=_TORCH_DTYPES[dtype])
    at_once = max(1, _PART_ELEMENTS // columns)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        ours = stored.read(tensor.parameter, (tensor.first_row + row) * columns, count * columns)
        theirs[:, row : row + count] = _converted(ours, dtype, tensor.name).view(count, columns).t()
    return theirs.view(-1)


def _converted(weights: Tensor, dtype: ExportDtype, name: str) -> Tensor:
    if not weights.isfinite().all():
        raise ConfigError(
            f"'{name}' holds NaN or infinity: training diverged before this checkpoint. Name another one."
        )
    converted = weights.to(_TORCH_DTYPES[dtype])
    if not converted.isfinite().all():
        largest = weights.abs().max().item()
        legal = "fp32 or bf16" if dtype == "fp16" else "fp32"
        raise ConfigError(f"{dtype} cannot hold the {largest:g} in '{name}'. Legal here: --dtype {legal}.")
    return converted


def export_adapters(
    checkpoint: Path, shape: GPTShape, family: Family, base: str, out: Path, *, card: str, overwrite: bool
) -> int:
    """Write a checkpoint's adapters to `out` for peft, in fp32, all of it or nothing; return their bytes.

    Raises CheckpointError, DataError and MachineError as `write_model` does.
    """
    stored = StoredWeights(checkpoint)
    tensors = [tensor for pair in peft_tensors(shape, family) for tensor in pair]
    num_bytes = sum(tensor_bytes(tensor, "fp32") for tensor in tensors)
    check_space(out, num_bytes)

    def read(tensor: HFTensor) -> Iterator[Tensor]:
        part = stored.read(tensor.parameter, tensor.first_row * tensor.shape[1], math.prod(tensor.shape))
        if not part.isfinite().all():
            raise ConfigError(f"'{tensor.name}' holds NaN or infinity: training diverged. Name another checkpoint.")
        yield part

    with new_folder(out, replace=overwrite) as folder:
        write_file(folder / ADAPTER_WEIGHTS_NAME, tensors, "fp32", read, lambda written: None)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        config = describe_adapters(shape, family, base)
        # Last, because a folder without it cannot be loaded.
        _write_json(folder / ADAPTER_CONFIG_NAME, config)
    return num_bytes
