"""ZeRO stages, offloads and activation checkpointing that fit, at their largest micro-batch or model. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout, build_batch_plan, cheapest_micro_batches
from llmscale.config.deepspeed.resolve import BatchFlags, DsConfig, parse_ds_config, resolve_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, OffloadDevice, Precision, ResolvedDsConfig
from llmscale.config.hardware import GPU, Interconnect
from llmscale.config.loss_settings import CHUNK_TOKENS, LossSettings
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.resolve import ResolvedStep, default_balance_loss, resolve_step
from llmscale.errors import ConfigError
from llmscale.limits import MAX_SEQ_LEN
from llmscale.memory.estimate import HFStates, MemoryEstimate, estimate_hf_states, estimate_least, estimate_memory
from llmscale.memory.states.state_memory import ZeroSetup
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


@dataclass(frozen=True)
class Strategy:
    """Memory settings of a ds_config and `--activation-checkpointing`."""

    zero_stage: int
    offload_optimizer: OffloadDevice
    offload_param: OffloadDevice
    checkpointing: CheckpointingMode
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
        parts.append("no recomputation" if self.checkpointing == "none" else f"{self.checkpointing} checkpointing")
        return ", ".join(parts)


def strategy_of(ds: DsConfig, checkpointing: CheckpointingMode) -> Strategy:
    """Return the strategy of a ds_config."""
    devices = (ds.offload_optimizer_device, ds.offload_param_device)
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
    return _with_strategy({**_precision_section(precision)}, strategy, nvme_path)


def build_strategy(strategy: Strategy, precision: Precision, nvme_path: str = DEFAULT_NVME_PATH) -> DsConfig | None:
    """Return a strategy's checked ds_config; None if DeepSpeed cannot train it."""
    return _checked(strategy_ds_config(strategy, precision, nvme_path), f"stage {strategy.zero_stage}")


def legal_strategies(
    precision: Precision, nvme_path: str, modes: Sequence[CheckpointingMode], hpz_ranks: int = 1
) -> Iterator[tuple[DsConfig, CheckpointingMode]]:
    """Yield the ds_config of every strategy with one of these checkpointing modes that DeepSpeed can train."""
    for strategy in all_strategies(hpz_ranks):
        ds = build_strategy(strategy, precision, nvme_path) if strategy.checkpointing in modes else None
        if ds is not None:
            yield ds, strategy.checkpointing


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
    if strategy.checkpointing == "full":
        changed["activation_checkpointing"] = checkpointing or {"cpu_checkpointing": False}
    return changed


def _precision_section(precision: Precision) -> dict[str, object]:
    if precision == "fp32":
        return {}
    return {"torch_autocast" if precision == "autocast" else precision: {"enabled": True}}


def _checked(config: dict[str, object], source: str) -> DsConfig | None:
    try:
        return parse_ds_config(config, source)
    except ConfigError:
        return None


#: GPUs of the largest common nodes, such as DGX-2.
_MANY_IN_A_NODE = 16


