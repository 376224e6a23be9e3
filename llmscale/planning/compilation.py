"""Whether a run's blocks are compiled, by what, and why. No torch.

What compiling costs is paid once per start, what it saves with every step. Neither was measured by us on a GPU:
nanoGPT's train.py announces about a minute, and torchtitan published 5,762 tokens/s a GPU without and 6,667 with it for
Llama 3 8B on H100s, 14 % less time for a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmscale.config.deepspeed.sections import DsFile
from llmscale.config.hardware import GPUS, find_gpu
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import CompileMode
from llmscale.planning.compute_time import estimate_compute_s

#: `inductor` writes kernels. `aot_eager` traces the same graphs and runs them operator by operator: it saves no time,
#: and works where inductor does not.
CompileBackend = Literal["inductor", "aot_eager"]

_COMPILE_S = 60.0
_SAVED_FRAC = 0.14
#: From here on it saves more than it costs.
_WORTH_S = _COMPILE_S / _SAVED_FRAC


@dataclass(frozen=True)
class Compilation:
    """What was decided for a run's blocks."""

    backend: CompileBackend | None
    """None: they run eagerly."""
    why: str

    def describe(self) -> str:
        """`compiled with inductor (...)`, or `eager (...)`."""
        return f"{f'compiled with {self.backend}' if self.backend else 'eager'} ({self.why})"


EAGER = Compilation(None, "--compile off")


def decide_compilation(
    mode: CompileMode, run: ResolvedRun, *, device_type: str, device_name: str, steps_left: int
) -> Compilation:
    """`device_type` in torch's words, `device_name` in the driver's.

    `auto` compiles on GPUs when what is left of the run takes at least `_WORTH_S` of computing; of a GPU that is not in
    the table this is judged as if it were the fastest one there.
    """
    if mode == "off":
        return EAGER
    if mode == "on":
        if device_type == "cpu" and run.precision != "fp32":
            why = f"which saves no time: torch 2.13's inductor fails in {run.precision} on a CPU"
            return Compilation("aot_eager", why)
        return Compilation("inductor", "--compile on")
    if device_type != "cuda":
        return Compilation(None, f"--compile auto compiles on GPUs, and this is a {device_type}")
    if _gathers_less_than_a_block(run):
        why = "--compile auto: a compiled block is gathered whole, and this ds_config keeps fewer parameters alive"
        return Compilation(None, why)
    left_s = _compute_s(run, device_name) * steps_left
    kind = "" if find_gpu(device_name) else " on the fastest GPU that is known"
    words = f"--compile auto: at least {_duration(left_s)} of computing are left{kind}, and compiling pays from "
    words += _duration(_WORTH_S)
    return Compilation("inductor" if left_s >= _WORTH_S else None, words)


def _gathers_less_than_a_block(run: ResolvedRun) -> bool:
    """Whether stage 3 is asked to keep less than a block's parameters: then eager blocks, layer by layer, need less
    memory than compiled ones."""
    zero = DsFile.model_validate(run.ds_config).zero
    kept = min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
    return zero.stage == 3 and kept < run.shape.num_parameters // run.shape.n_layer


def _compute_s(run: ResolvedRun, device_name: str) -> float:
    """Seconds of an optimizer step's forward and backward passes."""
    known = find_gpu(device_name)
    micro_steps = [
        estimate_compute_s(run.shape, run.plan.micro_batch_size, run.precision, run.checkpointing, gpu)
        for gpu in ([known] if known else GPUS)
    ]
    least = min((seconds for seconds in micro_steps if seconds is not None), default=0.0)
    return least * run.plan.gradient_accumulation_steps


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.0f} hours"
