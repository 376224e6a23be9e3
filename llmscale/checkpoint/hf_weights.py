"""Weights between our GPT and `transformers.GPT2LMHeadModel`, both ways.

Hugging Face stores a linear layer as Conv1D, [inputs, outputs], the transpose of ours, and a token table
without our padding rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.architecture.gpt2 import name_in_gpt2
from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.architecture.shape import Activation, GPTShape
from llmscale.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import GPT2Config

#: transformers' names of our activations; each has synonyms in `ACTIVATIONS_FROM_HF`.
ACTIVATIONS_TO_HF: dict[Activation, str] = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
ACTIVATIONS_FROM_HF: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def to_hf_state_dict(state: Mapping[str, Tensor], shape: GPTShape) -> dict[str, Tensor]:
    """Our state dict as GPT2LMHeadModel's, head included; the padding rows of the token table are cut off.

    A model without biases gets biases of zeros: GPT2LMHeadModel has no switch for them. Raises
    CheckpointError for a missing, surplus or misshapen tensor.
    """
    pairs = _pairs(shape)
    _check_names(state, {pair.ours for pair in pairs}, "checkpoint")
    converted: dict[str, Tensor] = {}
    for pair in pairs:
        tensor = _checked(state, pair.ours, pair.dims)
        if pair.ours == "wte.weight":
            tensor = tensor[: shape.vocab_size]
        converted[pair.theirs] = (tensor.t() if pair.is_linear else tensor).contiguous()
        if not shape.bias and not pair.ours.startswith(("wte", "wpe")):
            converted[pair.theirs.removesuffix("weight") + "bias"] = tensor.new_zeros(pair.dims[0])
    converted["lm_head.weight"] = converted["transformer.wte.weight"]
    return converted


def from_hf_state_dict(state: Mapping[str, Tensor], shape: GPTShape) -> dict[str, Tensor]:
    """GPT2LMHeadModel's (or GPT2Model's) state dict as ours; the token table gets padding rows of zeros.

    Raises CheckpointError for a missing, surplus or misshapen tensor, and for a head that is not the table.
    """
    prefix = "" if "wte.weight" in state else "transformer."
    table = f"{prefix}wte.weight"
    head = state.get("lm_head.weight")
    if head is not None and table in state and not torch.equal(head, state[table]):
        raise CheckpointError("lm_head.weight differs from wte.weight: a model with an untied head has no place here.")
    # Buffers of old versions of transformers: the causal mask.
    masks = (".attn.bias", ".attn.masked_bias")
    weights = {k: v for k, v in state.items() if k != "lm_head.weight" and not k.endswith(masks)}
    pairs = [replace(pair, theirs=pair.theirs.replace("transformer.", prefix, 1)) for pair in _pairs(shape)]
    _check_names(weights, {pair.theirs for pair in pairs}, "GPT-2 model")
    converted: dict[str, Tensor] = {}
    for pair in pairs:
        if pair.ours == "wte.weight":
            tensor = _checked(weights, pair.theirs, (shape.vocab_size, shape.n_embd))
            padding = tensor.new_zeros(shape.padded_vocab_size - shape.vocab_size, shape.n_embd)
            converted[pair.ours] = torch.cat([tensor, padding])
        else:
            tensor = _checked(weights, pair.theirs, pair.dims[::-1] if pair.is_linear else pair.dims)
            converted[pair.ours] = (tensor.t() if pair.is_linear else tensor).contiguous()
    return converted


def import_transformers() -> ModuleType:
    """The transformers package, without torchvision where that is broken.

    Streaming requires torchvision, and transformers imports it for images. One that was built for another
    torch (a CPU torch beside PyPI's torchvision, say) fails in that import, and GPT2LMHeadModel with it.
    Raises ConfigError where transformers is missing.
    """
    try:
        import transformers
        from transformers.utils import import_utils
    except ImportError as error:
        raise ConfigError("Hugging Face models need transformers below 5: `pip install 'llmscale[eval]'`.") from error
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        import_utils._torchvision_available = False
    return transformers


def hf_config(shape: GPTShape) -> GPT2Config:
    """The configuration of the GPT2LMHeadModel that computes what a GPT of this shape computes."""
    return import_transformers().GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        activation_function=ACTIVATIONS_TO_HF[shape.activation],
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        # GPT-2's own token ids (50256) need not exist in this vocabulary.
        bos_token_id=None,
        eos_token_id=None,
    )


def shape_from_hf_config(config: GPT2Config) -> GPTShape:
    """The GPTShape of a GPT-2 configuration; raises ConfigError for settings that our GPT does not have."""
    if config.model_type != "gpt2":
        raise ConfigError(f"the Hugging Face model is of type '{config.model_type}'; only 'gpt2' can be loaded.")
    legal: dict[str, tuple[object, ...]] = {
        "activation_function": tuple(ACTIVATIONS_FROM_HF),
        "n_inner": (None, 4 * config.n_embd),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "embd_pdrop": (config.resid_pdrop,),
        "attn_pdrop": (config.resid_pdrop,),
    }
    for name, values in legal.items():
        value = getattr(config, name)
        if value not in values:
            raise ConfigError(
                f"the Hugging Face model has {name} {value!r}; only {' or '.join(map(repr, values))} can be loaded."
            )
    return GPTShape(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        vocab_size=config.vocab_size,
        seq_len=config.n_positions,
        activation=ACTIVATIONS_FROM_HF[config.activation_function],
        dropout=config.resid_pdrop,
    )


@dataclass(frozen=True)
class _Pair:
    """A tensor of ours, and what it is in GPT2LMHeadModel."""

    ours: str
    theirs: str
    dims: tuple[int, ...]
    """Of ours."""
    is_linear: bool
    """A matrix that is stored transposed; not so an embedding."""


def _pairs(shape: GPTShape) -> list[_Pair]:
    """Every tensor that this shape has."""
    return [
        _Pair(
            tensor.name,
            name_in_gpt2(tensor.block, tensor.layer, tensor.parameter.name),
            tensor.parameter.shape,
            is_linear=tensor.kind == "matrix",
        )
        for tensor in ParameterTensors(shape.architecture).all
    ]


def _check_names(state: Mapping[str, Tensor], expected: Set[str], what: str) -> None:
    missing, surplus = sorted(expected - state.keys()), sorted(state.keys() - expected)
    for names, problem in ((missing, "lacks"), (surplus, "has no place for")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"the {what} {problem} '{names[0]}'{more}: it is not of this model's shape.")


def _checked(state: Mapping[str, Tensor], name: str, dims: tuple[int, ...]) -> Tensor:
    tensor = state[name]
    if tuple(tensor.shape) != dims:
        raise CheckpointError(f"'{name}' is {list(tensor.shape)}, and the model's shape says {list(dims)}.")
    return tensor
