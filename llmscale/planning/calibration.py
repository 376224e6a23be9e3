"""Rows that the throughput model was fitted to, and the known error of an estimate within and beyond them. No torch.

Beyond the rows the formulas extrapolate. Other published runs show the error there: tests/planning/published_runs.csv,
which was not used for the fit. SEEN_BEYOND summarises it, and a test computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmscale.config.hardware import GPU, Cluster, Interconnect, get_interconnect
from llmscale.config.optimizers import ADAMW
from llmscale.config.resolve import ResolvedStep
from llmscale.planning.kernels import kernel_efficiency
from llmscale.terminal.human_numbers import format_quantity

#: Tolerance within which a size counts as that of a row.
_NEAR = 1.1
#: Smallest micro-batch of the rows. With a smaller one a GPU may wait for its next kernel, which is not modelled.
SMALLEST_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class FittedRows:
    """Ranges of MosaicML's llm-foundry rows for one kind of GPU: PyTorch's FSDP in bf16, which is ZeRO stage 3."""

    gpu_names: tuple[str, ...]
    name: str
    gpus: tuple[int, int]
    parameters: tuple[float, float]
    seq_len: tuple[int, int]
    network: Interconnect

    def describe(self) -> str:
        """Return the ranges in words."""
        low, high = map(format_quantity, self.parameters)
        return (
            f"{self.name} rows of llm-foundry ({self.gpus[0]}-{self.gpus[1]} GPUs, {low}-{high} parameters, contexts "
            f"of {self.seq_len[0]:,}-{self.seq_len[1]:,}, bf16, FSDP as ZeRO stage 3)"
        )


#: Ranges of tests/planning/llm_foundry_rows.csv.
FITTED = (
    FittedRows(
        ("a100-40gb", "a100-80gb"), "A100", (8, 128), (125e6, 70e9), (512, 65_536), get_interconnect("roce-200g")
    ),
    FittedRows(("h100-80gb",), "H100", (8, 512), (760e6, 70e9), (512, 65_536), get_interconnect("ib-400g")),
)
#: Relative error of tokens/s on the rows. llmscale runs FlashAttention-2, with the speed of its paper.
ERROR_WITHIN = "error on them, which ran FlashAttention 1, 2 % in the median, 7 % for 9 of 10"

#: Published over estimated rate of runs beyond the rows, by the kinds of their extrapolations.
SEEN_BEYOND: Mapping[tuple[str, ...], tuple[float, ...]] = {
    ("blocks",): (0.81, 0.87, 0.88, 0.89, 0.93, 0.93, 0.94, 0.94, 0.94, 0.95),
    ("blocks", "fewer GPUs"): (0.86, 0.87),
    ("blocks", "fewer GPUs", "h200"): (1.07, 1.09, 1.10),
    ("blocks", "fewer GPUs", "h200", "stage"): (1.17,),
    ("blocks", "h200"): (0.99, 1.05),
    ("blocks", "network"): (
        *(0.90, 0.92, 0.95, 0.96, 0.98, 1.01, 1.01, 1.04, 1.05, 1.05, 1.06, 1.07, 1.08, 1.09, 1.13, 1.14),
    ),
    ("fewer GPUs", "stage"): (0.70, 0.80),
    ("larger",): (0.48, 0.50, 0.60, 0.65, 0.87),
    ("larger", "micro-batch"): (0.35, 0.38, 0.96),
    ("smaller model", "stage"): (1.02,),
    ("stage",): (0.70, 0.78, 0.83, 0.83, 0.84, 0.85, 0.85, 0.87, 0.88, 0.90, 0.96, 0.96, 0.97, 1.01),
}


@dataclass(frozen=True)
class Extrapolation:
    """Property of a run that no row has."""

    kind: str
    """Kind, by which published runs are sorted."""
    words: str


@dataclass(frozen=True)
class Calibration:
    """Basis of an estimate, and its known error."""

    rests_on: str
    """Rows of the fit, or the GPU whose efficiency is assumed."""
    beyond: tuple[str, ...]
    """Properties of the run that no row has."""
    error: str
    """Error within the rows, or of published runs beyond them."""

    @property
    def words(self) -> str:
        """Return all of it in one line."""
        beyond = f": {', '.join(self.beyond)}" if self.beyond else ""
        return f"{self.rests_on}{beyond}; {self.error}"


def nearest_rows(gpu: GPU) -> FittedRows:
    """Return the GPU's rows, or those of the GPU whose efficiency is assumed."""
    name = kernel_efficiency(gpu).like
    return next(rows for rows in FITTED if rows.name == name)


