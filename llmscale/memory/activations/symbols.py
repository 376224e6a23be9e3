"""Branches of the model's code, and the symbols in the sizes of recorded tensors. No torch.

A recording (llmscale/dry_run/recording.py) holds for one branch of the model's code at every shape: its sizes are
products of the symbols below. A shape or a setting that makes PyTorch run other operators makes another branch, with
its own recording. The part of a branch that the shape alone decides is a style; each style has a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

from llmscale.architecture.attention_kernels import AttentionKernel, ComputeCapability, attention_kernel
from llmscale.architecture.shape import AttentionBias, GPTShape, NormPlacement, Positions, QKNorm, RouterScore
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import softmax_tokens

#: bf16 and fp16 run the same operators on tensors of the same sizes.
PrecisionKind = Literal["fp32", "16bit", "autocast"]
NormKind = Literal["layernorm", "layernorm_without_bias", "rmsnorm"]
#: A window's mask is [t, t], one of documents [b, 1, t, t].
MaskKind = Literal["none", "window", "documents"]
#: How ranks that divide a sequence divide its key-value heads: not at all, as they are, repeated, or repeated until
#: every query head has its own.
SplitKind = Literal["", "divided", "repeated", "repeated_for_each"]
_BOTH = (False, True)


ONE_RANK = ParallelLayout(1)


@dataclass(frozen=True)
class RouterStyle:
    """Part of the operators of a block with experts that the shape and the loss decide."""

    score: RouterScore
    normalized: bool
    scaled: bool
    bias: bool
    shared: bool
    """A shared expert computes every token."""
    has_loss: bool
    """A balance loss or z-loss keeps tensors for the backward pass."""
    divided: bool = False
    """Ranks divide the experts, and exchange rows."""

    @property
    def key(self) -> str:
        """Part of the name of its table."""
        words = ["experts", "" if self.score == "softmax" else self.score, "" if self.normalized else "unnormalized"]
        given = {"scaled": self.scaled, "router_bias": self.bias, "shared": self.shared, "no_loss": not self.has_loss}
        given["divided"] = self.divided
        return "_".join(filter(None, (*words, *(word for word, is_given in given.items() if is_given))))


@dataclass(frozen=True)
class BlockStyle:
    """Part of a block's operators that the shape decides, without the attention kernel."""

    norm: NormKind
    norm_placement: NormPlacement
    positions: Positions
    qk_norm: QKNorm
    shares_keys: bool
    """Fewer key-value heads than query heads."""
    attention_bias: AttentionBias
    mlp_bias: bool
    gated_mlp: bool
    saves_preactivation: bool
    """The backward passes of GELU and SiLU read their input; ReLU's reads its result."""
    router: RouterStyle | None = None
    """None for a block without experts."""

    @property
    def key(self) -> str:
        """Name of its table."""
        words = [
            *(self.norm, "behind" if self.norm_placement == "post" else "", self.positions),
            *("" if self.qk_norm == "none" else f"qk_norm_{self.qk_norm}", "shared_keys" if self.shares_keys else ""),
            *("" if self.attention_bias == "none" else f"attention_bias_{self.attention_bias}",),
            *("mlp_bias" if self.mlp_bias else "", "gated" if self.gated_mlp else ""),
            *("" if self.saves_preactivation else "relu", self.router.key if self.router else ""),
        ]
        return "-".join(filter(None, words))


@dataclass(frozen=True)
class BlockBranch:
    """Choices that determine the operators of a block."""

    style: BlockStyle
    precision: PrecisionKind
    checkpointing: CheckpointingMode
    dropout: bool
    masked: bool
    """True when attention gets a mask. One mask for all sequences makes no difference: it is expanded, not copied."""
    attention: AttentionKernel
    zero3_linear: bool
    """True where ZeRO-3's replacement of F.linear (deepspeed/runtime/zero/linear.py) changes the recording: where it
    casts, and where `selective` saves the tensors that it adds biases to."""
    split: SplitKind = ""
    tiled: Literal["", "tiled"] = ""
    """`tiled` where the MLP runs some tokens at a time."""

    @property
    def key(self) -> str:
        """Name within the table of its style."""
        return " ".join(str(value) for value in astuple(self)[1:]).rstrip()


@dataclass(frozen=True)
class EndsBranch:
    """Choices that determine the operators outside the blocks: embeddings, mask, final norm, output head and loss."""

    norm: NormKind
    positions: Positions
    tied: bool
    mask: MaskKind
    precision: PrecisionKind
    dropout: bool
    one_sequence: bool
    """True for a single sequence: its targets are contiguous, and position gradients need no sum."""
    one_chunk: bool
    """True when all logits exist at once, without a sum of the head's gradient over chunks (llmscale.model.loss)."""
    split: Literal["", "divided"] = ""
    """`divided` where ranks divide sequences."""

    @property
    def key(self) -> str:
        return " ".join(str(value) for value in astuple(self)).rstrip()


