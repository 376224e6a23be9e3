"""Checkpoints in DeepSpeed's own layouts: native ones for any ranks and ZeRO stage, and universal ones.

DeepSpeed loads them with nothing of llmscale in the process. One tensor is in memory at a time where the layout lets
it; of a native checkpoint, one rank's share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmscale.checkpoint.portable import PortableCheckpoint, StoredGroup, StoredTensor
from llmscale.checkpoint.tensor_files import MASTER
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.paths import is_plain_name

STAGES = (0, 1, 2, 3)
#: A flat group's length is a multiple of this for each rank (DeepSpeed's nccl_start_alignment_factor).
_ALIGNMENT = 2
#: DeepSpeed's default of zero_optimization.sub_group_size.
_SUB_GROUP_SIZE = 1_000_000_000
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNIVERSAL_VERSION = 0.2
_MAX_REASON = 200
#: DeepSpeed's defaults of a dynamic loss scaler, where the checkpoint does not have its fields.
_SCALER_DEFAULTS = {
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


def write_native(source: PortableCheckpoint, folder: Path, *, ranks: int, stage: int) -> Path:
    """Write what `ranks` ranks at a ZeRO stage would have saved with the same ds_config. Raises CheckpointError."""
    _check_native(source, ranks, stage)
    place = _new_folder(folder, f"global_step{source.step}")
    with _written(place):
        _write_native(source, place, ranks, stage)
        write_durably(folder / "latest", place.name)
    return place


def _write_native(source: PortableCheckpoint, place: Path, ranks: int, stage: int) -> None:
    common = _model_state(source, ranks)
    if stage:
        common["param_shapes"] = _shapes_by_group(source, stage, ranks)
        common["shared_params"] = dict(source.tied)
    if stage == 3:
        for rank in range(ranks):
            fragments = {name: _piece(tensor, rank, ranks) for _, name, tensor in source.parts("frozen")}
            state = common | {"module": _placeholders(source)} | _frozen(source, fragments)
            torch.save(state, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    else:
        fragments = {name: tensor.read(source.shapes[name]) for _, name, tensor in source.parts("frozen")}
        frozen = _frozen(source, fragments if stage == 2 else {})
        if stage:
            optimizer = None
        else:
            optimizer = _stage0_optimizer(source)
        state = common | {"module": _module(source), "optimizer": optimizer} | frozen
        torch.save(state, place / "mp_rank_00_model_states.pt")
    prefix = "bf16_zero" if source.precision == "bf16" else "zero"
    for rank in range(ranks if stage else 0):
        if stage == 3:
            shard = _stage3_optimizer(source, rank, ranks)
        else:
            shard = _stage12_optimizer(source, rank, ranks, stage)
        contents = {"optimizer_state_dict": shard, "ds_config": dict(source.ds_config), "ds_version": _version()}
        torch.save(contents, place / f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def write_universal(source: PortableCheckpoint, folder: Path) -> Path:
    """Write DeepSpeed's universal layout, which its `load_universal` continues at stages 1 and 2."""
    for name in source.shapes:
        if not is_plain_name(name):  # a folder is made of it
            raise CheckpointError(f"{source.path}: '{name[:200]}' does not name a parameter of a module.")
    place = _new_folder(folder, f"global_step{source.step}_universal")
    with _written(place):
        _write_universal(source, place)
        write_durably(folder / "latest_universal", place.name)
    return place


