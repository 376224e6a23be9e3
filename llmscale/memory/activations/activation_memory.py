"""Activation memory of llmscale.model.gpt for one micro-batch, from recorded passes. No torch.

Which tensors autograd keeps and what else is alive beside them is recorded from the model itself
(llmscale.memory.activations.recorded); here it is put together with what ZeRO decides: parameters and their gradients
are left out, and `Moment.gradient_parameters` says which gradients exist by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.memory.activations.recorded import (
    MicroStep,
    Moment,
    evaluate_segments,
    moments_that_matter,
    recorded_segments,
)
from llmscale.memory.activations.symbols import block_branch, ends_branch, shape_symbols
from llmscale.memory.breakdown import allocated_bytes

#: DeepSpeed's cpu_checkpointing keeps the newest checkpoint on the GPU, and the one before until its copy is surely
#: done (offload_activations.py, keep_last_count and max_fwd_stash_count); of the others one element is left.
_INPUTS_KEPT_ON_GPU = 2


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes on the GPU, parameters and their gradients left out. How they add up over a micro-step:

    - before block i of the forward pass: `before_block_bytes(i, forward=True)`; within it at most
      `block_forward_peak_bytes` more;
    - output head and loss: `before_block_bytes(L, forward=True)` and at most `logits_forward_peak_bytes` more;
    - end of the forward pass: `before_block_bytes(L)`, the final norm's, the logits' and the head's cast;
    - head and loss backwards: `before_block_bytes(L)` and one of the moments `head_backward`;
    - block i backwards: `before_block_bytes(i)`, `head_gradient_bytes` and one of `block_backward`;
    - embeddings backwards: one of `embedding_backward`, which has everything in it.
    """

    n_layer: int
    saved_per_block_bytes: int
    """One block's input and what else it saves for the backward pass; weights cast by autocast are not in it."""
    saved_casts_per_block_bytes: int
    """Autocast's 16-bit copies of a block's matrices that the backward pass will read: none with checkpointing, none
    with ZeRO-3."""
    forward_casts_per_block_bytes: int
    """The same during the forward pass, whose cache holds the copies of all weights to its end in every mode, but with
    ZeRO-3 of the biases alone."""
    head_cast_bytes: int
    """Autocast's copy of the token table, as far as the output head leaves it behind."""
    saved_embedding_bytes: int
    """Until the end of the backward pass: the micro-batch's token ids, positions, the embedding's dropout mask."""
    saved_final_norm_bytes: int
    """The last block's result, the final norm's statistics, and what the loss keeps before the first tensor over the
    vocabulary: the targets, and the gradient of the norm's result."""
    logits_saved_bytes: int
    """The gradient of the head's weights, which is made with the loss; the loss itself."""
    block_forward_peak_bytes: int
    """What one block holds at the fullest moment of its forward pass, input, saved tensors and casts included."""
    logits_forward_peak_bytes: int
    """The same from the final norm to the loss."""
    block_backward: tuple[Moment, ...]
    """Everything that one block holds during its backward pass: its input, saved and recomputed tensors, gradients of
    activations, and of parameters until they are handed over. Only moments that no later one exceeds."""
    block_handovers: tuple[Moment, ...]
    """The same, in order, whenever a layer's gradients are handed over."""
    head_backward: tuple[Moment, ...]
    """As `block_backward`, from the loss back to the final norm."""
    head_handovers: tuple[Moment, ...]
    """As `block_handovers`. Of a tied table none."""
    embedding_backward: tuple[Moment, ...]
    """The same at the end. The token table's gradients, from the head, from the look-up and but for autocast their sum
    in a third tensor, count as temporaries here."""
    embedding_handovers: tuple[Moment, ...]
    """As `block_handovers`, of the embeddings. Of a tied table none."""
    head_gradient_bytes: int
    """The token table's gradient from the output head, which waits for the look-up's until the end; the loss and its
    own gradient."""
    inputs_kept_on_gpu: int
    """Of the last so many blocks the input stays on the GPU with cpu_checkpointing; 0 without."""
    input_bytes: int
    """One block's input [b, t, h]."""
    host_bytes: int
    """On the host, pinned: the other blocks' inputs, with cpu_checkpointing."""

    def before_block_bytes(self, blocks: int, *, forward: bool = False) -> int:
        """What the embeddings and the first `blocks` blocks hold, casts included, during the backward pass or the
        forward pass."""
        newest = blocks if forward else self.n_layer
        kept = max(0, blocks - max(0, newest - self.inputs_kept_on_gpu)) if self.inputs_kept_on_gpu else 0
        casts = self.forward_casts_per_block_bytes if forward else self.saved_casts_per_block_bytes
        saved = blocks * self.saved_per_block_bytes + kept * self.input_bytes
        return self.saved_embedding_bytes + saved + blocks * casts

    @property
    def forward_peak_bytes(self) -> int:
        last, after = (self.before_block_bytes(self.n_layer - back, forward=True) for back in (1, 0))
        return max(last + self.block_forward_peak_bytes, after + self.logits_forward_peak_bytes)

    @property
    def backward_peak_bytes(self) -> int:
        head = self.before_block_bytes(self.n_layer) + _largest(self.head_backward)
        block = self.before_block_bytes(self.n_layer - 1) + self.head_gradient_bytes + _largest(self.block_backward)
        return max(head, block, _largest(self.embedding_backward))

    @property
    def peak_bytes(self) -> int:
        """The largest sum over a forward and a backward pass."""
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
) -> ActivationMemory:
    """Every tensor of a forward and a backward pass over sequences of `seq_len` tokens.

    `cpu_checkpointing` applies to `full` checkpointing. `zero_stage` 3 has its own linear layers, which matter under
    autocast: they save inputs in fp32 and no copies of weights. `capability` is the GPU's, which decides the kernel of
    attention; None: of an Ampere or newer one. Raises NotRecorded for a branch that no table has.
    """
    segments = recorded_segments(
        block_branch(shape, precision, checkpointing, zero_stage, capability),
        ends_branch(shape, micro_batch_size, precision, loss_chunk_tokens),
    )
    micro_step = evaluate_segments(segments, shape_symbols(shape, micro_batch_size, loss_chunk_tokens), shape.n_layer)
    stream_bytes_per_element = (
        4 if precision in ("fp32", "autocast") else 2
    )  # autocast leaves the residual stream alone
    input_bytes = allocated_bytes(micro_batch_size * shape.seq_len * shape.n_embd, stream_bytes_per_element)
    return assemble_activations(micro_step, input_bytes, offloaded=cpu_checkpointing and checkpointing == "full")


