"""Recordings of llmscale.model.gpt's branches at small shapes, for the tables of `scripts/record_memory.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.attention_kernels import AttentionKernel
from llmscale.architecture.shape import GPTShape, Positions, build_shape
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import BALANCE_LOSS, DEFAULT_LOSS, LossSettings
from llmscale.dry_run.fakes import fake_row_counts, fake_world
from llmscale.dry_run.recording import MicroStepTrace, factor_traces, trace_micro_step
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.engine.expert_parallel import RankExperts
from llmscale.engine.mlp_tiles import tile_mlps
from llmscale.engine.sequence_parallel import RankSplit
from llmscale.memory.activations.recorded import BLOCK_SEGMENTS, RecordedSegment
from llmscale.memory.activations.symbols import (
    ONE_RANK,
    BlockBranch,
    BlockStyle,
    EndsBranch,
    MaskKind,
    NormKind,
    PrecisionKind,
    RouterStyle,
    SplitKind,
    block_style,
    shape_symbols,
    shows_zero3_linear,
)
from llmscale.model.gpt import GPT, BlockCheckpoint

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
_PRECISIONS: dict[PrecisionKind, Precision] = {"fp32": "fp32", "16bit": "bf16", "autocast": "autocast"}
_MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
_BOTH = (False, True)

#: (sequences, tokens, width, key-value heads, factor of head_dim, width of the MLP, vocabulary). No two products of
#: symbols have the same ratios between shapes. t is not a multiple of 8, and t and d rounded up by kernels have other
#: ratios.
_SHAPES = ((3, 37, 74, 3, 11, 122, 1300), (7, 166, 46, 2, 5, 134, 2100), (5, 290, 86, 5, 17, 94, 2900))
#: Experts, experts per token, and widths of an expert and of the shared MLP at each shape.
_EXPERTS = ((13, 3, 58, 142), (31, 7, 94, 202), (23, 4, 206, 178))
#: Ranks that divide the experts, experts of each, and rows that one receives.
_DIVIDED = ((4, 5, 1117), (3, 11, 2903), (7, 6, 1699))
#: Tokens of a loss chunk at each shape, for all sequences and for one: three chunks, the last one smaller.
_CHUNKS = ((41, 13), (431, 59), (521, 101))
#: Query heads that share a key-value head.
_SHARED = (2, 5, 3)
#: Ranks that divide a sequence, key-value heads, and query heads for each of those that are sent, at each shape.
_SPLITS: Mapping[SplitKind, tuple[tuple[int, int, int], ...]] = {
    "divided": ((3, 9, 3), (5, 10, 3), (2, 8, 5)),
    "repeated": ((4, 6, 3), (3, 2, 5), (5, 7, 4)),
    "repeated_for_each": ((4, 6, 1), (3, 2, 1), (5, 2, 1)),
}
#: Two blocks, which must allocate the same.
_LAYERS = 2

_LLAMA: Mapping[str, object] = {
    **{"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
}
#: Recorded blocks of the other families and of all presets, each with unshared and with shared key-value heads.
_MODERN: tuple[Mapping[str, object], ...] = (
    _LLAMA,  # Llama, Mistral, SmolLM
    {**_LLAMA, "attention_bias": "qkv"},  # Qwen 2
    {**_LLAMA, "attention_bias": "all"},  # Llama with attention_bias
    {**_LLAMA, "qk_norm": "head"},  # Qwen 3, gpt-modern
    {**_LLAMA, "qk_norm": "width", "norm_placement": "post"},  # OLMo 2
)
_GPT2: tuple[Mapping[str, object], ...] = tuple(
    {"bias": bias, "activation": activation} for bias in _BOTH for activation in ("gelu", "relu")
)
#: Recorded blocks with experts, without masks, dropout and autocast.
_SPARSE: tuple[Mapping[str, object], ...] = (
    {**_LLAMA, "n_kv_head": 1, "n_head": 2},  # Mixtral
    {**_LLAMA, "n_kv_head": 1, "n_head": 2, "qk_norm": "head"},  # Qwen 3
    {**_LLAMA, "qk_norm": "head"},  # tiny-moe
    {**_LLAMA, "qk_norm": "width", "normalize_router": False},  # OLMoE
    {  # dots.llm1, DeepSeek V3's router
        **{**_LLAMA, "qk_norm": "head", "router_score": "sigmoid", "router_bias": True, "router_scale": 2.5},
        "shared_expert_width": 1,
    },
)
#: Kernels without FlashAttention. In 16 bit GPT-2's blocks may have heads that FlashAttention does not accept; the
#: others' do so only on GPUs older than Ampere, in fp16.
_WITHOUT_FLASH: tuple[AttentionKernel, ...] = ("efficient", "math")


def all_block_styles() -> Iterator[BlockStyle]:
    """Yield every recorded style of blocks."""
    for settings in (*_GPT2, *_MODERN):
        yield block_style(_shape(0, settings, "flash", "bf16"))
        if settings in _MODERN:
            yield block_style(_shape(0, settings, "flash", "bf16", shares_keys=True))


def all_sparse_branches() -> Iterator[BlockBranch]:
    """Yield every recorded branch of blocks with experts."""
    for settings, mode in itertools.product(_SPARSE, _MODES):
        shape = _shape(0, {**settings, "num_experts": 2}, "flash", "bf16")
        style = block_style(shape, not shape.router_bias)
        yield BlockBranch(style, "16bit", mode, False, False, "flash", False)
        yield BlockBranch(style, "fp32", mode, False, False, "efficient", False)


def all_block_branches() -> Iterator[BlockBranch]:
    """Yield every recorded branch of the blocks. With a mask: without dropout, and with ordinary heads.

    Rarer branches are recorded when an estimate asks for them (llmscale.dry_run.on_demand).
    """
    for style, precision, mode, zero3 in itertools.product(all_block_styles(), _PRECISIONS, _MODES, _BOTH):
        if zero3 and not shows_zero3_linear(style, precision, mode):
            continue
        is_gpt2 = style.positions == "learned"
        flash: tuple[AttentionKernel, ...] = () if precision == "fp32" else ("flash", "flash_padded")
        others = _WITHOUT_FLASH
        if not is_gpt2 and precision != "fp32":
            others = ("efficient",) if precision == "16bit" else ()
        kernels = (*flash, *others)
        dropping = kernels if is_gpt2 else kernels[:1] if precision != "autocast" else ()
        for kernel, dropout in (*zip(kernels, itertools.repeat(False)), *zip(dropping, itertools.repeat(True))):
            yield BlockBranch(style, precision, mode, dropout, False, kernel, zero3)
        yield BlockBranch(style, precision, mode, False, True, "efficient", zero3)
    yield from all_sparse_branches()


def all_ends_branches() -> Iterator[EndsBranch]:
    """Yield every recorded branch of embeddings and head. Dropout: without a mask, for GPT-2 with a tied head, for the
    others without autocast."""
    found: tuple[tuple[NormKind, tuple[tuple[bool, MaskKind], ...]], ...] = (
        ("layernorm", ((True, "none"), (False, "none"), (True, "documents"))),
        ("layernorm_without_bias", ((True, "none"), (False, "none"), (True, "documents"))),
        ("rmsnorm", tuple(itertools.product(_BOTH, ("none", "window", "documents")))),
    )
    for norm, heads in found:
        positions: Positions = "rotary" if norm == "rmsnorm" else "learned"
        for (tied, mask), precision in itertools.product(heads, _PRECISIONS):
            may_drop = mask == "none" and (tied if positions == "learned" else precision != "autocast")
            for dropout, one_sequence, one_chunk in itertools.product(_BOTH if may_drop else (False,), _BOTH, _BOTH):
                yield EndsBranch(norm, positions, tied, mask, precision, dropout, one_sequence, one_chunk)


def record_branch(branch: BlockBranch | EndsBranch) -> dict[str, RecordedSegment]:
    """Record a branch, in a process that is not a rank of a job. Raises ValueError like `factor_traces`."""
    with fake_world(1):
        return record_blocks(branch) if isinstance(branch, BlockBranch) else record_ends(branch)


def record_blocks(branch: BlockBranch) -> dict[str, RecordedSegment]:
    """Record a branch of the blocks within `fake_world`. Raises ValueError like `factor_traces`."""
    style, precision = branch.style, _PRECISIONS[branch.precision]
    settings = {
        **{"norm": "rmsnorm" if style.norm == "rmsnorm" else "layernorm", "bias": style.norm == "layernorm"},
        **{"norm_placement": style.norm_placement, "positions": style.positions, "qk_norm": style.qk_norm},
        **{"attention_bias": style.attention_bias, "mlp_bias": style.mlp_bias, "gated_mlp": style.gated_mlp},
        **{"activation": "gelu" if style.saves_preactivation else "relu", "dropout": 0.1 if branch.dropout else 0.0},
        **({"document_end": 0} if branch.masked else {}),
    }
    shapes = [
        _shape(place, settings, branch.attention, precision, shares_keys=style.shares_keys)
        for place in range(len(_SHAPES))
    ]
    if style.router is not None:
        shapes = [_with_experts(shape, style.router, *sizes) for shape, sizes in zip(shapes, _EXPERTS, strict=True)]
    layouts = [ONE_RANK] * len(_SHAPES)
    if branch.split:
        shapes, layouts = _split(shapes, branch.split, shares_keys=style.shares_keys)
    micro_batches = [sequences for sequences, *_ in _SHAPES]
    if branch.tiled:
        parts = [chunk // ranks.sequence_parallel_size for (chunk, _), ranks in zip(_CHUNKS, layouts, strict=True)]
        shapes = [replace(shape, mlp_tile_tokens=part) for shape, part in zip(shapes, parts, strict=True)]
    if style.router is not None and style.router.divided:
        shapes = [
            replace(shape, num_experts=size * here) for shape, (size, here, _) in zip(shapes, _DIVIDED, strict=True)
        ]
        layouts = [
            ParallelLayout(ranks.world_size * size, ranks.sequence_parallel_size, size)
            for ranks, (size, *_) in zip(layouts, _DIVIDED, strict=True)
        ]
    loss = LossSettings(balance_loss=BALANCE_LOSS) if style.router and style.router.has_loss else LossSettings()
    how = precision, branch.checkpointing, branch.zero3_linear
    found = _record(shapes, layouts, micro_batches, *how, loss=loss)
    return {name: segment for name, segment in found.items() if name in BLOCK_SEGMENTS}


def record_ends(branch: EndsBranch) -> dict[str, RecordedSegment]:
    """Record a branch of embeddings and head within `fake_world`. Raises ValueError like `factor_traces`."""
    settings = {
        **{"norm": "rmsnorm" if branch.norm == "rmsnorm" else "layernorm", "bias": branch.norm == "layernorm"},
        **{"positions": branch.positions, "tied": branch.tied, "dropout": 0.1 if branch.dropout else 0.0},
        **{"sliding_window": 5 if branch.mask == "window" else 0},
        **({"document_end": 0} if branch.mask == "documents" else {}),
    }
    precision = _PRECISIONS[branch.precision]
    kernel: AttentionKernel = "efficient" if precision == "fp32" or branch.mask != "none" else "flash"
    shapes = [_shape(place, settings, kernel, precision) for place in range(len(_SHAPES))]
    layouts = [ONE_RANK] * len(_SHAPES)
    if branch.split:
        shapes, layouts = _split(shapes, "divided", shares_keys=False)
    micro_batches = [1 if branch.one_sequence else sequences for sequences, *_ in _SHAPES]
    sizes = [ranks.sequence_parallel_size for ranks in layouts]
    parts = [-(-chunk[branch.one_sequence] // size) for chunk, size in zip(_CHUNKS, sizes, strict=True)]
    chunks = None if branch.one_chunk else parts
    found = _record(shapes, layouts, micro_batches, precision, "none", False, chunks)
    return {name: segment for name, segment in found.items() if name not in BLOCK_SEGMENTS}


def trace_gpt(
    shape: GPTShape,
    micro_batch_size: int,
    precision: Precision,
    checkpointing: CheckpointingMode,
    zero_stage: int,
    loss: LossSettings,
    ranks: ParallelLayout = ONE_RANK,
    received_rows: int = 0,
) -> MicroStepTrace:
    """Trace a micro-step of a GPT within `fake_world`, as DeepSpeed's checkpointing asks for its rank.

    With `ranks` that divide sequences or experts, the trace is that of the first one, which receives `received_rows`.
    """
    size = ranks.sequence_parallel_size
    # Fake tensors are not exchanged, so that the group's size does not matter.
    split = RankSplit(size, 0, dist.group.WORLD) if size > 1 and dist.group.WORLD is not None else None

    experts = _RecordedExperts(ranks.expert_parallel_size, 0, "") if ranks.expert_parallel_size > 1 else None
    sent_rows = micro_batch_size * ranks.part_of(shape.seq_len) * shape.experts_per_token

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(micro_batch_size, shape.seq_len + 1, dtype=torch.long)
        found: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return found

    def build(run_block: BlockCheckpoint | None) -> GPT:
        model = GPT(shape, seed=0, checkpoint=run_block, loss=loss, split=split, experts=experts)
        if shape.mlp_tile_tokens:
            tile_mlps(model, shape.mlp_tile_tokens, zero_stage=0, checkpointing=checkpointing)
        return model

    return trace_micro_step(
        build,
        loss_of,
        n_layer=shape.n_layer,
        dtype=_DTYPES[precision],
        autocast=precision == "autocast",
        checkpoint=build_block_checkpoint(checkpointing, {}),
        patches=[partial(fake_row_counts, sent_rows, received_rows), *([_zero3_linear] if zero_stage == 3 else [])],
        used_twice=["wte.weight"] if shape.tied else [],
    )


class _RecordedExperts(RankExperts):
    """A part of the experts without DeepSpeed's groups."""

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def mark(self, parameter: nn.Parameter) -> None:
        """Mark nothing."""


