"""Ranks that divide the tokens of a sequence or the experts of a block, and exchange what the other ones need.

Sequence parallelism (Ulysses; Jacobs et al. 2023): ranks divide tokens, and within attention heads.

Each rank of a group computes embeddings, MLPs, norms and the loss of its tokens. Attention needs all tokens of a
sequence, but only one head at a time: an all-to-all before it exchanges tokens for heads, and another one after it
exchanges them back. Both are DeepSpeed's operator, whose backward pass is the opposite exchange. It makes gradients
contiguous first: the collective writes in memory order, and with other strides gradients would be wrong by less than a
loss shows. ZeRO is unchanged: the mean over all ranks of their gradients is the gradient of the mean loss.

Expert parallelism: ranks divide the experts of a block, and send each token to the ranks of its experts.

The groups are DeepSpeed's: neighbouring ranks hold all experts together, and exchange tokens; ranks that hold the same
experts average their gradients. ZeRO divides the states of an expert over the latter, all others over all ranks. Every
gradient is divided by the number of all ranks, so it is that of the mean loss, as without division.

Ranks exchange row counts first: a rank may send or get none at all, and still takes part in every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from llmscale.config.batch_plan import ParallelLayout
from llmscale.engine.process_group import COLLECTIVE_TIMEOUT
from llmscale.model.experts import Permute


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
            k = k.repeat_interleave(repeats, 2)
            v = v.repeat_interleave(repeats, 2)
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


@dataclass(frozen=True)
class RankExperts:
    """This rank's part of each block's experts; an ExpertSplit."""

    size: int
    """Ranks that hold all experts together."""
    index: int
    name: str
    """DeepSpeed's name of the groups."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that hold all experts together."""
        from deepspeed.utils import groups

        group: dist.ProcessGroup = groups._get_expert_parallel_group(self.name)
        return group

    def mark(self, parameter: nn.Parameter) -> None:
        """Tell DeepSpeed that only some ranks hold the parameter of this rank's experts."""
        from deepspeed.utils import groups

        marks = {
            "allreduce": False,
            "group_name": self.name,
            # Stage 3 reads these: zero.Init the group, and the reduction of gradients the rest.
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": self.name,
            "ds_zero_partition_process_group": groups._get_expert_data_parallel_group(self.name),
        }
        for key, value in marks.items():
            setattr(parameter, key, value)

    def run(self, x: Tensor, ends: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send rows of x [rows, width] to their experts, and return the results in the same order.

        The rows of expert e end before ends[e]; `experts` applies those of this rank. Collective.
        """
        sent = ends.diff(prepend=ends.new_zeros(1)).view(self.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send_sizes, receive_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        mine = _Exchange.apply(x, send_sizes, receive_sizes, self.group)
        # Rows arrive by sender and then by expert; the product needs them by expert.
        numbers = torch.arange(received.shape[1], device=x.device).repeat(self.size)
        order = numbers.repeat_interleave(received.flatten(), output_size=sum(receive_sizes)).argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        mine = Permute.apply(mine, places, order[:, None]).flatten(0, 1)
        done = experts(mine, received.sum(0).cumsum(0).type_as(ends))
        done = Permute.apply(done, order, places[:, None]).flatten(0, 1)
        result: Tensor = _Exchange.apply(done, receive_sizes, send_sizes, self.group)
        return result


class _Exchange(torch.autograd.Function):
    """All-to-all of rows whose backward pass is the opposite exchange. Collective."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        send_sizes: list[int],
        receive_sizes: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sizes, ctx.group = (send_sizes, receive_sizes), group  # type: ignore[attr-defined]
        return _exchange(rows, send_sizes, receive_sizes, group)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        send_sizes, receive_sizes = ctx.sizes  # type: ignore[attr-defined]
        return _exchange(gradient, receive_sizes, send_sizes, ctx.group), None, None, None  # type: ignore[attr-defined]


def _exchange(rows: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
    # The collective writes in memory order, so a gradient with other strides would be wrong.
    dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
    return received


def divide_experts(ranks: ParallelLayout) -> RankExperts | None:
    """Return this rank's part, in DeepSpeed's groups, which are created if needed; None if every rank has all experts.

    Collective.
    """
    size = ranks.expert_parallel_size
    if size == 1:
        return None
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(size)
    return RankExperts(size, dist.get_rank() % size, f"ep_size_{size}")


@contextmanager
def as_mixture_of_experts() -> Iterator[None]:
    """Let `deepspeed.initialize` treat a model with marked parameters as one of its own mixtures of experts.

    DeepSpeed knows a mixture by the classes of its modules, and refuses others at stage 3. Stages 1 and 2 refuse one
    without an expert to step: where all are frozen, they get no mixture. Stage 3 divides also what is frozen.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.moe.utils import is_moe_param

    configure = DeepSpeedEngine._configure_distributed_model
    validate = DeepSpeedEngine._validate_zero3_moe_compatibility

    def configure_mixture(engine: DeepSpeedEngine, model: nn.Module) -> None:
        is_sharded = engine.zero_optimization_partition_weights()
        experts = [weight for weight in model.parameters() if is_moe_param(weight)]
        engine.has_moe_layers = is_sharded or any(weight.requires_grad for weight in experts)
        configure(engine, model)

    DeepSpeedEngine._configure_distributed_model = configure_mixture
    DeepSpeedEngine._validate_zero3_moe_compatibility = lambda engine: None
    yield
    DeepSpeedEngine._configure_distributed_model = configure
    DeepSpeedEngine._validate_zero3_moe_compatibility = validate
