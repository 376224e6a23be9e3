"""The decision whether a run's blocks are compiled, by which backend, and why. No torch.

Compiling costs once per start, and saves time in every step. Neither was measured by us on a GPU: nanoGPT's train.py
announces about a minute, and the saving is the throughput model's, which counts the memory traffic that compiled blocks
save (llmscale.planning.kernels) and, at stage 3, their gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmscale.config.hardware import GPUS, INTERCONNECTS, Cluster, Interconnect, find_gpu
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import CompileMode
from llmscale.planning.step_time import estimate_step

#: `inductor` generates kernels. `aot_eager` traces the same graphs and runs them operator by operator: it saves no
#: time, but works where inductor fails.
CompileBackend = Literal["inductor", "aot_eager"]

_COMPILE_S = 60.0


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


def decide_compilation(
    mode: CompileMode,
    run: ResolvedRun,
    *,
    device_type: str,
    device_name: str,
    steps_left: int,
    gpus_per_node: int,
    network: Interconnect | None,
) -> Compilation:
    """Decide about compilation. `network`: network between the nodes, None if its speed is unknown.

    `auto` compiles on GPUs when that saves more in the remaining steps than it costs. A GPU that is not in the table
    counts as the one there that saves least.
    """
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
    crosses_nodes = run.plan.ranks.world_size > gpus_per_node
    if network is None and crosses_nodes and run.ds.zero_stage == 3:
        why = "--compile auto: at stage 3 compiled blocks gather more, which on a slow network takes longer than they "
        why = f"{why}save, and how fast the one between these nodes is cannot be told; on a fast one give --compile on"
        return Compilation(None, why)
    step_s = _saved_s(run, device_name, gpus_per_node, network or INTERCONNECTS[0])
    if step_s is None:
        return Compilation(None, "--compile auto: what it saves is not known of any GPU in this precision")
    where = f" with {network.description}" if network and crosses_nodes else ""
    if step_s <= 0:
        return Compilation(None, f"--compile auto: compiled blocks are estimated to save nothing{where}")
    known = "" if find_gpu(device_name) else " on any GPU that is known"
    words = f"--compile auto: it is estimated to save {_duration(step_s * steps_left)} of what is left{where}{known}"
    words += f", and to take {_duration(_COMPILE_S)}"
    return Compilation("inductor" if step_s * steps_left >= _COMPILE_S else None, words)


def _gathers_less_than_a_block(run: ResolvedRun) -> bool:
    """Return whether stage 3 may keep less than a block's parameters, so that eager blocks need less memory."""
    zero = run.engine_config.zero
    kept = min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
    return zero.stage == 3 and kept < run.shape.num_parameters // run.shape.n_layer


def _saved_s(run: ResolvedRun, device_name: str, gpus_per_node: int, network: Interconnect) -> float | None:
    """Return the seconds per step that compiled blocks save, possibly negative; None if the GPU's rate is unknown."""
    known = find_gpu(device_name)
    # Every optimizer takes the same time with either.
    steps = [estimate_step(run, Cluster(gpu, gpus_per_node, network)) for gpu in ([known] if known else GPUS)]
    tokens = run.plan.tokens_per_step
    saved = [tokens / step.tokens_per_second - tokens / step.compiled_tokens_per_second for step in steps if step]
    return min(saved, default=None)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.0f} hours"
