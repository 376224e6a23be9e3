"""The GPT that every shape describes (Radford et al. 2019; Touvron et al. 2023).

It knows nothing of ranks, ZeRO or precision, which are applied from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._triton import has_triton

from llmscale.architecture.attention_kernels import ComputeCapability, attention_kernel, has_flash_attention
from llmscale.architecture.layers import INIT_STD
from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import DEFAULT_LOSS, LossSettings
from llmscale.errors import DataError
from llmscale.model import attention_context
from llmscale.model.attention_context import (
    AttentionContext,
    AttentionContexts,
    KVCache,
    SequenceSplit,
    build_contexts,
    compute_dtype,
    part_of_tokens,
    positions_in_documents,
)
from llmscale.model.experts import BALANCE, Z_SQUARED, ExpertSplit, SparseMLP
from llmscale.model.layers import MLP, Embedding, Linear, RMSNorm, build_norm, fill_normal_, find_adapter, residual_std
from llmscale.model.loss import chunked_cross_entropy, score_tokens

#: Stores a layer's new keys and values [batch, t, n_kv_head, head_dim], and returns all stored ones.
CacheAppend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and earlier ones; key-value heads may be shared."""

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        width = shape.n_embd
        bias = shape.attention_bias
        # One matrix product for q, k and v of all heads: columns are [q | k | v], each of them head by head.
        rows = shape.qkv_heads * shape.head_dim
        adapter = find_adapter(shape, "attn.qkv")
        self.qkv = Linear(width, rows, generator, bias=bias != "none", adapter=adapter)
        if shape.qk_norm != "none":
            q_heads, k_heads = (shape.n_head, shape.n_kv_head) if shape.qk_norm == "width" else (1, 1)
            self.q_norm = RMSNorm(q_heads * shape.head_dim, shape.norm_eps)
            self.k_norm = RMSNorm(k_heads * shape.head_dim, shape.norm_eps)
        inner = shape.n_head * shape.head_dim
        std = residual_std(shape.n_layer)
        adapter = find_adapter(shape, "attn.proj")
        self.proj = Linear(inner, width, generator, bias=bias == "all", std=std, adapter=adapter)

    def forward(self, x: Tensor, context: AttentionContext, append_to_cache: CacheAppend | None = None) -> Tensor:
        """Compute [batch, t, n_embd] -> [batch, t, n_embd]; with `append_to_cache`, x continues cached positions."""
        shape = self.shape
        qkv = self.qkv(x).unflatten(-1, (shape.qkv_heads, shape.head_dim))
        # Split before the transposition: in the other order the backward pass copies all of qkv once more.
        q, k, v = qkv.split((shape.n_head, shape.n_kv_head, shape.n_kv_head), dim=2)  # each [batch, t, heads, head_dim]
        if shape.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        elif shape.qk_norm == "width":
            q = self.q_norm(q.flatten(2)).view_as(q)
            k = self.k_norm(k.flatten(2)).view_as(k)
        # Autocast norms in fp32; all later steps use the type of v.
        q = context.rotate(q.type_as(v))
        k = context.rotate(k.type_as(v))
        if append_to_cache is not None:
            k, v = append_to_cache(k, v)
        if context.split is not None:
            q, k, v = context.split.to_heads(q, k, v)
        y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.mask).transpose(1, 2)
        if context.split is not None:
            y = context.split.to_tokens(y)
        return F.dropout(self.proj(y.flatten(2)), shape.dropout, self.training)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Compute softmax(q k^T) v over [batch, heads, t, head_dim].

        Without a mask attention is causal, or a single query sees everything.
        """
        if isinstance(mask, BlockMask):
            return attention_context.attend_in_blocks(q, k, v, mask)
        shared = q.shape[1] // k.shape[1]
        # Only CUDA's FlashAttention shares key-value heads, in 16 bit and without a mask; the other kernels would fall
        # back to scores [t, t] (sdp_utils.cpp, check_batch_size_and_num_heads_dense).
        dropout = self.shape.dropout if self.training else 0.0
        is_native = mask is None and has_flash_attention(
            q.shape[-1],
            is_16bit=q.dtype in (torch.float16, torch.bfloat16),
            drops_out=dropout > 0,
            capability=device_capability(q.device),
        )
        if shared > 1 and not is_native:
            k = k.repeat_interleave(shared, 1)
            v = v.repeat_interleave(shared, 1)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=dropout,
            is_causal=mask is None and q.shape[2] == k.shape[2],
            enable_gqa=shared > 1 and is_native,
        )


def has_flex_attention(device: torch.device) -> bool:
    """Return whether FlexAttention trains on a device, compiled by Triton. A dry run replaces this function."""
    return device.type == "cuda" and has_triton()


def device_capability(device: torch.device) -> ComputeCapability | None:
    """Return a GPU's compute capability; None for other devices. A dry run replaces this function."""
    if device.type != "cuda":
        return None
    # Not get_device_capability, at which torch.compile's graph would break.
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