def assemble_activations(micro_step: MicroStep, input_bytes: int, *, offloaded: bool = False) -> ActivationMemory:
    """A recorded micro-step by the parts that the memory of a training step is added up from.

    A recording counts a block's input to what made it, `ActivationMemory` to the block. `offloaded`: blocks' inputs go
    to the host.
    """
    segments, starts, layers = micro_step.segments, micro_step.starts, micro_step.n_layer
    embeddings = starts["block_forward"].minus(Moment(input_bytes))
    block = segments["block_forward"].net
    saved_block = Moment(block.activations_bytes, casts_bytes=_kept_casts(micro_step))
    head_begins = embeddings.plus(saved_block, layers)
    last_block_begins = embeddings.plus(saved_block, layers - 1)
    # What waits for the end of the backward pass: the loss, its gradient, the token embedding's gradient from the head.
    waiting = _waiting(micro_step, last_block_begins, saved_block, input_bytes)
    logits_bytes = segments["head_forward"].net.logits_bytes
    before_head = embeddings.plus(block, layers)
    block_base = last_block_begins.plus(waiting)
    return ActivationMemory(
        n_layer=layers,
        saved_per_block_bytes=allocated_bytes(1, 1) if offloaded else saved_block.activations_bytes,
        saved_casts_per_block_bytes=saved_block.casts_bytes,
        forward_casts_per_block_bytes=block.casts_bytes,
        head_cast_bytes=starts["head_backward"].casts_bytes - layers * saved_block.casts_bytes,
        saved_embedding_bytes=embeddings.activations_bytes,
        saved_final_norm_bytes=starts["head_backward"].minus(head_begins).activations_bytes - logits_bytes,
        logits_saved_bytes=logits_bytes,
        block_forward_peak_bytes=input_bytes + _largest(segments["block_forward"].moments),
        logits_forward_peak_bytes=_largest(
            tuple(starts["head_forward"].plus(moment).minus(before_head) for moment in segments["head_forward"].moments)
        ),
        block_backward=_moments_beyond(micro_step, "block_backward", block_base),
        block_handovers=_beyond(micro_step, "block_backward", segments["block_backward"].handovers, block_base),
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
    """Of a block's casts those that outlive the forward pass."""
    segments = micro_step.segments
    return segments["block_forward"].net.casts_bytes + segments["end_forward"].per_block.casts_bytes


def _waiting(micro_step: MicroStep, last_block_begins: Moment, saved_block: Moment, input_bytes: int) -> Moment:
    """What is alive from the head's backward pass to the end, when the gradient of [b, t, h] reaches the last block."""
    begins = micro_step.starts["block_backward"].minus(last_block_begins).minus(saved_block)
    # The last block's result goes with the head's backward pass, but for checkpoints that hold it.
    result = input_bytes if begins.activations_bytes >= input_bytes else 0
    return Moment(begins.activations_bytes - result, begins.temporaries_bytes - input_bytes)


def _moments_beyond(micro_step: MicroStep, name: str, base: Moment) -> tuple[Moment, ...]:
    """Those of a segment's moments that can be its fullest, without `base`."""
    moments = (Moment(), *micro_step.segments[name].moments)
    return moments_that_matter(_beyond(micro_step, name, moments, base))


def _beyond(micro_step: MicroStep, name: str, moments: Iterable[Moment], base: Moment) -> tuple[Moment, ...]:
    """Moments of a segment without `base`; parameters with gradients counted from the segment's beginning."""
    start, found = micro_step.starts[name], []
    for moment in moments:
        live = start.plus(moment).minus(base)
        found.append(
            Moment(live.activations_bytes, live.temporaries_bytes, live.casts_bytes, moment.gradient_parameters)
        )
    return tuple(found)


def _largest(moments: tuple[Moment, ...]) -> int:
    return max(moment.total_bytes for moment in moments)
