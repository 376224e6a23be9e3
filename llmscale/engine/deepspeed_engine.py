"""Build a DeepSpeed engine from a resolved configuration, set its learning rate, read its gradient norm, release it."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.architecture.attention_kernels import may_skip_blocks
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.optimizers import OptimizerSpec
from llmscale.config.resolve import ResolvedStep
from llmscale.config.run_config import RunConfig
from llmscale.engine.activation_checkpointing import build_block_checkpoint, tile_mlps
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_patches import (
    compute_in_bf16,
    import_muon_uncompiled,
    keep_zeros,
    needs_own_sums,
    sum_gradients_in_fp32,
    without_autocast,
    without_memory_prints,
    without_sum_dtype,
)
from llmscale.engine.device_memory import has_bf16
from llmscale.engine.optimizers import Muon, build_optimizer
from llmscale.engine.parallel_ranks import as_mixture_of_experts, build_split, divide_experts
from llmscale.engine.zero_layout import check_deepspeed_version, group_name, inner_optimizer
from llmscale.engine.zero_shards import invalidate_hpz_copies, reset_step_counts
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT
from llmscale.model.loss import check_fused_loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepspeed import DeepSpeedEngine


def build_model(resolved: ResolvedStep, *, seed: int) -> GPT:
    """Build the GPT; stage 3 shards it while it is built, so it may be larger than one device. Collective."""
    import deepspeed

    section = resolved.ds_config.get("activation_checkpointing", {})
    checkpoint = build_block_checkpoint(resolved.checkpointing, section if isinstance(section, dict) else {})
    is_sharded = resolved.zero_stage == 3
    ds_config = dict(resolved.ds_config)
    split = build_split(resolved.plan.ranks)
    experts = divide_experts(resolved.plan.ranks)
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if is_sharded else contextlib.nullcontext():
        return GPT(
            resolved.shape,
            seed=seed,
            checkpoint=checkpoint,
            loss=resolved.loss,
            split=split,
            experts=experts,
            skips_blocks=may_skip_blocks(resolved.shape, resolved.checkpointing),
        )


def build_engine(config: RunConfig, resolved: ResolvedStep, compiler: BlockCompiler | None = None) -> DeepSpeedEngine:
    """Build model, optimizer and engine. Collective. Raises ConfigError when the device cannot run them."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    check_deepspeed_version()
    ds_config = resolved.ds_config
    check_async_io(ds_config)
    check_device(resolved)
    model = build_model(resolved, seed=config.seed)
    tensors = resolved.tensors
    for tensor in tensors.frozen_tensors:
        model.get_parameter(tensor.name).requires_grad_(False)
    if resolved.shape.mlp_tile_tokens:
        tiles = resolved.shape.mlp_tile_tokens
        stage = resolved.zero_stage
        tile_mlps(model, tiles, zero_stage=stage, checkpointing=resolved.checkpointing)
    if compiler is not None:
        compiler.compile_blocks(model, zero_stage=resolved.zero_stage, checkpointing=resolved.checkpointing)
    if resolved.precision == "autocast":
        compute_in_bf16(model)
    optimizer = build_optimizer(
        model,
        tensors.kinds,
        resolved.optimizer,
        # DeepSpeed steps some optimizers once at start-up to create their state; at 0 no weight decays in that step.
        lr=0.0,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    import_muon_uncompiled()
    own_sums = needs_own_sums(resolved)
    divided = resolved.plan.ranks.expert_parallel_size > 1
    with without_memory_prints(), as_mixture_of_experts() if divided else contextlib.nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=without_autocast(without_sum_dtype(ds_config) if own_sums else ds_config),
            dist_init_required=False,
        )
    if own_sums:
        sum_gradients_in_fp32(engine)
    reset_step_counts(engine)
    invalidate_hpz_copies(engine)
    if isinstance(optimizer, Muon):
        optimizer.plan(engine, tensors)
    if config.keep_zeros:
        keep_zeros(model, tensors.kinds)
    keep_gradient_norm_of_plain_optimizer(engine)
    return engine


