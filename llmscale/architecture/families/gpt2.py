"""GPT-2 and GPT-3 (transformers.GPT2LMHeadModel), and OPT (transformers.OPTForCausalLM): GPT-3 with ReLU and positions
that begin at 2."""

from __future__ import annotations

from collections.abc import Iterator

from llmscale.architecture.families.family import ACTIVATIONS, Family, HFTensor, Keys, stacked
from llmscale.architecture.shape import GPTShape

_OPT_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
#: Our activations by their names in both families.
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
_GPT2_LINEARS = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
#: Rows of OPT's position table that no token uses.
_SKIPPED = 2


def _read_gpt2(keys: Keys) -> dict[str, object]:
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
        "activation": keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "tied": keys.flag("tie_word_embeddings", True),
    }


def _write_gpt2(shape: GPTShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "n_positions": shape.seq_len,
        "n_embd": shape.n_embd,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_inner": shape.mlp_width,
        "activation_function": _WRITTEN_ACTIVATIONS[shape.activation],
        "layer_norm_epsilon": shape.norm_eps,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied,
    }


def _gpt2_tensors(shape: GPTShape) -> Iterator[HFTensor]:
    """Yield the tensors; linear layers are Conv1D, [inputs, outputs]."""
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
                f"{theirs}.{_GPT2_LINEARS[name]}.weight", f"{ours}.{name}.weight", (inputs, outputs), transposed=True
            )
            yield bias(f"{theirs}.{_GPT2_LINEARS[name]}.bias", f"{ours}.{name}.bias", outputs)
    yield HFTensor("transformer.ln_f.weight", "ln_f.weight", (h,))
    yield bias("transformer.ln_f.bias", "ln_f.bias", h)
    if not shape.tied:
        yield HFTensor("lm_head.weight", "head.weight", (shape.vocab_size, h))


GPT2 = Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _write_gpt2, _gpt2_tensors, adds="bias")


def _read_opt(keys: Keys) -> dict[str, object]:
    n_embd, n_head = keys.heads()
    keys.require("word_embed_proj_dim", n_embd)
    keys.require("do_layer_norm_before", True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("layer_norm_elementwise_affine", True)
    bias = keys.flag("enable_bias", True)
    return {
        "n_layer": keys.layers("num_hidden_layers"),
        "n_head": n_head,
        "n_embd": n_embd,
        "vocab_size": keys.count("vocab_size"),
        "seq_len": keys.count("max_position_embeddings", 2048),
        "mlp_width": keys.count("ffn_dim"),
        "activation": keys.choice("activation_function", _OPT_ACTIVATIONS, "relu"),
        "attention_bias": "all" if bias else "none",
        "mlp_bias": bias,
        "tied": keys.flag("tie_word_embeddings", True),
    }


def _write_opt(shape: GPTShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "hidden_size": shape.n_embd,
        "word_embed_proj_dim": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "ffn_dim": shape.mlp_width,
        "activation_function": _WRITTEN_ACTIVATIONS[shape.activation],
        "enable_bias": bool(shape.mlp_bias),
        "dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "tie_word_embeddings": shape.tied,
        # By default token 1, whose embedding transformers then leaves untrained.
        "pad_token_id": None,
    }


def _opt_tensors(shape: GPTShape) -> Iterator[HFTensor]:
    h, bias = shape.n_embd, bool(shape.mlp_bias)

    def norm(theirs: str, ours: str) -> Iterator[HFTensor]:
        for name in ("weight", "bias"):
            yield HFTensor(f"{theirs}.{name}", f"{ours}.{name}", (h,))

    yield HFTensor("model.decoder.embed_tokens.weight", "wte.weight", (shape.vocab_size, h))
    positions = "model.decoder.embed_positions.weight"
    yield HFTensor(positions, "wpe.weight", (shape.seq_len + _SKIPPED, h), skipped_rows=_SKIPPED)
    for block in range(shape.n_layer):
        ours, theirs = f"blocks.{block}", f"model.decoder.layers.{block}"
        yield from norm(f"{theirs}.self_attn_layer_norm", f"{ours}.ln_1")
        parts = {f"{theirs}.self_attn.{name}_proj": h for name in "qkv"}
        yield from stacked(parts, f"{ours}.attn.qkv", h, bias=bias)
        yield from stacked({f"{theirs}.self_attn.out_proj": h}, f"{ours}.attn.proj", h, bias=bias)
        yield from norm(f"{theirs}.final_layer_norm", f"{ours}.ln_2")
        yield from stacked({f"{theirs}.fc1": shape.mlp_width}, f"{ours}.mlp.up", h, bias=bias)
        yield from stacked({f"{theirs}.fc2": h}, f"{ours}.mlp.down", shape.mlp_width, bias=bias)
    yield from norm("model.decoder.final_layer_norm", "ln_f")
    if not shape.tied:
        yield HFTensor("lm_head.weight", "head.weight", (shape.vocab_size, h))


OPT = Family("opt", "OPTForCausalLM", _read_opt, _write_opt, _opt_tensors)
