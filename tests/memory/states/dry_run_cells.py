"""Compare the closed form with the dry run for a list of cells, in a process of its own.

Reads a JSON list of cells from standard input and writes one JSON object a line. Not a test module: test_states.py
runs it.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.memory.estimate import estimate_states
from llmscale.memory.states.state_memory import StateMemory, zero_setup

#: Large enough that step counts and rounding do not matter, with activations that hardly exist.
SHAPE = GPTShape(n_layer=3, n_head=4, n_embd=384, vocab_size=1200, seq_len=8)


def resolve(cell: dict) -> ResolvedStep:
    """A cell's keys: stage, precision, ranks, accumulation, and `zero` and `top` for the ds_config; `optimizer`;
    `capability`, of the GPU; `freeze`, patterns."""
    precision, accumulation, ranks = cell["precision"], cell["accumulation"], cell["ranks"]
    config = {"zero_optimization": {"stage": cell["stage"], **cell.get("zero", {})}, **cell.get("top", {})}
    if precision != "fp32":
        section = "torch_autocast" if precision == "autocast" else precision
        config[section] = {**config.get(section, {}), "enabled": True}
    plan = BatchPlan(accumulation * ranks, 1, accumulation, ParallelLayout(ranks), SHAPE.seq_len)
    optimizer = get_optimizer(cell.get("optimizer", "adamw"))
    optimizer = optimizer.with_rules((), cell.get("freeze", ()), SHAPE.tensors.all)
    return resolve_step(parse_ds_config(config, "cell"), SHAPE, plan, cell.get("checkpointing", "none"), optimizer)


def capability_of(cell: dict) -> ComputeCapability | None:
    return tuple(cell["capability"]) if "capability" in cell else None


def estimate(cell: dict) -> StateMemory:
    resolved = resolve(cell)
    return estimate_states(
        resolved.tensors, zero_setup(resolved, capability_of(cell)), recomputes=resolved.checkpointing != "none"
    )


def compare(cell: dict) -> dict[str, object]:
    """Bytes of the dry run and of the closed form, what a moment adds to the resident memory."""
    from llmscale.dry_run.engine import dry_run

    simulated = dry_run(resolve(cell), capability_of(cell))
    states = estimate(cell)
    resident = simulated.resident.total_bytes
    added = {moment: peak.total_bytes - resident for moment, peak in simulated.states.items()}
    return {
        "dry_run": {"resident": resident, "host": simulated.host_bytes, **added},
        "closed_form": {
            "resident": states.resident.total_bytes,
            "forward": states.forward_peak.total_bytes,
            "backward": states.backward_peak.total_bytes,
            "step": states.step.total_bytes,
            "host": states.host_bytes,
        },
        "categories": {"dry_run": simulated.resident.as_dict(), "closed_form": states.resident.as_dict()},
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number, wanted in enumerate(json.load(sys.stdin)):
        print(json.dumps(compare(wanted)), flush=True)
        if number == 0:
            # Dry runs collect garbage, and need not look at what the libraries made when they were first used.
            gc.collect()
            gc.freeze()
