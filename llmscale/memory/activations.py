"""Activation memory of llmscale.model.gpt for one micro-batch, counted tensor by tensor. No torch.

Sources: the count per layer of Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models,
equations 1 and 2), which `attention="eager"` reproduces, corrected for what our blocks do: fused attention with its
log-sum-exp (Dao et al. 2022), dropout or none, and the precisions of DeepSpeed. Nothing here is fitted.

ZeRO decides who holds parameters and gradients, so both are left out; `Moment.gradient_parameters` says which gradients
exist by then. Symbols: b micro-batch, t tokens of a sequence, h n_embd, a heads, L n_layer, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.config.ds_sections import CheckpointingMode, Precision
from llmscale.config.shape import GPTShape
from llmscale.memory.block_passes import run_block, run_block_backward, saved_by_autograd, saved_by_selection
from llmscale.memory.block_sizes import Attention, BlockSizes
from llmscale.memory.head_passes import count_embeddings, count_head
from llmscale.memory.ledger import Ledger, Moment, moments_that_matter
from llmscale.memory.linear_passes import leave_autocast

#: DeepSpeed's cpu_checkpointing keeps the newest checkpoint on the GPU, and the one before until its copy is surely
#: done (offload_activations.py, keep_last_count and max_fwd_stash_count); of the others one element is left.
_INPUTS_KEPT_ON_GPU = 2


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes on the GPU, parameters and their gradients left out. How they add up over a micro-step:

    - before block i of the forward pass: `before_block_bytes(i, forward=True)`; within it at most
      `block_forward_peak_bytes` more;
    - output head and loss: `before_block_bytes(L, forward=True)` and at most `logits_forward_peak_bytes` more;
    - end of the forward pass: `saved_bytes`;
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
    """Autocast's copy of the token table, from the output head to its backward pass."""
    saved_embedding_bytes: int
    """Until the end of the backward pass: the micro-batch's token ids, positions, the embedding's dropout mask."""
    saved_final_norm_bytes: int
    """The last block's result, the final norm's statistics and its result."""
    logits_saved_bytes: int
    """Log-softmax of the logits in fp32 and the targets, for the loss's backward pass; the loss itself."""
    block_forward_peak_bytes: int
    """What one block holds at the fullest moment of its forward pass, input, saved tensors and casts included."""
    logits_forward_peak_bytes: int
    """The same from the final norm to the loss."""
    block_recompute_bytes: int
    """What a checkpointed block has made again when its backward pass begins, beyond what it had saved."""
    block_backward: tuple[Moment, ...]
    """Everything that one block holds during its backward pass: its input, saved and recomputed tensors, gradients of
    activations. Only moments that no later one exceeds."""
    head_backward: tuple[Moment, ...]
    """The same from the loss back to the final norm."""
    embedding_backward: tuple[Moment, ...]
    """The same at the end. The token table's gradients, from the head, from the look-up and but for autocast their sum
    in a third tensor, count as temporaries here."""
    head_gradient_bytes: int
    """The token table's gradient from the output head, which waits for the look-up's until the end; the loss and its
    own gradient."""
    inputs_kept_on_gpu: int
    """Of the last so many blocks the input stays on the GPU with cpu_checkpointing; 0 without."""
    input_bytes: int
    """One block's input [b, t, h]."""
    host_bytes: int
    """On the host, pinned: the other blocks' inputs, with cpu_checkpointing."""

    @property
    def saved_outside_blocks_bytes(self) -> int:
        return self.saved_embedding_bytes + self.saved_final_norm_bytes

    @property
    def block_forward_temporaries_bytes(self) -> int:
        """Beyond what the block saves and casts."""
        return self.block_forward_peak_bytes - self.saved_per_block_bytes - self.saved_casts_per_block_bytes

    @property
    def block_backward_temporaries_bytes(self) -> int:
        """Beyond what the block has saved and recomputed."""
        held = self.saved_per_block_bytes + self.saved_casts_per_block_bytes + self.block_recompute_bytes
        return _largest(self.block_backward) - held

    @property
    def logits_backward_peak_bytes(self) -> int:
        return _largest(self.head_backward)

    def before_block_bytes(self, blocks: int, *, forward: bool = False) -> int:
        """What the embeddings and the first `blocks` blocks hold, casts included, during the backward pass or the
        forward pass."""
        newest = blocks if forward else self.n_layer
        kept = max(0, blocks - max(0, newest - self.inputs_kept_on_gpu)) if self.inputs_kept_on_gpu else 0
        casts = self.forward_casts_per_block_bytes if forward else self.saved_casts_per_block_bytes
        saved = blocks * self.saved_per_block_bytes + kept * self.input_bytes
        return self.saved_embedding_bytes + saved + blocks * casts

    @property
    def saved_bytes(self) -> int:
        """At the end of the forward pass."""
        outside = self.saved_final_norm_bytes + self.logits_saved_bytes + self.head_cast_bytes
        return self.before_block_bytes(self.n_layer) + outside

    @property
    def forward_peak_bytes(self) -> int:
        last, after = (self.before_block_bytes(self.n_layer - back, forward=True) for back in (1, 0))
        return max(last + self.block_forward_peak_bytes, after + self.logits_forward_peak_bytes)

    @property
    def backward_peak_bytes(self) -> int:
        head = self.before_block_bytes(self.n_layer) + self.logits_backward_peak_bytes
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
    attention: Attention = "flash",
    cpu_checkpointing: bool = False,
    zero_stage: int = 0,
) -> ActivationMemory:
    """Count every tensor of a forward and a backward pass over sequences of `seq_len` tokens.

    `attention="eager"` counts a model with separate matrix products for attention, for comparison with published
    figures. `cpu_checkpointing` applies to `full` checkpointing. `zero_stage` 3 has its own linear layers, which matter
    under autocast: they save inputs in fp32 and no copies of weights.
    """
    sizes = BlockSizes(shape, micro_batch_size, precision, attention, zero_stage)
    saved = {
        "none": saved_by_autograd(sizes),
        "selective": saved_by_selection(sizes),
        "full": frozenset[str](),
    }[checkpointing]
    block = Ledger()
    block.keep(stream_in=sizes.stream)
    run_block(block, sizes, saved)
    forward_peak = block.peak_bytes
    forward_casts = block.now.casts_bytes
    block.drop("stream_out")
    leave_autocast(block, saved)
    at_rest = block.now
    recomputed, block_backward = _run_backward(block, sizes, checkpointing)
    embeddings, head = count_embeddings(sizes), count_head(sizes)
    offloaded = cpu_checkpointing and checkpointing == "full"
    return ActivationMemory(
        n_layer=shape.n_layer,
        saved_per_block_bytes=sizes.tensor(1) if offloaded else at_rest.activations_bytes,
        saved_casts_per_block_bytes=at_rest.casts_bytes,
        forward_casts_per_block_bytes=forward_casts,
        head_cast_bytes=head.cast_bytes,
        saved_embedding_bytes=embeddings.saved_bytes,
        saved_final_norm_bytes=head.saved_norm_bytes,
        logits_saved_bytes=head.saved_logits_bytes,
        block_forward_peak_bytes=forward_peak,
        logits_forward_peak_bytes=head.forward_peak_bytes,
        block_recompute_bytes=recomputed.total_bytes - at_rest.total_bytes,
        block_backward=block_backward,
        head_backward=head.backward,
        embedding_backward=embeddings.backward,
        head_gradient_bytes=head.gradient_bytes,
        inputs_kept_on_gpu=_INPUTS_KEPT_ON_GPU if offloaded else 0,
        input_bytes=sizes.stream,
        host_bytes=max(0, shape.n_layer - 1) * sizes.stream if offloaded else 0,
    )


def _run_backward(
    block: Ledger, sizes: BlockSizes, checkpointing: CheckpointingMode
) -> tuple[Moment, tuple[Moment, ...]]:
    """What the block holds when its backward pass begins, without the incoming gradient, and the moments from the
    recomputation to the end."""
    block.moments.clear()
    block.use(gradient=sizes.stream)
    if checkpointing != "none":
        run_block(block, sizes, saved_by_autograd(sizes))
        leave_autocast(block, saved_by_autograd(sizes))
    if checkpointing == "selective":
        block.drop("stream_out")  # DeepSpeed's checkpoint holds it, and the incoming gradient, to the end
    begins = block.now
    recomputed = Moment(begins.activations_bytes, 0, begins.casts_bytes, 0)
    run_block_backward(block, sizes, caller_holds_gradient=checkpointing == "full")
    return recomputed, moments_that_matter(block.moments)


def _largest(moments: tuple[Moment, ...]) -> int:
    return max(moment.total_bytes for moment in moments)
