"""GPT-2 as transformers stores it. No torch."""

from __future__ import annotations

from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.gpt2 import name_in_gpt2
from llmscale.architecture.shape import GPTShape

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


class Gpt2(Family):
    """GPT2LMHeadModel."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"

    def write(self, shape: GPTShape) -> dict[str, object] | None:
        return {
            "model_type": "gpt2",
            "vocab_size": shape.vocab_size,
            "n_positions": shape.seq_len,
            "n_embd": shape.n_embd,
            "n_layer": shape.n_layer,
            "n_head": shape.n_head,
            "activation_function": _ACTIVATIONS[shape.activation],
            "resid_pdrop": shape.dropout,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": shape.dropout,
        }

    def tensors(self, shape: GPTShape) -> tuple[HFTensor, ...]:
        found: list[HFTensor] = []
        for entry in shape.tensors.all:
            name = name_in_gpt2(entry.block, entry.layer, entry.parameter.name)
            size = entry.parameter.shape
            if entry.name == "wte.weight":
                size = (shape.vocab_size, shape.n_embd)
            is_matrix = entry.kind == "matrix"
            found.append(HFTensor(name, entry.name, size[::-1] if is_matrix else size, transposed=is_matrix))
            if not shape.bias and entry.layer not in ("wte", "wpe"):
                rows = size[0]
                bias = name.removesuffix("weight") + "bias"
                found.append(HFTensor(bias, entry.name, (rows,), skipped_rows=rows))
        return tuple(found)