#: ASSUMED: share of a GPU's and of a node's memory that an estimate leaves free. No GPU has calibrated estimates.
MARGIN = 0.05
#: ASSUMED: host memory of a rank's process and its data worker: CUDA, PyTorch, DeepSpeed and NCCL.
PROCESS_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Machines:
    """Nodes and memory of a run."""

    num_nodes: int
    gpus_per_node: int
    gpu_bytes: int
    """Memory of one GPU, as CUDA reports it."""
    host_bytes: int | None = None
    """Memory of one node for offloaded states; None if unknown, and then not checked."""
    capability: ComputeCapability | None = None
    """Compute capability of the GPUs; None for Ampere or newer."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def in_words(self, gpu: str) -> str:
        """Return `2 nodes x 8 x h100-80gb`, with a hint at --num-nodes for an unusually large node."""
        if self.num_nodes > 1:
            return f"{self.num_nodes} nodes x {self.gpus_per_node} x {gpu}"
        one = " in one node (of several nodes: --num-nodes)" if self.gpus_per_node > _MANY_IN_A_NODE else ""
        return f"{self.gpus_per_node} x {gpu}{one}"


@dataclass(frozen=True)
class Job:
    """Model, batch and machines of a run."""

    shape: GPTShape
    global_batch_size: int
    """Sequences per optimizer step over all ranks."""
    machines: Machines
    micro_batch_size: int | None = None
    """Micro-batch fixed by the user; None for the largest that fits."""
    optimizer: OptimizerSpec = ADAMW
    loss_chunk_tokens: int = CHUNK_TOKENS
    """Value of --loss-chunk-tokens."""
    sequence_parallel_size: int = 1
    """Ranks that divide a sequence."""
    expert_parallel_size: int = 1
    """Ranks that divide the experts of a block."""
    is_default_batch: bool = False
    """True if nobody gave the global batch, so that a ds_config may."""

    def with_batch_of(self, ds: DsConfig) -> Job:
        """Return the job with the batch sizes of a ds_config that no flag overrides."""
        given = None if self.is_default_batch else self.global_batch_size
        flags = BatchFlags(given, self.micro_batch_size)
        batch = ds.batch(flags, self.global_batch_size, self.ranks.data_parallel_size)
        return replace(self, global_batch_size=batch.total or self.global_batch_size, micro_batch_size=batch.micro)

    @property
    def ranks(self) -> ParallelLayout:
        """Return the layout of all GPUs. Raises ConfigError if they cannot divide sequences or experts so."""
        return ParallelLayout(self.machines.world_size, self.sequence_parallel_size, self.expert_parallel_size)


@dataclass(frozen=True)
class Search:
    """Inputs of the rows of `llmscale estimate`."""

    job: Job
    gpu: GPU
    interconnect: Interconnect
    precision: Precision
    modes: Sequence[CheckpointingMode] = CHECKPOINTING
    """Modes of activation checkpointing to try."""
    nvme_path: str = DEFAULT_NVME_PATH
    files: Sequence[tuple[DsConfig, CheckpointingMode]] = ()
    """ds_configs of the user, the only ones to try; empty for every strategy in `precision`."""


@dataclass(frozen=True)
class Candidate:
    """A ds_config at a micro-batch on a job's machines."""

    step: ResolvedStep
    estimate: MemoryEstimate
    machines: Machines

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
    def spare_bytes(self) -> int:
        """Return the bytes left on the GPU, negative if it is too small."""
        return self.machines.gpu_bytes - self.estimate.total_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Return the host memory of offloaded states on a node, without the processes."""
        return self.estimate.host_bytes * self.machines.gpus_per_node

    @property
    def nvme_bytes_per_node(self) -> int:
        return self.estimate.nvme_bytes * self.machines.gpus_per_node

    @property
    def host_spare_bytes(self) -> int | None:
        """Return the bytes that offloaded states and the processes leave of a node's memory.

        None if its size is unknown, or nothing is offloaded.
        """
        limit, machines = self.machines.host_bytes, self.machines
        if limit is None or not self.host_bytes_per_node:
            return None
        return limit - self.host_bytes_per_node - machines.gpus_per_node * PROCESS_BYTES

    @property
    def fits(self) -> bool:
        """Return whether the estimate is within the memory, with or without the margin."""
        host = self.host_spare_bytes
        return self.spare_bytes >= 0 and (host is None or host >= 0)

    @property
    def has_gpu_margin(self) -> bool:
        """Return whether the row fits, and MARGIN of the GPU is left: a smaller micro-batch helps no host."""
        return self.fits and self.spare_bytes >= MARGIN * self.machines.gpu_bytes

    @property
    def has_margin(self) -> bool:
        """Return whether MARGIN of the GPU and of the node is left."""
        host, limit = self.host_spare_bytes, self.machines.host_bytes or 0
        return self.has_gpu_margin and (host is None or host >= MARGIN * limit)


def fit_at(ds: DsConfig, job: Job, checkpointing: CheckpointingMode, micro_batch_size: int) -> Candidate:
    """Estimate one micro-batch. Raises ConfigError if it does not divide the global batch."""
    return _fit(job, _step(ds, job, checkpointing, micro_batch_size))


def find_largest_fit(ds: DsConfig, job: Job, checkpointing: CheckpointingMode) -> Candidate:
    """Return the largest micro-batch that fits with MARGIN of those with the fewest fillers, else the smallest one.

    A fixed micro-batch is the only one tried.

    Memory grows with the micro-batch, except for the largest: without accumulation it needs fewer bytes for gradients,
    so it is tried separately. Raises ConfigError.
    """
    job = job.with_batch_of(ds)
    if job.micro_batch_size is not None:
        return fit_at(ds, job, checkpointing, job.micro_batch_size)
    sizes = cheapest_sizes(job)
    if len(sizes) == 1:
        return fit_at(ds, job, checkpointing, sizes[0])
    largest = _step(ds, job, checkpointing, sizes[-1])
    if estimate_least(largest, job.machines.capability) <= job.machines.gpu_bytes:
        fit = _fit(job, largest)
        if fit.has_gpu_margin:
            return fit
    return _bisect(job, _step(ds, job, checkpointing, sizes[0]), sizes[:-1])


def find_fits(search: Search) -> list[Candidate]:
    """Return the user's ds_configs, else every strategy that DeepSpeed can train, each at its largest micro-batch.

    hpZ is tried on several nodes, where GPUs of a node gather faster from each other.
    """
    machines = search.job.machines
    hpz_ranks = machines.gpus_per_node if machines.num_nodes > 1 else 1
    return [find_largest_fit(ds, search.job, mode) for ds, mode in _configs(search, hpz_ranks)]


def _configs(search: Search, hpz_ranks: int = 1) -> Sequence[tuple[DsConfig, CheckpointingMode]]:
    """Return the user's ds_configs, else those of every strategy that DeepSpeed can train."""
    divides = search.job.expert_parallel_size > 1
    legal = legal_strategies(search.precision, search.nvme_path, search.modes, 1 if divides else hpz_ranks)
    return search.files or [(ds, mode) for ds, mode in legal if ds.zero_stage or not divides]


