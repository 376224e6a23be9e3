"""Embeddings, final norm, output head and loss of llmscale.model.gpt, forwards and backwards. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.memory.block_sizes import BlockSizes
from llmscale.memory.ledger import Ledger, Moment, moments_that_matter

#: The loss and the gradient that the backward pass begins with: both live to its end.
_LOSS_SCALARS = 2


@dataclass(frozen=True)
class EmbeddingMemory:
    """Bytes; `llmscale.memory.activations.ActivationMemory` says what each is."""

    saved_bytes: int
    backward: tuple[Moment, ...]


@dataclass(frozen=True)
class HeadMemory:
    """Bytes; `llmscale.memory.activations.ActivationMemory` says what each is."""

    saved_norm_bytes: int
    saved_logits_bytes: int
    cast_bytes: int
    forward_peak_bytes: int
    backward: tuple[Moment, ...]
    gradient_bytes: int


def count_embeddings(sizes: BlockSizes) -> EmbeddingMemory:
    """Both look-ups, their sum and its dropout; the sum is the first block's input and not counted here."""
    return EmbeddingMemory(sum(_saved_embedding(sizes).values()), _embedding_backward(sizes))


def _saved_embedding(sizes: BlockSizes) -> dict[str, int]:
    """Token ids of b sequences of t + 1, whose inputs and targets are views of them; t positions; the dropout mask."""
    t = sizes.shape.seq_len
    tokens, positions = sizes.tensor(sizes.micro_batch_size * (t + 1), 8), sizes.tensor(t, 8)
    return {"tokens": tokens, "positions": positions, "mask": sizes.mask if sizes.dropout else 0}


def _embedding_backward(sizes: BlockSizes) -> tuple[Moment, ...]:
    """From the gradient of the embeddings' sum to those of both tables."""
    shape, ledger = sizes.shape, Ledger()
    table = sizes.tensor(sizes.table, sizes.stream_bytes)
    ledger.keep(**_saved_embedding(sizes))
    ledger.use(gradient=sizes.stream, head_gradient=table, loss=_LOSS_SCALARS * sizes.tensor(1))
    if sizes.dropout:
        ledger.use(dropped=sizes.stream)
        ledger.drop("gradient", "mask")
        ledger.rename("dropped", "gradient")
    if sizes.micro_batch_size > 1:
        ledger.use(summed=sizes.tensor(shape.seq_len * shape.n_embd, sizes.stream_bytes))
    ledger.gradient(shape.seq_len * shape.n_embd)
    ledger.drop("summed", "positions")
    ledger.use(look_up_gradient=table)
    ledger.drop("gradient")
    if not sizes.autocast and sizes.zero_stage < 3:
        ledger.use(sum=table)  # the head's gradient is a transposed view, to which autograd adds nothing in place
    return moments_that_matter(ledger.moments)


def count_head(sizes: BlockSizes) -> HeadMemory:
    """From the last block's result to the loss, and back to its gradient."""
    ledger = Ledger()
    _run_head(ledger, sizes)
    forward_peak, saved = ledger.peak_bytes, ledger.now
    logits = sizes.fp32_logits + _targets(sizes) + _LOSS_SCALARS * sizes.tensor(1)
    ledger.moments.clear()
    _run_head_backward(ledger, sizes)
    return HeadMemory(
        saved_norm_bytes=saved.activations_bytes - logits,
        saved_logits_bytes=logits,
        cast_bytes=saved.casts_bytes,
        forward_peak_bytes=forward_peak,
        backward=moments_that_matter(ledger.moments),
        gradient_bytes=sizes.tensor(sizes.table, sizes.stream_bytes) + _LOSS_SCALARS * sizes.tensor(1),
    )


def _run_head(ledger: Ledger, sizes: BlockSizes) -> None:
    """In 16 bit the loss converts the logits to fp32; the 16-bit ones live to the end of the model's forward."""
    shape = sizes.shape
    ledger.keep(stream_in=sizes.stream, ln_f_statistics=sizes.norm_statistics, ln_f=sizes.stream)
    if sizes.autocast:
        ledger.cast(head_weight=sizes.tensor(sizes.table))
        ledger.keep(head_input=sizes.width)
    else:
        ledger.rename("ln_f", "head_input")
    ledger.keep(logits=sizes.logits)
    if sizes.autocast and not sizes.saves_cast_inputs:
        ledger.drop("head_weight", "head_input")
        ledger.rename("ln_f", "head_input")
    ledger.drop("ln_f")
    if sizes.compute_bytes == 2:
        ledger.keep(fp32_logits=sizes.fp32_logits)
    ledger.keep(targets=_targets(sizes))
    ledger.keep(log_softmax=sizes.fp32_logits)
    if sizes.compute_bytes == 4 and shape.vocab_size != shape.padded_vocab_size:
        ledger.use(contiguous=sizes.fp32_logits)  # the kernel's copy of a slice
        ledger.drop("contiguous")
    ledger.keep(terms=sizes.tensor(1), loss=sizes.tensor(1))
    ledger.drop("logits", "fp32_logits")


def _run_head_backward(ledger: Ledger, sizes: BlockSizes) -> None:
    """The gradient of a slice is a full tensor of zeros with the slice's gradient copied in."""
    ledger.use(nll_gradient=sizes.fp32_logits, loss_gradient=sizes.tensor(1))
    ledger.drop("targets", "terms")
    ledger.use(gradient=sizes.fp32_logits)
    ledger.drop("nll_gradient", "log_softmax")
    if sizes.compute_bytes == 2:
        ledger.use(sliced_gradient=sizes.tensor(sizes.rows * sizes.shape.vocab_size))
        ledger.drop("gradient")
        ledger.rename("sliced_gradient", "gradient")
    if sizes.shape.vocab_size != sizes.shape.padded_vocab_size:
        ledger.use(logits_gradient=sizes.logits)
        ledger.drop("gradient")
        ledger.rename("logits_gradient", "gradient")
    recasts = sizes.autocast and not sizes.saves_cast_inputs
    if recasts:
        ledger.cast(head_weight=sizes.tensor(sizes.table))
        ledger.keep(input_copy=sizes.width)
    ledger.use(weight_gradient=sizes.tensor(sizes.table))
    ledger.use(head_input_gradient=sizes.width)
    ledger.drop("gradient", "head_weight", "input_copy", *(() if recasts else ("head_input",)))
    if sizes.autocast:
        ledger.use(norm_gradient=sizes.stream)
        ledger.drop("head_input_gradient")
        ledger.use(fp32_weight_gradient=sizes.tensor(sizes.table, 4))
        ledger.drop("weight_gradient", "head_input")
    ledger.use(stream_gradient=sizes.stream)


def _targets(sizes: BlockSizes) -> int:
    """A copy, because rows of b > 1 targets do not lie beside each other; the token ids of both are one tensor."""
    return sizes.tensor(sizes.rows, 8) if sizes.micro_batch_size > 1 else 0
