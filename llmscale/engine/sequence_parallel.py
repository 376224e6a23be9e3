"""Sequence parallelism (Ulysses; Jacobs et al. 2023): ranks divide tokens, and within attention heads.

Each rank of a group computes embeddings, MLPs, norms and the loss of its tokens. Attention needs all tokens of a
sequence, but only one head at a time: an all-to-all before it exchanges tokens for heads, and another one after it
exchanges them back. Both are DeepSpeed's operator, whose backward pass is the opposite exchange. It makes gradients
contiguous first: the collective writes in memory order, and with other strides gradients would be wrong by less than a
loss shows. ZeRO is unchanged: the mean over all ranks of their gradients is the gradient of the mean loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from llmscale.config.batch_plan import ParallelLayout
from llmscale.engine.process_group import COLLECTIVE_TIMEOUT


@dataclass(frozen=True)
class RankSplit:
    """This rank's part of each sequence; a SequenceSplit."""

    size: int
    """Ranks of its group."""
    index: int
    group: dist.ProcessGroup

    def __post_init__(self) -> None:
        from deepspeed.sequence.layer import register_all_to_all_group

        register_all_to_all_group(self.group)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [batch, t, heads, head_dim] for all tokens of this rank's heads, [batch, size t, h, head_dim].

        Key-value heads that the ranks cannot divide are repeated first. Collective.
        """
        repeats = self.size // math.gcd(k.shape[2], self.size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        # One exchange for all three: [size, batch, t, heads of a rank, head_dim].
        sent = torch.cat([x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)], dim=3)
        received = self._exchange(sent).transpose(0, 1).flatten(1, 2)
        heads = [x.shape[2] // self.size for x in (q, k, v)]
        q, k, v = received.split(heads, dim=2)
        return q, k, v

    def to_tokens(self, y: Tensor) -> Tensor:
        """Exchange this rank's heads [batch, size t, h, head_dim] for its tokens [batch, t, heads, head_dim].

        Collective.
        """
        received = self._exchange(y.unflatten(1, (self.size, -1)).transpose(0, 1))
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i, [size, ...], to rank i of the group, and return the parts received."""
        received: Tensor = torch.ops.deepspeed.dim_zero_all_to_all(parts.contiguous(), self.group.group_name)
        return received

    def sum_over_parts(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors. Collective."""
        return funcol.all_reduce(x, "sum", self.group)

    def gather_scores(self, scores: Tensor, t: int) -> Tensor:
        """Return the scores of `t` tokens from those of the ranks' parts: [batch, part, 2] -> [batch, t, 2].

        Collective.
        """
        parts = [torch.empty_like(scores) for _ in range(self.size)]
        dist.all_gather(parts, scores.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)[:, :t]


def build_split(ranks: ParallelLayout) -> RankSplit | None:
    """Return this rank's split, in a new group of neighbouring ranks; None for undivided sequences. Collective."""
    size = ranks.sequence_parallel_size
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
    return RankSplit(size, dist.get_rank() % size, group)