#: A block's result; with experts, in training, also the block's row of `GPT.routing`.
BlockOutput = Tensor | tuple[Tensor, Tensor]


class Block(nn.Module):
    """One transformer block, with experts if it is sparse; the residual stream itself is never normalised.

    Norms before: x + attention(norm(x)), then x + mlp(norm(x)). After: x + norm(attention(x)), then x + norm(mlp(x)).
    """

    def __init__(
        self,
        shape: GPTShape,
        generator: torch.Generator,
        loss: LossSettings = DEFAULT_LOSS,
        *,
        is_sparse: bool = False,
        experts: ExpertSplit | None = None,
    ) -> None:
        super().__init__()
        self.is_sparse = is_sparse
        self.is_pre = shape.norm_placement == "pre"
        self.ln_1 = build_norm(shape)
        self.attn = CausalSelfAttention(shape, generator)
        self.ln_2 = build_norm(shape)
        self.mlp = SparseMLP(shape, generator, loss, experts) if is_sparse else MLP(shape, generator)

    def forward(self, x: Tensor, context: AttentionContext, append_to_cache: CacheAppend | None = None) -> BlockOutput:
        """Compute [batch, t, n_embd] -> [batch, t, n_embd]; with `append_to_cache`, x continues cached positions.

        In training a sparse block also returns its row of `GPT.routing`.
        """
        if self.is_pre:
            x = x + self.attn(self.ln_1(x), context, append_to_cache)
            if self.is_sparse:
                y, routing = self.mlp(self.ln_2(x), context)
                return x + y if routing is None else (x + y, routing)
            return x + self.mlp(self.ln_2(x))
        x = x + self.ln_1(self.attn(x, context, append_to_cache))
        if self.is_sparse:
            y, routing = self.mlp(x, context)
            x = x + self.ln_2(y)
            return x if routing is None else (x, routing)
        return x + self.ln_2(self.mlp(x))


class _Head(nn.Module):
    def __init__(self, weight: Tensor, vocab_size: int, loss: LossSettings) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size = vocab_size
        self.loss = loss
        self.z_squared: Tensor | None = None
        """Sum of mean z^2 over the training micro-batches since the last reset to None, a scalar in fp32; None without
        a z-loss."""
        self.sequence_losses: deque[Tensor] | None = None
        """If set from outside, collects the nats per token of each sequence [batch] of micro-batches with targets; a
        token that is not a target adds 0."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        each_token: bool = False,
        share: float = 1.0,
        is_target: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Compute logits, or `share` times `scale` times the loss where `targets` are given.

        x: [batch, t, n_embd]. Returns logits [batch, t, vocab_size] in x's precision, a view without the padding rows.
        With `targets`, ids [batch, t], returns their mean cross-entropy in nats, a scalar in fp32, to which those that
        are not `is_target`, bool [batch, t], add nothing, or with
        `each_token` the result of `score_tokens`, [batch, t, 2]. The loss is computed here because ZeRO-3 gathers the
        weights only while this module runs.
        """
        if targets is None:
            return F.linear(x, self.weight)[..., : self.vocab_size]
        if each_token:
            return score_tokens(x, self.weight, targets, self.vocab_size, self.loss.chunk_tokens)
        if self.training:
            settings = self.loss
        else:
            settings = replace(self.loss, z_loss=0.0)
        collected = self.sequence_losses
        losses = chunked_cross_entropy(
            x,
            self.weight,
            targets,
            self.vocab_size,
            settings,
            each_sequence=collected is not None,
            is_target=is_target,
        )
        losses = losses.scaled(share)
        if collected is not None and losses.of_sequences is not None:
            collected.append(losses.of_sequences)
        losses = losses.scaled(scale)
        if self.training and losses.mean_z_squared is not None:
            before = self.z_squared
            if before is None:
                self.z_squared = losses.mean_z_squared
            else:
                self.z_squared = before + losses.mean_z_squared
        return losses.mean


class OutputHead(_Head):
    """Output head with its own weights, [padded_vocab_size, n_embd] like the token embedding."""

    def __init__(self, shape: GPTShape, generator: torch.Generator, loss: LossSettings) -> None:
        weight = nn.Parameter(torch.empty(shape.padded_vocab_size, shape.n_embd))
        super().__init__(weight, shape.vocab_size, loss)
        fill_normal_(self.weight, INIT_STD, generator)


