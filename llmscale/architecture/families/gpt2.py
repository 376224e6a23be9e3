"""GPT-2 and GPT-3 (transformers.GPT2LMHeadModel)."""

from __future__ import annotations

from collections.abc import Iterator

from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.families.family import Family, HFTensor
from llmscale.architecture.shape import GPTShape

_ACTIVATIONS = {
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
    **{"silu": "silu", "swish": "silu"},
}
_THEIR_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
_THEIRS = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def _read(keys: Keys) -> dict[str, object]:
    keys.require("add_cross_attention", False)
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    n_embd, n_head = keys.heads("n_embd", "n_head")
    return {
        "n_layer": keys.layers("n_layer"),
        "n_head": n_head,
        "n_embd": n_embd,
        "vocab_size": keys.count("vocab_size"),
        "seq_len": keys.count("n_positions", 1024),
        "mlp_width": keys.count("n_inner", 4 * n_embd),
        "activation": keys.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "tied": keys.flag("tie_word_embeddings", True),
    }


def _write(shape: GPTShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "n_positions": shape.seq_len,
        "n_embd": shape.n_embd,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_inner": shape.mlp_width,
        "activation_function": _THEIR_ACTIVATIONS[shape.activation],
        "layer_norm_epsilon": shape.norm_eps,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied,
    }


def _tensors(shape: GPTShape) -> Iterator[HFTensor]:
    """Linear layers are Conv1D: [inputs, outputs]."""
    h, m = shape.n_embd, shape.mlp_width
    yield HFTensor("transformer.wte.weight", "wte.weight", (shape.vocab_size, h))
    yield HFTensor("transformer.wpe.weight", "wpe.weight", (shape.seq_len, h))
    linears = {"attn.qkv": (h, 3 * h), "attn.proj": (h, h), "mlp.up": (h, m), "mlp.down": (m, h)}
    own = {tensor.name for tensor in shape.tensors.all}

    def bias(name: str, parameter: str, width: int) -> HFTensor:
        return HFTensor(name, parameter if parameter in own else "", (width,))

    for block in range(shape.n_layer):
        ours, theirs = f"blocks.{block}", f"transformer.h.{block}"
        for norm in ("ln_1", "ln_2"):
            yield HFTensor(f"{theirs}.{norm}.weight", f"{ours}.{norm}.weight", (h,))
            yield bias(f"{theirs}.{norm}.bias", f"{ours}.{norm}.bias", h)
        for name, (inputs, outputs) in linears.items():
            yield HFTensor(
                f"{theirs}.{_THEIRS[name]}.weight", f"{ours}.{name}.weight", (inputs, outputs), transposed=True
            )
            yield bias(f"{theirs}.{_THEIRS[name]}.bias", f"{ours}.{name}.bias", outputs)
    yield HFTensor("transformer.ln_f.weight", "ln_f.weight", (h,))
    yield bias("transformer.ln_f.bias", "ln_f.bias", h)
    if not shape.tied:
        yield HFTensor("lm_head.weight", "head.weight", (shape.vocab_size, h))


GPT2 = Family("gpt2", "GPT2LMHeadModel", _read, _write, _tensors, adds_biases=True)
