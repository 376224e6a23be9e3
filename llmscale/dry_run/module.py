"""The dry run of any module under any ds_config: DeepSpeed's engine around it, on tensors without storage.

Tensors have no values: code that decides by them decides as if they were false or zero. Rows that go to one of a number
of experts are an equal share of all.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.dry_run.simulate import MOST_MICRO_STEPS, Attribution, DryRun, Simulation, refuse_nvme, simulate
from llmscale.dry_run.simulated_gpu import GPU
from llmscale.engine.deepspeed_patches import without_memory_prints
from llmscale.errors import ConfigError, LlmscaleError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_aten = torch.ops.aten
#: Optimizers of a ds_config that have the states and the temporaries of torch's fused AdamW.
_LIKE_ADAMW = ("adam", "adamw", "fusedadam", "cpuadam")
#: Sections of a ds_config that say nothing about a module's memory, or that a simulation replaces.
_REPLACED = ("optimizer", "scheduler", "train_batch_size")


@dataclass(frozen=True)
class OwnModule:
    """A module with what a step of its training needs."""

    build: Callable[[], nn.Module]
    """Makes the module; nothing in it is allocated."""
    batch: Mapping[str, Any] | Sequence[Any]
    """Micro-batch of a rank: keyword arguments, or a tuple of arguments. Shapes and types of its tensors count."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """Makes the optimizer; None for AdamW."""
    loss: Callable[[Any], Tensor] | None = None
    """Takes the module's output; None for the output itself, its `loss`, or its first element."""
    experts: int = 1
    """Experts that divide the rows of a micro-batch."""
    expert_rows: int = 0
    """Rows that all experts of a block get together; 0 where nobody knows."""
    name: str = "build"
    """The module in messages."""
    batch_name: str = "the example batch"
    """The batch in messages."""

    def with_checkpointing(self) -> OwnModule:
        """Return the module with the activation checkpointing of transformers' models. Its build raises for others."""

        def build() -> nn.Module:
            module = self.build()
            enable = getattr(module, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ConfigError(
                    f"{self.name}: a {type(module).__name__} has no gradient_checkpointing_enable(), as transformers' "
                    "models have it. Without --activation-checkpointing it is simulated as it is built."
                )
            enable({"use_reentrant": False})
            return module.train()

        return replace(self, build=build)

    @property
    def batch_size(self) -> int:
        """Return the first dimension of the batch's first tensor. Raises ConfigError for a batch without tensors."""
        tensors = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim()]
        if not isinstance(self.batch, Mapping | tuple | list) or not tensors:
            given = type(self.batch).__name__
            if isinstance(self.batch, Mapping | tuple | list):
                given = f"{given} without tensors"
            raise ConfigError(
                f"{self.batch_name} has the type {given}: it must be a dict (keyword arguments) or a tuple (arguments) "
                "with tensors."
            )
        return len(tensors[0])


def simulate_module(
    module: OwnModule,
    ds_config: Mapping[str, Any],
    world_size: int,
    capability: ComputeCapability | None = None,
) -> DryRun:
    """Simulate steps of a module's engine as rank 0 of `world_size`.

    `ds_config` is DeepSpeed's, complete but for its batch. Raises ConfigError for a module that raises, for offload to
    NVMe, and in a process that is part of a job.
    """
    refuse_nvme(ds_config)
    micro_steps = min(int(ds_config.get("gradient_accumulation_steps", 1)), MOST_MICRO_STEPS)
    config = _simulated(ds_config, module.batch_size, micro_steps)
    attribution = Attribution()

    def build() -> DeepSpeedEngine:
        return _build_engine(module, config, attribution)

    def forward(engine: DeepSpeedEngine) -> Tensor:
        with _blaming(f"{module.name} on {module.batch_name}"):
            batch = tree_map(_on_gpu, module.batch)
            if isinstance(batch, Mapping):
                output = engine(**batch)
            else:
                output = engine(*batch)
            return _loss_of(output, module)

    simulation = Simulation(world_size, micro_steps, attribution, capability)
    with warnings.catch_warnings():
        # About fake tensors, and about what DeepSpeed calls.
        warnings.simplefilter("ignore")
        with _blaming(f"the step of {module.name}"):
            return simulate(build, forward, simulation, (_transformers_masks(), _equal_loads(module)))


