"""Activation memory of llmscale.model.gpt for one micro-batch, from recorded passes. No torch.

The tensors of a pass are recorded from the model itself (llmscale.memory.activations.recorded). This file sorts them by
the parts of a training step. Parameters and their gradients are left out, because ZeRO decides about them;
`Moment.gradient_parameters` counts the gradients that exist by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.memory.activations.recorded import (
    MicroStep,
    Moment,
    evaluate_segments,
    moments_that_matter,
    recorded_segments,
)
from llmscale.memory.activations.symbols import ONE_RANK, block_branch, ends_branch, shape_symbols
from llmscale.memory.breakdown import allocated_bytes

#: DeepSpeed's cpu_checkpointing keeps the newest checkpoint on the GPU, and the one before until its copy is done
#: (offload_activations.py, keep_last_count and max_fwd_stash_count). One element is left of each other one.
_INPUTS_KEPT_ON_GPU = 2


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block."""

    saved_bytes: int
    """Input, and other tensors saved for the backward pass, without weights cast by autocast."""
    saved_casts_bytes: int
    """Autocast's 16-bit copies of its matrices for the backward pass; 0 with checkpointing and with ZeRO-3."""
    forward_casts_bytes: int
    """Autocast's copies of its weights in its cache until the end of the forward pass; of biases with ZeRO-3."""
    forward_peak_bytes: int
    """Peak of its forward pass, with its input, saved tensors and casts."""
    backward: tuple[Moment, ...]
    """Moments of its backward pass that no later one exceeds: its input, saved and recomputed tensors, gradients of
    activations, and gradients of parameters until DeepSpeed gets them."""
    handovers: tuple[Moment, ...]
    """Moments, in order, at which DeepSpeed gets a layer's gradients."""


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes on the GPU, without parameters and their gradients. They add up over a micro-step:

    - before block i of the forward pass: `before_block_bytes(i, forward=True)`; within the block at most its
      `forward_peak_bytes` more;
    - output head and loss: `before_block_bytes(L, forward=True)` and at most `logits_forward_peak_bytes` more;
    - end of the forward pass: `before_block_bytes(L)`, the final norm's, the logits' and the head's cast;
    - head and loss backwards: `before_block_bytes(L)` and one of the moments `head_backward`;
    - block i backwards: `before_block_bytes(i)`, `head_gradient_bytes` and one of its moments `backward`;
    - embeddings backwards: one of `embedding_backward`, which includes everything.
    """

    blocks: tuple[BlockActivations, ...]
    """Blocks in the order of the forward pass; those of a kind are one object."""
    head_cast_bytes: int
    """Autocast's copy of the token table after the output head has run."""
    saved_embedding_bytes: int
    """The micro-batch's token ids, positions and the embedding's dropout mask, until the end of the backward pass."""
    saved_final_norm_bytes: int
    """The last block's result, the final norm's statistics, the targets, and the gradient of the norm's result."""
    logits_saved_bytes: int
    """The loss, and the gradient of the head's weights, which is made with it."""
    logits_forward_peak_bytes: int
    """Peak from the final norm to the loss."""
    head_backward: tuple[Moment, ...]
    """Moments like a block's `backward` from the loss back to the final norm."""
    head_handovers: tuple[Moment, ...]
    """Moments like a block's `handovers` of the head; none for a tied table."""
    embedding_backward: tuple[Moment, ...]
    """Moments like a block's `backward` at the end. The token table's gradients count as temporaries here: from the
    head, from the look-up and, except with autocast, their sum in a third tensor."""
    embedding_handovers: tuple[Moment, ...]
    """Moments like a block's `handovers` of the embeddings; none for a tied table."""
    head_gradient_bytes: int
    """The token table's gradient from the output head, which waits for the look-up's; the loss and its gradient."""
    inputs_kept_on_gpu: int
    """Last blocks whose input stays on the GPU with cpu_checkpointing; 0 without."""
    input_bytes: int
    """One block's input [b, t, h]."""
    host_bytes: int
    """Pinned host memory for the other blocks' inputs, with cpu_checkpointing."""

    @property
    def n_layer(self) -> int:
        return len(self.blocks)

    @cached_property
    def _saved(self) -> list[int]:
        """Bytes that the first 0, 1, 2, ... blocks save."""
        return list(accumulate((block.saved_bytes for block in self.blocks), initial=0))

    @cached_property
    def _casts(self) -> tuple[list[int], list[int]]:
        """Bytes of the casts of the first 0, 1, 2, ... blocks, in the backward and in the forward pass."""
        kinds = (block.saved_casts_bytes for block in self.blocks), (block.forward_casts_bytes for block in self.blocks)
        saved, forward = (list(accumulate(kind, initial=0)) for kind in kinds)
        return saved, forward

    def casts_bytes(self, blocks: int, *, forward: bool = False) -> int:
        """Return the casts that the first `blocks` blocks hold in a pass."""
        return self._casts[forward][blocks]

    def before_block_bytes(self, blocks: int, *, forward: bool = False) -> int:
        """Return what the embeddings and the first `blocks` blocks hold in a pass, with casts."""
        newest = blocks if forward else self.n_layer
        kept = max(0, blocks - max(0, newest - self.inputs_kept_on_gpu)) if self.inputs_kept_on_gpu else 0
        saved = self._saved[blocks] + kept * self.input_bytes
        return self.saved_embedding_bytes + saved + self.casts_bytes(blocks, forward=forward)

    @property
    def forward_peak_bytes(self) -> int:
        blocks = (self.before_block_bytes(i, forward=True) + b.forward_peak_bytes for i, b in enumerate(self.blocks))
        return max(*blocks, self.before_block_bytes(self.n_layer, forward=True) + self.logits_forward_peak_bytes)

    @property
    def backward_peak_bytes(self) -> int:
        head = self.before_block_bytes(self.n_layer) + _largest(self.head_backward)
        blocks = (self.before_block_bytes(i) + _largest(block.backward) for i, block in enumerate(self.blocks))
        return max(head, self.head_gradient_bytes + max(blocks), _largest(self.embedding_backward))

    @property
    def peak_bytes(self) -> int:
        """Largest sum over a forward and a backward pass."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


def estimate_activations(
    shape: GPTShape,
    *,
    micro_batch_size: int,
    precision: Precision,
    checkpointing: CheckpointingMode,
    cpu_checkpointing: bool = False,
    zero_stage: int = 0,
    capability: ComputeCapability | None = None,
    loss_chunk_tokens: int = CHUNK_TOKENS,
    ranks: ParallelLayout = ONE_RANK,
    router_loss: bool = True,
    worst_load: bool = False,
) -> ActivationMemory:
    """Estimate the activations of a forward and a backward pass over sequences of `seq_len` tokens.

    They are those of one rank, which may have only a part of the tokens.

    `cpu_checkpointing` applies to `full` checkpointing. `zero_stage` 3 has linear layers that save inputs in fp32 under
    autocast, and no copies of weights. The GPU's `capability` decides the kernel of attention; None means Ampere or
    newer. `router_loss`: routers, if there are any, have one. `worst_load`: all ranks that divide experts send this one
    as many rows as routers can; else it receives as many as it sends. Raises NotRecorded for a branch in no table.
    """
    symbols = shape_symbols(shape, micro_batch_size, loss_chunk_tokens, ranks)
    if worst_load and ranks.expert_parallel_size > 1:
        symbols["rows"] = most_rows(shape, symbols["rows"], ranks)
    # Autocast does not cast the residual stream.
    stream_width = 4 if precision in ("fp32", "autocast") else 2
    input_bytes = allocated_bytes(micro_batch_size * ranks.part_of(shape.seq_len) * shape.n_embd, stream_width)
    ends = ends_branch(shape, micro_batch_size, precision, loss_chunk_tokens, ranks)

    def of_kind(is_sparse: bool) -> ActivationMemory:
        """Return the memory as if all blocks were of a kind, with experts or without."""
        kind = router_loss if is_sparse else None
        branch = block_branch(shape, precision, checkpointing, zero_stage, capability, ranks, kind)
        micro_step = evaluate_segments(recorded_segments(branch, ends), symbols, shape.n_layer)
        return assemble_activations(micro_step, input_bytes, offloaded=cpu_checkpointing and checkpointing == "full")

    order = [shape.is_sparse(block) for block in range(shape.n_layer)]
    kinds = {is_sparse: of_kind(is_sparse) for is_sparse in set(order)}
    found = replace(kinds[order[-1]], blocks=tuple(kinds[is_sparse].blocks[0] for is_sparse in order))
    if any(order):
        # The blocks' rows of `GPT.routing`, and their sums over micro-batches.
        rows, width = sum(order), shape.num_experts + 4
        routing_bytes = rows * allocated_bytes(width, 4) + 2 * allocated_bytes(rows * width, 4)
        found = replace(found, saved_embedding_bytes=found.saved_embedding_bytes + routing_bytes)
    if not (shape.has_window and shape.has_document_mask and shape.global_layers):
        return found
    # Blocks without the window have a mask of their own. All blocks are counted as those with a mask.
    mask_bytes = allocated_bytes(micro_batch_size * shape.seq_len * symbols["t_to_8"], 4 if precision == "fp32" else 2)
    return replace(found, saved_embedding_bytes=found.saved_embedding_bytes + mask_bytes)


def most_rows(shape: GPTShape, rows: int, ranks: ParallelLayout) -> int:
    """Return the rows that a rank receives at most, if each rank of its group sends `rows`.

    A token's experts differ, so that those of one rank take no more of its rows than there are of them.
    """
    taken = min(shape.experts_per_token, shape.num_experts // ranks.expert_parallel_size)
    return ranks.expert_parallel_size * rows * taken // shape.experts_per_token


def assemble_activations(micro_step: MicroStep, input_bytes: int, *, offloaded: bool = False) -> ActivationMemory:
    """Sort a recorded micro-step by the parts of `ActivationMemory`.

    A recording counts a block's input with the layer that made it, `ActivationMemory` with the block. `offloaded`: the
    blocks' inputs are copied to the host.
    """
    segments, starts, layers = micro_step.segments, micro_step.starts, micro_step.n_layer
    embeddings = starts["block_forward"].minus(Moment(input_bytes))
    block = segments["block_forward"].net
    saved_block = Moment(block.activations_bytes, casts_bytes=_kept_casts(micro_step))
    head_begins = embeddings.plus(saved_block, layers)
    last_block_begins = embeddings.plus(saved_block, layers - 1)
    # The loss, its gradient and the token embedding's gradient from the head wait for the end of the backward pass.
    waiting = _waiting(micro_step, last_block_begins, saved_block, input_bytes)
    logits_bytes = segments["head_forward"].net.logits_bytes
    before_head = embeddings.plus(block, layers)
    block_base = last_block_begins.plus(waiting)
    kind = BlockActivations(
        saved_bytes=allocated_bytes(1, 1) if offloaded else saved_block.activations_bytes,
        saved_casts_bytes=saved_block.casts_bytes,
        forward_casts_bytes=block.casts_bytes,
        forward_peak_bytes=input_bytes + _largest(segments["block_forward"].moments),
        backward=_moments_beyond(micro_step, "block_backward", block_base),
        handovers=_beyond(micro_step, "block_backward", segments["block_backward"].handovers, block_base),
    )
    return ActivationMemory(
        blocks=(kind,) * layers,
        head_cast_bytes=starts["head_backward"].casts_bytes - layers * saved_block.casts_bytes,
        saved_embedding_bytes=embeddings.activations_bytes,
        saved_final_norm_bytes=starts["head_backward"].minus(head_begins).activations_bytes - logits_bytes,
        logits_saved_bytes=logits_bytes,
        logits_forward_peak_bytes=_largest(
            tuple(starts["head_forward"].plus(moment).minus(before_head) for moment in segments["head_forward"].moments)
        ),
        head_backward=_moments_beyond(micro_step, "head_backward", head_begins),
        head_handovers=_beyond(micro_step, "head_backward", segments["head_backward"].handovers, head_begins),
        embedding_backward=_moments_beyond(micro_step, "embed_backward", Moment()),
        embedding_handovers=_beyond(micro_step, "embed_backward", segments["embed_backward"].handovers, Moment()),
        head_gradient_bytes=waiting.total_bytes,
        inputs_kept_on_gpu=_INPUTS_KEPT_ON_GPU if offloaded else 0,
        input_bytes=input_bytes,
        host_bytes=max(0, layers - 1) * input_bytes if offloaded else 0,
    )


def _kept_casts(micro_step: MicroStep) -> int:
    """Return the bytes of a block's casts that outlive the forward pass."""
    segments = micro_step.segments
    return segments["block_forward"].net.casts_bytes + segments["end_forward"].per_block.casts_bytes


