"""GPT-2's block, written down once: pre-norm, learned positions, one matrix for q, k and v, an MLP of two layers."""

from __future__ import annotations

from llmscale.architecture.description import Architecture
from llmscale.architecture.layers import attention, elementwise, embedding, head, layer_norm, linear

#: Hugging Face's names of our modules (transformers.GPT2LMHeadModel).
_THEIRS = {
    **{"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    **{"blocks": "transformer.h", "wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f"},
}


def describe_gpt2(
    *, n_layer: int, n_head: int, n_embd: int, mlp_width: int, rows: int, seq_len: int, bias: bool, tied: bool
) -> Architecture:
    """`rows`: of the token embedding. The names are those of llmscale.model.gpt."""
    h = n_embd
    return Architecture(
        before_blocks=(embedding("wte", rows, h), embedding("wpe", seq_len, h)),
        block=(
            layer_norm("ln_1", h, bias=bias),
            linear("attn.qkv", h, 3 * h, bias=bias),
            attention(n_head, h // n_head),
            linear("attn.proj", h, h, bias=bias),
            elementwise(h),
            layer_norm("ln_2", h, bias=bias),
            linear("mlp.up", h, mlp_width, bias=bias),
            elementwise(mlp_width),
            linear("mlp.down", mlp_width, h, bias=bias),
            elementwise(h),
        ),
        n_layer=n_layer,
        after_blocks=(layer_norm("ln_f", h, bias=bias), head("head", rows, h, tied_to="wte" if tied else "")),
    )


def name_in_gpt2(block: int | None, layer: str, parameter: str) -> str:
    """A tensor's name in a GPT2LMHeadModel's state dict."""
    prefix = "" if block is None else f"{_THEIRS['blocks']}.{block}."
    return f"{prefix}{_THEIRS.get(layer, layer)}.{parameter}"
