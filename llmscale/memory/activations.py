"""Moments of a micro-step that can be the peak of its activations, from the bytes of its layers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.memory.layers import LayerMemory, Pass, attention, ends_bytes, experts, loss, mlp, norm
from llmscale.memory.states import Handed


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
    complete: float = 0
    """Gradients that DeepSpeed has by then."""
    handing: float = 0
    """Gradients that are being handed over."""
    is_settled: bool = False
    """True between all-gathers of stage 3, False while the largest may run."""

    @property
    def total_bytes(self) -> float:
        return self.casts + self.activations + self.logits + self.temporaries


class BlockKind(NamedTuple):
    """Differences between the blocks of a model."""

    is_sparse: bool
    """True with experts."""
    frozen: frozenset[str] = frozenset()
    """Layers without trained parameters."""
    is_passive: bool = False
    """True if nothing is trained in the block or before it, so that no backward pass reaches it."""


class OtherBlocks(NamedTuple):
    """State in which the backward pass reaches a block."""

    saved: float = 0.0
    """Bytes that the embeddings and earlier blocks hold."""
    casts: float = 0.0
    complete: int = 0
    """Gradients of later layers."""


@dataclass(frozen=True)
class Block:
    """A block under one mode of checkpointing."""

    branches: tuple[list[LayerMemory], list[LayerMemory]]
    mode: CheckpointingMode
    x: float
    unsaved_input: float = 0.0
    """Bytes of the block's input, if none of its layers saves it."""
    is_passive: bool = False
    """True if it keeps nothing for a backward pass."""

    @cached_property
    def layers(self) -> list[LayerMemory]:
        return [layer for branch in self.branches for layer in branch]

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def saved(self) -> float:
        """Bytes kept between the passes, the block's input among them; neither its result nor casts."""
        if self.is_passive:
            return 0.0
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
    def forward_gather(self) -> float:
        """Bytes of a forward pass when stage 3 gathers experts, its input among them; 0 without experts there."""
        place = next((place for place, layer in enumerate(self.layers) if layer.gathers), None)
        if place is None:
            return 0.0
        before = self.layers[:place]
        row = self.layers[place].gathers
        if self.mode == "none":
            return self.x + row + sum(layer.saved for layer in before)
        if self.mode == "selective":
            selected = sum(layer.selected for layer in before)
        else:
            selected = 0
        return 2 * self.x + row + selected

    @cached_property
    def backward(self) -> list[Moment]:
        """Moments of the backward pass, without bytes and gradients of other blocks: of equal gradients the largest."""
        largest: dict[tuple[float, float, bool], Moment] = {}
        for moment in self._backward():
            gradients = moment.complete, moment.handing, moment.is_settled
            if gradients not in largest or moment.total_bytes > largest[gradients].total_bytes:
                largest[gradients] = moment
        return list(largest.values())

    @cached_property
    def backward_bytes(self) -> list[float]:
        """Bytes of these moments."""
        return [moment.total_bytes for moment in self.backward]

    @cached_property
    def handed(self) -> Handed:
        """Gradients at each of these moments."""
        return tuple((moment.complete, moment.handing, moment.is_settled) for moment in self.backward)

    def _backward(self) -> Iterator[Moment]:
        held = self.unsaved_input if self.mode != "none" else 0.0  # by the checkpoint
        live = self.used + held
        casts = self.casts
        complete = 0

        def moment(temporaries: float, handing: float = 0, *, is_settled: bool = False) -> Moment:
            return Moment(
                "block backward",
                casts,
                live,
                temporaries=temporaries,
                complete=complete,
                handing=handing,
                is_settled=is_settled,
            )

        gathers = any(layer.gathers for layer in self.layers)
        if self.mode == "selective":
            yield moment(3 * self.x + held, is_settled=gathers)
        extra = self.x  # the gradient of the residual stream
        given = self.x if self.mode == "full" else 0  # the recomputed result
        for branch in reversed(self.branches):
            for layer in reversed(branch):
                if layer.gathers:
                    yield moment(extra + given + layer.gathers)
                yield moment(extra + given + layer.backward, is_settled=gathers)
                live -= layer.saved
                casts -= layer.casts
                if layer.parameters:
                    yield moment(extra + given + layer.passed, layer.parameters)
                    complete += layer.parameters
            given *= 2  # and DeepSpeed holds the gradient that it passed in


def build_block(p: Pass, mode: CheckpointingMode, kind: BlockKind) -> Block:
    """model/gpt.py, Block: two branches beside the residual stream, with norms before or after attention and MLP."""
    p = replace(p, frozen=kind.frozen)
    if kind.is_sparse:
        inner = experts(p)
    else:
        inner = mlp(p)
    if kind.is_passive:
        layers = [norm(p), *attention(p), norm(p), *inner]
        unread = [LayerMemory(layer.name, layer.parameters, forward=layer.forward) for layer in layers]
        return Block((unread, []), mode, p.x, is_passive=True)
    if p.shape.norm_placement == "pre":
        return Block(([norm(p), *attention(p)], [norm(p), *inner]), mode, p.x)
    after = norm(p, own_gradient=False)
    # The first layer saves a copy in 16 bit, or nothing if it is frozen.
    saves_input = p.is_stage3 or not (p.autocast or "attn.qkv" in kind.frozen)
    return Block(([*attention(p), after], [*inner, after]), mode, p.x, 0 if saves_input else p.x)