def _write_universal(source: PortableCheckpoint, place: Path) -> None:
    for kind, name, tensor in source.parts():
        if kind in ("frozen", "buffer"):
            continue
        below = place / "zero" / name
        below.mkdir(parents=True, exist_ok=True)
        file = "fp32" if kind == MASTER else kind
        torch.save({"param": tensor.read(source.shapes[name])}, below / f"{file}.pt")
    for group in source.groups:
        for name in group.names:
            if "step" in group.scalars:
                torch.save(torch.tensor(float(group.scalars["step"])), place / "zero" / name / "step.pt")
    state = _model_state(source, source.ranks) | {
        "module": _module(source),
        "param_shapes": _shapes_by_group(source, 1, source.ranks),
        "shared_params": dict(source.tied),
        "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION},
    }
    torch.save(state, place / "mp_rank_00_model_states.pt")
    inner = _torch_state(source.groups, [_own_scalars(group) for group in source.groups])
    common = {"base_optimizer_state": inner, "optimizer_state_dict": inner, "param_groups": inner["param_groups"]}
    torch.save(common | {"ds_version": _version()}, place / "zero" / "optimizer_state.pt")


def _check_native(source: PortableCheckpoint, ranks: int, stage: int) -> None:
    if stage not in STAGES:
        raise CheckpointError(f"stage {stage}: ZeRO has the stages {', '.join(map(str, STAGES))}.")
    if ranks < 1:
        raise CheckpointError(f"{ranks} ranks: must be at least 1.")
    if source.precision == "fp16" and 0 in (stage, source.zero_stage):
        raise CheckpointError(
            "fp16 at ZeRO stage 0: DeepSpeed divides gradients by a loss scale that it never applied there. Use "
            "stage 1."
        )
    if source.lost:
        raise CheckpointError(
            f"{source.path} does not have '{source.lost[0]}' (and {len(source.lost) - 1} more), which is "
            "trainable and not in the optimizer: DeepSpeed loses such parameters at ZeRO stage 3. "
            "api.load_deepspeed leaves them as the script made them."
        )
    zero = source.ds_config.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("round_robin_gradients") and stage in (1, 2):
        raise CheckpointError(
            "zero_optimization.round_robin_gradients orders parameters by the number of ranks, which reshard does not. "
            "Switch it off, and use --stage 3, or api.load_deepspeed."
        )


def _new_folder(folder: Path, name: str) -> Path:
    place = folder / name
    if place.exists():
        raise CheckpointError(f"{place} exists. Name another folder, or remove it.")
    with _written(place):
        place.mkdir(parents=True)
    return place


@contextmanager
def _written(place: Path) -> Iterator[None]:
    """Raise CheckpointError for what keeps files from being written."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        reason = " ".join(str(error).split())[:_MAX_REASON]
        text = f"{place} cannot be written: {reason}. Remove what is there, and name another folder."
        raise CheckpointError(text) from None


def _version() -> str:
    # From the package's metadata: importing DeepSpeed takes seconds.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.8"


def _model_state(source: PortableCheckpoint, ranks: int) -> dict[str, Any]:
    """Return what every file of a model has, without its weights."""
    return {
        "buffer_names": [name for _, name, _ in source.parts("buffer")],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": source.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": source.skipped_steps,
        "global_steps": source.step,
        "global_samples": source.global_samples,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": dict(source.ds_config),
        "ds_version": _version(),
        **source.client_state,
    }


def _frozen(source: PortableCheckpoint, fragments: Mapping[str, Tensor]) -> dict[str, Any]:
    if not fragments:
        return {}
    shapes = OrderedDict((name, torch.Size(source.shapes[name])) for name in fragments)
    return {"frozen_param_shapes": shapes, "frozen_param_fragments": OrderedDict(fragments)}


def _in_module_order(source: PortableCheckpoint, values: dict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Return a state dict with tied names, in the module's order where it is known."""
    for alias, name in source.tied.items():
        values[alias] = values[name]
    first = [name for name in source.module_order if name in values]
    rest = [name for name in values if name not in source.module_order]
    return OrderedDict((name, values[name]) for name in [*first, *rest])


def _module(source: PortableCheckpoint) -> OrderedDict[str, Tensor]:
    """Return the module's state dict, trained weights in the precision of training."""
    dtype = _DTYPES[source.precision]
    values = {}
    for kind, name, tensor in source.parts(MASTER, "frozen", "buffer"):
        stored = tensor.read(source.shapes[name])
        values[name] = stored.to(dtype) if kind == MASTER else stored
    return _in_module_order(source, values)


