"""DeepSpeed's own checkpoints, native and universal, of any ranks: as named flat tensors, and nothing is executed.

The layout of each stage, as DeepSpeed 0.14 to 0.19 writes it:

0: the file of rank 0 has the module, and the optimizer's state by number, without names: the engine gives them.
1, 2: a file per rank. Each optimizer group is one flat tensor, in the order of `param_shapes` (round_robin_gradients
   changes the module's order) with `param_alignment_paddings` between, cut into equal partitions. Weights are saved
   without the padding of the last partition, states with it; BF16_Optimizer saves both with it.
3: a file per rank. Each sub-group of an optimizer group is, on each rank, the rank's pieces of its parameters, one
after the other; a piece has ceil(elements / ranks) elements, the last ones padded.
Frozen parameters are in the module, at stage 3 in `frozen_param_fragments`, a piece per rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from llmscale.checkpoint.deepspeed_pickles import StoredFields, flat, read_pickle
from llmscale.checkpoint.portable import PortableCheckpoint, StoredGroup, StoredTensor, plain_settings
from llmscale.engine.zero_layout import plain_name
from llmscale.errors import CheckpointError

#: Names that DeepSpeed's files of a model have beside the user's client_state.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "sparse_tensor_module_names",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "moe",
    ]
)
_MAX_RANKS = 1_000_000
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: FP16_Optimizer's loss scaler at stage 0 stands among other keys of the optimizer.
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "dynamic_loss_scale")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?P<kind>bf16_zero|zero)_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_?optim_states\.pt")
#: A layout's tensors by key, and its optimizer groups.
_Layout = tuple[dict[str, StoredTensor], list[StoredGroup]]


def open_deepspeed_checkpoint(
    place: Path,
    names: Sequence[Sequence[str]] | None = None,
    allow: Sequence[type] = (),
) -> PortableCheckpoint:
    """Open the folder of a tag (global_step100). Raises CheckpointError unless everything is there.

    `names` are the parameters of each optimizer group, which stage 0 does not store. `allow`: classes that
    client_state or the scheduler hold.
    """
    try:
        return _open(place, names, allow)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, StopIteration) as error:
        raise CheckpointError(
            f"{place} is not a checkpoint as DeepSpeed 0.14 to 0.19 write it ({type(error).__name__}: "
            f"{str(error)[:200]})."
        ) from None


def _open(place: Path, names: Sequence[Sequence[str]] | None, allow: Sequence[type]) -> PortableCheckpoint:
    _check_parallelism_of_files(place)
    models = _read_model_files(place, allow)
    model = models[0]
    _check_parallelism(place, model)
    ranks = _rank_count(model)
    optims: list[Mapping[str, Any]] = []
    if (place / "zero").is_dir():
        stage = 3 if len(models) > 1 else 1
        tensors, groups = _read_universal(place, model)
    elif model.get("param_shapes") is None:
        stage = 0
        tensors, groups = _read_stage0(place, model, names)
    else:
        optims = _read_optimizer_files(place, ranks, allow)
        stage = int(optims[0].get("zero_stage", 1))
        read = _read_stage3 if stage == 3 else _read_stage12
        tensors, groups = read(place, model, optims)
    if stage == 3 and len(models) != ranks:
        _refuse_missing(place, "*_model_states.pt", len(models), ranks)
    shapes, others, lost = _read_others(place, models, tensors)
    tensors |= others
    for key, tensor in tensors.items():
        if not tensor.is_complete():
            raise CheckpointError(f"{place}: the pieces of '{key}' do not make its {tensor.total:,} elements.")
    config = model.get("ds_config")
    if groups and groups[0].names:
        trained = model["module"].get(groups[0].names[0])
    else:
        trained = None
    return PortableCheckpoint(
        path=place,
        zero_stage=stage,
        ranks=ranks,
        precision=_PRECISIONS.get(getattr(trained, "dtype", torch.float32), "fp32"),
        step=int(model["global_steps"]),
        tensors=tensors,
        groups=tuple(groups),
        shapes=shapes,
        tied=_find_tied(model, shapes),
        scheduler=model.get("lr_scheduler"),
        loss_scaler=_read_scaler(model, optims),
        skipped_steps=int(model.get("skipped_steps") or 0),
        global_samples=int(model.get("global_samples") or 0),
        client_state={key: value for key, value in model.items() if key not in OWN_KEYS},
        ds_config=config if isinstance(config, dict) else {},
        has_frozen=model.get("frozen_param_shapes") is not None or any(key.startswith("frozen/") for key in others),
        lost=lost,
        module_order=tuple(model["module"]),
    )


# Files


def _check_parallelism_of_files(place: Path) -> None:
    names = [path.name for path in place.glob("*.pt")]
    parts = {named["part"] for name in names if (named := _MODEL_FILE.fullmatch(name) or _OPTIM_FILE.fullmatch(name))}
    if any("_expert_" in name or name.startswith("expp_rank_") for name in names):
        raise CheckpointError(f"{place} is of a model whose experts are divided over ranks: these are not read.")
    if parts - {"00"} or any(name.startswith("layer_") for name in names):
        raise CheckpointError(
            f"{place} is of a model that tensor or pipeline parallelism divides: only ZeRO's ranks are read."
        )
    if (place / "offloaded_tensors").exists():
        raise CheckpointError(
            f"{place} has its optimizer on NVMe (offloaded_tensors), in files that only its ranks read. "
            "Save it once with offload_optimizer on the CPU."
        )


def _check_parallelism(place: Path, model: Mapping[str, Any]) -> None:
    dimensions = model.get("checkpoint_parallel_dimensions") or {}
    if model.get("mp_world_size", 1) != 1 or any(value != 1 for value in dimensions.values()):
        raise CheckpointError(
            f"{place} is of a model that tensor or pipeline parallelism divides: only ZeRO's ranks are read."
        )
    if model.get("num_experts") or model.get("ds_autoep_layers"):
        raise CheckpointError(f"{place} is of a model whose experts are divided over ranks: these are not read.")


def _read_model_files(place: Path, allow: Sequence[type]) -> list[Mapping[str, Any]]:
    files = {path: named for path in place.glob("*.pt") if (named := _MODEL_FILE.fullmatch(path.name))}
    divided = sorted((int(named["rank"]), path) for path, named in files.items() if named["rank"] is not None)
    plain = [path for path, named in files.items() if named["rank"] is None]
    if not files:
        raise CheckpointError(f"{place} is not a checkpoint of DeepSpeed: it has no *_model_states.pt.")
    if divided and plain:
        raise CheckpointError(
            f"{place} has {plain[0].name} and {divided[0][1].name}: two runs, one of them at ZeRO stage 3, saved "
            "into it. Move the files of one away."
        )
    if plain:
        return [read_pickle(plain[0], allow)]
    first = read_pickle(divided[0][1], allow)
    ranks = _rank_count(first)
    wanted = [path for rank, path in divided if rank < ranks]
    if len(wanted) != ranks and not (place / "zero").is_dir():
        _refuse_missing(place, "*_model_states.pt", len(wanted), ranks)
    return [first, *(read_pickle(path, allow) for path in wanted[1:])]


def _rank_count(model: Mapping[str, Any]) -> int:
    ranks = int(model["dp_world_size"])
    if not 1 <= ranks <= _MAX_RANKS:
        raise ValueError(f"{ranks} ranks")
    return ranks


def _read_optimizer_files(place: Path, ranks: int, allow: Sequence[type]) -> list[Mapping[str, Any]]:
    by_kind: dict[str, dict[int, Path]] = {}
    for path in place.glob("*optim_states.pt"):
        if named := _OPTIM_FILE.fullmatch(path.name):
            by_kind.setdefault(named["kind"], {})[int(named["rank"])] = path
    if len(by_kind) > 1:
        raise CheckpointError(
            f"{place} has files zero_pp_rank_* and bf16_zero_pp_rank_*: two runs of different precisions saved "
            "into it. Move the files of one away."
        )
    paths = next(iter(by_kind.values()), {})
    # More files than ranks are of an earlier save with the same tag; DeepSpeed leaves them, too.
    wanted = [paths[rank] for rank in range(ranks) if rank in paths]
    if len(wanted) != ranks:
        _refuse_missing(place, "*_optim_states.pt", len(wanted), ranks)
    return [read_pickle(path, allow)["optimizer_state_dict"] for path in wanted]


def _refuse_missing(place: Path, kind: str, present: int, ranks: int) -> NoReturn:
    raise CheckpointError(
        f"{place} has {present} of the {ranks} files {kind} that {ranks} ranks saved: those of some nodes are missing. "
        "Copy them into one folder."
    )


# Stages


def _read_stage0(place: Path, model: Mapping[str, Any], names: Sequence[Sequence[str]] | None) -> _Layout:
    optimizer = model.get("optimizer")
    if optimizer is None:
        raise CheckpointError(f"{place} was saved without an optimizer: there is nothing to continue.")
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if names is None:
        names = _names_in_order(place, model, inner)
    stored_names = {plain_name(name): name for name in model["module"]}
    names = [[stored_names.get(name, name) for name in of_group] for of_group in names]
    is_flat = "fp32_groups_flat" in optimizer  # FP16_Optimizer, around fused optimizers
    if is_flat:
        members = [[0] * len(of_group) for of_group in names]
    else:
        members = _members(place, inner, names)
    tensors: dict[str, StoredTensor] = {}
    groups = []
    for number, (of_group, group) in enumerate(zip(names, inner["param_groups"], strict=True)):
        scalars: dict[str, Any] = {}
        begin = 0
        for position, name in zip(members[number], of_group, strict=True):
            weights = model["module"][name]
            end = begin + weights.numel()
            if is_flat:
                cut = slice(begin, end)
            else:
                cut = slice(None)
            state = inner["state"].get(group["params"][position], {})
            if is_flat:
                master = optimizer["fp32_groups_flat"][number]
            elif "fp32_groups" in optimizer:
                master = optimizer["fp32_groups"][number][position]
            else:
                master = weights
            tensors[f"master/{name}"] = _whole(flat(master, place)[cut], place)
            for key, value in state.items():
                if _is_scalar(key, value):
                    scalars[key] = max(value, scalars.get(key, value))
                    continue
                if not is_flat and value.shape != weights.shape and value.numel() == weights.numel():
                    raise CheckpointError(
                        f"{place}: '{key}' of '{name}' has shape {list(value.shape)}, and its weights have "
                        f"{list(weights.shape)}: this engine has other optimizer groups."
                    )
                tensors[f"{key}/{name}"] = _whole(flat(value, place)[cut], place)
            begin = end
        groups.append(StoredGroup(tuple(of_group), plain_settings(group), scalars))
    return tensors, groups


def _members(place: Path, inner: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the positions of each group's trained parameters, `names`, in the group as it was saved.

    Frozen ones, which have no state, may be among those saved. Raises CheckpointError.
    """
    groups = inner["param_groups"]
    members = []
    for of_group, group in zip(names, groups, strict=False):
        positions = list(range(len(group["params"])))
        if len(positions) > len(of_group):
            positions = [position for position in positions if inner["state"].get(group["params"][position])]
        members.append(positions)
    if len(names) != len(groups) or [*map(len, members)] != [*map(len, names)]:
        raise CheckpointError(
            f"{place} has optimizer groups of {[len(group['params']) for group in groups]} parameters, and this "
            f"engine of {[*map(len, names)]}. ZeRO stage 0 saves no names: the groups must be the same."
        )
    return members


