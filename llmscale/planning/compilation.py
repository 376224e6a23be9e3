"""The decision whether a run's blocks are compiled, by which backend, and why. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import CompileMode

#: `inductor` generates kernels. `aot_eager` traces the same graphs and runs them operator by operator: it saves no
#: time, but works where inductor fails.
CompileBackend = Literal["inductor", "aot_eager"]

#: Seconds of compiling that nanoGPT's train.py announces.
_COMPILE_S = 60.0
#: Seconds that a step is taken to last, and that compiled blocks are taken to save of it; torchtitan's saved a seventh.
ASSUMED_STEP_S = 0.5
_SAVED_S = 0.06
#: Steps that a start must have left for `auto` to compile.
FEWEST_STEPS = round(_COMPILE_S / _SAVED_S)


@dataclass(frozen=True)
class Compilation:
    """Decision for a run's blocks."""

    backend: CompileBackend | None
    """Backend; None for eager blocks."""
    why: str

    @property
    def setting(self) -> str:
        """Return the backend, or `off`."""
        return self.backend or "off"

    def describe(self) -> str:
        """Return `compiled with inductor (...)`, or `eager (...)`."""
        return f"{f'compiled with {self.backend}' if self.backend else 'eager'} ({self.why})"


EAGER = Compilation(None, "--compile off")


def decide_compilation(mode: CompileMode, run: ResolvedRun, device_type: str, steps_left: int) -> Compilation:
    """Decide about compilation. `auto` compiles on GPUs, unless fewer than FEWEST_STEPS steps are left."""
    if mode == "off":
        return EAGER
    if run.plan.ranks.expert_parallel_size > 1:
        return Compilation(None, "--expert-parallel-size: how many tokens ranks exchange, only the step itself tells")
    if mode == "on":
        if device_type == "cpu" and run.precision != "fp32":
            why = f"which saves no time: torch 2.13's inductor fails in {run.precision} on a CPU"
            return Compilation("aot_eager", why)
        return Compilation("inductor", "--compile on")
    if run.shape.mlp_tile_tokens:
        return Compilation(None, "--compile auto: MLPs run in tiles (--mlp-tile-tokens)")
    if device_type != "cuda":
        return Compilation(None, f"--compile auto compiles on GPUs, and this is a {device_type}")
    if _gathers_less_than_a_block(run):
        why = "--compile auto: a compiled block is gathered whole, and this ds_config keeps fewer parameters alive"
        return Compilation(None, why)
    if steps_left < FEWEST_STEPS:
        return Compilation(
            None, f"--compile auto: fewer than {FEWEST_STEPS:,} steps are left, too few to earn a minute"
        )
    return Compilation("inductor", "--compile auto")


def _gathers_less_than_a_block(run: ResolvedRun) -> bool:
    """Return whether stage 3 may keep less than a block's parameters, so that eager blocks need less memory."""
    zero = run.engine_config.zero
    live = min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
    return zero.stage == 3 and live < run.shape.num_parameters // run.shape.n_layer
