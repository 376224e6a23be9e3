"""Activation memory of every layer of the GPT: bytes saved for the backward pass, and peaks of its passes. No torch.

Each function mirrors one `forward()` of llmscale/model and is to be read beside it. A block is the list of its
layers, and its saved bytes are their sum. Its backward pass walks the list from the end and frees what a layer saved.
It peaks where the saved bytes plus that layer's `backward` are largest. Bytes are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
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
        is_16bit, mode = self.width == 2, self.checkpointing
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
    """y = x W: saves x; the backward pass holds the gradients of y, x and W.

    `saves`: bytes of x, where another layer has saved it or it is in fp32. `ends_branch`: y is added to the residual
    stream, whose gradient is that of y.
    """
    tokens, width = p.tokens, p.width
    weights = inputs * outputs + bias * outputs
    of_x = tokens * inputs * width
    saved = of_x if saves is None else saves
    is_stream = ends_branch and not p.autocast and not p.shape.dropout and p.shape.norm_placement == "pre"
    of_y = 0 if is_stream else tokens * outputs * width
    layer = LayerMemory(
        name,
        parameters=weights,
        saved=saved,
        selected=tokens * outputs * width,
        backward=of_y + of_x + weights * width + (2 * weights if p.autocast and p.is_stage3 else 0),
        passed=of_x,
        casts=2 * weights if p.autocast and not p.is_stage3 else 0,
    )
    if not p.autocast:
        return [layer]
    # The gradient of W in 16 bit becomes one in fp32 once y's gradient and the cast are free; stage 3 still holds x.
    later = saved if p.is_stage3 else 0
    passed = max(of_x, later)
    cast = LayerMemory(f"{name}: gradient in fp32", weights, saved=later, backward=passed + 6 * weights, passed=passed)
    return [cast, replace(layer, parameters=0, saved=saved - later)]


def dropout(p: Pass, elements: float) -> list[LayerMemory]:
    """Saves a mask of one byte per element."""
    return [LayerMemory("dropout", saved=elements, backward=p.width * elements)] if p.shape.dropout else []


def attention(p: Pass) -> list[LayerMemory]:
    """model/gpt.py, CausalSelfAttention: qkv, norms of q and k, rotation, exchange of heads, kernel, projection."""
    s, width, tokens = p.shape, p.width, p.tokens
    q, k, qkv = (heads * s.head_dim * tokens * width for heads in (s.n_head, s.n_kv_head, s.qkv_heads))
    normed, rotary = s.qk_norm != "none", s.positions == "rotary"
    layers = linear(
        p, "qkv", s.n_embd, s.qkv_heads * s.head_dim, bias=s.attention_bias != "none", saves=_norm_result(p)
    )
    if normed:
        statistics = 4 * tokens * (s.n_head + s.n_kv_head if s.qk_norm == "head" else 2)
        inputs = 2 * (q + k) if p.autocast else qkv  # views of qkv, or fp32 copies
        weights = 2 * s.head_dim if s.qk_norm == "head" else (s.n_head + s.n_kv_head) * s.head_dim
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
        "proj",
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
    s, t, d = p.shape, p.shape.seq_len, p.shape.head_dim
    heads, kv_heads = p.heads
    size, is_flash = p.ranks.sequence_parallel_size, p.kernel.startswith("fl")  # FlexAttention saves the same
    repeats = kv_heads < heads and not is_flash
    q, k = (float(count * d * p.tokens * p.width) for count in (heads, kv_heads))
    source = views
    if size > 1:
        yield LayerMemory("exchange", backward=2 * (q + 2 * k))
        source = q + 2 * k + (2 * q if repeats else 0)
    elif p.kernel == "flash_padded":
        padding = -(-d // 8) * 8 / d
        q, k = padding * q, padding * k
        source = q + 2 * k
    elif p.kernel == "math":
        source = 3 * p.tokens * heads * d * 4
    elif repeats:
        source = 2 * q + repeated
    rows = p.batch * heads // size * t
    if p.kernel == "math":  # scores in fp32 of every pair of positions
        scores = 4 * rows * t
        saved, selected, work = source + scores * (3 if s.dropout else 1), 0.0, 2.0 * scores
    else:
        log_sum_exp = 4 * rows * (1 if is_flash else -(-t // 32) * 32 / t)
        saved, selected = source + q + log_sum_exp, 0.0 if s.dropout else q + log_sum_exp
        if is_flash:  # the backward kernel sums dQ in fp32 in blocks of 128 rows
            padded_rows, padded_d = rows / t * (-(-t // 128) * 128), _round_up(d, 32 if d <= 128 else 64)
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
    s, gates, bias = p.shape, 2 if p.shape.gated_mlp else 1, bool(p.shape.mlp_bias)
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
        *linear(p, "up", s.n_embd, gates * hidden, bias=bias, saves=_norm_result(p)),
        activation,
        *linear(p, "down", hidden, s.n_embd, bias=bias, saves=saves, ends_branch=True),
    ]


def _tiled_mlp(p: Pass) -> LayerMemory:
    """Saves x; the backward pass runs each tile again and sums the gradients of the weights in fp32."""
    s, h, m, gates = p.shape, p.shape.n_embd, p.shape.mlp_width, 2 if p.shape.gated_mlp else 1
    weights = (gates + 1) * h * m + bool(s.mlp_bias) * (gates * m + h)
    tile = min(s.mlp_tile_tokens, p.tokens) * p.width * (2 * h + (3 * gates - 1) * m)
    inside = tile + weights * p.stream + (2 * weights if p.autocast else 0)
    return LayerMemory(
        "mlp in tiles",
        weights,
        saved=p.x,
        backward=p.x + 4 * weights + max(inside, weights * p.stream),
        passed=p.x,
        cached=2 * weights if p.autocast else 0,
    )


def experts(p: Pass) -> list[LayerMemory]:
    """model/experts.py, SparseMLP: router in fp32, rows sorted by expert, two grouped products, weighted sum."""
    s, width, tokens, h = p.shape, p.width, p.tokens, p.shape.n_embd
    rows, gates, parts = p.received_rows, 2 if p.shape.gated_mlp else 1, p.ranks.expert_parallel_size
    row, result = rows * h * width, rows * s.expert_width * width
    index, per_row, score = 8 * rows, 4 * rows, 4 * tokens * s.num_experts
    here = s.num_experts // parts * h * s.expert_width
    router, cast = s.num_experts * h, 2 if p.autocast else 0
    loss = (5 if p.router_loss else 2) * 4 * tokens
    exchanged = row + 2 * index if parts > 1 else 0  # what is received and sent back has its own order
    stream = tokens * h * width

    def product(name: str, weights: int, inputs: float, outputs: float, passed: float, more: float) -> LayerMemory:
        return LayerMemory(
            name,
            weights,
            saved=inputs + cast * weights + more,
            selected=outputs,
            backward=outputs + inputs + weights * (p.stream + cast) + per_row,
            passed=passed,
        )

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
        product("up of experts", gates * here, row, gates * result, 2 * row, index),
        LayerMemory(
            "activation of experts",
            saved=(gates + 1) * result if gates == 2 else result,
            backward=(gates + 1) * result + per_row,
            forward=gates * result + row + 2 * score + 3 * index + 4 * tokens * h,
        ),
        product("down of experts", here, result, row, result, 0),
        LayerMemory(
            "sum of experts",
            saved=row + 2 * rows + exchanged,
            backward=2 * row + 2 * rows + 2 * score + (stream if s.shared_expert_width else 0),
        ),
    ]
    shared = _mlp(p, s.shared_expert_width) if s.shared_expert_width else []
    return [*layers, *shared, *dropout(p, tokens * h)]


class Moment(NamedTuple):
    """Bytes of activations at one moment of a micro-step, or of one block's part of it."""

    name: str
    """Part of the step, as in llmscale.memory.estimate.PHASES."""
    casts: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    temporaries: float = 0.0
    place: int = -1
    """In the forward pass: 0 for embeddings, blocks from 1, then the final norm, and the loss; else -1."""
    done: float = 0
    """Gradients that DeepSpeed has by then."""
    own: float = 0
    """Gradients that are being handed over."""

    @property
    def total_bytes(self) -> float:
        return self.casts + self.activations + self.logits + self.temporaries


