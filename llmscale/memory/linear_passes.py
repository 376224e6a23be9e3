"""A linear layer, forwards and backwards, with what autocast and ZeRO-3 make of it. No torch."""

from __future__ import annotations

from collections.abc import Callable

from llmscale.memory.block_sizes import LAYERS, BlockSizes
from llmscale.memory.ledger import Ledger

#: Drops those of the names that nothing keeps.
Drop = Callable[..., None]

#: Layers whose input is a layer norm's result: fp32 under autocast.
_AFTER_NORM = ("qkv", "up")


def run_linear(ledger: Ledger, sizes: BlockSizes, drop: Drop, layer: str, result_bytes: int) -> None:
    """From the layer's input to its result, which has the layer's name.

    Autocast's cache holds the copies of weights until `leave_autocast`. In ZeRO-3's replacement of `F.linear` they, and
    the copy of an fp32 input, are made for one product only; it saves the originals (deepspeed/runtime/zero/linear.py).
    """
    result = {layer: result_bytes}
    if not sizes.autocast:
        ledger.keep(**result)
        return
    ledger.cast(**{f"{layer}_bias": sizes.bias_cast(layer)})
    after_norm = layer in _AFTER_NORM
    if sizes.saves_cast_inputs:
        ledger.cast(**{f"{layer}_weight": sizes.weight_cast(layer)})
        if after_norm:
            ledger.keep(**{f"{layer}_input": sizes.width})
        ledger.keep(**result)
        if after_norm:
            drop(f"{layer}_input")
        return
    ledger.cast(weight_copy=sizes.weight_cast(layer))
    ledger.keep(input_copy=sizes.width if after_norm else 0)
    ledger.keep(**result)
    ledger.drop("weight_copy", "input_copy")


def leave_autocast(ledger: Ledger, saved: frozenset[str]) -> None:
    """The outermost autocast region ends: what is not saved of the weights' copies goes."""
    casts = {f"{layer}_{part}" for layer in LAYERS for part in ("weight", "bias")}
    ledger.drop(*(casts - saved))


def linear_backward(ledger: Ledger, sizes: BlockSizes, layer: str, saved: str, incoming: tuple[str, ...]) -> None:
    """Gradients of the layer's input, as `<saved>_gradient`, and of its weights, under autocast in 16 bit first.

    `saved` is the input; `incoming` are the names that end with the layer's backward pass.
    """
    # ReLU reads its own result once more.
    read_again = saved == "act" and sizes.shape.activation == "relu"
    done = () if read_again else (saved,)
    parameters = sizes.weight(layer) + sizes.bias(layer)
    recasts = sizes.autocast and not sizes.saves_cast_inputs
    if recasts:
        ledger.cast(weight_copy=sizes.weight_cast(layer))
    ledger.use(**{f"{saved}_gradient": sizes.hidden if layer == "down" else sizes.width})
    if not sizes.autocast:
        ledger.gradient(parameters)
        ledger.drop(*incoming, *done)
        return
    if recasts:
        ledger.keep(input_copy=sizes.width if layer in _AFTER_NORM else 0)
    ledger.use(weight_gradient=sizes.weight_cast(layer), bias_gradient=sizes.bias_cast(layer))
    ledger.drop(*incoming, f"{layer}_weight", "weight_copy", "input_copy")
    if recasts and layer in _AFTER_NORM:
        ledger.use(norm_gradient=sizes.stream)
        ledger.drop(f"{saved}_gradient")
    ledger.drop(*done)
    ledger.gradient(parameters)
    ledger.drop("weight_gradient", "bias_gradient")