def block_style(shape: GPTShape, router_loss: bool | None = None, ranks: ParallelLayout = ONE_RANK) -> BlockStyle:
    """Return the style of this shape's blocks with experts, whose routers have a loss; None: of those without."""
    router = None
    if router_loss is not None:
        router = RouterStyle(
            score=shape.router_score,
            normalized=shape.normalize_router,
            scaled=shape.router_scale != 1,
            bias=shape.router_bias,
            shared=shape.shared_expert_width > 0,
            has_loss=router_loss,
            divided=ranks.expert_parallel_size > 1,
        )
    return BlockStyle(
        norm=_norm_kind(shape),
        norm_placement=shape.norm_placement,
        positions=shape.positions,
        qk_norm=shape.qk_norm,
        shares_keys=shape.n_kv_head < shape.n_head,
        attention_bias=shape.attention_bias or "none",
        mlp_bias=bool(shape.mlp_bias),
        gated_mlp=shape.gated_mlp,
        saves_preactivation=shape.activation != "relu",
        router=router,
    )


def block_branch(
    shape: GPTShape,
    precision: Precision,
    checkpointing: CheckpointingMode,
    zero_stage: int,
    capability: ComputeCapability | None = None,
    ranks: ParallelLayout = ONE_RANK,
    router_loss: bool | None = None,
) -> BlockBranch:
    """Return the branch of this shape's blocks on GPUs of that compute capability.

    `router_loss`: that of `block_style`.
    """
    style = block_style(shape, router_loss, ranks)
    return BlockBranch(
        style=style,
        precision=_kind_of(precision),
        checkpointing=checkpointing,
        dropout=shape.dropout > 0,
        masked=shape.has_mask,
        attention=attention_kernel(
            shape.head_dim,
            is_16bit=precision != "fp32",
            masked=shape.has_mask,
            drops_out=shape.dropout > 0,
            capability=capability,
        ),
        zero3_linear=zero_stage == 3 and shows_zero3_linear(style, _kind_of(precision), checkpointing),
        split=_split_kind(shape, ranks),
        tiled="tiled" if shape.mlp_tile_tokens else "",
    )


def _split_kind(shape: GPTShape, ranks: ParallelLayout) -> SplitKind:
    if ranks.sequence_parallel_size == 1:
        return ""
    heads, kv_heads = ranks.heads_of_rank(shape.n_head, shape.n_kv_head)
    if kv_heads * ranks.sequence_parallel_size == shape.n_kv_head:
        return "divided"
    return "repeated_for_each" if kv_heads == heads else "repeated"


def shows_zero3_linear(style: BlockStyle, precision: PrecisionKind, checkpointing: CheckpointingMode) -> bool:
    """Return True where ZeRO-3's linear layers save or hold other tensors than PyTorch's."""
    has_biases = style.attention_bias != "none" or style.mlp_bias
    return precision == "autocast" or (checkpointing == "selective" and has_biases)


def ends_branch(
    shape: GPTShape,
    micro_batch_size: int,
    precision: Precision,
    loss_chunk_tokens: int,
    ranks: ParallelLayout = ONE_RANK,
) -> EndsBranch:
    """Return the branch of embeddings and head."""
    return EndsBranch(
        norm=_norm_kind(shape),
        positions=shape.positions,
        tied=shape.tied,
        mask="documents" if shape.has_document_mask else "window" if shape.has_window else "none",
        precision=_kind_of(precision),
        dropout=shape.dropout > 0,
        one_sequence=micro_batch_size == 1,
        one_chunk=micro_batch_size * ranks.part_of(shape.seq_len) <= loss_chunk_tokens,
        split="divided" if ranks.sequence_parallel_size > 1 else "",
    )


def related_branches(branch: BlockBranch | EndsBranch) -> Iterator[BlockBranch | EndsBranch]:
    """Yield the branch, and those of the same model at other ZeRO stages, micro-batches and checkpointing.

    A table of strategies needs all of them.
    """
    if isinstance(branch, EndsBranch):
        for one_chunk, one_sequence in itertools.product(_BOTH, _BOTH):
            yield replace(branch, one_chunk=one_chunk, one_sequence=one_sequence)
        return
    for mode, zero3 in itertools.product(get_args(CheckpointingMode), _BOTH):
        if not zero3 or shows_zero3_linear(branch.style, branch.precision, mode):
            yield replace(branch, checkpointing=mode, zero3_linear=zero3)