def _simulated(ds_config: Mapping[str, Any], micro_batch_size: int, micro_steps: int) -> dict[str, Any]:
    """Return a ds_config with the simulated batch, for an optimizer that is there already."""
    named = str((ds_config.get("optimizer") or {}).get("type", "adamw"))
    if named.lower() not in _LIKE_ADAMW:
        raise ConfigError(
            f"the ds_config's optimizer {named[:80]!r} is not simulated. AdamW is, and whatever api.estimate_module is "
            "given as `optimizer`."
        )
    others = {key: value for key, value in ds_config.items() if key not in _REPLACED}
    return {
        **others,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "zero_allow_untested_optimizer": True,
        # Adam on the host has the states that torch's has, and none of it is on the GPU.
        "zero_force_ds_cpu_optimizer": False,
    }


def _build_engine(module: OwnModule, config: dict[str, Any], attribution: Attribution) -> DeepSpeedEngine:
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    is_sharded = config.get("zero_optimization", {}).get("stage", 0) == 3
    if is_sharded:
        sharding = deepspeed.zero.Init(config_dict_or_path=config)
    else:
        sharding = contextlib.nullcontext()
    with sharding, _blaming(module.name):
        built = module.build()
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{module.name} returned {type(built).__name__}: it must return a torch.nn.Module.")
    if not is_sharded:
        built = built.to(GPU)
    with _blaming(f"the optimizer of {module.name}"):
        if module.optimizer:
            optimizer = module.optimizer(built)
        else:
            optimizer = _adamw(built)
    _as_on_a_gpu(optimizer)
    with without_memory_prints():
        engine, *_ = deepspeed.initialize(model=built, optimizer=optimizer, config=config, dist_init_required=False)
    _attribute(engine.module, attribution)
    return engine


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], fused=True)


def _as_on_a_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's optimizers step all tensors at once, as on a GPU: their temporaries are as large as all tensors."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _attribute(module: nn.Module, attribution: Attribution) -> None:
    """Tell the sizes of logits, and the shapes of tables that are a head, too."""
    heads = {getattr(part, "out_features", 0) for part in module.modules()}
    uses = Counter(
        (id(parameter), tuple(getattr(parameter, "ds_shape", parameter.shape)))
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
    )
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.num_embeddings in heads:
            attribution.logits.add(part.num_embeddings)
    attribution.tables |= {shape for (_, shape), count in uses.items() if count > 1}


def _on_gpu(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=GPU)


def _loss_of(output: Any, module: OwnModule) -> Tensor:
    result: object = None
    if module.loss is not None:
        result = module.loss(output)
    elif isinstance(output, Tensor):
        result = output
    else:
        result = getattr(output, "loss", None)
        if result is None and isinstance(output, Sequence | Mapping) and output:
            result = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(result, Tensor) or result.numel() != 1:
        if isinstance(result, Tensor):
            what = f"a tensor {list(result.shape)}"
        else:
            what = f"a {type(output).__name__}"
        raise ConfigError(
            f"{module.name} gives no loss, but {what}: its output must be the loss, have `.loss`, or begin with it."
        )
    return result


@contextlib.contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn what a user's own code raises into a ConfigError of one line."""
    try:
        yield
    except LlmscaleError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"{what} raised {type(error).__name__}: {message or 'no message'}") from error


def _transformers_masks() -> AbstractContextManager[object]:
    """Let transformers find no packed sequences, which it looks for in the values of position_ids.

    Its models would build a mask that training without packing has not.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return mock.patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None)


class _Shares(TorchDispatchMode):
    """Gives each of a number of experts an equal share of the rows that are looked for by value.

    Of a vector with one element per expert every element counts: each expert has rows.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is not _aten.nonzero.default:
            return func(*args, **(kwargs or {}))
        looked_in: Tensor = args[0]
        elements = looked_in.numel()
        rows = elements if elements == self._experts else -(-elements // self._experts)
        return looked_in.new_empty((rows, looked_in.dim()), dtype=torch.long)


@contextlib.contextmanager
def _equal_loads(module: OwnModule) -> Iterator[None]:
    def tolist(self: FakeTensor) -> list[int]:
        if list(self.shape) != [module.experts] or not module.expert_rows:
            raise NotImplementedError("it reads the values of a tensor, and a dry run has none")
        share, rest = divmod(module.expert_rows, module.experts)
        return [share + (expert < rest) for expert in range(module.experts)]

    with mock.patch.object(FakeTensor, "tolist", tolist, create=True), _Shares(module.experts):
        yield
