"""OPT (transformers.OPTForCausalLM): GPT-3 with ReLU, and positions that begin at 2."""

from __future__ import annotations

from collections.abc import Iterator

from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.families.family import Family, HFTensor, stacked
from llmscale.architecture.shape import GPTShape

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
_THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
#: Rows of the position table that no token uses.
_SKIPPED = 2


def _read(keys: Keys) -> dict[str, object]:
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
        "activation": keys.choice("activation_function", _ACTIVATIONS, "relu"),
        "attention_bias": "all" if bias else "none",
        "mlp_bias": bias,
        "tied": keys.flag("tie_word_embeddings", True),
    }


def _write(shape: GPTShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "hidden_size": shape.n_embd,
        "word_embed_proj_dim": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "ffn_dim": shape.mlp_width,
        "activation_function": _THEIR_ACTIVATIONS[shape.activation],
        "enable_bias": bool(shape.mlp_bias),
        "dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "tie_word_embeddings": shape.tied,
        # By default token 1, whose embedding transformers then leaves untrained.
        "pad_token_id": None,
    }


def _tensors(shape: GPTShape) -> Iterator[HFTensor]:
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


OPT = Family("opt", "OPTForCausalLM", _read, _write, _tensors)
