"""One block of llmscale.model.block, forwards and backwards, as scripts of what appears and what goes. No torch.

They follow the operators in the order in which PyTorch runs them on a GPU. A tensor goes where the last Python name, or
the last reference saved for the backward pass, goes.
"""

from __future__ import annotations

from llmscale.memory.block_sizes import BlockSizes
from llmscale.memory.ledger import Ledger
from llmscale.memory.linear_passes import Drop, linear_backward, run_linear


def saved_by_autograd(sizes: BlockSizes) -> frozenset[str]:
    """What a block saves for the backward pass beside its input, with autocast's weights.

    Bytes per element of [b, t, h] in 16 bit, without dropout: two layer norms' inputs and results 2 x (2 + 2), of which
    the first input is the block's own; q, k and v 6; attention's output 2; the non-linearity's input and result 8 + 8
    (ReLU: its result alone). Dropout adds a byte for each of two masks, eager attention 5 a t / h of them.
    """
    names = {
        *("ln_1_statistics", "qkv_input", "qkv", "padded_qkv", "attention", "attention_statistics", "proj_input"),
        *("softmax", "attention_mask", "dropped_softmax", "proj_mask", "stream_mid", "ln_2_statistics", "up_input"),
        *("up", "act", "down_mask", "qkv_weight", "proj_weight", "up_weight", "down_weight"),
    }
    if sizes.head_padding:
        names.remove("qkv")  # the kernel has its padded copy
    if sizes.shape.activation == "relu":
        names.remove("up")
    return frozenset(names)


def saved_by_selection(sizes: BlockSizes) -> frozenset[str]:
    """What `selective` checkpointing saves beside the block's input: results of matrix products and, where no random
    numbers are drawn in it, of attention (llmscale/engine/activation_checkpointing.py)."""
    products = frozenset({"qkv", "proj", "up", "down"})
    return products if sizes.dropout else products | {"attention", "attention_statistics"}


def run_block(ledger: Ledger, sizes: BlockSizes, kept: frozenset[str]) -> None:
    """A forward pass from `stream_in`, which the caller holds, to `stream_out`.

    Of what lies between only `kept` stays, and autocast's copies of the weights.
    """

    def drop(*names: str) -> None:
        ledger.drop(*(name for name in names if name not in kept))

    _run_attention(ledger, sizes, drop)
    _run_mlp(ledger, sizes, drop)


def _run_attention(ledger: Ledger, sizes: BlockSizes, drop: Drop) -> None:
    _run_norm(ledger, sizes, drop, "ln_1", "qkv")
    run_linear(ledger, sizes, drop, "qkv", sizes.qkv)
    if sizes.attention == "eager":
        _run_eager_attention(ledger, sizes, drop)
    else:
        if sizes.head_padding:
            ledger.keep(padded_qkv=3 * sizes.heads)
        ledger.keep(attention=sizes.heads, attention_statistics=sizes.attention_statistics)
        drop("attention_statistics")
    if sizes.head_padding:
        ledger.keep(proj_input=sizes.width)
    run_linear(ledger, sizes, drop, "proj", sizes.width)
    _run_dropout(ledger, sizes, drop, "proj")
    ledger.drop("ln_1")
    drop("qkv_input", "qkv", "padded_qkv", "attention", "proj_input")
    ledger.keep(stream_mid=sizes.stream)
    drop("proj", "dropped_proj")


def _run_mlp(ledger: Ledger, sizes: BlockSizes, drop: Drop) -> None:
    _run_norm(ledger, sizes, drop, "ln_2", "up")
    run_linear(ledger, sizes, drop, "up", sizes.hidden)
    ledger.keep(act=sizes.hidden)
    drop("up")
    run_linear(ledger, sizes, drop, "down", sizes.width)
    drop("act")
    _run_dropout(ledger, sizes, drop, "down")
    ledger.drop("ln_2")
    drop("up_input")
    ledger.keep(stream_out=sizes.stream)
    drop("down", "dropped_down", "stream_mid")


def _run_norm(ledger: Ledger, sizes: BlockSizes, drop: Drop, norm: str, layer: str) -> None:
    """Layer norm, whose result the next linear layer saves but where autocast hands it a copy."""
    ledger.keep(**{f"{norm}_statistics": sizes.norm_statistics, norm: sizes.stream})
    drop(f"{norm}_statistics")
    if not sizes.saves_cast_inputs:
        ledger.rename(norm, f"{layer}_input")


def _run_dropout(ledger: Ledger, sizes: BlockSizes, drop: Drop, layer: str) -> None:
    if sizes.dropout:
        ledger.keep(**{f"dropped_{layer}": sizes.width, f"{layer}_mask": sizes.mask})
        drop(f"{layer}_mask", layer)