def release_engine(engine: DeepSpeedEngine) -> None:
    """Free all memory of an engine. The engine, its model and its optimizer are unusable afterwards.

    DeepSpeed's `destroy` removes hooks and leaves the rest to Python's garbage collector. That misses stage 3's modules
    and autograd functions, and stage 1's bf16 parameters, because they refer to each other through C++. So their
    contents are cleared one by one.
    """
    zero = engine.optimizer
    inner = inner_optimizer(engine)
    modules = list(engine.modules())
    parameters = list(engine.module.parameters())
    engine.destroy()
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        vars(parameter).clear()
    inner.state.clear()
    inner.param_groups.clear()
    for holder in (zero, *modules):
        vars(holder).clear()


def check_async_io(ds_config: Mapping[str, object]) -> None:
    """Raise ConfigError for offload to NVMe without libaio, which DeepSpeed's async_io is compiled against."""
    from deepspeed.accelerator import get_accelerator

    if '"device": "nvme"' not in json.dumps(ds_config):
        return
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        raise ConfigError(
            "offload to NVMe needs DeepSpeed's async_io extension, and libaio is not installed. Fix: apt-get install "
            "libaio-dev (or libaio-devel), or use --ds zero3_offload, which offloads to host memory."
        )


def check_device(resolved: ResolvedStep) -> None:
    """Raise ConfigError for a precision or loss kernel that this machine cannot run."""
    from deepspeed.accelerator import get_accelerator

    check_precision(resolved.precision)
    if resolved.loss.kernel == "liger":
        check_fused_loss(get_accelerator().device_name())


def check_precision(precision: Precision) -> None:
    """Raise ConfigError for a precision that the device has no arithmetic for."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    dtypes = accelerator.supported_dtypes()
    if precision == "fp16" and torch.float16 not in dtypes:
        raise ConfigError(
            f"this {accelerator.device_name()} has no fp16 arithmetic. Use bf16: a ds_config with "
            '"bf16": {"enabled": true}, or --precision bf16.'
        )
    if precision == "bf16" and not has_bf16():
        raise ConfigError(
            f"this {accelerator.device_name()} has no bf16 arithmetic. Use fp16 (--ds zero2_fp16) or --precision fp32."
        )


def set_learning_rate(engine: DeepSpeedEngine, optimizer: OptimizerSpec, lr: float) -> None:
    """Set the learning rate of the next optimizer step, times each group's own factor."""
    factors = {group.name: group.learning_rate_factor for group in optimizer.groups}
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * factors[group_name(group)]


def keep_gradient_norm_of_plain_optimizer(engine: DeepSpeedEngine) -> None:
    """Compute and store the gradient norm at stage 0 in fp32.

    There DeepSpeed clips without storing the norm, and computes none without clipping.
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return
    step = engine._take_model_step
    max_norm = engine.gradient_clipping()

    def take_model_step(lr_kwargs: dict[str, object] | None) -> None:
        gradients = [param.grad for param in engine.module.parameters() if param.grad is not None]
        engine._global_grad_norm = clip_gradients(gradients, max_norm)
        step(lr_kwargs)

    engine._take_model_step = take_model_step
    engine.clip_fp32_gradients = lambda: None  # clip_gradients has run by then


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place to a global norm of at most `max_norm`, as ZeRO does; 0 leaves them unchanged.

    Returns the norm before clipping, a scalar. Every rank has the same gradients, so no communication is needed.

    torch's fp32 norm of a large tensor is off by up to 7e-5 on a CPU, whose sum has few accumulators. Row by row, with
    the rows' norms summed in fp64, it takes no longer and is within 1e-7, as are the norms of stages 1 to 3.
    """
    rows = [torch.linalg.vector_norm(gradient, dim=-1).view(-1) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients), scale)
    return norm


def gradient_norm(engine: DeepSpeedEngine) -> float | None:
    """Return the last step's gradient norm before clipping; None when DeepSpeed computed none.

    Synchronises with the device.
    """
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    return float(norm)
