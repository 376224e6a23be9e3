"""Our GPT as `transformers.GPT2LMHeadModel`: its tensors and its configuration.

Hugging Face stores a linear layer as Conv1D, [inputs, outputs], the transpose of ours, and a token embedding without
our padding rows.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.architecture.gpt2 import name_in_gpt2
from llmscale.architecture.shape import Activation, GPTShape
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT

if TYPE_CHECKING:
    from transformers import GPT2Config

#: transformers' names of our activations.
_ACTIVATIONS: dict[Activation, str] = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """The model's weights under GPT2LMHeadModel's names, without the head: it is tied to the token embedding.

    The padding rows of the token embedding are cut off. A model without biases gets biases of zeros: GPT2LMHeadModel
    has no switch for them.
    """
    shape, state = model.shape, model.state_dict()
    converted: dict[str, Tensor] = {}
    for entry in shape.tensors.all:
        tensor = state[entry.name]
        if entry.name == "wte.weight":
            tensor = tensor[: shape.vocab_size]
        name = name_in_gpt2(entry.block, entry.layer, entry.parameter.name)
        # An embedding is no matrix.
        converted[name] = (tensor.t() if entry.kind == "matrix" else tensor).contiguous()
        if not shape.bias and entry.layer not in ("wte", "wpe"):
            converted[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
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


def hf_config(shape: GPTShape, eot_token: int, dtype: torch.dtype) -> GPT2Config:
    """The configuration of the GPT2LMHeadModel that computes what a GPT of this shape computes.

    `eot_token`: the id that ends a text. `dtype`: of the stored weights.
    """
    return import_transformers().GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        activation_function=_ACTIVATIONS[shape.activation],
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        # So that `generate` ends a text where training did; GPT-2's own id (50256) need not exist in this vocabulary.
        bos_token_id=eot_token,
        eos_token_id=eot_token,
        architectures=["GPT2LMHeadModel"],
        torch_dtype=dtype,
    )
