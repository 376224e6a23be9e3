"""Bugs, each modelled on a real one, that are planted in DeepSpeed, torch or llmscale while a check runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.honest import GPT2, MODERN, MOE

_ABSENT = object()


class Planter:
    """Replaces attributes, and puts back what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    def put(self, owner: Any, name: str, value: object) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], object]) -> None:
        """Replace an attribute by what `make` makes of it."""
        self.put(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    plant: Callable[[Planter], None]
    flags: str
    link: str
    """Link that breaks; empty for one that rounding hides."""
    parameter: str = ""
    """First parameter that is wrong; empty if any may be."""
    rank: int | None = None
    """Rank that is named."""
    seq_len: int = 32
    steps: int = 2


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[None]:
    """Plant a bug, and remove it."""
    planter = Planter()
    try:
        if mutant is not None:
            mutant.plant(planter)
        yield
    finally:
        planter.undo()


def zero12() -> Any:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer


def zero3() -> Any:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3


def accumulation_divides_twice(plant: Planter) -> None:
    from deepspeed import DeepSpeedEngine

    def make(old: Any) -> Any:
        return lambda self, loss, **options: old(self, loss / self.gradient_accumulation_steps(), **options)

    plant.wrap(DeepSpeedEngine, "backward", make)


def ranks_divide_twice(plant: Planter) -> None:
    def make(old: Any) -> Any:
        return lambda self, tensor, dtype: old(self, tensor.div_(dist.get_world_size()), dtype)

    plant.wrap(zero12(), "average_tensor", make)


def norm_lacks_a_third(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def norm(self: Any, gradients: Any, params: Any, norm_type: int = 2) -> Any:
            rest = len(params) - len(params) // 3
            return old(self, list(gradients)[:rest], list(params)[:rest], norm_type)

        return norm

    plant.wrap(zero12(), "get_grad_norm_direct", make)


def divided_by_65536_at_stage_0(plant: Planter) -> None:
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    def make(old: Any) -> Any:
        def unscale(self: Any, total_norm: Any, apply_scale: bool = True) -> Any:
            scale = old(self, total_norm, apply_scale)
            for group in self.fp32_groups:
                for p in group:
                    p.grad.data.mul_(1 / 65536)
            return scale

        return unscale

    plant.wrap(FP16_UnfusedOptimizer, "unscale_and_clip_grads", make)


def stale_weights_at_stage_3(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def reassign(self: Any, sub_group_id: int) -> None:
            flat = self.fp16_partitioned_groups_flat[sub_group_id]
            before = flat.clone()
            old(self, sub_group_id)
            if sub_group_id == len(self.fp16_groups) - 1:
                flat.copy_(before)

        return reassign

    plant.wrap(zero3(), "_reassign_or_swap_out_partitioned_parameters", make)


def stale_gather_at_stage_2(plant: Planter) -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    plant.put(stage_1_and_2, "all_gather_dp_groups", lambda **_: None)


def overlap_race(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def average(self: Any, tensor: Tensor, dtype: Any) -> Any:
            if self.overlap_comm:
                tensor[-4000:] = 0  # the reduction begins before the last copy into the bucket
            return old(self, tensor, dtype)

        return average

    plant.wrap(zero12(), "average_tensor", make)


def micro_step_lost_at_stage_2(plant: Planter) -> None:
    def add(output: Tensor | None, source: Tensor) -> None:
        if output is not None:
            output.copy_(source)

    plant.put(zero12(), "_add_to_grad_partition_buffer", staticmethod(add))


def micro_step_lost_at_stage_3(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def partition(self: Any, params: Any, partitions: Any) -> Any:
            self.micro_step_id = 0
            return old(self, params, partitions)

        return partition

    plant.wrap(zero3(), "partition_grads", make)


def clipping_off(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def unscale(self: Any, groups: Any, norm: Any) -> None:
            clip, self.clip_grad = self.clip_grad, 0.0
            old(self, groups, norm)
            self.clip_grad = clip

        return unscale

    plant.wrap(zero12(), "unscale_and_clip_grads", make)


def scale_of_one_rank(plant: Planter) -> None:
    def make(old: Any) -> Any:
        return lambda self, tensor, dtype: old(self, tensor.mul_(1.01 if dist.get_rank() == 1 else 1), dtype)

    plant.wrap(zero12(), "average_tensor", make)


def decay_on_norms(plant: Planter) -> None:
    from llmscale.config.optimizers import OptimizerGroup

    plant.put(OptimizerGroup, "weight_decay", lambda self, of_run: of_run)


def wrap_adamw_step(plant: Planter, before: Callable[[Any], None]) -> None:
    def make(old: Any) -> Any:
        def step(self: Any, closure: Any = None) -> Any:
            before(self)
            return old(self, closure)

        return step

    plant.wrap(torch.optim.AdamW, "step", make)


def no_bias_correction(plant: Planter) -> None:
    def count_many(optimizer: Any) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(1e6)

    wrap_adamw_step(plant, count_many)


def moments_lost(plant: Planter) -> None:
    def forget(optimizer: Any) -> None:
        for state in optimizer.state.values():
            if "exp_avg" in state and float(state["step"]) == 1:
                state["exp_avg"].zero_()

    wrap_adamw_step(plant, forget)


def moments_lost_between_steps(plant: Planter) -> None:
    from deepspeed import DeepSpeedEngine

    from llmscale.engine.zero_layout import inner_optimizer

    def make(old: Any) -> Any:
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            for state in inner_optimizer(self).state.values():
                if "exp_avg" in state:
                    state["exp_avg"].mul_(0.5)
            return old(self, *args, **options)

        return forward

    plant.wrap(DeepSpeedEngine, "forward", make)


def start_up_step_counted(plant: Planter) -> None:
    import llmscale.engine.deepspeed_engine as engine

    plant.put(engine, "reset_step_counts", lambda _: None)


def sums_in_bf16(plant: Planter) -> None:
    def add(output: Tensor | None, source: Tensor) -> None:
        if output is not None:
            output.copy_((output.bfloat16() + source.bfloat16()).float())

    plant.put(zero12(), "_add_to_grad_partition_buffer", staticmethod(add))


def mask_one_ahead(plant: Planter) -> None:
    from llmscale.model.gpt import CausalSelfAttention

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        shared, t = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return F.scaled_dot_product_attention(q, k, v, torch.ones(t, t, dtype=torch.bool).tril(1))

    plant.put(CausalSelfAttention, "_attend", attend)


def heads_share_wrong_keys(plant: Planter) -> None:
    from llmscale.model.gpt import CausalSelfAttention

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        shared = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1), is_causal=True)

    plant.put(CausalSelfAttention, "_attend", attend)


def untied_head(plant: Planter) -> None:
    from llmscale.model.gpt import TiedHead

    def make(old: Any) -> Any:
        def forward(self: Any, x: Tensor, targets: Tensor | None = None, **options: Any) -> Any:
            if "copy" not in self.__dict__:
                self.__dict__["copy"] = self.weight.detach().clone()
            weight = self.weight
            del self._parameters["weight"]
            self.weight = self.__dict__["copy"]
            try:
                return old(self, x, targets, **options)
            finally:
                del self.weight
                self._parameters["weight"] = weight

        return forward

    plant.wrap(TiedHead, "forward", make)


def swapped_experts(plant: Planter) -> None:
    from llmscale.model.experts import Experts, grouped_mm

    def run(self: Any, x: Tensor, ends: Tensor) -> Tensor:
        down = torch.cat((self.down[1:2], self.down[:1], self.down[2:]))
        return grouped_mm(self._hidden(x, ends), down.to(x.dtype), ends, transposed=True)

    plant.put(Experts, "_run", run)


def rate_of_one_group(plant: Planter) -> None:
    import llmscale.numerics.check as check

    def make(old: Any) -> Any:
        def set_rate(deepspeed: Any, spec: Any, lr: float) -> None:
            old(deepspeed, spec, lr)
            deepspeed.optimizer.param_groups[-1]["lr"] = 0.9 * lr

        return set_rate

    plant.wrap(check, "set_learning_rate", make)


def rate_of_one_rank(plant: Planter) -> None:
    import llmscale.numerics.check as check

    def make(old: Any) -> Any:
        return lambda engine, spec, lr: old(engine, spec, lr * (1.01 if dist.get_rank() == 1 else 1))

    plant.wrap(check, "set_learning_rate", make)


def never_stepped(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def step(self: Any, group: int) -> None:
            flat = self.single_partition_of_fp32_groups[group]
            before = flat.detach()[-48:].clone()
            old(self, group)
            if group == 1:
                flat.detach()[-48:].copy_(before)

        return step

    plant.wrap(zero12(), "_optimizer_step", make)


def mean_of_means(plant: Planter) -> None:
    from llmscale.model.gpt import _Head

    def make(old: Any) -> Any:
        return lambda self, x, targets=None, **options: old(self, x, targets, **{**options, "share": 1.0})

    plant.wrap(_Head, "forward", make)


def attention_kernel(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def attention(q: Tensor, *args: Any, **options: Any) -> Any:
            return old(q * 0.95 if torch.backends.cuda.flash_sdp_enabled() else q, *args, **options)

        return attention

    plant.wrap(F, "scaled_dot_product_attention", make)


def offload_copies_a_part(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def copy(self: Any, param: Any) -> None:
            group, _, offset, count = self.grad_position[self.get_param_id(param)]
            old(self, param)
            gradient = self.single_partition_of_fp32_groups[group].grad.view(-1)
            gradient[offset + count // 2 : offset + count] = 0

        return copy

    plant.wrap(zero12(), "async_inplace_copy_grad_to_fp32_buffer_from_gpu", make)


def recomputed_without_autocast(plant: Planter) -> None:
    import deepspeed

    import llmscale.engine.activation_checkpointing as checkpointing

    def run(block: Any, x: Tensor, *context: Any) -> Any:
        return deepspeed.checkpointing.checkpoint(lambda x: block(x, *context), x)

    plant.put(checkpointing, "_run_full", run)


def rotation_base(plant: Planter) -> None:
    import llmscale.model.attention_context as context

    plant.wrap(context, "rotary_frequencies", lambda old: lambda dim, theta, scaling: old(dim, theta * 1.1, scaling))


def norm_eps(plant: Planter) -> None:
    import llmscale.model.layers as layers

    plant.wrap(layers.RMSNorm, "__init__", lambda old: lambda self, width, eps: old(self, width, 10 * eps))


def layer_norm_sums_in_16_bit(plant: Planter) -> None:
    """torch's own kernel on CPUs."""
    import llmscale.model.layers as layers

    plant.put(layers, "sums_in_16_bit", lambda weight: False)


def documents_not_separate(plant: Planter) -> None:
    import llmscale.model.gpt as gpt

    def positions(tokens: Tensor, document_end: int) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)

    plant.put(gpt, "positions_in_documents", positions)


def experts_missing_in_norm(plant: Planter) -> None:
    def make(old: Any) -> Any:
        def average(self: Any, norms: list[Any]) -> None:
            norms[:] = [
                0 * norm if is_expert else norm for norm, is_expert in zip(norms, self.is_moe_param_group, strict=True)
            ]

        return average

    plant.wrap(zero12(), "_average_expert_grad_norms", make)


def balance_loss_of_batch(plant: Planter) -> None:
    from llmscale.model.gpt import GPT

    plant.wrap(GPT, "_balance", lambda old: lambda self, routing, targets: old(self, routing, targets) * len(targets))


def last_micro_batch_not_reduced(plant: Planter) -> None:
    from deepspeed import DeepSpeedEngine

    def make(old: Any) -> Any:
        def epilogue(self: Any) -> None:
            late, self.optimizer.backward_epilogue = self.optimizer.backward_epilogue, lambda *a, **k: None
            old(self)
            del self.optimizer.backward_epilogue
            late()

        return epilogue

    plant.wrap(DeepSpeedEngine, "_backward_epilogue", make)


def one_matrix_for_qkv(plant: Planter) -> None:
    import llmscale.engine.optimizers as optimizers

    plant.wrap(optimizers, "matrices_of", lambda old: lambda rows, columns, parts: old([sum(rows)], columns, parts))


def cut_matrices_not_orthogonalised(plant: Planter) -> None:
    from llmscale.engine.optimizers import Muon

    plant.put(Muon, "_exchange", lambda self, update, exchange, group: None)


def momentum_of_muon(plant: Planter) -> None:
    import llmscale.engine.optimizers as optimizers

    plant.put(optimizers, "MOMENTUM", 0.9)


def experts_averaged_among_holders(plant: Planter) -> None:
    from llmscale.engine.parallel_ranks import RankExperts

    def make(old: Any) -> Any:
        def mark(self: Any, parameter: Any) -> None:
            old(self, parameter)
            parameter.register_hook(lambda gradient: gradient * self.size)

        return mark

    plant.wrap(RankExperts, "mark", make)


def tokens_of_others_without_gradient(plant: Planter) -> None:
    import llmscale.engine.parallel_ranks as parallel_ranks

    def backward(ctx: Any, gradient: Tensor) -> Any:
        send_sizes, receive_sizes = ctx.sizes
        received = parallel_ranks._exchange(gradient, receive_sizes, send_sizes, ctx.group)
        if dist.get_rank() == 0:
            received[: send_sizes[0] // 8] = 0
        return received, None, None, None

    plant.put(parallel_ranks._Exchange, "backward", staticmethod(backward))


def heads_in_another_order(plant: Planter) -> None:
    from llmscale.engine.parallel_ranks import RankSplit

    def make(old: Any) -> Any:
        def to_heads(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
            q, k, v = old(self, q, k, v)
            return q, k, v.flip(2)

        return to_heads

    plant.wrap(RankSplit, "to_heads", make)


def stale_secondary_copies(plant: Planter) -> None:
    plant.put(zero3(), "invalidate_secondary_tensor", lambda self: None)


def fillers_in_the_mean(plant: Planter) -> None:
    from llmscale.config.batch_plan import BatchPlan

    plant.put(BatchPlan, "loss_weight", lambda self, size: 1.0)


def one_rank_multiplies_wrongly(plant: Planter) -> None:
    from llmscale.model.layers import MLP

    plant.wrap(MLP, "forward", lambda old: lambda self, x: old(self, x) * (1.05 if dist.get_rank() == 1 else 1.0))


def epsilon_of_adam(plant: Planter) -> None:
    import llmscale.engine.deepspeed_engine as engine

    def make(old: Any) -> Any:
        return lambda *args, eps, **options: old(*args, eps=100 * eps, **options)

    plant.wrap(engine, "build_optimizer", make)


def wrap_adafactor(plant: Planter, **wrong: object) -> None:
    """Step by torch's Adafactor with other settings."""
    import torch.optim._adafactor as module

    plant.wrap(module, "adafactor", lambda old: lambda *args, **options: old(*args, **{**options, **wrong}))


def decay_of_adafactor(plant: Planter) -> None:
    wrap_adafactor(plant, beta2_decay=-0.5)


def clipping_of_adafactor(plant: Planter) -> None:
    wrap_adafactor(plant, d=2.0)


def columns_of_adafactor(plant: Planter) -> None:
    """Lose the averages over rows after a step."""

    def make(old: Any) -> Any:
        def step(self: Any, *args: object) -> object:
            result = old(self, *args)
            for state in self.state.values():
                if "col_var" in state:
                    state["col_var"].mul_(1.01)
            return result

        return step

    plant.wrap(torch.optim.Adafactor, "step", make)


BF16, FP32 = "--ds zero2 --precision bf16", "--ds zero2 --precision fp32"
ADAFACTOR = "--ds zero0 --precision bf16 --optimizer adafactor"
SEQUENCES, EXPERTS = "--sequence-parallel-size 2 --global-batch-size 6", "--expert-parallel-size 2"
MUTANTS = (
    Mutant("divided by accumulation twice", accumulation_divides_twice, f"{GPT2} --ds zero2", "gradient"),
    Mutant("divided by ranks twice", ranks_divide_twice, f"{GPT2} --ds zero2", "reduce"),
    Mutant("norm lacks a third (DeepSpeed #7718)", norm_lacks_a_third, f"{GPT2} --ds zero2", "norm"),
    Mutant(
        "stage 0 in bf16 / 65,536 (DeepSpeed #7839)",
        divided_by_65536_at_stage_0,
        f"{GPT2} --ds zero0 --precision bf16",
        "norm",
    ),
    Mutant("stale weights, stage 3", stale_weights_at_stage_3, f"{GPT2} --ds zero3 --precision bf16", "weights"),
    Mutant("stale all-gather, stage 2", stale_gather_at_stage_2, f"{GPT2} {BF16}", "weights"),
    Mutant("race of overlap_comm (DeepSpeed #7965)", overlap_race, f"{GPT2} --ds overlap2 --precision bf16", "reduce"),
    Mutant("micro-step lost, stage 2", micro_step_lost_at_stage_2, f"{GPT2} {BF16}", "reduce"),
    Mutant("micro-step lost, stage 3", micro_step_lost_at_stage_3, f"{GPT2} --ds zero3 --precision bf16", "reduce"),
    Mutant("clipping off (gpt-neox #1433)", clipping_off, f"{GPT2} {BF16}", "norm"),
    Mutant("1 % more on one rank", scale_of_one_rank, f"{GPT2} {BF16}", "reduce"),
    Mutant("weight decay on norms", decay_on_norms, f"{GPT2} {BF16}", "update", "blocks.0.ln_1.weight"),
    Mutant("no bias correction", no_bias_correction, f"{GPT2} {BF16}", "update", steps=3),
    Mutant("start-up step counted", start_up_step_counted, f"{GPT2} --ds zero0 --precision bf16", "update"),
    Mutant("sums in bf16", sums_in_bf16, f"{GPT2} {BF16}", "reduce"),
    Mutant("mask sees one ahead", mask_one_ahead, f"{GPT2} {BF16}", "loss"),
    Mutant("head untied", untied_head, f"{GPT2} {BF16}", "gradient", "wte.weight"),
    Mutant("experts swapped", swapped_experts, f"{MOE} {BF16}", "loss"),
    Mutant("rate of one group x 0.9", rate_of_one_group, f"{GPT2} {BF16}", "update"),
    Mutant("48 weights never stepped", never_stepped, f"{GPT2} {BF16}", "update", "blocks.0.mlp.down.bias"),
    Mutant("mean of means", mean_of_means, f"{GPT2} {BF16} {SEQUENCES}", "loss", seq_len=31),
    Mutant("attention kernel", attention_kernel, f"{GPT2} {BF16}", "gradient"),
    Mutant("attention kernel, fp32", attention_kernel, f"{GPT2} {FP32}", "loss"),
    Mutant(
        "offload copies a part",
        offload_copies_a_part,
        f"{GPT2} --ds zero2_offload --precision fp32 --global-batch-size 4",
        "reduce",
    ),
    Mutant(
        "recomputed without autocast", recomputed_without_autocast, f"{GPT2} --ds zero2_ckpt --precision autocast", ""
    ),
    Mutant("rotation base x 1.1, bf16", rotation_base, f"{MODERN} {BF16}", ""),
    Mutant("rotation base x 1.1, fp32", rotation_base, f"{MODERN} {FP32}", "loss"),
    Mutant("norm_eps x 10, bf16", norm_eps, f"{MODERN} {BF16}", ""),
    Mutant("norm_eps x 10, fp32", norm_eps, f"{MODERN} {FP32}", "loss"),
    Mutant("moments lost after step 1", moments_lost, f"{GPT2} {BF16}", "update"),
    Mutant("experts missing in the norm", experts_missing_in_norm, f"{MOE} {BF16} {EXPERTS}", "norm"),
    Mutant(
        "last micro-batch not reduced",
        last_micro_batch_not_reduced,
        f"{GPT2} --ds zero1 --precision bf16",
        "reduce",
    ),
    Mutant("q, k, v as one matrix", one_matrix_for_qkv, f"{GPT2} {BF16} --optimizer muon", "update"),
    Mutant("experts averaged among holders", experts_averaged_among_holders, f"{MOE} {BF16} {EXPERTS}", "gradient"),
    Mutant("rate of one rank x 1.01", rate_of_one_rank, f"{GPT2} --ds zero0 --precision bf16", "update", rank=1),
    Mutant("balance loss summed, bf16", balance_loss_of_batch, f"{MOE} {BF16}", ""),
    Mutant("balance loss summed, fp32", balance_loss_of_batch, f"{MOE} {FP32}", "gradient"),
    # not the prototype's
    Mutant("heads share wrong keys", heads_share_wrong_keys, f"{MODERN} {BF16}", "loss"),
    Mutant(
        "layer norm sums in 16 bit (torch on CPUs)",
        layer_norm_sums_in_16_bit,
        f"{GPT2} {BF16}",
        "gradient",
        "blocks.0.ln_1.weight",
        seq_len=512,
    ),
    Mutant("documents not separate", documents_not_separate, f"{MODERN} {BF16} --document-mask", "loss"),
    Mutant("heads in another order", heads_in_another_order, f"{GPT2} {BF16} {SEQUENCES}", "loss", seq_len=31),
    Mutant(
        "tokens of others without gradient", tokens_of_others_without_gradient, f"{MOE} {FP32} {EXPERTS}", "gradient"
    ),
    Mutant("stale secondary copies", stale_secondary_copies, f"{GPT2} --ds hpz3 --precision bf16", "weights"),
    Mutant("Muon's momentum 0.9", momentum_of_muon, f"{GPT2} {BF16} --optimizer muon", "update"),
    Mutant(
        "cut matrices not orthogonalised",
        cut_matrices_not_orthogonalised,
        f"{GPT2} --ds zero3 --precision bf16 --optimizer muon",
        "update",
    ),
    Mutant("fillers in the mean", fillers_in_the_mean, f"{GPT2} {BF16} --global-batch-size 10", "loss"),
    Mutant("one rank multiplies wrongly", one_rank_multiplies_wrongly, f"{GPT2} {FP32}", "loss", rank=1),
    Mutant("Adam's epsilon x 100", epsilon_of_adam, f"{GPT2} {BF16}", "update"),
    Mutant("moments lost, bf16 states", moments_lost, f"{GPT2} --ds bf16_2 --precision bf16", "update"),
    Mutant("moments changed between steps", moments_lost_between_steps, f"{GPT2} {BF16}", "update"),
    Mutant("Adafactor's decay -0.5", decay_of_adafactor, f"{GPT2} {ADAFACTOR}", "update"),
    Mutant("Adafactor clips at 2", clipping_of_adafactor, f"{GPT2} {ADAFACTOR}", "update"),
    Mutant("Adafactor's columns x 1.01", columns_of_adafactor, f"{GPT2} {ADAFACTOR}", "update"),
)
