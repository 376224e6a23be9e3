"""The largest micro-batch that fits a GPU, for one ds_config or for every strategy there is. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, build_batch_plan, divisors
from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.config.loss_settings import CHUNK_TOKENS, LossSettings
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.memory.estimate import MemoryEstimate, estimate_least, estimate_memory
from llmscale.planning.strategy import (
    CHECKPOINTING,
    DEFAULT_NVME_PATH,
    Strategy,
    legal_strategies,
    strategy_of,
)

#: GPUs; DGX-2 and some clouds' largest machines have so many.
_MANY_IN_A_NODE = 16


@dataclass(frozen=True)
class Machines:
    """What a run is given."""

    num_nodes: int
    gpus_per_node: int
    gpu_bytes: int
    """Of one GPU, as CUDA reports it."""
    host_bytes: int | None = None
    """Of one node, for what is offloaded; None: not known, so it is not checked."""
    capability: ComputeCapability | None = None
    """Of the GPUs; None: not known, and taken to be Ampere's or newer."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def in_words(self, gpu: str) -> str:
        """`2 nodes x 8 x h100-80gb`. What is rare for one node may have been meant for several: it says so."""
        if self.num_nodes > 1:
            return f"{self.num_nodes} nodes x {self.gpus_per_node} x {gpu}"
        one = " in one node (of several nodes: --num-nodes)" if self.gpus_per_node > _MANY_IN_A_NODE else ""
        return f"{self.gpus_per_node} x {gpu}{one}"


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what."""

    shape: GPTShape
    global_batch_size: int
    """Sequences per optimizer step over all ranks."""
    machines: Machines
    micro_batch_size: int | None = None
    """Fixed by the user; None: the largest that fits."""
    optimizer: OptimizerSpec = ADAMW
    loss_chunk_tokens: int = CHUNK_TOKENS
    """As train.py takes it."""


@dataclass(frozen=True)
class Search:
    """All that the rows of `llmscale estimate` depend on."""

    job: Job
    gpu: GPU
    interconnect: Interconnect
    precision: Precision
    modes: Sequence[CheckpointingMode] = CHECKPOINTING
    """Activation checkpointing that is tried."""
    nvme_path: str = DEFAULT_NVME_PATH
    files: Sequence[tuple[DsConfig, CheckpointingMode]] = ()
    """The user's ds_configs, which alone are tried; empty: every strategy, in `precision`."""


@dataclass(frozen=True)
class Fit:
    """One ds_config at one micro-batch on a job's machines."""

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
        """What is left on the GPU; negative: by how much it is too small."""
        return self.machines.gpu_bytes - self.estimate.total_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Host memory for what is offloaded, beyond the processes themselves."""
        return self.estimate.host_bytes * self.machines.gpus_per_node

    @property
    def nvme_bytes_per_node(self) -> int:
        return self.estimate.nvme_bytes * self.machines.gpus_per_node

    @property
    def host_spare_bytes(self) -> int | None:
        """What is left of a node's memory; None when its size was not given."""
        limit = self.machines.host_bytes
        return None if limit is None else limit - self.host_bytes_per_node

    @property
    def fits(self) -> bool:
        host = self.host_spare_bytes
        return self.spare_bytes >= 0 and (host is None or host >= 0)


def fit_at(ds: DsConfig, job: Job, checkpointing: CheckpointingMode, micro_batch_size: int) -> Fit:
    """One micro-batch. Raises ConfigError when it does not divide a rank's share of the global batch."""
    return _fit(job, _step(ds, job, checkpointing, micro_batch_size))


def find_largest_fit(ds: DsConfig, job: Job, checkpointing: CheckpointingMode) -> Fit:
    """The largest micro-batch that fits, else the smallest one, which says how much is missing.

    A micro-batch that the job or the file fixes is the only one tried. Memory grows with the micro-batch, but for the
    last one, which needs no accumulation and so fewer bytes for gradients; it is tried by itself. Raises ConfigError.
    """
    fixed = _fixed_micro_batch(ds, job)
    if fixed is not None:
        return fit_at(ds, job, checkpointing, fixed)
    sizes = legal_micro_batches(job)
    if len(sizes) == 1:
        return fit_at(ds, job, checkpointing, sizes[0])
    whole = _step(ds, job, checkpointing, sizes[-1])
    if estimate_least(whole, job.machines.capability) <= job.machines.gpu_bytes:
        fit = _fit(job, whole)
        if fit.fits:
            return fit
    return _bisect(job, _step(ds, job, checkpointing, sizes[0]), sizes[:-1])


def find_fits(search: Search) -> list[Fit]:
    """The user's ds_configs, else every strategy that DeepSpeed can train, each at its largest micro-batch. hpZ is for
    nodes of several GPUs, which gather faster from each other than from another node."""
    machines = search.job.machines
    hpz_ranks = machines.gpus_per_node if machines.num_nodes > 1 else 1
    configs = search.files or legal_strategies(search.precision, search.nvme_path, search.modes, hpz_ranks)
    return [find_largest_fit(ds, search.job, mode) for ds, mode in configs]


def legal_micro_batches(job: Job) -> list[int]:
    """Divisors of a rank's share of the global batch, ascending. Raises ConfigError when there is no whole share."""
    plan = _plan(job, None)
    return divisors(plan.samples_per_rank)


def _bisect(job: Job, smallest: ResolvedStep, sizes: Sequence[int]) -> Fit:
    """The largest of ascending `sizes` that fits, else the first, which `smallest` has; all of them accumulate."""

    def fit(index: int) -> Fit:
        return _fit(job, smallest.with_plan(_plan(job, sizes[index])))

    best = fit(0)
    low, high = 0, len(sizes)
    while best.fits and high - low > 1:
        middle = (low + high) // 2
        found = fit(middle)
        if found.fits:
            low, best = middle, found
        else:
            high = middle
    return best


def _step(ds: DsConfig, job: Job, checkpointing: CheckpointingMode, micro_batch_size: int) -> ResolvedStep:
    optimizer = job.optimizer.on_gpu(job.machines.capability)
    loss = LossSettings(job.loss_chunk_tokens)
    return resolve_step(ds, job.shape, _plan(job, micro_batch_size), checkpointing, optimizer, loss)


def _fit(job: Job, step: ResolvedStep) -> Fit:
    return Fit(step, estimate_memory(step, job.machines.capability), job.machines)


def _plan(job: Job, micro_batch_size: int | None) -> BatchPlan:
    return build_batch_plan(
        global_batch_size=job.global_batch_size,
        ranks=ParallelLayout(job.machines.world_size),
        seq_len=job.shape.seq_len,
        micro_batch_size=micro_batch_size,
    )


def _fixed_micro_batch(ds: DsConfig, job: Job) -> int | None:
    """What the user chose: the flag, else a number in the file, directly or through the accumulation."""
    if job.micro_batch_size is not None:
        return job.micro_batch_size
    if isinstance(ds.keys.train_micro_batch_size_per_gpu, int):
        return ds.keys.train_micro_batch_size_per_gpu
    steps = ds.keys.gradient_accumulation_steps
    # Where it does not divide the share, the micro-batch that comes next is refused with both numbers.
    return max(1, _plan(job, None).samples_per_rank // steps) if isinstance(steps, int) else None
