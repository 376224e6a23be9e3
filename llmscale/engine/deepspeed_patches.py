"""Changes to DeepSpeed 0.19 from outside: autocast, fp32 gradient sums at stage 0, leaf modules of stage 3,
`--keep-zeros`, fewer messages and imports.

Imports torch only inside functions.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn

    from llmscale.architecture.layers import ParameterKind
    from llmscale.config.resolve import ResolvedStep


def quiet_libraries() -> None:
    """Silence four messages that a user can do nothing about. Call it before importing DeepSpeed.

    - torch 2.13 deprecates two collectives that DeepSpeed 0.19 still calls; both work.
    - torch.distributed.checkpoint reports that it loads in a single process, as requested.
    - torch.compile warns that selective checkpointing must not contain in-place operators; a block has none.
    - DeepSpeed reports on every rank of a CPU machine that it found no GPU; train.py prints the device it uses. The
      choice stays DeepSpeed's: setting DS_ACCELERATOR would need its detection of vendors again.
    """
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        category=FutureWarning,
    )
    warnings.filterwarnings(
        "ignore",
        message=r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
        category=UserWarning,
    )
    # A filter outlives the level that DeepSpeed sets on its logger at import.
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    known = ("Setting accelerator to CPU.", "Detected that context_fn is passed to torch.utils.checkpoint")
    return not record.getMessage().strip().startswith(known)


@contextmanager
def without_memory_prints() -> Iterator[None]:
    """Suppress the six memory reports that DeepSpeed's BF16_Optimizer prints while it is built."""
    from deepspeed.runtime import bf16_optimizer

    see_memory_usage = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    yield
    bf16_optimizer.see_memory_usage = see_memory_usage


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which llmscale never runs, without compiling it. Call it before `deepspeed.initialize`.

    DeepSpeed imports it to check any optimizer, and its decorators import torch._inductor: two seconds of processor
    time on each rank.
    """
    from deepspeed.runtime import compiler

    compile_function = compiler.compile
    compiler.compile = lambda: lambda function: function
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401

    compiler.compile = compile_function


def compute_in_bf16(model: nn.Module) -> None:
    """Run the model's forward pass under bf16 autocast. Call it before `deepspeed.initialize`.

    DeepSpeed's own `torch_autocast` section is not used: it takes the type in which ranks exchange a gradient from
    the module's class (ZeROOptimizer.get_param_comm_dtype; Linear, but no subclass of it) and ignores
    `communication_data_type`. It also remembers until the process ends that some engine had it. An engine without
    that section is an fp32 engine, and exchanges gradients in `communication_data_type` at every stage.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    under_autocast = torch.autocast(get_accelerator().device_name(), torch.bfloat16)
    model.forward = under_autocast(model.forward)


def without_autocast(ds_config: Mapping[str, object]) -> dict[str, object]:
    """Return a resolved ds_config without its `torch_autocast` section."""
    return {key: value for key, value in ds_config.items() if key != "torch_autocast"}


def needs_own_sums(step: ResolvedStep) -> bool:
    """Return whether a step asks for gradient sums that DeepSpeed refuses.

    Stages 1 to 3 have them (`data_types.grad_accum_dtype`). At stage 0 DeepSpeedEngine._do_optimizer_sanity_check
    refuses sums in another type than the parameters'.
    """
    types = cast("Mapping[str, object]", step.ds_config.get("data_types", {}))
    return step.zero_stage == 0 and types.get("grad_accum_dtype") not in (None, step.ds.keys.model_dtype)


def without_sum_dtype(ds_config: Mapping[str, object]) -> dict[str, object]:
    """Return a resolved ds_config without `data_types.grad_accum_dtype`."""
    types = cast("Mapping[str, object]", ds_config["data_types"])
    others = {key: value for key, value in types.items() if key != "grad_accum_dtype"}
    return {**ds_config, "data_types": others}


def sum_gradients_in_fp32(engine: DeepSpeedEngine) -> None:
    """Sum the micro-batches' gradients in fp32 at stage 0; DeepSpeed finds the sum, rounded once, when it reduces."""
    if engine.gradient_accumulation_steps() == 1:
        return
    sums: dict[nn.Parameter, Tensor] = {}

    def add(param: nn.Parameter) -> None:
        assert param.grad is not None
        if param in sums:
            sums[param].add_(param.grad)
        else:
            sums[param] = param.grad.float()
        param.grad = None

    def hand_over() -> None:
        for param in list(sums):
            param.grad = sums.pop(param).to(param.dtype)

    reduce = engine.allreduce_gradients

    def allreduce_gradients(*args: object, **kwargs: object) -> None:
        if engine.is_gradient_accumulation_boundary():
            hand_over()
        reduce(*args, **kwargs)

    for param in engine.module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(add)
    engine.allreduce_gradients = allreduce_gradients


def gather_as_one(model: nn.Module, kind: type[nn.Module]) -> None:
    """Let stage 3 gather and release each module of a kind at once. Call it before `deepspeed.initialize`.

    DeepSpeed reduces the gradients of such a module in torch's full backward hook. If no input of the module needs a
    gradient, as after frozen embeddings, the hook runs before the module's backward pass. So the input gets one.
    """
    import deepspeed

    deepspeed.utils.set_z3_leaf_modules(model, [kind])
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Return inputs whose first one needs a gradient if the module has weights to train; None if it does already."""
    import torch

    x, *others = inputs
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())
    if is_trained and not x.requires_grad:
        return (x.detach().requires_grad_(), *others)
    return None


def keep_zeros(model: nn.Module, kinds: Mapping[str, ParameterKind]) -> None:
    """Mask the gradients of the blocks' matrices where a weight is 0, so that pruned weights stay 0 at every stage.

    AdamW then never moves them: their moments stay 0, and weight decay of 0 is 0. The mask is applied where autograd
    hands over the gradient, before any rank reduces, scales or clips it. The parameter is gathered then; stage 3
    releases it only after its module's backward pass.
    """
    for name, parameter in model.named_parameters():
        if kinds[name] == "matrix" and parameter.requires_grad:
            parameter.register_hook(_masking(parameter))


def _masking(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    import torch

    reference = weakref.ref(parameter)  # a hook that holds its parameter would outlive the engine

    def mask(gradient: Tensor) -> Tensor:
        owner = reference()
        assert owner is not None
        assert owner.shape == gradient.shape, "ZeRO-3 released a parameter before its gradient was complete"
        return torch.where(owner.detach() != 0, gradient, 0)

    return mask
