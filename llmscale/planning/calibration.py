"""What the throughput model was fitted to, and whether a run lies within it. No torch.

The fit is llmscale.planning.compute_time'. Within the rows its error is known; beyond them the formulas go on, and the
only runs to compare with are those of PUBLISHED, which were slower than it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import GPU
from llmscale.config.human_numbers import format_quantity
from llmscale.memory.zero_settings import EngineLayout

#: A size counts as that of a row up to so much beside it.
_NEAR = 1.1


@dataclass(frozen=True)
class FittedRows:
    """Extremes of MosaicML's llm-foundry rows for one kind of GPU: PyTorch's FSDP in bf16, which is ZeRO stage 3."""

    gpu_names: tuple[str, ...]
    name: str
    gpus: tuple[int, int]
    parameters: tuple[float, float]
    seq_len: tuple[int, int]

    def describe(self) -> str:
        """In a sentence's words."""
        low, high = map(format_quantity, self.parameters)
        return (
            f"{self.name} rows of llm-foundry ({self.gpus[0]}-{self.gpus[1]} GPUs, {low}-{high} parameters, contexts "
            f"of {self.seq_len[0]:,}-{self.seq_len[1]:,}, bf16, FSDP as ZeRO stage 3)"
        )


#: tests/planning/llm_foundry_rows.csv.
FITTED = (
    FittedRows(("a100-40gb", "a100-80gb"), "A100", (8, 128), (125e6, 70e9), (512, 65_536)),
    FittedRows(("h100-80gb",), "H100", (8, 512), (760e6, 70e9), (512, 65_536)),
)
#: Relative error of tokens/s on the rows.
ERROR_WITHIN = "error within them 3 % in the median, 8 % for 9 of 10"


@dataclass(frozen=True)
class PublishedRun:
    """ZeRO-3 of 2021, fp16, full recomputation, contexts of 2,048, on A100 80 GB with 8 x 200 Gbit/s per node."""

    n_layer: int
    n_head: int
    n_embd: int
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    tflops_per_gpu: float
    """Hardware FLOPs by the paper's formula (3), recomputation included."""


#: Narayanan et al. 2021 (SC '21, arXiv 2104.04473), table 2, "ZeRO-3 without Model Parallelism"; vocabulary 51,200.
#: None of it was used for the fit. OPT-175B (Zhang et al. 2022) reached 147 TFLOP/s per GPU on 992 A100s, with tensor
#: parallelism beside FSDP.
PUBLISHED = (
    PublishedRun(96, 96, 12288, 384, 4, 1536, 144),
    PublishedRun(96, 96, 12288, 768, 2, 1536, 88),
    PublishedRun(96, 96, 12288, 1536, 1, 1536, 44),
    PublishedRun(105, 128, 20480, 640, 4, 2560, 138),
    PublishedRun(105, 128, 20480, 1120, 2, 2240, 98),
    PublishedRun(105, 128, 20480, 2240, 1, 2240, 48),
)
#: What the model says of them over what they reached: tests/planning/test_calibration.py.
_LARGER_SCALE = "published runs at larger scale were 1.2 to 3.8 times slower than estimated"


def fitted_rows(gpu: GPU) -> FittedRows | None:
    """None for a GPU without rows."""
    return next((rows for rows in FITTED if gpu.name in rows.gpu_names), None)


def beyond_rows(rows: FittedRows, shape: GPTShape, layout: EngineLayout) -> Iterator[str]:
    """Everything about a run that no row has."""
    if not rows.gpus[0] <= layout.ranks.world_size <= rows.gpus[1]:
        yield f"{layout.ranks.world_size:,} GPU{'s' if layout.ranks.world_size > 1 else ''}"
    if not rows.parameters[0] / _NEAR <= shape.num_parameters <= rows.parameters[1] * _NEAR:
        yield f"{format_quantity(shape.num_parameters)} parameters"
    if not rows.seq_len[0] <= shape.seq_len <= rows.seq_len[1]:
        yield f"a context of {shape.seq_len:,}"
    if layout.precision != "bf16":
        yield layout.precision
    if layout.zero_stage != 3:
        yield f"ZeRO stage {layout.zero_stage}"
    if layout.offload_optimizer.device != "none" or layout.offload_param.device != "none":
        yield "offload"


def calibration_words(rows: FittedRows, shape: GPTShape, layout: EngineLayout) -> str:
    """What an estimate for a GPU with rows rests on."""
    beyond = list(beyond_rows(rows, shape, layout))
    if not beyond:
        return f"calibrated: {rows.describe()}; {ERROR_WITHIN}"
    is_larger = layout.ranks.world_size > rows.gpus[1] or shape.num_parameters > rows.parameters[1] * _NEAR
    error = _LARGER_SCALE if is_larger else "the error there is not known"
    return f"extrapolated beyond the {rows.describe()}: {', '.join(beyond)}; {error}"
