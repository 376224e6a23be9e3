"""Activation memory of every layer of the GPT: bytes saved for the backward pass, and peaks of its passes. No torch.

Each function mirrors one `forward()` of llmscale/model and is to be read beside it. A block is the list of its
layers, and its saved bytes are their sum. Its backward pass walks the list from the end and frees what a layer saved.
It peaks where the saved bytes plus that layer's `backward` are largest. Bytes are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from llmscale.architecture.attention_kernels import AttentionKernel, ComputeCapability, training_kernel
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import CHUNK_TOKENS, softmax_tokens

_ONE_RANK = ParallelLayout(1)


@dataclass(frozen=True)
class LayerMemory:
    """One step of a block's forward pass."""

    name: str
    parameters: int = 0
    saved: float = 0.0
    """Bytes that its backward pass reads and that no earlier layer has counted, without casts."""
    selected: float = 0.0
    """Bytes of its result if `selective` checkpointing keeps it."""
    backward: float = 0.0
    """Bytes of gradients and work space at the peak of its backward pass, without the residual stream's gradient."""
    passed: float = 0.0
    """Bytes of the gradient that it hands to the layer before."""
    forward: float = 0.0
    """Bytes of results and work space in a forward pass that saves nothing, without its input, where they are large."""
    casts: float = 0.0
    """Bytes of autocast's 16-bit copies of its weights, which the backward pass reads."""
    gathers: float = 0.0
    """Bytes of the gradient, or of the input, while stage 3 gathers its many weights at once; 0 where it has few."""
    cached: float = 0.0
    """Bytes of copies that only autocast's cache holds, until the end of the forward pass."""


@dataclass(frozen=True)
class Pass:
    """A micro-batch on one rank."""

    shape: GPTShape
    batch: int
    precision: Precision = "bf16"
    is_stage3: bool = False
    ranks: ParallelLayout = _ONE_RANK
    chunk_tokens: int = CHUNK_TOKENS
    loss_kernel: str = "torch"
    router_loss: bool = True
    trains_head: bool = True
    trains_table: bool = True
    """The token embedding is trained, which is the head if they are tied."""
    frozen_patterns: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    frozen: frozenset[str] = frozenset()
    """Layers of the block in question of which no parameter is trained."""
    checkpointing: CheckpointingMode = "none"
    capability: ComputeCapability | None = None
    """Compute capability of the GPU; None means Ampere or newer."""
    worst_load: bool = False
    """All ranks that divide experts send this one as many rows as they can; else it receives as many as it sends."""

    @property
    def t(self) -> int:
        """Tokens of a sequence that the rank has."""
        return self.ranks.part_of(self.shape.seq_len)

    @cached_property
    def tokens(self) -> int:
        return self.batch * self.t

    @cached_property
    def width(self) -> int:
        """Bytes of an element in matrix products."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def stream(self) -> int:
        """Bytes of an element of the residual stream, of a parameter and of its gradient."""
        return 4 if self.precision in ("fp32", "autocast") else 2

    @property
    def autocast(self) -> bool:
        return self.precision == "autocast"

    @cached_property
    def x(self) -> int:
        """Bytes of the residual stream."""
        return self.tokens * self.shape.n_embd * self.stream

    @property
    def kernel(self) -> AttentionKernel:
        is_16bit = self.width == 2
        mode = self.checkpointing
        return training_kernel(self.shape, is_16bit=is_16bit, checkpointing=mode, capability=self.capability)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key-value heads in attention, of all ranks that divide the sequence."""
        size = self.ranks.sequence_parallel_size
        heads, kv_heads = self.ranks.heads_of_rank(self.shape.n_head, self.shape.n_kv_head)
        return heads * size, kv_heads * size

    @property
    def rows(self) -> int:
        """Rows that the rank sends to experts."""
        return self.tokens * self.shape.experts_per_token

    @property
    def received_rows(self) -> int:
        """Rows that the rank's experts get."""
        if self.worst_load and self.ranks.expert_parallel_size > 1:
            return most_rows(self.shape, self.rows, self.ranks)
        return self.rows