def shape_symbols(
    shape: GPTShape, micro_batch_size: int, loss_chunk_tokens: int, ranks: ParallelLayout = ONE_RANK
) -> dict[str, int]:
    """Return symbol -> number. Kernels and the vocabulary's padding use the rounded ones."""
    t, d = ranks.part_of(shape.seq_len), shape.head_dim
    tokens, in_attention = micro_batch_size * t, t * ranks.sequence_parallel_size
    return {
        "b": micro_batch_size,
        "t": t,
        "h": shape.n_embd,
        "a": shape.n_head,
        "kv": shape.n_kv_head,
        "qkv": shape.qkv_heads,
        "d": d,
        "m": shape.mlp_width,
        "V": shape.vocab_size,
        "padded_V": shape.padded_vocab_size,
        "t+1": shape.seq_len + 1,  # a sample has one token more than the model sees at once
        "d_to_8": _round_up(d, 8),  # FlashAttention's padding of a head
        "d_to_32_or_64": _round_up(d, 32 if d <= 128 else 64),  # its backward kernel's sum of dQ, with t in blocks
        **(
            _split_symbols(shape, in_attention, ranks)
            if ranks.sequence_parallel_size > 1
            else {
                "t_to_128": _round_up(t, 128),
                "t_to_32": _round_up(t, 32),  # the memory-efficient kernel's log-sum-exp
            }
        ),
        "t_to_8": _round_up(in_attention, 8),  # rows of a mask
        # tokens of the loss's chunks, and of the last one; a single chunk has b t
        **({} if tokens <= loss_chunk_tokens else _chunk_symbols(tokens, loss_chunk_tokens)),
        **(_tile_symbols(tokens, min(tokens, shape.mlp_tile_tokens)) if shape.mlp_tile_tokens else {}),
        "softmax": softmax_tokens(min(tokens, loss_chunk_tokens)),  # whose logits exist in fp32
        **(_expert_symbols(shape, tokens, ranks) if shape.num_experts else {}),
    }


def _expert_symbols(shape: GPTShape, tokens: int, ranks: ParallelLayout) -> dict[str, int]:
    """Return the symbols of blocks with experts. Ranks that divide these receive as many rows as they send."""
    size = ranks.expert_parallel_size
    rows = {"rows": tokens * shape.experts_per_token, "experts_here": shape.num_experts // size, "ranks": size}
    rows["experts+1"] = shape.num_experts + 1  # ends of the experts' rows, and their beginning
    return {
        **(rows if size > 1 else {"experts": shape.num_experts}),
        "chosen": shape.experts_per_token,
        "expert_m": shape.expert_width,
        "experts+4": shape.num_experts + 4,  # a block's row of the routing table
        **({"shared_m": shape.shared_expert_width} if shape.shared_expert_width else {}),
    }


def _split_symbols(shape: GPTShape, t: int, ranks: ParallelLayout) -> dict[str, int]:
    """Return the symbols of ranks that divide sequences; `t`: tokens in attention. "t" is a rank's part."""
    heads, kv_heads = ranks.heads_of_rank(shape.n_head, shape.n_kv_head)
    size = ranks.sequence_parallel_size
    return {
        "t_all": t,
        "kv_sent": kv_heads * size,  # key-value heads, repeated
        "qkv_sent": (heads + 2 * kv_heads) * size,
        # rows of a rank's heads in attention kernels
        "a_t_to_128": heads * _round_up(t, 128),
        "a_t_to_32": heads * _round_up(t, 32),
    }


def _chunk_symbols(tokens: int, chunk_tokens: int) -> dict[str, int]:
    return {"c": chunk_tokens, "c_last": tokens - (tokens - 1) // chunk_tokens * chunk_tokens}


def _tile_symbols(tokens: int, tile_tokens: int) -> dict[str, int]:
    return {"u": tile_tokens, "u_last": tokens - (tokens - 1) // tile_tokens * tile_tokens}


#: Symbols of the vocabulary: the head's tensors count as the loss's from the first of these on.
VOCABULARY_SYMBOLS = frozenset({"V", "padded_V"})


def _norm_kind(shape: GPTShape) -> NormKind:
    if shape.norm == "rmsnorm":
        return "rmsnorm"
    return "layernorm" if shape.bias else "layernorm_without_bias"


def _kind_of(precision: Precision) -> PrecisionKind:
    kinds: dict[Precision, PrecisionKind] = {"fp32": "fp32", "bf16": "16bit", "fp16": "16bit", "autocast": "autocast"}
    return kinds[precision]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