def cheapest_sizes(job: Job) -> list[int]:
    """Return the ascending micro-batches with the fewest fillers. Raises ConfigError for more ranks than sequences."""
    return cheapest_micro_batches(job.global_batch_size, _plan(job, 1).ranks.data_parallel_size)


def _bisect(job: Job, smallest: ResolvedStep, sizes: Sequence[int]) -> Candidate:
    """Return the largest of ascending `sizes` that has MARGIN, else the first, that of `smallest`. All accumulate."""

    def fit(index: int) -> Candidate:
        return _fit(job, smallest.with_plan(_plan(job, sizes[index])))

    best = fit(0)
    low, high = 0, len(sizes)
    while best.has_gpu_margin and high - low > 1:
        middle = (low + high) // 2
        found = fit(middle)
        if found.has_gpu_margin:
            low, best = middle, found
        else:
            high = middle
    return best


def _step(ds: DsConfig, job: Job, checkpointing: CheckpointingMode, micro_batch_size: int) -> ResolvedStep:
    optimizer = job.optimizer.on_gpu(job.machines.capability)
    loss = LossSettings(job.loss_chunk_tokens, balance_loss=default_balance_loss(job.shape))
    return resolve_step(ds, job.shape, _plan(job, micro_batch_size), checkpointing, optimizer, loss)


def _fit(job: Job, step: ResolvedStep) -> Candidate:
    return Candidate(step, estimate_memory(step, job.machines.capability), job.machines)


def _plan(job: Job, micro_batch_size: int | None) -> BatchPlan:
    return build_batch_plan(
        global_batch_size=job.global_batch_size,
        ranks=job.ranks,
        seq_len=job.shape.seq_len,
        micro_batch_size=micro_batch_size,
    )


@dataclass(frozen=True)
class HFConfig:
    """A ds_config for a transformers model, of which only the states are known."""

    strategy: Strategy
    states: HFStates
    room_bytes: int
    """Bytes left for activations, negative if the states do not fit."""
    ds_config: ResolvedDsConfig

    @property
    def fits(self) -> bool:
        return self.room_bytes > 0


def find_hf_configs(
    model: HFModel, machines: Machines, precision: Precision, global_batch_size: int | None
) -> list[HFConfig]:
    """Return every stage and offload that DeepSpeed can train, without activation checkpointing."""
    ranks = ParallelLayout(machines.world_size)
    # The states depend only on whether there is accumulation; most runs have it.
    plan = build_batch_plan(
        global_batch_size=global_batch_size or 2 * ranks.data_parallel_size, ranks=ranks, seq_len=1, micro_batch_size=1
    )
    found = []
    for ds, mode in legal_strategies(precision, DEFAULT_NVME_PATH, ("none",)):
        resolved = ResolvedDsConfig.model_validate(resolve_ds_config(ds, model, plan))
        states = estimate_hf_states(model, ZeroSetup(resolved, ranks.world_size, ADAMW))
        room = states.room_bytes(machines.gpu_bytes)
        spare = machines.gpu_bytes - states.estimate.total_bytes
        found.append(HFConfig(strategy_of(ds, mode), states, min(room, spare) if spare < 0 else room, resolved))
    return found


def most_room(configs: list[HFConfig]) -> HFConfig:
    """Return the config with most room for activations, without offload if one fits; else the nearest."""
    fitting = [config for config in configs if config.fits]
    on_gpu = [config for config in fitting if config.strategy.offload == "-"]
    return max(on_gpu or fitting or configs, key=lambda config: config.room_bytes)


@dataclass(frozen=True)
class LargestModel:
    """Largest model that a strategy can train on a job's machines."""

    strategy: Strategy
    fit: Candidate | None
    """Estimate of that model; None if not even the family's smallest fits."""
    shape: GPTShape | None
    preset: str | None
    """Largest preset that is not larger."""