def _shape(
    place: int,
    settings: Mapping[str, object],
    kernel: AttentionKernel,
    precision: Precision,
    *,
    shares_keys: bool = False,
) -> GPTShape:
    """Return one of _SHAPES with other settings."""
    _, seq_len, n_embd, n_kv_head, number, mlp_width, vocab_size = _SHAPES[place]
    return build_shape(
        {
            **{"n_layer": _LAYERS, "n_embd": n_embd, "mlp_width": mlp_width, "seq_len": seq_len},
            **{"n_kv_head": n_kv_head, "n_head": n_kv_head * (_SHARED[place] if shares_keys else 1)},
            "head_dim": _head_dim(number, kernel, precision),
            "vocab_size": vocab_size,
            **settings,
        }
    )


def _with_experts(
    shape: GPTShape, router: RouterStyle, num_experts: int, chosen: int, width: int, shared_width: int
) -> GPTShape:
    return replace(
        shape,
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_width=width,
        shared_expert_width=shared_width if router.shared else 0,
        router_score=router.score,
        normalize_router=router.normalized,
        router_scale=2.5 if router.scaled else 1.0,
        router_bias=router.bias,
    )


def _split(
    shapes: list[GPTShape], kind: SplitKind, *, shares_keys: bool
) -> tuple[list[GPTShape], list[ParallelLayout]]:
    """Return shapes whose heads ranks can divide in this way, and the ranks."""
    found: list[GPTShape] = []
    layouts: list[ParallelLayout] = []
    for shape, (size, kv_heads, shared) in zip(shapes, _SPLITS[kind], strict=True):
        sent = math.lcm(size, kv_heads)
        heads = sent * (shared if shares_keys else 1)
        ranks = ParallelLayout(size, size)
        # The ranks divide it. Other lengths allocate one number more, the share of the loss.
        seq_len = size * ranks.part_of(shape.seq_len)
        found.append(replace(shape, n_kv_head=kv_heads, n_head=heads, seq_len=seq_len))
        layouts.append(ranks)
    return found, layouts


