"""What the throughput model was fitted to, and whether a run lies within it. No torch.

The fit is llmscale.planning.compute_time'. Within the rows its error is known; beyond them the formulas go on, and the
only runs to compare with (tests/planning/test_calibration.py, PUBLISHED) were slower than it says.
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
#: What the model says over what the runs of PUBLISHED in tests/planning/test_calibration.py reached.
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
    if (shape.norm, shape.positions, shape.gated_mlp) != ("layernorm", "learned", False):
        yield "blocks unlike GPT-3's"
    if shape.has_mask:
        yield "attention with a mask"
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
