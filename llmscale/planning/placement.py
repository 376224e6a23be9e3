"""A model on given GPUs: how it is laid out, how fast it is, how many nodes it needs. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.hardware import GPU, usable_precision
from llmscale.config.interconnect import Interconnect
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.planning.compute_time import estimate_compute_s
from llmscale.planning.largest_micro_batch import Fit, Job, Machines, Search, fit_at
from llmscale.planning.ranked_configs import RankedConfig, rank_configs
from llmscale.planning.recommend import nearest_fit
from llmscale.planning.strategy import Strategy, build_strategy

_GIB = 2**30
_SMALLEST = Strategy(3, "none", "none", "full")
"""The least memory on the GPU without offload."""
_MOST_NODES = 4096
#: Tokens per micro-batch of the speed that is assumed before memory is known.
_USUAL_MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class GPUs:
    """What a run is to be planned on."""

    gpu: GPU
    gpus_per_node: int
    num_nodes: int | None
    """None: as few as fit, without offload."""
    interconnect: Interconnect
    mfu: float | None
    """Given by the user; None: estimated."""

    @property
    def precision(self) -> Precision:
        return usable_precision(None, self.gpu)

    def machines(self, num_nodes: int) -> Machines:
        return Machines(num_nodes, self.gpus_per_node, int(self.gpu.memory_gib * _GIB), capability=self.gpu.capability)


@dataclass(frozen=True)
class GPUPlacement:
    """A model on a number of nodes."""

    machines: Machines
    global_batch_size: int
    """Sequences."""
    row: RankedConfig | None
    """The row of `llmscale estimate` to run; None: nothing fits these machines."""
    why: str
    """Why this row; or by how much the nearest misses, and how many nodes it takes."""
    mfu: float | None
    """None: nothing fits, and none was given."""
    calibration: str
    """What the MFU rests on."""

    def tokens_per_second(self, shape: GPTShape, gpu: GPU) -> float | None:
        """All GPUs together."""
        if self.mfu is None:
            return None
        return self.mfu * gpu.dense_16bit_flops * self.machines.world_size / shape.flops_per_token


def place(
    shape: GPTShape,
    batch: int,
    *,
    is_batch_given: bool,
    gpus: GPUs,
    optimizer: OptimizerSpec = ADAMW,
    loss_chunk_tokens: int = CHUNK_TOKENS,
) -> GPUPlacement:
    """Find the row to run. A batch that was not given is rounded up to a multiple of the GPUs.

    Raises ConfigError when a given batch cannot be divided over them.
    """

    def job_on(num_nodes: int) -> Job:
        machines = gpus.machines(num_nodes)
        whole = batch if is_batch_given else -(-batch // machines.world_size) * machines.world_size
        return Job(shape, whole, machines, optimizer=optimizer, loss_chunk_tokens=loss_chunk_tokens)

    job = job_on(gpus.num_nodes or _fewest_nodes(job_on, gpus.precision, 1) or 1)
    ranking = rank_configs(Search(job, gpus.gpu, gpus.interconnect, gpus.precision))
    row = ranking.recommended
    if row is not None and ranking.recommendation is not None:
        why = ranking.recommendation.why
    else:
        enough = _fewest_nodes(job_on, gpus.precision, job.machines.num_nodes + 1)
        why = _what_is_missing(nearest_fit(ranking.fits), enough)
    mfu, calibration = gpus.mfu, "given by --mfu"
    if mfu is None:
        throughput = row.throughput if row else None
        mfu = throughput.mfu if throughput else None
        calibration = throughput.calibration if throughput else "nothing fits"
    return GPUPlacement(job.machines, job.global_batch_size, row, why, mfu, calibration)


def usual_mfu(shape: GPTShape, gpus: GPUs) -> float:
    """Of the arithmetic alone: what is assumed before memory is known."""
    if gpus.mfu is not None:
        return gpus.mfu
    micro_batch_size = max(1, _USUAL_MICRO_BATCH_TOKENS // shape.seq_len)
    seconds = estimate_compute_s(shape, micro_batch_size, gpus.precision, "none", gpus.gpu)
    if seconds is None:
        raise ValueError("16-bit rates are known for every GPU")
    return shape.flops_per_token * micro_batch_size * shape.seq_len / seconds / gpus.gpu.dense_16bit_flops


def _fewest_nodes(job_on: Callable[[int], Job], precision: Precision, least: int) -> int | None:
    """Nodes, doubling, on which the smallest layout of their job fits; None when no number of them helps."""
    ds = build_strategy(_SMALLEST, precision)
    if ds is None:
        return None
    num_nodes = 1
    while num_nodes <= _MOST_NODES:
        job = job_on(num_nodes)
        if job.global_batch_size % job.machines.world_size:
            return None
        if num_nodes >= least and fit_at(ds, job, _SMALLEST.checkpointing, 1).fits:
            return num_nodes
        num_nodes *= 2
    return None


def _what_is_missing(nearest: Fit, enough: int | None) -> str:
    missing = f"the row that misses least needs {-nearest.spare_bytes / _GIB:,.1f} GiB more per GPU"
    if enough is None:
        return f"{missing}. More GPUs alone do not help; a shorter --seq-len or a smaller model does."
    return f"{missing}; --num-nodes {enough} is enough."