def _placeholders(source: PortableCheckpoint) -> OrderedDict[str, Tensor]:
    """Return the module's state dict at stage 3: buffers, and empty tensors in place of parameters."""
    dtype = _DTYPES[source.precision]
    values = {}
    for kind, name, tensor in source.parts(MASTER, "frozen", "buffer"):
        empty = torch.empty(0, dtype=dtype if kind == MASTER else tensor.dtype)
        values[name] = tensor.read(source.shapes[name]) if kind == "buffer" else empty
    return _in_module_order(source, values)


# Optimizer


def _sub_groups(source: PortableCheckpoint, group: StoredGroup, ranks: int) -> list[list[str]]:
    """Cut a group's parameters as stage 3 does: a new sub-group after sub_group_size elements of a rank."""
    zero = source.ds_config.get("zero_optimization")
    if isinstance(zero, Mapping):
        largest = zero.get("sub_group_size", _SUB_GROUP_SIZE)
    else:
        largest = _SUB_GROUP_SIZE
    if isinstance(largest, int | float):
        limit = int(largest)
    else:
        limit = _SUB_GROUP_SIZE
    sizes = {name: -(-math.prod(source.shapes[name]) // ranks) for name in group.names}
    if limit >= sum(sizes.values()):
        return [list(group.names)]
    subs: list[list[str]] = [[]]
    held = 0
    for name in group.names:
        if held >= limit:
            subs.append([])
            held = 0
        subs[-1].append(name)
        held += sizes[name]
    return subs


def _shapes_by_group(source: PortableCheckpoint, stage: int, ranks: int) -> list[OrderedDict[str, torch.Size]]:
    parts: list[list[str]] = []
    for group in source.groups:
        parts += _sub_groups(source, group, ranks) if stage == 3 else [list(group.names)]
    return [OrderedDict((name, torch.Size(source.shapes[name])) for name in names) for names in parts]


def _state_kinds(source: PortableCheckpoint, names: list[str]) -> list[str]:
    """Return the states with elements that a group's parameters have."""
    wanted = {*names}
    return list(dict.fromkeys(kind for kind, name, _ in source.parts() if name in wanted and kind != MASTER))


def _torch_state(groups: tuple[StoredGroup, ...], states: list[dict[str, Any]], subs: list[int] | None = None) -> dict:
    """Return the state dict of a torch optimizer that has `subs` parameters in each group, by default one."""
    counts = subs or [1] * len(groups)
    listed = []
    first = 0
    for group, count in zip(groups, counts, strict=True):
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in group.settings.items()}
        listed.append({**settings, "params": list(range(first, first + count))})
        first += count
    return {"state": {number: state for number, state in enumerate(states) if state}, "param_groups": listed}


def _own_scalars(group: StoredGroup) -> dict[str, Any]:
    """Return a group's scalars for one of its states: optimizers count steps in place, and one tensor for all would
    count them all."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.scalars.items()}


def _zeros_unless(tensor: StoredTensor | None, target: Tensor, start: int) -> None:
    if tensor is not None:  # a parameter that never had a gradient has no state
        tensor.fill(target, start)


def _scaler_keys(source: PortableCheckpoint) -> dict[str, Any]:
    """Return DeepSpeed's loss scaler with its own class, by which it is pickled."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    is_dynamic = "cur_iter" in source.loss_scaler
    scaler: Any
    if is_dynamic:
        scaler = DynamicLossScaler(1.0, **_SCALER_DEFAULTS)
    else:
        scaler = LossScaler(scale=1.0)
    vars(scaler).update(source.loss_scaler)
    return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": False}


def _stage12_optimizer(source: PortableCheckpoint, rank: int, ranks: int, stage: int) -> dict[str, Any]:
    masters = []
    states: list[dict[str, Any]] = []
    paddings = []
    for group in source.groups:
        names = list(group.names)
        total = sum(math.prod(source.shapes[name]) for name in names)
        size = -(-total // (_ALIGNMENT * ranks)) * _ALIGNMENT
        padding = min(size, max(0, (rank + 1) * size - total))
        masters.append(_partition(source, MASTER, names, rank * size, size)[: size - padding])
        paddings.append(padding)
        elements = {kind: _partition(source, kind, names, rank * size, size) for kind in _state_kinds(source, names)}
        states.append({**_own_scalars(group), **elements})
    return {
        # Without its scaler and clipping an engine keeps those of its configuration.
        **(_scaler_keys(source) if source.precision == "fp16" else {}),
        "base_optimizer_state": _torch_state(source.groups, states),
        "single_partition_of_fp32_groups": masters,
        "zero_stage": stage,
        "group_paddings": paddings,
        "partition_count": [ranks] * len(source.groups),
        "ds_version": _version(),
        "param_slice_mappings": [OrderedDict() for _ in source.groups],
    }


def _partition(source: PortableCheckpoint, kind: str, names: list[str], first: int, size: int) -> Tensor:
    """Return elements [first, first + size) of a group's flat tensor, zeros after its end."""
    target = torch.zeros(size, dtype=_dtype_of(source, kind))
    begin = 0
    for name in names:
        total = math.prod(source.shapes[name])
        start = max(first, begin)
        stop = min(first + size, begin + total)
        if start < stop:
            _zeros_unless(source.tensors.get(f"{kind}/{name}"), target[start - first : stop - first], start - begin)
        begin += total
    return target


def _stage3_optimizer(source: PortableCheckpoint, rank: int, ranks: int) -> dict[str, Any]:
    masters = []
    states: list[dict[str, Any]] = []
    counts = []
    for group in source.groups:
        subs = _sub_groups(source, group, ranks)
        counts.append(len(subs))
        for names in subs:
            masters.append(_pieces(source, MASTER, names, rank, ranks))
            elements = {kind: _pieces(source, kind, names, rank, ranks) for kind in _state_kinds(source, names)}
            states.append({**_own_scalars(group), **elements})
    return {
        **_scaler_keys(source),
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": _torch_state(source.groups, states, counts),
        "fp32_flat_groups": masters,
    }


def _pieces(source: PortableCheckpoint, kind: str, names: list[str], rank: int, ranks: int) -> Tensor:
    """Return a rank's pieces of the parameters of a sub-group, one after the other."""
    pieces = []
    for name in names:
        size = -(-math.prod(source.shapes[name]) // ranks)
        target = torch.zeros(size, dtype=_dtype_of(source, kind))
        _zeros_unless(source.tensors.get(f"{kind}/{name}"), target, rank * size)
        pieces.append(target)
    return torch.cat(pieces)


def _piece(tensor: StoredTensor, rank: int, ranks: int) -> Tensor:
    size = -(-tensor.total // ranks)
    target = torch.zeros(size, dtype=tensor.dtype)
    tensor.fill(target, rank * size)
    return target


def _stage0_optimizer(source: PortableCheckpoint) -> dict[str, Any]:
    """Return the optimizer's state by number; in 16 bit with its wrapper's keys (FP16_UnfusedOptimizer)."""
    states = []
    counts = []
    for group in source.groups:
        counts.append(len(group.names))
        for name in group.names:
            elements = {
                kind: tensor.read(source.shapes[name])
                for kind in _state_kinds(source, [name])
                if (tensor := source.tensors.get(f"{kind}/{name}"))
            }
            states.append({**_own_scalars(group), **elements})
    inner = _torch_state(source.groups, states, counts)
    if source.precision == "fp32":
        return inner
    masters = [
        [source.tensors[f"{MASTER}/{name}"].read(source.shapes[name]) for name in group.names]
        for group in source.groups
    ]
    scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}
    return {**scale, "optimizer_state_dict": inner, "fp32_groups": masters}


def _dtype_of(source: PortableCheckpoint, kind: str) -> torch.dtype:
    return next(tensor.dtype for _, _, tensor in source.parts(kind))