def _names_in_order(place: Path, model: Mapping[str, Any], inner: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of stage 0's only group by the module's order, where the shapes of the states confirm it."""
    seen: set[int] = set()
    names = []
    for name, tensor in model["module"].items():
        if name not in model["buffer_names"] and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            names.append(name)
    states = inner["state"]
    shapes = []
    for number in sorted(states):
        elements = [value.shape for key, value in states[number].items() if not _is_scalar(key, value)]
        shapes += elements[:1]
    if len(inner["param_groups"]) != 1 or [model["module"][name].shape for name in names] != shapes:
        raise CheckpointError(
            f"{place} was saved at ZeRO stage 0, which stores the optimizer without names, and they do not follow from "
            "the module. Load it in the script that built the optimizer: api.load_deepspeed."
        )
    return [names]


def _read_stage12(place: Path, model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> _Layout:
    tensors: dict[str, StoredTensor] = {}
    groups = []
    inner = [of_rank["base_optimizer_state"] for of_rank in optims]
    if not isinstance(inner[0], dict):
        raise CheckpointError(f"{place} was saved with zero_optimization.elastic_checkpoint, which is not read.")
    if len(inner[0]["param_groups"]) != len(model["param_shapes"]):
        raise ValueError("param_shapes has other optimizer groups than the optimizer")
    for number, shapes in enumerate(model["param_shapes"]):
        gaps = (optims[0].get("param_alignment_paddings") or {number: [0] * len(shapes)})[number]
        masters = [flat(of_rank["single_partition_of_fp32_groups"][number], place) for of_rank in optims]
        states = [of_rank["state"].get(number, {}) for of_rank in inner]
        kinds, scalars = _split_states(states, place)
        kinds["master"] = masters
        size = masters[0].numel()
        begin = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            total = shape.numel()
            for kind, parts in kinds.items():
                tensors[f"{kind}/{name}"] = StoredTensor(total, tuple(_cut(parts, size, begin, total)))
            begin += total + gap
        groups.append(StoredGroup(tuple(shapes), plain_settings(inner[0]["param_groups"][number]), scalars))
    return tensors, groups


def _cut(parts: Sequence[Tensor], size: int, begin: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of elements [begin, begin + length) of partitions of `size`, of which the last may be
    shorter."""
    for rank, part in enumerate(parts):
        start = rank * size
        first = max(begin, start)
        last = min(begin + length, start + min(size, part.numel()))
        if first < last:
            yield first - begin, part[first - start : last - start]


def _read_stage3(place: Path, model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> _Layout:
    tensors: dict[str, StoredTensor] = {}
    ranks = len(optims)
    inner = [of_rank["optimizer_state_dict"] for of_rank in optims]
    stored_groups = inner[0]["param_groups"]
    group_of = {sub: number for number, group in enumerate(stored_groups) for sub in group["params"]}
    names: list[list[str]] = [[] for _ in stored_groups]
    scalars: list[dict[str, Any]] = [{} for _ in stored_groups]
    for sub, shapes in enumerate(model["param_shapes"]):
        masters = [flat(of_rank["fp32_flat_groups"][sub], place) for of_rank in optims]
        kinds, of_sub = _split_states([of_rank["state"].get(sub, {}) for of_rank in inner], place)
        kinds["master"] = masters
        scalars[group_of[sub]] |= of_sub
        sizes = {name: -(-shape.numel() // ranks) for name, shape in shapes.items()}
        if any(part.numel() != sum(sizes.values()) for part in masters):
            raise CheckpointError(
                f"{place}: the pieces of sub-group {sub} have {masters[0].numel():,} elements per rank in place of "
                f"{sum(sizes.values()):,}: they are not cut over {ranks} ranks (MiCS?), and are not read."
            )
        begin = 0
        for name, shape in shapes.items():
            for kind, parts in kinds.items():
                tensors[f"{kind}/{name}"] = _gather_pieces(parts, begin, sizes[name], shape.numel())
            begin += sizes[name]
        names[group_of[sub]] += shapes
    groups = [
        StoredGroup(tuple(names[number]), plain_settings(group), scalars[number])
        for number, group in enumerate(stored_groups)
    ]
    return tensors, groups


def _gather_pieces(parts: Sequence[Tensor], begin: int, size: int, total: int) -> StoredTensor:
    """Return the tensor of which each rank has `size` elements, from its element `begin` on; the last ones are
    padding."""
    pieces = []
    for rank, part in enumerate(parts):
        length = min(size, total - rank * size)
        if length > 0:
            pieces.append((rank * size, part[begin : begin + length]))
    return StoredTensor(total, tuple(pieces))


def _split_states(states: Sequence[Mapping[str, Any]], place: Path) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return the states that have elements, a flat tensor per rank, and the scalars of rank 0."""
    tensors: dict[str, list[Tensor]] = {}
    scalars: dict[str, Any] = {}
    for key, value in states[0].items():
        if _is_scalar(key, value):
            scalars[key] = value
        else:
            tensors[key] = [flat(state[key], place) for state in states]
    return tensors, scalars


def _is_scalar(key: str, value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0 or key == "step"


def _read_universal(place: Path, model: Mapping[str, Any]) -> _Layout:
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, Any] = {}
    for path in sorted((place / "zero").glob("*/*.pt")):
        name = path.parent.name
        stored = _read_universal_file(path)
        if path.stem == "step":
            steps[name] = stored
        elif isinstance(stored, Tensor):
            kind = "master" if path.stem == "fp32" else path.stem
            tensors[f"{kind}/{name}"] = _whole(stored, place)
    common = read_pickle(place / "zero" / "optimizer_state.pt")
    inner = common.get("base_optimizer_state") or common.get("optimizer_state_dict") or {}
    stored_groups = common.get("param_groups") or inner.get("param_groups") or []
    states = inner.get("state") or {}
    names = [tuple(shapes) for shapes in model["param_shapes"]]
    if stored_groups and len(names) != len(stored_groups):  # stage 3's sub-groups
        names = [tuple(name for sub in group["params"] for name in names[sub]) for group in stored_groups]
    groups = []
    for number, of_group in enumerate(names):
        if stored_groups:
            settings = plain_settings(stored_groups[number])
        else:
            settings = {}
        if of_group and of_group[0] in steps:
            scalars = {"step": steps[of_group[0]]}
        else:
            scalars = {}
        if not scalars:
            scalars = {key: value for key, value in states.get(number, {}).items() if _is_scalar(key, value)}
        groups.append(StoredGroup(of_group, settings, scalars))
    return tensors, groups


def _read_universal_file(path: Path) -> Any:
    """Return the value of a file below zero/: stages 1 and 2 wrap a tensor, stage 3 does not, and a step is a
    number."""
    contents = read_pickle(path, expected=object)
    return contents["param"] if isinstance(contents, dict) else contents


# What the optimizer has not


def _read_others(
    place: Path, models: Sequence[Mapping[str, Any]], masters: Mapping[str, StoredTensor]
) -> tuple[dict[str, list[int]], dict[str, StoredTensor], tuple[str, ...]]:
    """Return all shapes, the frozen parameters and buffers, and the names of parameters that were not saved."""
    model = models[0]
    shapes = {name: list(shape) for of in model.get("param_shapes") or () for name, shape in of.items()}
    tensors = _read_fragments(place, models)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        shapes[name] = list(shape)
    trained = {key.partition("/")[2] for key in masters}
    aliases = model.get("shared_params") or {}
    places: set[int] = set()
    lost = []
    for name, tensor in model["module"].items():
        if not isinstance(tensor, Tensor):
            continue
        if name in model["buffer_names"]:
            shapes[name] = list(tensor.shape)
            tensors[f"buffer/{name}"] = _whole(tensor, place)
        elif name in trained:
            shapes.setdefault(name, list(tensor.shape))
            places.add(tensor.data_ptr())
        elif name in aliases or f"frozen/{name}" in tensors:
            continue
        elif len(models) > 1 or tensor.shape == (0,):  # stage 3's placeholder
            lost.append(name)
        elif tensor.data_ptr() not in places:
            places.add(tensor.data_ptr())
            shapes[name] = list(tensor.shape)
            tensors[f"frozen/{name}"] = _whole(tensor, place)
    return shapes, tensors, tuple(lost)


def _read_fragments(place: Path, models: Sequence[Mapping[str, Any]]) -> dict[str, StoredTensor]:
    """Return the frozen parameters of stages 2 and 3."""
    tensors: dict[str, StoredTensor] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        total = shape.numel()
        parts = [flat(of_rank["frozen_param_fragments"][name], place) for of_rank in models]
        if len(parts) == 1:  # stage 2, or one rank
            tensors[f"frozen/{name}"] = StoredTensor(total, ((0, parts[0][:total]),))
        else:
            tensors[f"frozen/{name}"] = _gather_pieces(parts, 0, parts[0].numel(), total)
    return tensors


def _find_tied(model: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name that is stored."""
    module = model["module"]
    tied = dict(model.get("shared_params") or {})
    stored = {module[name].data_ptr(): name for name in shapes if name in module and module[name].numel()}
    for name, tensor in module.items():
        if isinstance(tensor, Tensor) and name not in shapes and tensor.numel() and tensor.data_ptr() in stored:
            tied[name] = stored[tensor.data_ptr()]
    return tied


def _read_scaler(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if optims:
        source = optims[0].get("loss_scaler")
    else:
        source = None
    if isinstance(source, StoredFields):
        values: Mapping[str, Any] = vars(source)
    else:
        optimizer = model.get("optimizer") or {}
        values = {key: optimizer[key] for key in _SCALER_FIELDS if key in optimizer}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def _whole(tensor: Tensor, place: Path) -> StoredTensor:
    return StoredTensor(tensor.numel(), ((0, flat(tensor, place)),))