def find_largest_models(search: Search, family: str = GPT3) -> list[LargestModel]:
    """Return the largest model of every strategy that DeepSpeed can train, at the job's micro-batch or 1.

    Properties that the family does not scale are those of the job's shape.
    """
    job = search.job
    found: list[LargestModel] = []
    width = WIDTH_MULTIPLE
    for ds, mode in _configs(search):
        best = _find_largest(ds, job, mode, width, family)
        shape = None if best is None else interpolated_shape(best[0], job.shape, family)
        # Neighbouring strategies have similar answers, so the next search begins at this one.
        width = WIDTH_MULTIPLE if best is None else best[0]
        found.append(
            LargestModel(strategy_of(ds, mode), None if best is None else best[1], shape, preset_below(shape, family))
        )
    return found


def _find_largest(
    ds: DsConfig, job: Job, mode: CheckpointingMode, start: int, family: str
) -> tuple[int, Candidate] | None:
    """Return the largest width that fits and its estimate.

    Steps from `start` double until they enclose the answer, then halve: models far too large take long to estimate.
    """

    def fit(width: int) -> Candidate:
        shape = interpolated_shape(width, job.shape, family)
        return fit_at(ds, replace(job, shape=shape), mode, job.micro_batch_size or 1)

    return _bisect_from(start, fit, unit=WIDTH_MULTIPLE, largest=LARGEST_WIDTH)


def _bisect_from(
    start: int, fit: Callable[[int], Candidate], *, unit: int, largest: int
) -> tuple[int, Candidate] | None:
    """Return the largest multiple of `unit` up to `largest` that fits with MARGIN, and its estimate."""
    low, high = 0, largest + unit
    best: Candidate | None = None
    size, step = start, unit

    def half() -> int:
        return max(unit, (high - low) // 2 // unit * unit)

    while high - low > unit:
        found = fit(size)
        if found.has_margin:
            low, best = size, found
            step = 2 * step if high > largest else half()
            size = min(low + step, high - unit)
        else:
            high = size
            step = 2 * step if low == 0 else half()
            size = max(high - step, low + unit)
    return None if best is None else (low, best)


#: Lengths of sequences to try are multiples of this many tokens.
_LENGTH_UNIT = 1024


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequence that a strategy can train, by GPUs that divide it."""

    ds: DsConfig
    strategy: Strategy
    fits: dict[int, Candidate | None]
    """Estimates at that length; None if not even _LENGTH_UNIT tokens fit."""

    @property
    def checkpointing(self) -> str:
        """Return the mode of checkpointing, `full, host` if the host keeps the blocks' inputs, or `-`."""
        mode = self.strategy.checkpointing
        on_host = mode == "full" and self.ds.cpu_checkpointing
        return "-" if mode == "none" else f"{mode}{', host' if on_host else ''}"


def find_longest(search: Search, sizes: Sequence[int]) -> list[LongestSequences]:
    """Return the longest sequences of the user's ds_configs, else of every strategy that DeepSpeed can train, at the
    job's micro-batch or 1, without accumulation.

    Strategies that offload are also tried with the inputs of checkpointed blocks on the host.
    """
    job, found = search.job, []
    start = dict.fromkeys(sizes, _LENGTH_UNIT)
    for ds, mode in _configs_to_lengthen(search):
        fits: dict[int, Candidate | None] = {}
        for size in sizes:
            best = _find_longest(ds, replace(job, sequence_parallel_size=size), mode, start[size])
            # Neighbouring strategies have similar answers, so the next search begins at this one.
            start[size] = best[0] if best else _LENGTH_UNIT
            fits[size] = best[1] if best else None
        found.append(LongestSequences(ds, strategy_of(ds, mode), fits))
    return found


def _configs_to_lengthen(search: Search) -> Iterator[tuple[DsConfig, CheckpointingMode]]:
    on_host = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for ds, mode in _configs(search):
        yield ds, mode
        strategy = strategy_of(ds, mode)
        if mode == "full" and strategy.offload != "-" and not search.files:
            keys = strategy_ds_config(strategy, search.precision, search.nvme_path)
            yield parse_ds_config(keys | on_host, ds.source), mode


def _find_longest(ds: DsConfig, job: Job, mode: CheckpointingMode, start: int) -> tuple[int, Candidate] | None:
    micro_batch_size = job.micro_batch_size or 1
    job = replace(job, global_batch_size=micro_batch_size * job.ranks.data_parallel_size)

    def fit(seq_len: int) -> Candidate:
        return fit_at(ds, replace(job, shape=replace(job.shape, seq_len=seq_len)), mode, micro_batch_size)

    return _bisect_from(start, fit, unit=_LENGTH_UNIT, largest=MAX_SEQ_LEN)
