"""From resolved configuration to a DeepSpeed engine."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.optimizers import OptimizerSpec
from llmscale.config.resolve import ResolvedStep
from llmscale.config.run_config import RunConfig
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.engine.autocast import compute_in_bf16, without_autocast
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.device_memory import has_bf16
from llmscale.engine.gradient_sums import sum_gradients_in_fp32, sums_are_ours, without_sums
from llmscale.engine.kept_zeros import keep_zeros
from llmscale.engine.muon import Muon
from llmscale.engine.optimizer import build_optimizer
from llmscale.engine.silence_libraries import without_memory_prints
from llmscale.engine.zero_layout import check_deepspeed_version, inner_optimizer
from llmscale.engine.zero_shards import forget_second_copies, reset_step_counts
from llmscale.errors import ConfigError
from llmscale.model.fused_loss import check_fused_loss
from llmscale.model.gpt import GPT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepspeed import DeepSpeedEngine


def build_model(resolved: ResolvedStep, *, seed: int) -> GPT:
    """The GPT; at stage 3 sharded while it is built, so that it may be larger than one device."""
    import deepspeed

    section = resolved.ds_config.get("activation_checkpointing", {})
    checkpoint = build_block_checkpoint(resolved.checkpointing, section if isinstance(section, dict) else {})
    is_sharded, ds_config = resolved.zero_stage == 3, dict(resolved.ds_config)
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if is_sharded else contextlib.nullcontext():
        return GPT(resolved.shape, seed=seed, checkpoint=checkpoint, loss=resolved.loss)


def build_engine(config: RunConfig, resolved: ResolvedStep, compiler: BlockCompiler | None = None) -> DeepSpeedEngine:
    """Model, optimizer and `deepspeed.initialize`. Collective. Raises ConfigError when the device cannot run
    what is asked for."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    check_deepspeed_version()
    ds_config = resolved.ds_config
    check_async_io(ds_config)
    check_device(resolved)
    model = build_model(resolved, seed=config.seed)
    tensors = ParameterTensors(resolved.shape.architecture)
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
    ours = sums_are_ours(ds_config)
    with without_memory_prints():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=without_autocast(without_sums(ds_config) if ours else ds_config),
            dist_init_required=False,
        )
    if ours:
        sum_gradients_in_fp32(engine)
    reset_step_counts(engine)
    forget_second_copies(engine)
    if isinstance(optimizer, Muon):
        optimizer.bind(engine, tensors)
    if config.keep_zeros:
        keep_zeros(model, tensors.kinds)
    keep_gradient_norm_of_plain_optimizer(engine)
    return engine


def release_engine(engine: DeepSpeedEngine) -> None:
    """Free all that an engine holds. It, its model and its optimizer are of no use afterwards; the process group is.

    DeepSpeed's `destroy` removes hooks and leaves the rest to Python's collector, which cannot see that it may take it:
    stage 3's modules and autograd functions, and the parameters of stage 1 in bf16, refer to each other through C++.
    So their contents go one by one.
    """
    zero, inner = engine.optimizer, inner_optimizer(engine)
    modules, parameters = list(engine.modules()), list(engine.module.parameters())
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
    """Offload to NVMe needs DeepSpeed's async_io, which is compiled against libaio on first use."""
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
    """Refuse what this machine cannot run, before anything is built. Raises ConfigError."""
    from deepspeed.accelerator import get_accelerator

    check_precision(resolved.precision)
    if resolved.loss.kernel == "liger":
        check_fused_loss(get_accelerator().device_name())


def check_precision(precision: Precision) -> None:
    """Refuse a precision that the device has no arithmetic for, and say which it has."""
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
    """The learning rate of the next optimizer step, times each group's own factor."""
    factors = {group.name: group.learning_rate_factor for group in optimizer.groups}
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * factors[group["name"]]


def keep_gradient_norm_of_plain_optimizer(engine: DeepSpeedEngine) -> None:
    """Without ZeRO in fp32 DeepSpeed clips but forgets the norm, and takes none where nothing is clipped; keep it where
    every other stage keeps it."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return
    step, max_norm = engine._take_model_step, engine.gradient_clipping()

    def take_model_step(lr_kwargs: dict[str, object] | None) -> None:
        gradients = [param.grad for param in engine.module.parameters() if param.grad is not None]
        engine._global_grad_norm = clip_gradients(gradients, max_norm)
        step(lr_kwargs)

    engine._take_model_step = take_model_step
    engine.clip_fp32_gradients = lambda: None  # it is done by then


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale them in place so that their global norm is at most `max_norm`, as ZeRO does; 0: leave them.

    Returns the norm before that, a scalar. Every rank has the same gradients, so none asks the others.

    torch's fp32 norm of a whole tensor is off by up to 7e-5 on a CPU, whose sum has few accumulators. Row by row, with
    the rows' norms summed in fp64, it takes no longer and is within 1e-7, as are the norms of stages 1 to 3.
    """
    rows = [torch.linalg.vector_norm(gradient, dim=-1).view(-1) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients), scale)
    return norm


def gradient_norm(engine: DeepSpeedEngine) -> float | None:
    """Global gradient norm before clipping of the last step; None when DeepSpeed did not compute one. Synchronises."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)
