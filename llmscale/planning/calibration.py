"""What the throughput model was fitted to, whether a run lies within it, and how far it was off outside. No torch.

The fit is llmscale.planning.kernels' and communication_time's. Within the rows its error is known. Beyond them the
formulas go on, and there are other people's published runs to compare with: tests/planning/published_runs.csv, which
was not used for the fit. SEEN_BEYOND sums it up, and a test computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmscale.config.hardware import GPU, Cluster
from llmscale.config.interconnect import Interconnect, get_interconnect
from llmscale.config.optimizers import ADAMW
from llmscale.config.resolve import ResolvedStep
from llmscale.planning.kernels import kernel_efficiency
from llmscale.terminal.human_numbers import format_quantity

#: A size counts as that of a row up to so much beside it.
_NEAR = 1.1
#: Of the rows'. Smaller micro-batches may leave a GPU waiting for its next kernel, which estimated rates know nothing
#: of.
SMALLEST_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class FittedRows:
    """Extremes of MosaicML's llm-foundry rows for one kind of GPU: PyTorch's FSDP in bf16, which is ZeRO stage 3."""

    gpu_names: tuple[str, ...]
    name: str
    gpus: tuple[int, int]
    parameters: tuple[float, float]
    seq_len: tuple[int, int]
    network: Interconnect

    def describe(self) -> str:
        """In a sentence's words."""
        low, high = map(format_quantity, self.parameters)
        return (
            f"{self.name} rows of llm-foundry ({self.gpus[0]}-{self.gpus[1]} GPUs, {low}-{high} parameters, contexts "
            f"of {self.seq_len[0]:,}-{self.seq_len[1]:,}, bf16, FSDP as ZeRO stage 3)"
        )


#: tests/planning/llm_foundry_rows.csv.
FITTED = (
    FittedRows(
        ("a100-40gb", "a100-80gb"), "A100", (8, 128), (125e6, 70e9), (512, 65_536), get_interconnect("roce-200g")
    ),
    FittedRows(("h100-80gb",), "H100", (8, 512), (760e6, 70e9), (512, 65_536), get_interconnect("ib-400g")),
)
#: Relative error of tokens/s on the rows; llmscale runs FlashAttention-2, whose speed is its paper's.
ERROR_WITHIN = "error on them, which ran FlashAttention 1, 2 % in the median, 7 % for 9 of 10"

#: Of published runs beyond the rows, by the kinds of ways in which they are: published rate over estimated one.
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
class Beyond:
    """One thing about a run that no row has."""

    kind: str
    """Published runs are sorted by it."""
    words: str


@dataclass(frozen=True)
class Calibration:
    """What an estimate rests on, and how far off it is known to be."""

    rests_on: str
    """The rows, or whose efficiency is assumed."""
    beyond: tuple[str, ...]
    """What of the run no row has; empty: nothing."""
    error: str
    """Within the rows, or of published runs beyond them."""

    @property
    def words(self) -> str:
        """All of it in a line."""
        beyond = f": {', '.join(self.beyond)}" if self.beyond else ""
        return f"{self.rests_on}{beyond}; {self.error}"


def nearest_rows(gpu: GPU) -> FittedRows:
    """The GPU's own, or those of the GPU whose efficiency it is given."""
    name = kernel_efficiency(gpu).like
    return next(rows for rows in FITTED if rows.name == name)


def beyond_rows(step: ResolvedStep, cluster: Cluster) -> Iterator[Beyond]:
    """Everything about a run that no row has."""
    shape, gpu, zero = step.shape, cluster.gpu, step.engine_config.zero
    rows, ranks = nearest_rows(gpu), step.plan.ranks.world_size
    if gpu.name not in rows.gpu_names:
        yield Beyond(gpu.name, gpu.name)
    if not rows.gpus[0] <= ranks <= rows.gpus[1]:
        kind = "larger" if ranks > rows.gpus[1] else "fewer GPUs"
        yield Beyond(kind, f"{ranks:,} GPU{'s' if ranks > 1 else ''}")
    if not rows.parameters[0] / _NEAR <= shape.num_parameters <= rows.parameters[1] * _NEAR:
        kind = "larger" if shape.num_parameters > rows.parameters[1] else "smaller model"
        yield Beyond(kind, f"{format_quantity(shape.num_parameters)} parameters")
    if not rows.seq_len[0] <= shape.seq_len <= rows.seq_len[1]:
        yield Beyond("context", f"a context of {shape.seq_len:,}")
    if (shape.norm, shape.positions, shape.gated_mlp) != ("layernorm", "learned", False):
        yield Beyond("blocks", "blocks unlike GPT-3's")
    if shape.has_mask:
        yield Beyond("mask", "attention with a mask")
    tokens = step.plan.micro_batch_size * shape.seq_len
    if tokens < SMALLEST_MICRO_BATCH_TOKENS:
        yield Beyond("micro-batch", f"micro-batches of {tokens:,} tokens")
    if step.precision != "bf16":
        yield Beyond("precision", step.precision)
    if step.zero_stage != 3:
        yield Beyond("stage", f"ZeRO stage {step.zero_stage}")
    if zero.zero_hpz_partition_size > 1:
        yield Beyond("hpZ", "hpZ")
    if step.optimizer != ADAMW:
        yield Beyond("optimizer", step.optimizer.name)
    if zero.offload_optimizer.device != "none" or zero.offload_param.device != "none":
        yield Beyond("offload", "offload")
    interconnect, gpus_per_node = cluster.interconnect, cluster.gpus_per_node
    per_gpu = interconnect.bytes_per_s_per_node(gpus_per_node) / gpus_per_node
    if ranks > gpus_per_node and per_gpu < rows.network.bytes_per_s:
        yield Beyond("network", f"{interconnect.name} where theirs is {rows.network.name}")


def calibrate(step: ResolvedStep, cluster: Cluster) -> Calibration:
    """What an estimate of this run rests on."""
    beyond = tuple(beyond_rows(step, cluster))
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
    """How far published runs were from the estimate that lay beyond the rows in some of these ways and in no other. Of
    a way in which none of them lay they tell nothing, and of larger ones only larger ones tell, whatever their blocks.
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
