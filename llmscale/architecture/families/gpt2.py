"""GPT-2 and GPT-3 (transformers.GPT2LMHeadModel), and OPT (transformers.OPTForCausalLM): GPT-3 with ReLU and positions
that begin at 2."""

from __future__ import annotations

from collections.abc import Iterator

from llmscale.architecture.families.family import Entry, Family, Fields, HFTensor, Keys, stacked
from llmscale.architecture.shape import GPTShape

_GPT2_LINEARS = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
#: Rows of OPT's position table that no token uses.
_SKIPPED = 2


def _gpt2_tensors(shape: GPTShape) -> Iterator[HFTensor]:
    """Yield the tensors; linear layers are Conv1D, [inputs, outputs]."""
    h = shape.n_embd
    m = shape.mlp_width
    yield HFTensor("transformer.wte.weight", "wte.weight", (shape.vocab_size, h))
    yield HFTensor("transformer.wpe.weight", "wpe.weight", (shape.seq_len, h))
    linears = {"attn.qkv": (h, 3 * h), "attn.proj": (h, h), "mlp.up": (h, m), "mlp.down": (m, h)}
    own = {tensor.name for tensor in shape.tensors.all}

    def bias(name: str, parameter: str, width: int) -> HFTensor:
        return HFTensor(name, parameter if parameter in own else "", (width,))

    for block in range(shape.n_layer):
        ours = f"blocks.{block}"
        theirs = f"transformer.h.{block}"
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


def _check_gpt2(keys: Keys, _: Fields) -> Fields:
    keys.require("add_cross_attention", False)
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    return {}


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    entries=(
        Entry("n_layer", "n_layer"),
        Entry("n_head", "n_head"),
        Entry("n_embd", "n_embd"),
        Entry("vocab_size", "vocab_size"),
        Entry("n_positions", "seq_len", 1024),
        Entry("n_inner", "mlp_width", lambda keys, fields: 4 * fields["n_embd"]),
        Entry("activation_function", "activation", "gelu_new"),
        Entry("layer_norm_epsilon", "norm_eps", 1e-5),
        Entry("tie_word_embeddings", "tied", True),
    ),
    tensors=_gpt2_tensors,
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    read_more=_check_gpt2,
    adds="bias",
)


def _opt_tensors(shape: GPTShape) -> Iterator[HFTensor]:
    h = shape.n_embd
    bias = bool(shape.mlp_bias)

    def norm(theirs: str, ours: str) -> Iterator[HFTensor]:
        for name in ("weight", "bias"):
            yield HFTensor(f"{theirs}.{name}", f"{ours}.{name}", (h,))

    yield HFTensor("model.decoder.embed_tokens.weight", "wte.weight", (shape.vocab_size, h))
    positions = "model.decoder.embed_positions.weight"
    yield HFTensor(positions, "wpe.weight", (shape.seq_len + _SKIPPED, h), skipped_rows=_SKIPPED)
    for block in range(shape.n_layer):
        ours = f"blocks.{block}"
        theirs = f"model.decoder.layers.{block}"
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


def _check_opt(keys: Keys, fields: Fields) -> Fields:
    keys.require("word_embed_proj_dim", fields["n_embd"])
    keys.require("do_layer_norm_before", True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("layer_norm_elementwise_affine", True)
    return {}


OPT = Family(
    "opt",
    "OPTForCausalLM",
    entries=(
        Entry("num_hidden_layers", "n_layer"),
        Entry("num_attention_heads", "n_head"),
        Entry("hidden_size", "n_embd"),
        Entry("vocab_size", "vocab_size"),
        Entry("max_position_embeddings", "seq_len", 2048),
        Entry("ffn_dim", "mlp_width"),
        Entry("activation_function", "activation", "relu"),
        Entry("enable_bias", "attention_bias", True),
        Entry("enable_bias", "mlp_bias", True),
        Entry("tie_word_embeddings", "tied", True),
    ),
    tensors=_opt_tensors,
    dropouts=("dropout", "attention_dropout"),
    read_more=_check_opt,
    # By default token 1 is for padding, whose embedding transformers then leaves untrained.
    write_more=lambda shape: {"word_embed_proj_dim": shape.n_embd, "pad_token_id": None},
)