def _waiting(micro_step: MicroStep, last_block_begins: Moment, saved_block: Moment, input_bytes: int) -> Moment:
    """Return what stays alive from the head's backward pass to the end."""
    begins = micro_step.starts["block_backward"].minus(last_block_begins).minus(saved_block)
    # The head's backward pass frees the last block's result, unless a checkpoint holds it.
    result = input_bytes if begins.activations_bytes >= input_bytes else 0
    return Moment(begins.activations_bytes - result, begins.temporaries_bytes - input_bytes)


def _moments_beyond(micro_step: MicroStep, name: str, base: Moment) -> tuple[Moment, ...]:
    """Return the moments of a segment that can be its peak, less `base`."""
    moments = (Moment(), *micro_step.segments[name].moments)
    return moments_that_matter(_beyond(micro_step, name, moments, base))


def _beyond(micro_step: MicroStep, name: str, moments: Iterable[Moment], base: Moment) -> tuple[Moment, ...]:
    """Return moments of a segment less `base`, with gradients counted from the segment's beginning."""
    start, found = micro_step.starts[name], []
    for moment in moments:
        live = start.plus(moment).minus(base)
        found.append(
            Moment(live.activations_bytes, live.temporaries_bytes, live.casts_bytes, moment.gradient_parameters)
        )
    return tuple(found)


def _largest(moments: tuple[Moment, ...]) -> int:
    return max(moment.total_bytes for moment in moments)