def most_rows(shape: GPTShape, rows: int, ranks: ParallelLayout) -> int:
    """Return the rows that a rank receives at most, if each rank of its group sends `rows`.

    A token's experts differ, so that those of one rank take no more of its rows than there are of them.
    """
    taken = min(shape.experts_per_token, shape.num_experts // ranks.expert_parallel_size)
    return ranks.expert_parallel_size * rows * taken // shape.experts_per_token


def norm(p: Pass, *, own_gradient: bool = True) -> LayerMemory:
    """x -> x, in the stream's precision: saves its input and mean and 1/std (RMS norm: 1/rms) in fp32."""
    is_layernorm = p.shape.norm == "layernorm"
    return LayerMemory(
        "norm",
        parameters=p.shape.n_embd * (2 if is_layernorm and p.shape.bias else 1),
        saved=p.x + 4 * p.tokens * (2 if is_layernorm else 1),
        backward=(2 if own_gradient else 1) * p.x,
    )


def linear(
    p: Pass, name: str, inputs: int, outputs: int, *, bias: bool, saves: float | None = None, ends_branch: bool = False
) -> list[LayerMemory]:
    """y = x W: saves x for the gradient of W; the backward pass holds the gradients of y, x and W.

    `name`: the layer's in a block. `saves`: bytes of x, where another layer has saved it or it is in fp32.
    `ends_branch`: y is added to the residual stream, whose gradient is that of y.
    """
    tokens = p.tokens
    width = p.width
    weights = inputs * outputs + bias * outputs
    of_x = tokens * inputs * width
    saved = of_x if saves is None else saves
    is_trained = name not in p.frozen
    if not is_trained and not p.is_stage3:  # whose own linear layer saves x in any case
        saved = 0
    is_stream = ends_branch and not p.autocast and not p.shape.dropout and p.shape.norm_placement == "pre"
    of_y = 0 if is_stream else tokens * outputs * width
    layer = LayerMemory(
        name,
        parameters=weights,
        saved=saved,
        selected=tokens * outputs * width,
        backward=of_y
        + of_x
        + (weights * width if is_trained else 0)
        + (2 * weights if p.autocast and p.is_stage3 else 0),
        passed=of_x,
        casts=2 * weights if p.autocast and not p.is_stage3 else 0,
    )
    if not p.autocast or not is_trained:
        return [layer]
    # The gradient of W in 16 bit becomes one in fp32 once y's gradient and the cast are free; stage 3 still holds x.
    later = saved if p.is_stage3 else 0
    passed = max(of_x, later)
    cast = LayerMemory(f"{name}: gradient in fp32", weights, saved=later, backward=passed + 6 * weights, passed=passed)
    return [cast, replace(layer, parameters=0, saved=saved - later)]


def dropout(p: Pass, elements: float) -> list[LayerMemory]:
    """Saves a mask of one byte per element."""
    if p.shape.dropout:
        return [LayerMemory("dropout", saved=elements, backward=p.width * elements)]
    return []


def attention(p: Pass) -> list[LayerMemory]:
    """model/gpt.py, CausalSelfAttention: qkv, norms of q and k, rotation, exchange of heads, kernel, projection."""
    s = p.shape
    width = p.width
    tokens = p.tokens
    q, k, qkv = (heads * s.head_dim * tokens * width for heads in (s.n_head, s.n_kv_head, s.qkv_heads))
    normed = s.qk_norm != "none"
    rotary = s.positions == "rotary"
    layers = linear(
        p, "attn.qkv", s.n_embd, s.qkv_heads * s.head_dim, bias=s.attention_bias != "none", saves=_norm_result(p)
    )
    if normed:
        statistics = 4 * tokens * (s.n_head + s.n_kv_head if s.qk_norm == "head" else 2)
        inputs = 2 * (q + k) if p.autocast else qkv  # views of qkv, or fp32 copies
        if s.qk_norm == "head":
            weights = 2 * s.head_dim
        else:
            weights = (s.n_head + s.n_kv_head) * s.head_dim
        layers.append(LayerMemory("qk_norm", weights, saved=inputs + statistics, backward=2 * qkv))
    if rotary:
        layers.append(LayerMemory("rotary", backward=3.5 * q + 2 * k))
    # v, and without rotation q and k, are views of qkv.
    views = (q + k if rotary or normed else 0) + (0 if normed and not p.autocast else qkv)
    repeated = q if rotary or normed else qkv
    layers += _kernel(p, views, repeated)
    has_own_input = p.ranks.sequence_parallel_size > 1 or p.kernel in ("flash_padded", "math")
    layers += linear(
        p,
        "attn.proj",
        s.n_head * s.head_dim,
        s.n_embd,
        bias=s.attention_bias == "all",
        saves=q if has_own_input else 0,
        ends_branch=True,
    )
    return [*layers, *dropout(p, tokens * s.n_embd)]


def _kernel(p: Pass, views: float, repeated: float) -> Iterator[LayerMemory]:
    """Yield the exchange of heads and softmax(q k^T) v.

    `views`: bytes of q, k and v as the layers before leave them; `repeated`: those beside repeated keys and values.
    """
    s = p.shape
    t = p.shape.seq_len
    d = p.shape.head_dim
    heads, kv_heads = p.heads
    # FlexAttention saves the same
    size = p.ranks.sequence_parallel_size
    is_flash = p.kernel.startswith("fl")
    repeats = kv_heads < heads and not is_flash
    q, k = (float(count * d * p.tokens * p.width) for count in (heads, kv_heads))
    source = views
    if size > 1:
        yield LayerMemory("exchange", backward=2 * (q + 2 * k))
        source = q + 2 * k + (2 * q if repeats else 0)
    elif p.kernel == "flash_padded":
        padding = -(-d // 8) * 8 / d
        q = padding * q
        k = padding * k
        source = q + 2 * k
    elif p.kernel == "math":
        source = 3 * p.tokens * heads * d * 4
    elif repeats:
        source = 2 * q + repeated
    rows = p.batch * heads // size * t
    if p.kernel == "math":  # scores in fp32 of every pair of positions
        scores = 4 * rows * t
        saved = source + scores * (3 if s.dropout else 1)
        selected = 0.0
        work = 2.0 * scores
    else:
        log_sum_exp = 4 * rows * (1 if is_flash else -(-t // 32) * 32 / t)
        saved = source + q + log_sum_exp
        selected = 0.0 if s.dropout else q + log_sum_exp
        if is_flash:  # the backward kernel sums dQ in fp32 in blocks of 128 rows
            padded_rows = rows / t * (-(-t // 128) * 128)
            padded_d = _round_up(d, 32 if d <= 128 else 64)
            work = 2 * q + 2 * k + (2 * q if kv_heads < heads else 0) + 4 * padded_rows * (padded_d + 1)
        else:
            work = 4 * q + 4 * rows * d + 8 * rows
    yield LayerMemory("attention", saved=saved, selected=selected, backward=work, passed=q + 2 * k)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _norm_result(p: Pass) -> float | None:
    """Bytes of the input that a linear layer after a norm saves: stage 3's own saves it before the cast."""
    return p.x if p.autocast and p.is_stage3 else None


def mlp(p: Pass) -> list[LayerMemory]:
    """model/layers.py, MLP; engine/activation_checkpointing.py where it runs in tiles."""
    if p.shape.mlp_tile_tokens:
        return [_tiled_mlp(p)]
    return [*_mlp(p, p.shape.mlp_width), *dropout(p, p.tokens * p.shape.n_embd)]


def _mlp(p: Pass, hidden: int) -> list[LayerMemory]:
    """Up, non-linearity, down."""
    s = p.shape
    gates = 2 if p.shape.gated_mlp else 1
    bias = bool(p.shape.mlp_bias)
    result = p.tokens * hidden * p.width
    # The backward passes of GELU and SiLU read their input, ReLU's its result, which `down` reads too.
    reads_input = s.gated_mlp or s.activation != "relu"
    activation = LayerMemory(
        "activation",
        saved=3 * result if s.gated_mlp else result,
        backward=(3 if s.gated_mlp else 2) * result,
        passed=gates * result,
        forward=gates * result,
    )
    saves = result if reads_input else 0
    return [
        *linear(p, "mlp.up", s.n_embd, gates * hidden, bias=bias, saves=_norm_result(p)),
        activation,
        *linear(p, "mlp.down", hidden, s.n_embd, bias=bias, saves=saves, ends_branch=True),
    ]


def _tiled_mlp(p: Pass) -> LayerMemory:
    """Saves x; the backward pass runs each tile again and sums the gradients of the weights in fp32."""
    s = p.shape
    h = p.shape.n_embd
    m = p.shape.mlp_width
    gates = 2 if p.shape.gated_mlp else 1
    weights = (gates + 1) * h * m + bool(s.mlp_bias) * (gates * m + h)
    trained = 0
    if "mlp.up" not in p.frozen:
        trained += gates * h * m + (gates * m if s.mlp_bias else 0)
    if "mlp.down" not in p.frozen:
        trained += h * m + (h if s.mlp_bias else 0)
    tile = min(s.mlp_tile_tokens, p.tokens) * p.width * (2 * h + (3 * gates - 1) * m)
    inside = tile + trained * p.stream + (2 * weights if p.autocast else 0)
    return LayerMemory(
        "mlp in tiles",
        weights,
        saved=p.x,
        backward=p.x + 4 * trained + max(inside, trained * p.stream),
        passed=p.x,
        cached=2 * weights if p.autocast else 0,
    )


def experts(p: Pass) -> list[LayerMemory]:
    """model/experts.py, SparseMLP: router in fp32, rows sorted by expert, two grouped products, weighted sum."""
    s = p.shape
    width = p.width
    tokens = p.tokens
    h = p.shape.n_embd
    rows = p.received_rows
    gates = 2 if p.shape.gated_mlp else 1
    parts = p.ranks.expert_parallel_size
    row = rows * h * width
    result = rows * s.expert_width * width
    index = 8 * rows
    per_row = 4 * rows
    score = 4 * tokens * s.num_experts
    here = s.num_experts // parts * h * s.expert_width
    router = s.num_experts * h
    cast = 2 if p.autocast else 0
    loss = (5 if p.router_loss else 2) * 4 * tokens
    # Received rows have an order of their own.
    exchanged = 2 * index if parts > 1 else 0
    stream = tokens * h * width
    is_trained = "mlp.experts" not in p.frozen

    def product(
        name: str, weights: int, *, inputs: float, outputs: float, passed: float, index_bytes: float = 0
    ) -> list[LayerMemory]:
        layer = LayerMemory(
            name,
            weights,
            saved=inputs + cast * weights + index_bytes,
            selected=outputs,
            backward=outputs + inputs + (width * weights if is_trained else 0) + per_row,
            passed=passed,
            gathers=row if p.is_stage3 else 0,
        )
        if not p.autocast or not is_trained:
            return [layer]
        # The gradient of the weights in 16 bit becomes one in fp32 once what the product has read is free.
        later = LayerMemory(f"{name}: gradient in fp32", weights, backward=passed + 6 * weights, passed=passed)
        return [later, replace(layer, parameters=0)]

    of_router = 2 * score + per_row + 2 * index + loss + (4 * router if p.stream == 2 else 0)
    layers = [
        LayerMemory(
            "router",
            router,
            saved=4 * tokens * h + of_router,
            selected=score,
            backward=2 * score + 4 * tokens * h + 4 * router + stream,
            passed=p.x,
        ),
        *product("up of experts", gates * here, inputs=row, outputs=gates * result, passed=2 * row, index_bytes=index),
        LayerMemory(
            "activation of experts",
            saved=(gates + 1) * result if gates == 2 else result,
            backward=(gates + 1) * result + per_row,
            forward=gates * result + row + 2 * score + 3 * index + 4 * tokens * h,
        ),
        *product("down of experts", here, inputs=result, outputs=row, passed=result),
        LayerMemory(
            "sum of experts",
            saved=row + 2 * rows + exchanged,
            backward=2 * row + 2 * rows + 2 * score + (stream if s.shared_expert_width else 0),
        ),
    ]
    if s.shared_expert_width:
        shared = _mlp(p, s.shared_expert_width)
    else:
        shared = []
    return [*layers, *shared, *dropout(p, tokens * h)]


def ends_bytes(p: Pass) -> float:
    """Return the bytes of token ids, positions, rotations, masks and routing, until the end of the backward pass."""
    s = p.shape
    t = p.shape.seq_len
    batch = p.batch
    own = batch if s.has_document_mask else 1
    rotations = 2 * p.width * own * p.t * s.head_dim if s.positions == "rotary" else 0
    # FlexAttention's mask has four tables of blocks of 128 x 128, and the first position that each one sees.
    if p.kernel == "flex":
        mask = 16 * (-(-t // 128)) ** 2 + 8 * t
    else:
        mask = p.width * t * _round_up(t, 8)
    masks = mask * (own if s.has_mask else 0)
    if s.has_window and s.has_document_mask and s.global_layers:
        masks *= 2
    if s.num_experts:
        sparse = sum(map(s.is_sparse, range(s.n_layer)))
    else:
        sparse = 0
    routing = (s.num_experts + 4) * 12 * sparse
    return 8 * batch * (t + 1) + 8 * t * own + rotations + masks + routing + (p.tokens * s.n_embd if s.dropout else 0)


class LossMemory(NamedTuple):
    """Peaks beside the last block's result."""

    cast: float
    """Autocast's copies, in the forward pass."""
    forward: float
    """From the final norm to the loss, without `cast`."""
    backward: float


def loss(p: Pass) -> LossMemory:
    """model/loss.py: the forward pass makes the gradients of x and, in fp32 over chunks, of the head's weights."""
    s = p.shape
    width = p.width
    weights = s.padded_vocab_size * s.n_embd
    chunk = min(p.tokens, p.chunk_tokens)
    head = weights if p.trains_head else 0
    is_one = p.tokens <= p.chunk_tokens
    sums = (width if is_one else 4) * head
    product = 0 if is_one or width == 4 else width * head
    if p.loss_kernel == "torch":
        softmax = 4 * softmax_tokens(chunk) * s.padded_vocab_size
    else:
        softmax = 0
    small = (20 if p.batch > 1 else 12) * p.tokens
    # A chunk's gradient of x, which the gradient of the head's weights exceeds where it comes after.
    of_x = 0 if is_one and head else width * chunk * s.n_embd
    logits = width * chunk * s.padded_vocab_size + max(product, of_x)
    return LossMemory(
        cast=2 * weights + 2 * chunk * s.n_embd if p.autocast else 0,
        forward=2 * p.x + small + sums + softmax + logits,
        backward=2 * p.x + 8 * p.tokens + sums + p.stream * head,
    )
