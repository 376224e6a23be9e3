"""ZeRO stages, offloads and activation checkpointing that fit, at their largest micro-batch or model. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, cast

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout, build_batch_plan, cheapest_micro_batches
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, OffloadDevice, Precision
from llmscale.config.hardware import Cluster
from llmscale.config.resolve import ResolvedStep
from llmscale.errors import ConfigError
from llmscale.limits import MAX_SEQ_LEN
from llmscale.memory.breakdown import GIB
from llmscale.memory.estimate import MemoryEstimate, estimate_least, estimate_memory
from llmscale.memory.host_bytes import pinned_bytes
from llmscale.planning.scaling import GPT3, LARGEST_WIDTH, WIDTH_MULTIPLE, interpolated_shape, preset_below

STAGES = (0, 1, 2, 3)
#: (optimizer states, parameters), from the fastest to the smallest on the GPU.
OFFLOADS: tuple[tuple[OffloadDevice, OffloadDevice], ...] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "nvme"),
)
#: From the fastest to the smallest.
CHECKPOINTING: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
#: Folder on the local disk of every node, as in ds_configs/zero3_nvme.json, for the user to change.
DEFAULT_NVME_PATH = "/local_nvme"
#: ASSUMED: share of a GPU's and of a node's memory that an estimate leaves free. No GPU has calibrated estimates.
MARGIN = 0.05
#: ASSUMED: host memory of a rank's process and its data worker: CUDA, PyTorch, DeepSpeed and NCCL.
PROCESS_BYTES = 4 * 2**30
#: Lengths of sequences to try are multiples of this many tokens.
_LENGTH_UNIT = 1024


@dataclass(frozen=True)
class Strategy:
    """Memory settings of a ds_config and `--activation-checkpointing`."""

    zero_stage: int
    offload_optimizer: OffloadDevice
    offload_param: OffloadDevice
    activation_checkpointing: CheckpointingMode
    zero_hpz_partition_size: int = 1
    """Ranks that share a second copy of the parameters; 1 without hpZ."""

    @property
    def stage_words(self) -> str:
        """Return `3`, or `3 hpZ`."""
        return f"{self.zero_stage}{' hpZ' if self.zero_hpz_partition_size > 1 else ''}"

    @property
    def offload(self) -> str:
        """Return what is offloaded in a few words, or `-`."""
        if self.offload_optimizer == self.offload_param == "none":
            return "-"
        if self.offload_param == "none":
            return f"optim {self.offload_optimizer}"
        if self.offload_optimizer == "none":
            return f"param {self.offload_param}"
        if self.offload_optimizer == self.offload_param:
            return f"both {self.offload_param}"
        return f"optim {self.offload_optimizer}, param {self.offload_param}"

    def describe(self) -> str:
        """Return the settings in words."""
        parts = [f"ZeRO stage {self.zero_stage}"]
        if self.zero_hpz_partition_size > 1:
            parts.append(f"hpZ within {self.zero_hpz_partition_size} GPUs")
        if self.offload != "-":
            parts.append(f"offload: {self.offload}")
        mode = self.activation_checkpointing
        parts.append("no recomputation" if mode == "none" else f"{mode} checkpointing")
        return ", ".join(parts)


def strategy_of(ds: DsConfig, checkpointing: CheckpointingMode) -> Strategy:
    """Return the strategy of a ds_config."""
    devices = (ds.keys.offload_optimizer_device, ds.keys.offload_param_device)
    return Strategy(ds.zero_stage, *devices, checkpointing, ds.zero_hpz_partition_size)


def all_strategies(hpz_ranks: int = 1) -> list[Strategy]:
    """Return all combinations, legal or not; stage 3 also with hpZ in groups of `hpz_ranks`."""
    stages = [(stage, 1) for stage in STAGES] + [(3, hpz_ranks)] * (hpz_ranks > 1)
    return [
        Strategy(stage, *offload, mode, group)
        for (stage, group), offload, mode in itertools.product(stages, OFFLOADS, CHECKPOINTING)
    ]


def strategy_ds_config(
    strategy: Strategy, precision: Precision, nvme_path: str = DEFAULT_NVME_PATH
) -> dict[str, object]:
    """Return the ds_config file of a strategy; missing keys have llmscale's defaults.

    `selective` checkpointing is not in it, but a flag of train.py: --activation-checkpointing.
    """
    key = "torch_autocast" if precision == "autocast" else precision
    return _with_strategy({} if precision == "fp32" else {key: {"enabled": True}}, strategy, nvme_path)


def build_strategy(strategy: Strategy, precision: Precision, nvme_path: str = DEFAULT_NVME_PATH) -> DsConfig | None:
    """Return a strategy's checked ds_config; None if DeepSpeed cannot train it."""
    return _checked(strategy_ds_config(strategy, precision, nvme_path), f"stage {strategy.zero_stage}")


