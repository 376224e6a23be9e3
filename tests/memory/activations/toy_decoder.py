"""A decoder that llmscale does not have: RMS norm, gated MLP, fewer key-value heads, an untied head.

It knows nothing of memory, and no line of llmscale knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.dry_run.recording import MicroStepTrace, factor_traces, trace_micro_step
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.memory.activations.recorded import MicroStep, RecordedSegment
from llmscale.memory.breakdown import allocated_bytes
from llmscale.model.gpt import BlockCheckpoint


@dataclass(frozen=True)
class ToyShape:
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    seq_len: int

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_dim

    @property
    def num_parameters(self) -> int:
        h, kv = self.n_embd, self.n_kv_head * self.head_dim
        block = 2 * h + 2 * h * h + 2 * h * kv + 3 * h * self.mlp_width
        return self.n_layer * block + 2 * self.vocab_size * h + h

    def symbols(self, micro_batch_size: int) -> dict[str, int]:
        t, d = self.seq_len, self.head_dim
        return {
            "b": micro_batch_size,
            "t": t,
            "a": self.n_head,
            "k": self.n_kv_head,
            "d": d,
            "m": self.mlp_width,
            "V": self.vocab_size,
            "t+1": t + 1,
            "d_to_32_or_64": -(-d // (32 if d <= 128 else 64)) * (32 if d <= 128 else 64),
            "t_to_128": -(-t // 128) * 128,
        }


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class ToyBlock(nn.Module):
    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv = shape.n_embd, shape.n_kv_head * shape.head_dim
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, kv, kv))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        batch, t, width = x.shape
        q, k, v = (f(x).view(batch, t, -1, self.shape.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        shared = self.shape.n_head // self.shape.n_kv_head
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, t, width))


class ToyDecoder(nn.Module):
    def __init__(self, shape: ToyShape, run_block: BlockCheckpoint) -> None:
        super().__init__()
        self.run_block = run_block
        self.embedding = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.blocks = nn.ModuleList(ToyBlock(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.n_embd)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x).flatten(0, 1))
        return F.cross_entropy(logits.float(), targets.flatten())


#: (sequences, shape): no two products of the symbols grow alike.
SMALL = (
    (2, ToyShape(2, 6, 3, 104, 211, 307, 37)),
    (3, ToyShape(2, 10, 2, 40, 503, 997, 150)),
    (7, ToyShape(2, 28, 7, 136, 811, 2111, 290)),
)


def trace_toy(shape: ToyShape, micro_batch_size: int, mode: CheckpointingMode) -> MicroStepTrace:
    """One micro-step in bf16. Within `fake_world`."""

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(micro_batch_size, shape.seq_len + 1, dtype=torch.long)
        return model(tokens[:, :-1], tokens[:, 1:])

    return trace_micro_step(
        lambda run_block: ToyDecoder(shape, run_block),
        loss_of,
        n_layer=shape.n_layer,
        dtype=torch.bfloat16,
        checkpoint=build_block_checkpoint(mode, {}),
    )


class LiveBytes(NamedTuple):
    """Bytes of a traced micro-step, without gradients of parameters."""

    saved: int
    """Bytes alive at the end of the forward pass."""
    forward_peak: int
    backward_peak: int


def count_live_bytes(trace: MicroStepTrace) -> LiveBytes:
    """By following its events."""
    live, saved, peaks = 0, 0, {"forward": 0, "backward": 0}
    for segment in trace.segments:
        direction = segment.name.rpartition("_")[2]
        if segment.name == "head_backward":
            saved = live
        for storage, appears in segment.events:
            if trace.kinds[storage] != "gradient":
                live += (1 if appears else -1) * allocated_bytes(trace.sizes[storage], 1)
                peaks[direction] = max(peaks[direction], live)
    return LiveBytes(saved, peaks["forward"], peaks["backward"])


def record_toy(mode: CheckpointingMode) -> dict[str, RecordedSegment]:
    """From small shapes."""
    traces = [trace_toy(shape, sequences, mode) for sequences, shape in SMALL]
    return factor_traces(traces, [shape.symbols(sequences) for sequences, shape in SMALL])


#: Llama 3 8B's, with fewer blocks so that the direct run is quick.
LARGE = replace(ToyShape(32, 32, 8, 128, 14336, 128256, 8192), n_layer=5)


def peak_bytes(micro_step: MicroStep, direction: str) -> int:
    """Return the peak of the "forward" or "backward" segments."""
    most = 0
    for name, segment in micro_step.segments.items():
        # Every block changes the live bytes by the same amount: the first or the last has the peak.
        for done in (0, micro_step.n_layer - 1) if name.startswith("block") else (0,):
            start = micro_step.starts[name].total_bytes + done * segment.net.total_bytes
            peak = max(start, *(start + moment.total_bytes for moment in segment.moments))
            most = max(most, peak) if name.endswith(direction) else most
    return most