def _run_eager_attention(ledger: Ledger, sizes: BlockSizes, drop: Drop) -> None:
    ledger.keep(scores=sizes.scores)
    ledger.keep(softmax=sizes.scores)
    ledger.drop("scores")
    if sizes.dropout:
        ledger.keep(dropped_softmax=sizes.scores, attention_mask=sizes.scores_mask)
        drop("attention_mask", "softmax")
    ledger.keep(attention=sizes.width)
    drop("softmax", "dropped_softmax")


def run_block_backward(ledger: Ledger, sizes: BlockSizes, *, caller_holds_gradient: bool) -> None:
    """A backward pass from `gradient`, of [b, t, h], to the same name for the block's input.

    With `caller_holds_gradient` the incoming one is alive until the caller drops it as `output_gradient`.
    """
    if caller_holds_gradient:
        ledger.rename("gradient", "output_gradient")
    incoming = _branch_backward(ledger, sizes, "down")
    linear_backward(ledger, sizes, "down", "act", incoming)
    ledger.use(up_gradient=sizes.hidden)
    ledger.drop("act_gradient", "act", "up")
    linear_backward(ledger, sizes, "up", "up_input", ("up_gradient",))
    _norm_backward(ledger, sizes, "ln_2", "up_input_gradient", "stream_mid")
    _add_residual(ledger, sizes, in_place=not caller_holds_gradient)

    incoming = _branch_backward(ledger, sizes, "proj")
    linear_backward(ledger, sizes, "proj", "proj_input", incoming)
    _attention_backward(ledger, sizes)
    ledger.use(stacked=sizes.qkv)
    ledger.drop("q_k_v_gradients")
    ledger.use(qkv_gradient=sizes.qkv)
    ledger.drop("stacked")
    linear_backward(ledger, sizes, "qkv", "qkv_input", ("qkv_gradient",))
    _norm_backward(ledger, sizes, "ln_1", "qkv_input_gradient", "stream_in")
    _add_residual(ledger, sizes, in_place=True)


def _branch_backward(ledger: Ledger, sizes: BlockSizes, layer: str) -> tuple[str, ...]:
    """From the residual stream's gradient to that of a linear layer's result: the cast and the dropout between them.

    Returns the names that end with the layer's backward pass; none where it is the stream's gradient itself.
    """
    incoming: tuple[str, ...] = ()
    if sizes.autocast:
        ledger.use(branch_cast=sizes.width)
        incoming = ("branch_cast",)
    if sizes.dropout:
        ledger.use(branch=sizes.width)
        ledger.drop(f"{layer}_mask", "branch_cast")
        incoming = ("branch",)
    return incoming


def _norm_backward(ledger: Ledger, sizes: BlockSizes, norm: str, incoming: str, saved: str) -> None:
    if sizes.autocast:
        ledger.use(norm_gradient=sizes.stream)
        ledger.drop(incoming)
    ledger.use(stream_gradient=sizes.stream)
    ledger.gradient(sizes.norm_parameters)
    ledger.drop(incoming, "norm_gradient", f"{norm}_statistics", saved)


def _add_residual(ledger: Ledger, sizes: BlockSizes, *, in_place: bool) -> None:
    """The gradient of the branch is added to that of the stream; to a new tensor where others hold the latter."""
    if not in_place:
        ledger.use(gradient=sizes.stream)
    ledger.drop("stream_gradient")


def _attention_backward(ledger: Ledger, sizes: BlockSizes) -> None:
    if sizes.attention == "eager":
        ledger.use(softmax_gradient=sizes.scores)
        if sizes.dropout:
            ledger.use(scores_gradient=sizes.scores)
            ledger.drop("softmax_gradient", "dropped_softmax", "attention_mask")
            ledger.rename("scores_gradient", "softmax_gradient")
        ledger.use(scores_gradient=sizes.scores)
        ledger.drop("softmax_gradient", "softmax")
        ledger.use(q_k_v_gradients=3 * sizes.width)
        ledger.drop("scores_gradient", "proj_input_gradient", "qkv", "attention")
        return
    if sizes.head_padding:
        ledger.use(attention_gradient=sizes.heads)
        ledger.drop("proj_input_gradient", "proj_input")
    ledger.use(padded_gradients=3 * sizes.heads, workspace=sizes.attention_workspace)
    ledger.drop("workspace", "proj_input_gradient", "attention_gradient")
    ledger.drop("qkv", "padded_qkv", "attention", "attention_statistics")
    if sizes.head_padding:
        ledger.use(q_k_v_gradients=3 * sizes.width)
        ledger.drop("padded_gradients")
    else:
        ledger.rename("padded_gradients", "q_k_v_gradients")