def extrapolations(step: ResolvedStep, cluster: Cluster) -> Iterator[Extrapolation]:
    """Yield the properties of a run that no row has."""
    shape, gpu, zero = step.shape, cluster.gpu, step.engine_config.zero
    rows, ranks = nearest_rows(gpu), step.plan.ranks.world_size
    if gpu.name not in rows.gpu_names:
        yield Extrapolation(gpu.name, gpu.name)
    if not rows.gpus[0] <= ranks <= rows.gpus[1]:
        kind = "larger" if ranks > rows.gpus[1] else "fewer GPUs"
        yield Extrapolation(kind, f"{ranks:,} GPU{'s' if ranks > 1 else ''}")
    if not rows.parameters[0] / _NEAR <= shape.num_parameters <= rows.parameters[1] * _NEAR:
        kind = "larger" if shape.num_parameters > rows.parameters[1] else "smaller model"
        yield Extrapolation(kind, f"{format_quantity(shape.num_parameters)} parameters")
    if not rows.seq_len[0] <= shape.seq_len <= rows.seq_len[1]:
        yield Extrapolation("context", f"a context of {shape.seq_len:,}")
    if (shape.norm, shape.positions, shape.gated_mlp) != ("layernorm", "learned", False):
        yield Extrapolation("blocks", "blocks unlike GPT-3's")
    if shape.num_experts:
        yield Extrapolation("experts", "experts")
    if shape.has_mask:
        yield Extrapolation("mask", "attention with a mask")
    if step.plan.ranks.sequence_parallel_size > 1:
        yield Extrapolation("split", f"sequences on {step.plan.ranks.sequence_parallel_size} GPUs")
    tokens = step.plan.tokens_per_forward
    if tokens < SMALLEST_MICRO_BATCH_TOKENS:
        yield Extrapolation("micro-batch", f"micro-batches of {tokens:,} tokens")
    if step.precision != "bf16":
        yield Extrapolation("precision", step.precision)
    if step.zero_stage != 3:
        yield Extrapolation("stage", f"ZeRO stage {step.zero_stage}")
    if zero.zero_hpz_partition_size > 1:
        yield Extrapolation("hpZ", "hpZ")
    if step.optimizer.name != ADAMW.name:
        yield Extrapolation("optimizer", step.optimizer.name)
    if zero.offload_optimizer.device != "none" or zero.offload_param.device != "none":
        yield Extrapolation("offload", "offload")
    interconnect, gpus_per_node = cluster.interconnect, cluster.gpus_per_node
    per_gpu = interconnect.bytes_per_s_per_node(gpus_per_node) / gpus_per_node
    if ranks > gpus_per_node and per_gpu < rows.network.bytes_per_s:
        yield Extrapolation("network", f"{interconnect.name} where theirs is {rows.network.name}")


def calibrate(step: ResolvedStep, cluster: Cluster) -> Calibration:
    """Return the basis of an estimate of this run."""
    beyond = tuple(extrapolations(step, cluster))
    rows, gpu = nearest_rows(cluster.gpu), cluster.gpu
    if not beyond:
        return Calibration(f"calibrated: {rows.describe()}", (), ERROR_WITHIN)
    is_known = gpu.name in rows.gpu_names
    return Calibration(
        rests_on=f"extrapolated beyond the {rows.describe()}" if is_known else kernel_efficiency(gpu).source,
        beyond=tuple(way.words for way in beyond),
        error=_seen_words({way.kind for way in beyond}),
    )


def _seen_words(kinds: set[str]) -> str:
    """Return the rates of published runs over their estimates, for runs with only extrapolations among `kinds`.

    Every kind must occur in one of these runs. Only runs larger than the rows count for a larger run, whose blocks then
    do not matter.
    """
    alike = {
        ways: rates
        for ways, rates in SEEN_BEYOND.items()
        if kinds.issuperset(ways) and ("larger" in ways) == ("larger" in kinds)
    }
    needed = kinds - {"blocks"} if "larger" in kinds else kinds
    if not needed.issubset(kind for ways in alike for kind in ways):
        return "no published run like it is known"
    rates = [rate for group in alike.values() for rate in group]
    runs = "1 published run like it" if len(rates) == 1 else f"{len(rates)} published runs like it"
    low, high = min(rates), max(rates)
    return f"{runs} reached {low:.2f}" + (f" to {high:.2f}" if high > low else "") + " times the estimate"