class OtherBlocks(NamedTuple):
    """State in which the backward pass reaches a block."""

    saved: float = 0.0
    """Bytes that the embeddings and earlier blocks hold."""
    casts: float = 0.0
    done: int = 0
    """Gradients of later layers."""


@dataclass(frozen=True)
class Block:
    """A block under one mode of checkpointing."""

    branches: tuple[list[LayerMemory], list[LayerMemory]]
    mode: CheckpointingMode
    x: float
    unsaved_input: float = 0.0
    """Bytes of the block's input, if none of its layers saves it."""

    @cached_property
    def layers(self) -> list[LayerMemory]:
        return [layer for branch in self.branches for layer in branch]

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def saved(self) -> float:
        """Bytes kept between the passes, the block's input among them; neither its result nor casts."""
        if self.mode == "full":
            return self.x
        if self.mode == "selective":
            return self.x + sum(layer.selected for layer in self.layers)
        return self.used

    @cached_property
    def used(self) -> float:
        """Bytes that the backward pass reads, without casts."""
        return sum(layer.saved for layer in self.layers)

    @cached_property
    def casts(self) -> float:
        return sum(layer.casts for layer in self.layers)

    @cached_property
    def saved_casts(self) -> float:
        """Bytes of casts kept between the passes."""
        return self.casts if self.mode == "none" else 0.0

    @cached_property
    def forward_casts(self) -> float:
        """Bytes of casts that live until the end of the forward pass."""
        return self.casts + sum(layer.cached for layer in self.layers)

    @cached_property
    def forward(self) -> float:
        """Bytes of a forward pass beside what it saves; with checkpointing only."""
        if self.mode == "none":
            return self.x
        inputs = [0.0, *(layer.selected for layer in self.layers)]  # which `selective` has counted
        pairs = zip(self.layers, inputs, strict=False)
        return 2 * self.x + max(layer.forward + (given if self.mode == "full" else 0) for layer, given in pairs)

    @cached_property
    def backward(self) -> list[Moment]:
        """Moments of the backward pass, without bytes and gradients of other blocks: of equal gradients the largest."""
        largest: dict[tuple[float, float], Moment] = {}
        for moment in self._backward():
            gradients = moment.done, moment.own
            if gradients not in largest or moment.total_bytes > largest[gradients].total_bytes:
                largest[gradients] = moment
        return list(largest.values())

    @cached_property
    def backward_bytes(self) -> list[float]:
        """Bytes of these moments."""
        return [moment.total_bytes for moment in self.backward]

    @cached_property
    def handed(self) -> tuple[tuple[float, float], ...]:
        """(gradients that are complete, and those being handed over) at each of these moments."""
        return tuple((moment.done, moment.own) for moment in self.backward)

    def _backward(self) -> Iterator[Moment]:
        held = self.unsaved_input if self.mode != "none" else 0.0  # by the checkpoint
        live, casts, done = self.used + held, self.casts, 0

        def moment(temporaries: float, own: float = 0) -> Moment:
            return Moment("block backward", casts, live, 0.0, temporaries, -1, done, own)

        if self.mode == "selective":
            yield moment(3 * self.x + held)
        extra = self.x  # the gradient of the residual stream
        given = self.x if self.mode == "full" else 0  # the recomputed result
        for branch in reversed(self.branches):
            for layer in reversed(branch):
                yield moment(extra + given + layer.backward)
                live, casts = live - layer.saved, casts - layer.casts
                if layer.parameters:
                    yield moment(extra + given + layer.passed, layer.parameters)
                    done += layer.parameters
            given *= 2  # and DeepSpeed holds the gradient that it passed in


