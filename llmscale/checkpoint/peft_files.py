"""Adapters in the format of Hugging Face's peft: adapter_config.json, and the tensors' places among ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.hf_config import family_of, get_family
from llmscale.architecture.layers import ADAPTERS
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import WeightsFiles, list_safetensors
from llmscale.checkpoint.hf_write import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from llmscale.config.hf_model import PublishedModel
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import open_regular, unreadable_as

if TYPE_CHECKING:
    import torch.distributed as dist
    from deepspeed import DeepSpeedEngine
    from torch import Tensor

_PREFIX = "base_model.model."
#: Settings of peft that our adapters lack, with the values that leave them out.
_OFF: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    # Others subtract the first adapters from the base.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
}


def peft_tensors(shape: GPTShape, family: Family) -> Iterator[tuple[HFTensor, HFTensor]]:
    """Yield A [rank, inputs] and B [outputs, rank] of each of the family's linear layers, in the files of peft."""
    for tensor in family.tensors(shape):
        place, _, kind = tensor.parameter.rpartition(".")
        rows = shape.adapter_rows(re.sub(r"^blocks\.\d+\.", "", place))
        if kind != "weight" or not rows:
            continue
        outputs, inputs = tensor.shape[::-1] if tensor.transposed else tensor.shape
        # A family may have three layers where ours has one adapter: each gets its A, and its rows of B.
        number = next(index for index in range(len(rows)) if tensor.first_row < sum(rows[: index + 1]))
        module = _PREFIX + tensor.name.removesuffix(".weight")
        rank = shape.lora_rank
        yield (
            HFTensor(f"{module}.lora_A.weight", f"{place}.{ADAPTERS[0]}", (rank, inputs), number * rank),
            HFTensor(f"{module}.lora_B.weight", f"{place}.{ADAPTERS[1]}", (outputs, rank), tensor.first_row),
        )


def describe_adapters(shape: GPTShape, family: Family, base: str) -> dict[str, object]:
    """Return adapter_config.json for adapters of the model `base`."""
    modules = {re.split(r"\.\d+\.", a.name)[-1].removesuffix(".lora_A.weight") for a, _ in peft_tensors(shape, family)}
    alpha = shape.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(tensor.transposed for tensor in family.tensors(shape)),
        "target_modules": sorted(modules),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def read_adapters(folder: Path, shape: GPTShape, family: Family) -> dict[str, Tensor]:
    """Read peft's adapters into tensors of ours, [adapters x rank, inputs] and [outputs, rank] in fp32, by name.

    A layer that the files leave out gets zeros: it adds nothing, and no gradient reaches it. Raises CheckpointError for
    adapters that the shape has no place for.
    """
    check_adapters(folder, shape, family)
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / ADAPTER_WEIGHTS_NAME)

    own = {tensor.name: tensor.parameter.shape for tensor in shape.tensors.all if tensor.name.endswith(ADAPTERS)}
    adapters = {name: torch.zeros(size) for name, size in own.items()}
    filled = set[tuple[str, int]]()
    for pair in peft_tensors(shape, family):
        for tensor in pair:
            if tensor.name not in stored:
                continue
            value = stored[tensor.name].float()
            if not value.isfinite().all():
                raise CheckpointError(f"{folder}: '{tensor.name}' holds NaN or infinity. Name other adapters.")
            place = adapters[tensor.parameter].narrow(0, tensor.first_row, tensor.shape[0])
            if (tensor.parameter, tensor.first_row) in filled and not torch.equal(place, value):
                raise CheckpointError(
                    f"{folder}: '{tensor.name}' differs from that of the layer beside it, and llmscale has one for "
                    "both. Merge the adapters with peft, and begin with that folder."
                )
            filled.add((tensor.parameter, tensor.first_row))
            place.copy_(value)
    return adapters


def family_beside(shape: GPTShape, base: PublishedModel | None) -> Family:
    """Return the family whose layers the adapters of a published model, or of a run, are named after."""
    if base is not None:
        return get_family(base.entries, base.source)
    return family_of(shape)


def load_adapters(engine: DeepSpeedEngine, folder: Path, base: PublishedModel | None, group: dist.ProcessGroup) -> None:
    """Fill this rank's part of the adapters from a folder of peft. Collective. Raises CheckpointError on every rank."""
    from llmscale.engine.collectives import on_all_ranks, on_main_rank
    from llmscale.engine.zero_shards import refresh_low_precision_weights, weights_to_fill

    shape = engine.module.shape
    family = family_beside(shape, base)
    # Rank 0 reads them for all: other nodes might have other files at that path.
    adapters = on_main_rank(group, lambda: read_adapters(folder, shape, family))

    def fill() -> None:
        for views in weights_to_fill(engine):
            for name in adapters.keys() & views.keys():
                view = views[name]
                view.local.copy_(adapters[name].view(-1)[view.start : view.start + view.local.numel()])

    on_all_ranks(group, fill)
    refresh_low_precision_weights(engine)


def check_adapters(folder: Path, shape: GPTShape, family: Family) -> None:
    """Raise CheckpointError unless a folder of peft holds adapters of this rank and scale, of layers that have some.

    Reads no numbers.
    """
    path = folder / ADAPTER_CONFIG_NAME
    remedy = "Name a folder that peft's save_pretrained or `llmscale export` wrote."
    with unreadable_as(CheckpointError, path, remedy):
        config = load_json(path, Rules(CheckpointError, not_finite=True))
    for name, legal in _OFF.items():
        if (value := config.get(name, legal[0])) not in legal:
            raise CheckpointError(f"{path}: {name} is {str(value)[:80]}, which llmscale does not have.")
    for key, flag, own in (("r", "--lora-rank", shape.lora_rank), ("lora_alpha", "--lora-alpha", shape.lora_alpha)):
        if config.get(key) != own:
            value = str(config.get(key))[:80]
            raise CheckpointError(f"{path}: {key} is {value}, and {own:g} here. Give {flag} {value}.")
    path = folder / ADAPTER_WEIGHTS_NAME
    with unreadable_as(CheckpointError, path):
        open_regular(path).close()
    stored = list_safetensors(WeightsFiles(folder, (path,), {}))
    places = {tensor.name: tensor for pair in peft_tensors(shape, family) for tensor in pair}
    if not stored:
        raise CheckpointError(f"{path} holds no adapters. Name another folder.")
    if strange := sorted(stored.keys() - places.keys()):
        raise CheckpointError(
            f"{folder} holds '{strange[0][:200]}', which --lora-targets {shape.lora_targets} has no place for. Give "
            "the layers that it adapts, or leave the flag out for all."
        )
    for name, tensor in stored.items():
        if tensor.shape != places[name].shape:
            sizes = f"{list(tensor.shape)}, not {list(places[name].shape)}"
            raise CheckpointError(f"{folder}: '{name}' is {sizes}: it is of another model.")