def legal_strategies(
    precision: Precision, nvme_path: str, modes: Sequence[CheckpointingMode], hpz_ranks: int = 1
) -> Iterator[tuple[DsConfig, CheckpointingMode]]:
    """Yield the ds_config of every strategy with one of these checkpointing modes that DeepSpeed can train."""
    for strategy in all_strategies(hpz_ranks):
        if strategy.activation_checkpointing in modes:
            ds = build_strategy(strategy, precision, nvme_path)
        else:
            ds = None
        if ds is not None:
            yield ds, strategy.activation_checkpointing


def change_strategy(ds: DsConfig, strategy: Strategy) -> DsConfig | None:
    """Return a user's ds_config with another strategy and all else kept; None if it cannot train."""
    keys = cast("dict[str, object]", ds.keys.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return _checked(_with_strategy(keys, strategy, DEFAULT_NVME_PATH), ds.source)


def _with_strategy(keys: dict[str, object], strategy: Strategy, nvme_path: str) -> dict[str, object]:
    changed = dict(keys)
    written = changed.pop("zero_optimization", {})
    zero = dict(cast("dict[str, object]", written)) | {"stage": strategy.zero_stage}
    zero.pop("zero_hpz_partition_size", None)
    if strategy.zero_hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = strategy.zero_hpz_partition_size
    devices = {"offload_optimizer": strategy.offload_optimizer, "offload_param": strategy.offload_param}
    for name, device in devices.items():
        section = cast("dict[str, object]", zero.pop(name, {}))
        if device == "none":
            continue
        if section.get("device") != device:
            section = {"device": device} | ({"nvme_path": nvme_path} if device == "nvme" else {})
        zero[name] = section
    checkpointing = changed.pop("activation_checkpointing", None)
    changed = {"zero_optimization": zero, **changed}
    if strategy.activation_checkpointing == "full":
        changed["activation_checkpointing"] = checkpointing or {"cpu_checkpointing": False}
    return changed


def _checked(config: dict[str, object], source: str) -> DsConfig | None:
    try:
        return parse_ds_config(config, source)
    except ConfigError:
        return None


class Fit:
    """Memory of some step of training on the machines that it would run on."""

    estimate: MemoryEstimate
    cluster: Cluster

    @property
    def strategy(self) -> Strategy:
        raise NotImplementedError

    @property
    def micro_batch_size(self) -> int:
        raise NotImplementedError

    @property
    def micro_batch_tokens(self) -> int:
        raise NotImplementedError

    @property
    def save_bytes_per_node(self) -> int:
        """Return the host memory of a checkpoint's copy on a node; 0 where none is made."""
        return 0

    @property
    def spare_bytes(self) -> int:
        """Return the bytes left on the GPU, negative if it is too small."""
        return self.cluster.gpu_bytes - self.estimate.total_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Return the host memory of offloaded states on a node, without the processes."""
        return self.estimate.host_bytes * self.cluster.gpus_per_node

    @property
    def nvme_bytes_per_node(self) -> int:
        return self.estimate.nvme_bytes * self.cluster.gpus_per_node

    @property
    def host_spare_bytes(self) -> int | None:
        """Return the bytes that offloaded states, a checkpoint's copy and the processes leave of a node's memory.

        None if its size is unknown, or nothing is offloaded.
        """
        limit = self.cluster.host_bytes
        cluster = self.cluster
        if limit is None or not self.host_bytes_per_node:
            return None
        taken = self.host_bytes_per_node + self.save_bytes_per_node + cluster.gpus_per_node * PROCESS_BYTES
        return limit - taken

    @property
    def fits(self) -> bool:
        """Return whether the estimate is within the memory, with or without the margin."""
        host = self.host_spare_bytes
        return self.spare_bytes >= 0 and (host is None or host >= 0)

    @property
    def has_gpu_margin(self) -> bool:
        """Return whether the row fits, and MARGIN of the GPU is left: a smaller micro-batch helps no host."""
        return self.fits and self.spare_bytes >= MARGIN * self.cluster.gpu_bytes

    @property
    def share_of_limit(self) -> float:
        """Return how full the GPU or, if it is fuller, the node is, where 1 leaves just MARGIN."""
        share = self.estimate.total_bytes / max(1, self.cluster.gpu_bytes)
        host = self.host_spare_bytes
        if host is not None and self.cluster.host_bytes:
            share = max(share, 1 - host / self.cluster.host_bytes)
        return share / (1 - MARGIN)

    @property
    def has_margin(self) -> bool:
        """Return whether MARGIN of the GPU and of the node is left."""
        return self.share_of_limit <= 1

    @property
    def verdict(self) -> str:
        """Return whether it fits, and by how much, in a few words."""
        if self.spare_bytes < 0:
            return f"  no, {-self.spare_bytes / GIB:,.1f} over"
        host = self.host_spare_bytes
        if host is not None and host < 0:
            return f"  no, host {-host / GIB:,.0f} over"
        if self.has_margin:
            tight = ""
        elif self.has_gpu_margin:
            tight = ", host tight"
        else:
            tight = ", tight"
        return f"  {self.spare_bytes / GIB:.1f} free{tight}"


@dataclass(frozen=True)
class Candidate(Fit):
    """A step on the machines that it would run on, and its memory there."""

    step: ResolvedStep
    estimate: MemoryEstimate
    cluster: Cluster

    @property
    def ds(self) -> DsConfig:
        return self.step.ds

    @property
    def plan(self) -> BatchPlan:
        return self.step.plan

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.step.ds, self.step.checkpointing)

    @property
    def micro_batch_size(self) -> int:
        return self.plan.micro_batch_size

    @property
    def micro_batch_tokens(self) -> int:
        return self.plan.micro_batch_size * self.plan.seq_len

    @cached_property
    def save_bytes_per_node(self) -> int:
        """Return the host memory of a checkpoint's copy on a node, from which it is written in the background.

        Every rank copies its shards; at stage 0 these are the complete states. Copies from a GPU are page-locked.
        """
        step = self.step
        cluster = self.cluster
        copies = cluster.gpus_per_node if step.zero_stage == 0 else 1 / cluster.num_nodes
        checkpoint = copies * step.stored_optimizer.checkpoint_bytes(step.shape.architecture)
        if step.engine_config.zero.offload_optimizer.device != "none":
            return round(checkpoint)
        width = step.stored_optimizer.groups[0].master_bytes
        pieces = cluster.world_size if step.zero_stage == 3 else 1
        sizes = [width * tensor.elements / pieces for tensor in step.tensors.trainable]
        return round(checkpoint * sum(map(pinned_bytes, sizes)) / sum(sizes))


def evaluate(step: ResolvedStep, cluster: Cluster) -> Candidate:
    """Estimate a step's memory on a cluster."""
    return Candidate(step, estimate_memory(step, cluster.gpu.capability), cluster)


def may_fit(step: ResolvedStep, cluster: Cluster) -> bool:
    """Return False for a step of which a fast lower bound of its memory is too large."""
    return estimate_least(step, cluster.gpu.capability) <= cluster.gpu_bytes


def with_micro_batch(step: ResolvedStep, micro_batch_size: int, ranks: ParallelLayout | None = None) -> ResolvedStep:
    """Return the step with another micro-batch, and on other ranks. Raises ConfigError if they do not fit its batch."""
    plan = build_batch_plan(
        global_batch_size=step.plan.global_batch_size,
        ranks=ranks or step.plan.ranks,
        seq_len=step.plan.seq_len,
        micro_batch_size=micro_batch_size,
    )
    if ranks is None:
        return step.with_plan(plan)
    return step.changed(plan=plan)


def cheapest_sizes(step: ResolvedStep) -> list[int]:
    """Return the ascending micro-batches with the fewest fillers. Raises ConfigError for more ranks than sequences."""
    return cheapest_micro_batches(step.plan.global_batch_size, step.plan.ranks.data_parallel_size)


@dataclass(frozen=True)
class Trial:
    """A run to try on a cluster."""

    step: ResolvedStep
    is_fixed: bool = False
    """True if the user chose its micro-batch; else the largest that fits is looked for."""


def try_strategies(
    trial: Trial,
    modes: Sequence[CheckpointingMode] = CHECKPOINTING,
    hpz_ranks: int = 1,
    nvme_path: str = DEFAULT_NVME_PATH,
) -> list[Trial]:
    """Return the run with every strategy that DeepSpeed can train in its precision, in these modes of checkpointing.

    Raises ConfigError if it can train none.
    """
    step = trial.step
    divides = step.plan.ranks.expert_parallel_size > 1
    trials = []
    for ds, mode in legal_strategies(step.precision, nvme_path, modes, 1 if divides else hpz_ranks):
        can_train = step.optimizer.steps_shards or not ds.zero_stage
        can_train = can_train and not (step.optimizer.frozen and ds.keys.offload_param_device == "nvme")
        if can_train and (ds.zero_stage or not divides):
            trials.append(replace(trial, step=step.changed(ds=ds, checkpointing=mode)))
    if not trials:
        raise ConfigError(
            f"optimizer '{step.optimizer.name}' runs at ZeRO stage 0 only, which trains neither in fp16 nor with "
            f"divided experts; this run is in {step.precision}. Use --optimizer adamw."
        )
    return trials


def find_largest_fit(trial: Trial, cluster: Cluster) -> Candidate:
    """Return the largest micro-batch that fits with MARGIN of those with the fewest fillers, else the smallest one.

    A fixed micro-batch is the only one tried.

    Memory grows with the micro-batch, except for the largest: without accumulation it needs fewer bytes for gradients,
    so it is tried separately. Raises ConfigError.
    """
    step = trial.step
    sizes = cheapest_sizes(trial.step)
    if trial.is_fixed:
        return evaluate(step, cluster)
    largest = with_micro_batch(step, sizes[-1])
    if len(sizes) == 1 or may_fit(largest, cluster):
        fit = evaluate(largest, cluster)
        if len(sizes) == 1 or fit.has_gpu_margin:
            return fit
    return _bisect(step, cluster, sizes[:-1])


def _bisect(step: ResolvedStep, cluster: Cluster, sizes: Sequence[int]) -> Candidate:
    """Return the largest of ascending `sizes` that has MARGIN, else the first. All accumulate."""
    best = evaluate(with_micro_batch(step, sizes[0]), cluster)
    low = 0
    high = len(sizes)
    while best.has_gpu_margin and high - low > 1:
        middle = (low + high) // 2
        fit = evaluate(with_micro_batch(step, sizes[middle]), cluster)
        if fit.has_gpu_margin:
            low = middle
            best = fit
        else:
            high = middle
    return best


@dataclass(frozen=True)
class LargestModel:
    """Largest model that a strategy can train on a cluster."""

    DERIVED: ClassVar = ("shape", "num_parameters", "total_bytes")

    strategy: Strategy
    fit: Candidate | None = field(repr=False)
    """Estimate of that model; None if not even the family's smallest fits."""
    preset: str | None
    """Largest preset that is not larger."""

    @property
    def shape(self) -> GPTShape | None:
        return self.fit.step.shape if self.fit else None

    @property
    def num_parameters(self) -> int | None:
        return self.fit.step.shape.num_parameters if self.fit else None

    @property
    def total_bytes(self) -> int | None:
        return self.fit.estimate.total_bytes if self.fit else None

    @property
    def size(self) -> str:
        """Return the number of parameters in a few characters."""
        if self.num_parameters is None:
            return "nothing fits"
        billions = self.num_parameters / 1e9
        return f"{billions:.3g}B" if billions < 1000 else f"{billions / 1000:.3g}T"


def find_largest_models(trials: Sequence[Trial], cluster: Cluster, family: str = GPT3) -> list[LargestModel]:
    """Return the largest model of every trial, at its micro-batch if that is fixed, or 1.

    Properties that the family does not scale are those of the trial's shape.
    """
    models: list[LargestModel] = []
    search = _BoundarySearch(16 * WIDTH_MULTIPLE, WIDTH_MULTIPLE, LARGEST_WIDTH, power=3)
    for trial in trials:
        if trial.is_fixed:
            step = trial.step
        else:
            step = with_micro_batch(trial.step, 1)
        fit = search.find(partial(_evaluate_width, step, cluster, family))
        shape = fit.step.shape if fit else None
        models.append(LargestModel(strategy_of(step.ds, step.checkpointing), fit, preset_below(shape, family)))
    return models


def _evaluate_width(step: ResolvedStep, cluster: Cluster, family: str, width: int) -> Candidate:
    return evaluate(step.changed(shape=interpolated_shape(width, step.shape, family)), cluster)


class _BoundarySearch:
    """Searches for the largest sizes that fit, one strategy after the other; a search begins where the last ended."""

    def __init__(self, start: int, unit: int, largest: int, power: float) -> None:
        self._start = start
        self._unit = unit
        self._largest = largest
        self._size = start
        self._power = power
        """Size at which the next search begins, and the power of the size that memory grows as there."""

    def find(self, fit: Callable[[int], Candidate]) -> Candidate | None:
        """Return the estimate of the largest multiple of the unit that fits with MARGIN.

        A step goes where memory that grows as a power leaves just the margin. Every sixth one adds half, or halves the
        range, in case it does not grow so.
        """
        low = 0
        high = self._largest + self._unit
        size = self._size
        tries = 0
        best: Candidate | None = None
        last: tuple[int, float] | None = None
        while high - low > self._unit:
            candidate = fit(size)
            share = candidate.share_of_limit
            tries = tries + 1
            if candidate.has_margin:
                low = size
                best = candidate
            else:
                high = size
            if last and share != last[1]:
                self._power = max(0.1, math.log(share / last[1]) / math.log(size / last[0]))
            last = size, share
            if tries % 6 == 0:
                size = 3 * low // 2 if high > self._largest else (low + high) // 2
            else:
                size = int(size * share ** (-1 / self._power))
            size = min(max(size // self._unit * self._unit, low + self._unit), high - self._unit)
        self._size = low or self._start
        return best


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequence that a strategy can train, by GPUs that divide it."""

    DERIVED: ClassVar = ("seq_len",)

    strategy: Strategy
    cpu_checkpointing: bool
    fits: dict[int, Candidate | None] = field(repr=False)
    """Estimates at that length; None if not even _LENGTH_UNIT tokens fit."""

    @property
    def seq_len(self) -> dict[int, int | None]:
        """Return the lengths by GPUs."""
        return {size: fit.plan.seq_len if fit else None for size, fit in self.fits.items()}

    @property
    def checkpointing(self) -> str:
        """Return the mode of checkpointing, `full, host` if the host keeps the blocks' inputs, or `-`."""
        mode = self.strategy.activation_checkpointing
        on_host = mode == "full" and self.cpu_checkpointing
        if mode == "none":
            return "-"
        return f"{mode}{', host' if on_host else ''}"


def find_longest(trials: Sequence[Trial], cluster: Cluster, sizes: Sequence[int]) -> list[LongestSequences]:
    """Return the longest sequences of every trial by the GPUs that divide one, without accumulation, at the trial's
    micro-batch if that is fixed, or 1."""
    rows = []
    searches = {size: _BoundarySearch(_LENGTH_UNIT, _LENGTH_UNIT, MAX_SEQ_LEN, power=1) for size in sizes}
    for trial in trials:
        steps = {size: _undivided_step(trial, size) for size in sizes}
        fits = {size: search.find(partial(_evaluate_length, steps[size], cluster)) for size, search in searches.items()}
        ds = trial.step.ds
        rows.append(LongestSequences(strategy_of(ds, trial.step.checkpointing), ds.keys.cpu_checkpointing, fits))
    return rows


def with_inputs_on_host(trials: Sequence[Trial], nvme_path: str) -> Iterator[Trial]:
    """Yield the trials; those that offload and checkpoint also with the inputs of checkpointed blocks on the host."""
    on_host = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for trial in trials:
        yield trial
        step = trial.step
        strategy = strategy_of(step.ds, step.checkpointing)
        if step.checkpointing == "full" and strategy.offload != "-":
            keys = strategy_ds_config(strategy, step.precision, nvme_path)
            yield replace(trial, step=step.changed(ds=parse_ds_config(keys | on_host, step.ds.source)))


def _undivided_step(trial: Trial, split: int) -> ResolvedStep:
    """Return the trial with `split` GPUs that divide a sequence, and one micro-batch per group of them."""
    step = trial.step
    micro_batch_size = step.plan.micro_batch_size if trial.is_fixed else 1
    ranks = replace(step.plan.ranks, sequence_parallel_size=split)
    plan = build_batch_plan(
        global_batch_size=micro_batch_size * ranks.data_parallel_size,
        ranks=ranks,
        seq_len=step.plan.seq_len,
        micro_batch_size=micro_batch_size,
    )
    return step.changed(plan=plan)


def _evaluate_length(step: ResolvedStep, cluster: Cluster, seq_len: int) -> Candidate:
    return evaluate(step.with_length(seq_len), cluster)