def build_block(p: Pass, mode: CheckpointingMode, *, is_sparse: bool) -> Block:
    """model/gpt.py, Block: two branches beside the residual stream, with norms before or after attention and MLP."""
    inner = experts(p) if is_sparse else mlp(p)
    if p.shape.norm_placement == "pre":
        return Block(([norm(p), *attention(p)], [norm(p), *inner]), mode, p.x)
    after = norm(p, own_gradient=False)
    unsaved = p.x if p.autocast and not p.is_stage3 else 0  # the first layer saves a copy in 16 bit
    return Block(([*attention(p), after], [*inner, after]), mode, p.x, unsaved)


def ends_bytes(p: Pass) -> float:
    """Return the bytes of token ids, positions, rotations, masks and routing, until the end of the backward pass."""
    s, t, batch = p.shape, p.shape.seq_len, p.batch
    own = batch if s.has_document_mask else 1
    rotations = 2 * p.width * own * p.t * s.head_dim if s.positions == "rotary" else 0
    # FlexAttention's mask has four tables of blocks of 128 x 128, and the first position that each one sees.
    mask = 16 * (-(-t // 128)) ** 2 + 8 * t if p.kernel == "flex" else p.width * t * _round_up(t, 8)
    masks = mask * (own if s.has_mask else 0)
    if s.has_window and s.has_document_mask and s.global_layers:
        masks *= 2
    sparse = sum(map(s.is_sparse, range(s.n_layer))) if s.num_experts else 0
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
    s, width = p.shape, p.width
    weights, chunk = s.padded_vocab_size * s.n_embd, min(p.tokens, p.chunk_tokens)
    head = weights if p.trains_head else 0
    is_one = p.tokens <= p.chunk_tokens
    sums = (width if is_one else 4) * head
    product = 0 if is_one or width == 4 else width * head
    softmax = 4 * softmax_tokens(chunk) * s.padded_vocab_size if p.loss_kernel == "torch" else 0
    small = 8 * p.tokens + 8 * p.tokens * (p.batch > 1) + 4 * p.tokens
    logits = width * chunk * s.padded_vocab_size + max(product, 0 if is_one else width * chunk * s.n_embd)
    return LossMemory(
        cast=2 * weights + 2 * chunk * s.n_embd if p.autocast else 0,
        forward=2 * p.x + small + sums + softmax + logits,
        backward=2 * p.x + 8 * p.tokens + sums + p.stream * head,
    )


@dataclass(frozen=True)
class Activations:
    """The moments of a micro-step that can be its peak."""

    p: Pass
    mode: CheckpointingMode = "none"
    cpu_checkpointing: bool = False

    @cached_property
    def kinds(self) -> dict[bool, Block]:
        """Blocks by whether they have experts."""
        shape = self.p.shape
        order = {shape.is_sparse(block) for block in range(shape.n_layer)} if shape.num_experts else {False}
        return {is_sparse: build_block(self.p, self.mode, is_sparse=is_sparse) for is_sparse in order}

    @cached_property
    def blocks(self) -> list[Block]:
        if len(self.kinds) == 1:
            return [*self.kinds.values()] * self.p.shape.n_layer
        return [self.kinds[self.p.shape.is_sparse(block)] for block in range(self.p.shape.n_layer)]

    @property
    def _offloads(self) -> bool:
        return self.cpu_checkpointing and self.mode == "full"

    @property
    def host_bytes(self) -> float:
        return (self.p.shape.n_layer - 1) * self.p.x if self._offloads else 0

    @cached_property
    def saved(self) -> list[float]:
        """Bytes that the embeddings and the first 0, 1, 2, ... blocks hold, without casts."""
        # DeepSpeed leaves the last two blocks' inputs on the GPU.
        newest = self.p.shape.n_layer - 2
        own = [
            (self.p.x if place >= newest else 0) if self._offloads else block.saved
            for place, block in enumerate(self.blocks)
        ]
        return list(accumulate(own, initial=ends_bytes(self.p)))

    def forward_blocks(self) -> Iterator[tuple[float, Moment]]:
        """Yield the blocks' forward passes from the last block to the first, each with bytes that none exceeds from
        there on."""
        casts = list(accumulate((block.forward_casts for block in self.blocks), initial=0.0))
        most = max(block.forward for block in self.kinds.values())
        for place in range(self.p.shape.n_layer, 0, -1):
            # Offloaded inputs leave the GPU two blocks later.
            saved = self.saved[0] + min(place, 3) * self.p.x if self._offloads else self.saved[place]
            moment = Moment("forward", casts[place], saved + self.blocks[place - 1].forward, place=place)
            yield casts[place] + saved + most, moment

    def backward_blocks(self) -> Iterator[tuple[float, OtherBlocks, Block]]:
        """Yield the blocks in the order of the backward pass, each with bytes that none exceeds from there on."""
        casts, done = sum(block.saved_casts for block in self.blocks), self._head + norm(self.p).parameters
        most = max(max(block.backward_bytes) for block in self.kinds.values())
        for saved, block in zip(reversed(self.saved[:-1]), reversed(self.blocks), strict=True):
            casts -= block.saved_casts
            yield saved + casts + most, OtherBlocks(saved, casts, done), block
            done += block.parameters

    @cached_property
    def largest_own(self) -> float:
        """Most gradients that a layer of a block hands over."""
        return max(own for block in self.kinds.values() for _, own in block.handed)

    @property
    def ends(self) -> Iterator[Moment]:
        """Moments outside of the blocks: the final norm and the loss, and the backward pass before and after blocks."""
        p, layers, loss_memory, own = self.p, self.p.shape.n_layer, loss(self.p), norm(self.p).parameters
        stays, casts = self.saved[-1] + p.x, sum(block.forward_casts for block in self.blocks)
        yield Moment("loss forward", casts, stays, place=layers + 1)
        yield Moment("loss forward", casts + loss_memory.cast, stays, loss_memory.forward, place=layers + 2)
        casts = sum(block.saved_casts for block in self.blocks)
        yield Moment("loss backward", casts, stays, loss_memory.backward)
        if not p.shape.tied:
            yield Moment("loss backward", casts, stays + p.x, own=self._head)
        yield Moment("loss backward", casts, self.saved[-1], temporaries=p.x, done=self._head, own=own)
        done = self._head + own + sum(block.parameters for block in self.blocks)
        yield Moment("end of backward", 0.0, self.saved[0], 0.0, p.x + p.stream * self._head, done=done)

    @property
    def _head(self) -> int:
        """Elements of the output head."""
        return self.p.shape.padded_vocab_size * self.p.shape.n_embd


@lru_cache(maxsize=64)
def estimate_activations(p: Pass, mode: CheckpointingMode, *, cpu_checkpointing: bool = False) -> Activations:
    """Return the activations of a micro-batch. Rows of one table ask for the same again and again."""
    return Activations(p, mode, cpu_checkpointing)