class TiedHead(_Head):
    """Output head that multiplies with the token embedding's weights.

    It is a module because ZeRO-3 gathers a sharded parameter when a module with that parameter runs. State dicts
    contain the weights only under the embedding's name.
    """

    def __init__(self, embedding: Embedding, vocab_size: int, loss: LossSettings) -> None:
        super().__init__(embedding.weight, vocab_size, loss)

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """Save nothing."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Load nothing."""


class BlockCheckpoint(Protocol):
    """Activation checkpointing: runs one block and recomputes it in the backward pass."""

    def __call__(self, block: nn.Module, x: Tensor, *context: object) -> BlockOutput:
        """Run `block` on x [batch, t, n_embd]; `context` are further arguments of the block, without gradients."""


class GPT(nn.Module):
    """Decoder: token embedding, equal blocks, final norm, output head.

    The weights are a function of (shape, seed) alone; the global random state is neither read nor advanced.
    `checkpoint` runs the blocks when gradients are computed; without it every activation is kept. With `split`, losses
    and scores are those of a part of the tokens; with `experts` the model has a part of each block's experts. With
    `skips_blocks` a GPU takes FlexAttention for masks.
    """

    def __init__(
        self,
        shape: GPTShape,
        *,
        seed: int,
        checkpoint: BlockCheckpoint | None = None,
        loss: LossSettings = DEFAULT_LOSS,
        split: SequenceSplit | None = None,
        experts: ExpertSplit | None = None,
        skips_blocks: bool = False,
    ) -> None:
        super().__init__()
        self.skips_blocks = skips_blocks
        self.shape = shape
        self.checkpoint = checkpoint
        self.split = split
        self.loss = loss
        self.routing: Tensor | None = None
        """Sums over the training micro-batches since the last reset to None, [sparse blocks, experts + 4] in fp32: this
        rank's tokens per expert, then the columns of `llmscale.model.experts`."""
        generator = torch.Generator().manual_seed(seed)
        self.wte = Embedding(shape.padded_vocab_size, shape.n_embd, generator)
        if shape.positions == "learned":
            self.wpe = Embedding(shape.seq_len, shape.n_embd, generator)
        self.blocks = nn.ModuleList(
            Block(shape, generator, loss, is_sparse=shape.is_sparse(layer), experts=experts)
            for layer in range(shape.n_layer)
        )
        self.ln_f = build_norm(shape)
        self.head = TiedHead(self.wte, shape.vocab_size, loss) if shape.tied else OutputHead(shape, generator, loss)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        each_token: bool = False,
        cache: KVCache | None = None,
        at: Tensor | None = None,
        is_target: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Compute logits, or the loss where `targets` are given.

        tokens, targets: integers [batch, t] with t <= seq_len. Returns logits [batch, t, vocab_size] in the model's
        precision, or the mean cross-entropy over all positions in nats, a scalar in fp32. With `each_token`, returns
        every target's log-probability and whether it is the likeliest token, [batch, t, 2]. Padding rows of the token
        table take no part. Targets that are not `is_target`, bool [batch, t], add nothing to the mean, which is
        multiplied by `scale`; the losses of routers are not.

        With a split, every part gets complete sequences. It returns its scores, with those of padding, [batch, part, 2]
        or its share of the loss: their mean over the parts is the loss.

        With `cache`, tokens continue its sequences. With `at`, integers [batch], only the logits at that index of each
        row of `tokens` are computed: [batch, 1, vocab_size]. Raises DataError when more than seq_len positions are
        needed, cached ones included.
        """
        t = tokens.shape[1]
        if t > self.shape.seq_len:
            raise DataError(
                f"a sequence of {t} tokens is longer than the model's {self.shape.seq_len} positions "
                "(seq_len). Cut the sequences, or train a model with a longer seq_len."
            )
        split = self.split if targets is not None else None
        part = part_of_tokens(t, split)
        if split is not None:
            tokens = F.pad(tokens, (0, (part.stop - part.start) * split.size - t))
        if cache is not None:
            cached = cache.next_positions(tokens)
        else:
            cached = None
        if cached is not None:
            positions = cached.positions
        else:
            positions = self._positions(tokens)
        routing = None
        x = self.wte(tokens[:, part])
        if self.shape.positions == "learned":
            x = x + self.wpe(positions[..., part])
        x = F.dropout(x, self.shape.dropout, self.training)
        if split is None:
            padding = 0
        else:
            padding = min(max(0, part.stop - t), part.stop - part.start)
        in_blocks = cache is None and self._takes_blocks(t, x)
        contexts = build_contexts(self.shape, positions, compute_dtype(x), split, padding, in_blocks=in_blocks)
        if cache is not None and cached is not None:
            x = self._run_with_cache(x, contexts.with_masks(cached), cache, cached.slots)
        else:
            rows: list[Tensor] = []
            for layer in range(len(self.blocks)):
                # The only reference to a block's input, which is freed after the block if no layer saves it.
                x = self._run_block(layer, x, contexts, rows)
            if rows:
                routing = torch.stack(rows)
            else:
                routing = None
        if at is not None:
            x = x[torch.arange(len(at), device=x.device), at][:, None]
        if targets is not None:
            loss: Tensor = self._score(self.ln_f(x), targets, split, each_token, is_target, scale)
            if routing is None:
                return loss
            return loss + self._balance(routing, targets)
        logits: Tensor = self.head(self.ln_f(x))
        return logits

    def _takes_blocks(self, t: int, x: Tensor) -> bool:
        """Return whether sequences of t tokens take FlexAttention, which is compiled for each length."""
        if not (self.skips_blocks and (self.training or t == self.shape.seq_len) and has_flex_attention(x.device)):
            return False
        kernel = attention_kernel(
            self.shape.head_dim,
            is_16bit=compute_dtype(x) in (torch.float16, torch.bfloat16),
            masked=self.shape.has_mask,
            drops_out=self.shape.dropout > 0,
            may_skip=True,
            capability=device_capability(x.device),
        )
        return kernel == "flex"

    def _run_block(self, layer: int, x: Tensor, contexts: AttentionContexts, rows: list[Tensor]) -> Tensor:
        """Run a block on [batch, t, n_embd], and add its row of `routing` to `rows`, in training with experts."""
        checkpoint = self.checkpoint if torch.is_grad_enabled() else None
        block = self.blocks[layer]
        context = contexts.local if self.shape.is_local(layer) else contexts.dense
        y: BlockOutput
        if checkpoint is None:
            y = block(x, context)
        else:
            y = checkpoint(block, x, context)
        if isinstance(y, tuple):
            y, row = y
            rows.append(row)
        return y

    def _balance(self, routing: Tensor, targets: Tensor) -> Tensor:
        """Add a micro-batch's `routing`, and return 0 with the gradients of the routers' losses: a sum over blocks."""
        if self.routing is None:
            self.routing = routing.detach()
        else:
            self.routing = self.routing + routing.detach()
        parts = 1 if self.split is None else self.split.size
        balance = self.loss.balance_loss * routing[:, BALANCE].sum() / len(targets)
        z_squared = self.loss.router_z_loss * routing[:, Z_SQUARED].sum() / targets.numel()
        loss = (balance + z_squared) * parts
        return loss - loss.detach()

    def _positions(self, tokens: Tensor) -> Tensor:
        """Return the positions [t], or with a document mask [batch, t], of tokens [batch, t] and their padding."""
        if self.shape.document_end is not None:
            positions = positions_in_documents(tokens, self.shape.document_end)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # Padding, of a split, may exceed the learned positions.
        if self.split is None:
            return positions
        return positions.clamp(max=self.shape.seq_len - 1)

    def _score(
        self,
        x: Tensor,
        targets: Tensor,
        split: SequenceSplit | None,
        each_token: bool,
        is_target: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Compute loss or scores of the model's part from x [batch, part, n_embd]; targets, is_target: [batch, t]."""
        share = 1.0
        if split is not None:
            t = targets.shape[1]
            part = part_of_tokens(t, split)
            if each_token:
                own = F.pad(targets, (0, max(0, part.stop - t)))[:, part]
            else:
                own = targets[:, part]
            share = own.shape[1] * split.size / t
            # A part of nothing but padding takes the loss of any token, zero times.
            targets = own if own.shape[1] else targets[:, :1]
            x = x[:, : targets.shape[1]]
            if is_target is not None:
                is_target = is_target[:, part] if own.shape[1] else is_target[:, :1]
        scores: Tensor = self.head(x, targets, each_token=each_token, share=share, is_target=is_target, scale=scale)
        return scores

    def _run_with_cache(self, x: Tensor, contexts: AttentionContexts, cache: KVCache, slots: Tensor) -> Tensor:
        """Run all blocks on [batch, t, n_embd], whose tokens take `slots` of the cache."""
        for layer, block in enumerate(self.blocks):
            context = contexts.local if self.shape.is_local(layer) else contexts.dense
            x = block(x, context, partial(cache.append, layer, slots))
        cache.lengths = [length + x.shape[1] for length in cache.lengths]
        return x