def _record(
    shapes: list[GPTShape],
    layouts: list[ParallelLayout],
    micro_batches: list[int],
    precision: Precision,
    checkpointing: CheckpointingMode,
    zero3_linear: bool,
    chunks: Sequence[int] | None = None,
    loss: LossSettings = DEFAULT_LOSS,
) -> dict[str, RecordedSegment]:
    """Record at all shapes. `chunks`: tokens of a loss chunk at each shape; None for all tokens at once."""
    all_tokens = [shape.seq_len * size for shape, size in zip(shapes, micro_batches, strict=True)]
    cases = list(zip(shapes, micro_batches, chunks or all_tokens, layouts, strict=True))
    stage = 3 if zero3_linear else 0
    traces = [
        trace_gpt(shape, size, precision, checkpointing, stage, replace(loss, chunk_tokens=tokens), ranks, received)
        for (shape, size, tokens, ranks), (_, _, received) in zip(cases, _DIVIDED, strict=True)
    ]
    symbols = [shape_symbols(*case) for case in cases]
    for found, (_, _, received) in zip(symbols, _DIVIDED, strict=True):
        found |= {"rows": received} if "rows" in found else {}
    return factor_traces(traces, symbols)


def _head_dim(number: int, kernel: AttentionKernel, precision: Precision) -> int:
    """Return an even head_dim that this kernel accepts (llmscale.architecture.attention_kernels)."""
    if kernel == "flash":
        return 8 * number
    if kernel == "flash_padded":
        # Rounded up to 8 its ratios must differ from those of the number of heads.
        return 2 * number + 16
    if precision == "fp32":
        return 4 * number if kernel == "efficient" else 2 * number
    return 256 + (8 if kernel == "efficient" else 2) * number


def _zero3_linear() -> AbstractContextManager[object]:
    """Replace `F.linear` like `deepspeed.zero.Init` at stage 3."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return mock.patch.object(F, "linear", zero3_linear_wrap)