@dataclass(frozen=True)
class Activations:
    """The moments of a micro-step that can be its peak."""

    p: Pass
    mode: CheckpointingMode = "none"
    cpu_checkpointing: bool = False

    @cached_property
    def _kinds(self) -> list[BlockKind]:
        """Kind of each block."""
        shape = self.p.shape
        if not self.p.frozen_patterns:
            return [BlockKind(shape.is_sparse(block)) for block in range(shape.n_layer)]
        tensors = replace(shape.tensors, frozen=self.p.frozen_patterns)
        trained = {(tensor.block, tensor.layer) for tensor in tensors.trainable}
        embeddings = {layer.name for layer in shape.architecture.before_blocks}
        is_passive = not any((None, name) in trained for name in embeddings)
        kinds: list[BlockKind] = []
        for block in range(shape.n_layer):
            layers = {layer.name for layer in shape.architecture.layers_of(block) if layer.name}
            frozen = frozenset(name for name in layers if (block, name) not in trained)
            is_passive = is_passive and frozen == layers
            kinds.append(BlockKind(shape.is_sparse(block), frozen, is_passive))
        return kinds

    @cached_property
    def kinds(self) -> dict[BlockKind, Block]:
        """Blocks that differ."""
        return {kind: build_block(self.p, self.mode, kind) for kind in set(self._kinds)}

    @cached_property
    def blocks(self) -> list[Block]:
        return [self.kinds[kind] for kind in self._kinds]

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
        saved: list[float]
        if self._offloads:
            saved = [float(self.p.x) if place >= newest else 0.0 for place in range(self.p.shape.n_layer)]
        else:
            saved = [block.saved for block in self.blocks]
        return list(accumulate(saved, initial=ends_bytes(self.p)))

    def forward_blocks(self) -> Iterator[tuple[float, Moment]]:
        """Yield the blocks' forward passes from the last block to the first, each with bytes that none exceeds from
        there on."""
        casts = list(accumulate((block.forward_casts for block in self.blocks), initial=0.0))
        most = max(block.forward for block in self.kinds.values())
        for place in range(self.p.shape.n_layer, 0, -1):
            # Offloaded inputs leave the GPU two blocks later.
            if self._offloads:
                saved = self.saved[0] + min(place, 3) * self.p.x
            else:
                saved = self.saved[place]
            block = self.blocks[place - 1]
            gathering = block.forward_gather
            moment = Moment("forward", casts[place], saved + block.forward, place=place, is_settled=gathering > 0)
            yield casts[place] + saved + most, moment
            if gathering:
                if self._offloads:
                    before = self.saved[0] + min(place - 1, 3) * self.p.x
                else:
                    before = self.saved[place - 1]
                yield casts[place] + saved + most, moment._replace(activations=before + gathering, is_settled=False)

    def backward_blocks(self) -> Iterator[tuple[float, OtherBlocks, Block]]:
        """Yield the blocks in the order of the backward pass, each with bytes that none exceeds from there on."""
        casts = sum(block.saved_casts for block in self.blocks)
        complete = self._head + norm(self.p).parameters
        most = max(max(block.backward_bytes) for block in self.kinds.values())
        for saved, block in zip(reversed(self.saved[:-1]), reversed(self.blocks), strict=True):
            casts -= block.saved_casts
            yield saved + casts + most, OtherBlocks(saved, casts, complete), block
            complete += block.parameters

    @cached_property
    def largest_handing(self) -> float:
        """Most gradients that a layer of a block hands over."""
        return max(handing for block in self.kinds.values() for _, handing, _ in block.handed)

    @property
    def ends(self) -> Iterator[Moment]:
        """Moments outside of the blocks: the final norm and the loss, and the backward pass before and after blocks."""
        p = self.p
        layers = self.p.shape.n_layer
        loss_memory = loss(self.p)
        norm_parameters = norm(self.p).parameters
        stays = self.saved[-1] + p.x
        casts = sum(block.forward_casts for block in self.blocks)
        yield Moment("loss forward", casts, stays, place=layers + 1)
        yield Moment("loss forward", casts + loss_memory.cast, stays, loss_memory.forward, place=layers + 2)
        casts = sum(block.saved_casts for block in self.blocks)
        yield Moment("loss backward", casts, stays, loss_memory.backward)
        if not p.shape.tied:
            yield Moment("loss backward", casts, stays + p.x, handing=self._head)
        yield Moment(
            "loss backward", casts, self.saved[-1], temporaries=p.x, complete=self._head, handing=norm_parameters
        )
        complete = self._head + norm_parameters + sum(block.parameters for block in self.blocks)
        table_gradient = p.stream * self._head if p.trains_table else 0
        yield Moment("end of backward", 0.0, self.saved[0], temporaries=p.x + table_gradient, complete=complete)

    @property
    def _head(self) -> int:
        """Elements of the output head."""
        return self.p.shape.padded_vocab_size * self.p.shape.n_embd


@lru_cache(maxsize=64)
def estimate_activations(p: Pass, mode: CheckpointingMode, *, cpu_checkpointing: bool = False) -> Activations:
    """Return the activations of a micro-batch. Rows of one table ask for the same again and again."""
    return Activations(p, mode, cpu_checkpointing)
