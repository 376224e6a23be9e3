"""How wrong memory estimates are: llmscale's and three others beside the peak of a training run.

    python -m scripts.bench.memory.memory_grid                          # on a GPU
    python -m scripts.bench.memory.memory_grid --measure dry-run        # anywhere

Trains every cell of a grid (124M to 7B parameters, ZeRO 0-3, offload, activation checkpointing, several micro-batches)
for a few steps in a process of its own. The peak of allocated bytes comes from CUDA's allocator, or from the dry run:
the same engine on tensors without storage. Beside it stand the estimates of `llmscale estimate`, DeepSpeed's estimator,
the EleutherAI cookbook's formula and `accelerate estimate-memory`. The last column is the caching allocator's need
beyond the peak: what it reserved on a GPU, or its least by its rules in a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.presets import get_preset
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.engine.device_settings import set_allocator_default
from llmscale.memory.estimate import estimate_memory
from scripts.bench.harness import (
    GIB,
    REPOSITORY,
    describe_machine,
    gpu_names,
    machine_line,
    median_and_range,
    output_file,
    python_environment,
    save_result,
    why_it_failed,
)

#: The name that starts this file, also where another script imports it.
MODULE = "scripts.bench.memory.memory_grid"
ESTIMATORS = ("llmscale", "deepspeed", "cookbook", "accelerate")
Row = dict[str, object]
VOCAB_SIZE = 50257
#: Memory is steady from the second step on, with ZeRO-3 from the third.
STEPS = 4


@dataclass(frozen=True)
class Cell:
    """A run of the grid, on one GPU."""

    model: str
    """Preset."""
    zero_stage: int
    offload: str
    """States in host memory: "none", "optimizer", or "parameters" (with the optimizer's; stage 3)."""
    checkpointing: str
    """Activation checkpointing: "none", "selective" or "full"."""
    micro_batch_size: int
    precision: str = "bf16"
    gradient_accumulation_steps: int = 2
    seq_len: int | None = None
    """Tokens per sequence; None for the preset's."""

    @property
    def name(self) -> str:
        parts = [self.model, f"z{self.zero_stage}", self.precision, f"mb{self.micro_batch_size}"]
        parts += [f"offload-{self.offload}"] if self.offload != "none" else []
        parts += [self.checkpointing] if self.checkpointing != "none" else []
        parts += [f"acc{self.gradient_accumulation_steps}"] if self.gradient_accumulation_steps != 2 else []
        parts += [f"seq{self.seq_len}"] if self.seq_len else []
        return "-".join(parts)

    def ds_config(self) -> dict[str, object]:
        """Return the ds_config that a user would write."""
        zero: dict[str, object] = {"stage": self.zero_stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        config: dict[str, object] = {"zero_optimization": zero}
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True}
        if self.precision == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config


def list_cells() -> list[Cell]:
    """Return the cells from small to large, so that a run that is cut short has covered every stage."""
    small = [
        Cell("gpt2-124m", stage, "none", checkpointing, micro_batch_size)
        for stage in (0, 1, 2, 3)
        for checkpointing, micro_batch_size in (("none", 4), ("none", 16), ("selective", 8), ("full", 16))
    ]
    precisions = [
        Cell("gpt2-124m", stage, "none", "none", 8, precision)
        for stage, precision in ((0, "fp32"), (2, "fp32"), (2, "autocast"), (3, "autocast"), (1, "fp16"), (3, "fp16"))
    ]
    accumulation = [Cell("gpt2-350m", stage, "none", "none", 4, "bf16", 1) for stage in (1, 2, 3)]
    long = [Cell("gpt3-350m", 2, "none", "full", 2, seq_len=8192)]
    medium = [
        Cell("gpt2-774m", stage, "none", checkpointing, micro_batch_size)
        for stage in (1, 2, 3)
        for checkpointing, micro_batch_size in (("none", 2), ("selective", 4), ("full", 8))
    ]
    offload = [
        Cell("gpt2-1.5b", stage, where, "full", 4)
        for stage, where in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters"))
    ]
    large = [
        *(Cell("gpt3-2.7b", stage, "none", "full", 2) for stage in (1, 2, 3)),
        *(Cell("gpt3-2.7b", stage, "optimizer", "full", 4) for stage in (2, 3)),
        *(Cell("gpt3-6.7b", stage, "optimizer", "full", micro) for stage in (2, 3) for micro in (1, 4)),
        Cell("gpt3-6.7b", 3, "parameters", "full", 2),
    ]
    return [*small, *precisions, *accumulation, *long, *medium, *offload, *large]


def main() -> int:
    args = parse_arguments()
    if args.rank_job:
        print(json.dumps(measure_here(args.measure, Cell(**json.loads(args.rank_job)))))
        return 0
    cells = [cell for cell in list_cells() if not args.only or cell.name in args.only]
    machine = describe_machine()
    rows: list[Row] = []
    print(heading())
    for cell in cells:
        rows.append(measure(cell, args.measure, args.timeout_s))
        print(table_line(rows[-1]), flush=True)
        # After every row: a grid takes hours, and a killed one keeps its rows.
        errors = {name: summarize_errors(rows, name) for name in ESTIMATORS}
        reserve = summarize_reserve(rows)
        result = {"machine": machine, "measured_by": args.measure, "errors": errors, "reserve": reserve, "rows": rows}
        save_result(args.json, result)
    for name in ESTIMATORS:
        print(summary_line(name, errors[name]))
    print(reserve_line(reserve))
    print(machine_line(machine))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [cell.name for cell in list_cells()]
    parser.add_argument("--measure", choices=("gpu", "dry-run"), default="gpu" if gpu_names() else "dry-run")
    parser.add_argument("--only", nargs="+", metavar="CELL", help=f"these cells alone, of: {', '.join(names)}")
    parser.add_argument("--json", type=output_file, help="write the raw measurements to this file")
    parser.add_argument("--timeout-s", type=float, default=900, help="seconds for one cell (%(default)s)")
    parser.add_argument("--rank-job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure == "gpu" and not gpu_names():
        parser.error("--measure gpu: this machine has no GPU; --measure dry-run needs none")
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only: no cell is called {name}; --help lists them")
    return args


def measure(cell: Cell, how: str, timeout_s: float) -> Row:
    """Measure a cell in a fresh process; return estimates and peak, or the problem."""
    command = [sys.executable, "-m", MODULE, "--measure", how, "--rank-job", json.dumps(asdict(cell))]
    pipes = {"capture_output": True, "text": True, "cwd": REPOSITORY}
    try:
        done = subprocess.run(command, env=python_environment(), timeout=timeout_s, **pipes)
    except subprocess.TimeoutExpired:
        return {"cell": cell.name, "problem": f"took longer than {timeout_s:.0f} s"}
    if done.returncode:
        return {"cell": cell.name, "problem": why_it_failed(done)}
    return {"cell": cell.name, **json.loads(done.stdout.splitlines()[-1])}


def relative_error(row: Row, estimator: str) -> float | None:
    """Return (estimate - peak) / peak; None without an estimate or a peak."""
    estimates, peak = row.get("estimates"), row.get("peak_bytes")
    if not isinstance(estimates, dict) or not isinstance(peak, int) or estimates.get(estimator) is None:
        return None
    return estimates[estimator] / peak - 1


def summarize_errors(rows: Sequence[Row], estimator: str) -> dict[str, float | int]:
    """Return number, median and range of the absolute relative errors of an estimator."""
    errors = [abs(error) for row in rows if (error := relative_error(row, estimator)) is not None]
    if not errors:
        return {"cells": 0}
    within = sum(error <= 0.05 for error in errors)
    return {"cells": len(errors), "within_5_percent": within, **_median_and_worst(errors)}


def relative_reserve(row: Row) -> float | None:
    """Return the caching allocator's bytes beyond the peak, over the peak; None in a dry run."""
    peak, held = row.get("peak_bytes"), row.get("reserved_bytes")
    return held / peak - 1 if isinstance(peak, int) and isinstance(held, int) else None


def summarize_reserve(rows: Sequence[Row]) -> dict[str, float | int]:
    """Return number, median and range over all measured cells."""
    reserves = [reserve for row in rows if (reserve := relative_reserve(row)) is not None]
    return {"cells": len(reserves), **_median_and_worst(reserves)} if reserves else {"cells": 0}


def _median_and_worst(values: Sequence[float]) -> dict[str, float]:
    spread = median_and_range(values)
    return {"median": spread["median"], "least": spread["min"], "worst": spread["max"]}


def heading() -> str:
    return f"{'cell':44}{'peak GiB':>10}" + "".join(f"{name:>13}" for name in (*ESTIMATORS, "allocator"))


def table_line(row: Row) -> str:
    peak = row.get("peak_bytes")
    if not isinstance(peak, int):
        return f"{row['cell']:44} {row['problem']}"
    errors = [*(relative_error(row, name) for name in ESTIMATORS), relative_reserve(row)]
    error_cells = "".join(f"{'-' if error is None else f'{error:+.1%}':>13}" for error in errors)
    return f"{row['cell']:44}{peak / GIB:10.2f}{error_cells}"


def summary_line(name: str, errors: dict[str, float | int]) -> str:
    if not errors["cells"]:
        return f"{name}: no cell"
    return (
        f"{name}: median error {errors['median']:.1%} ({errors['least']:.1%} to {errors['worst']:.1%}), "
        f"{errors['within_5_percent']} of {errors['cells']} cells within 5 %"
    )


def reserve_line(reserve: dict[str, float | int]) -> str:
    if not reserve["cells"]:
        return "allocator: no cell"
    spread = f"{reserve['median']:.1%} ({reserve['least']:.1%} to {reserve['worst']:.1%})"
    return f"allocator: beyond the peak it needs {spread}"


# Inside the process of a cell.


def measure_here(how: str, cell: Cell) -> Row:
    """Return a cell's peak and all estimates, in bytes. Imports torch after the allocator is set."""
    config, run = resolve(cell)
    measured = measure_on_gpu(cell, config, run) if how == "gpu" else measure_dry(run)
    estimate = estimate_memory(run)
    estimates = {
        "llmscale": estimate.peak.total_bytes,
        "deepspeed": deepspeed_bytes(cell, run.shape),
        "cookbook": cookbook_bytes(cell, run.shape),
        "accelerate": accelerate_bytes(cell, run.shape),
    }
    return {**measured, "estimates": estimates}


def resolve(cell: Cell) -> tuple[RunConfig, ResolvedRun]:
    config = RunConfig(
        model=cell.model,
        global_batch_size=cell.micro_batch_size * cell.gradient_accumulation_steps,
        micro_batch_size=cell.micro_batch_size,
        activation_checkpointing=cell.checkpointing,
        steps=STEPS,
    )
    ds = parse_ds_config(cell.ds_config(), cell.name)
    seq_len = cell.seq_len or get_preset(cell.model).seq_len
    return config, resolve_run(config, ds, SetFacts(VOCAB_SIZE, seq_len, 1000, 0), world_size=1)


def measure_on_gpu(cell: Cell, config: RunConfig, run: ResolvedRun) -> dict[str, object]:
    """Train STEPS steps on random tokens; return the bytes of CUDA's allocator and of the GPU."""
    # train.py sets this too, before torch is imported.
    set_allocator_default(os.environ)
    import torch

    from llmscale.engine.deepspeed_engine import build_engine
    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.engine.train_step import PhaseTimer, train_step

    world = join_world()
    engine = build_engine(config, run)
    timer = PhaseTimer(world.device)
    shape = (cell.micro_batch_size, run.shape.seq_len + 1)
    for _ in range(STEPS):
        micro_batches = [torch.randint(VOCAB_SIZE, shape) for _ in range(cell.gradient_accumulation_steps)]
        train_step(engine, micro_batches, world.device, timer)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    result = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_torch_bytes": total - free - reserved,
        "device": world.device_name,
    }
    leave_world()
    return result


def measure_dry(run: ResolvedRun) -> dict[str, object]:
    """Run the engine on tensors without storage."""
    from llmscale.dry_run.engine import dry_run

    result = dry_run(run)
    peak = max(moment.total_bytes for moment in (result.forward, result.backward, result.step))
    return {"peak_bytes": peak, "seconds": result.seconds}


#: accelerate's names of our precisions.
ACCELERATE_PRECISIONS = {"fp32": "float32", "autocast": "bfloat16", "bf16": "bfloat16", "fp16": "float16"}


def deepspeed_bytes(cell: Cell, shape: GPTShape) -> int | None:
    """Return DeepSpeed's estimate_zero{2,3}_model_states_mem_needs (16 bit, model states); None at other stages."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if cell.zero_stage == 2:
        _, gpu_bytes = estimate_zero2_model_states_mem_needs(
            shape.num_parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=cell.offload != "none"
        )
        return gpu_bytes
    if cell.zero_stage == 3:
        _, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            shape.num_parameters,
            shape.padded_vocab_size * shape.n_embd,
            num_gpus_per_node=1,
            num_nodes=1,
            cpu_offload=cell.offload != "none",
            cpu_offload_params=cell.offload == "parameters",
        )
        return gpu_bytes
    return None


def cookbook_bytes(cell: Cell, shape: GPTShape) -> int:
    """Return the estimate of the EleutherAI cookbook, calc/calc_transformer_mem.py, with its defaults for one GPU.

    It counts an untied embedding, fp32 gradients, Adam's 12 bytes, and activations by Korthikanti et al. with attention
    scores. It has no offload and no logits, and keeps 34 s b h in every layer with checkpointing.
    """
    h, layers, tokens = shape.n_embd, shape.n_layer, cell.micro_batch_size * shape.seq_len
    parameters = 2 * shape.vocab_size * h + h * shape.seq_len + 8 * h * layers + 2 * h + 12 * layers * h * h
    low = 4 if cell.precision == "fp32" else 2
    per_token = (16 * 2 + 2) * h * layers
    if cell.checkpointing == "none":
        per_token += (2 * 2 + 1) * shape.n_head * shape.seq_len * layers
    return parameters * (low + 4 + 12) + tokens * per_token


def accelerate_bytes(cell: Cell, shape: GPTShape) -> int:
    """Return `accelerate estimate-memory`'s "Training using Adam" at batch size 1: weights, gradients, moments."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(4 * shape.num_parameters, ACCELERATE_PRECISIONS[cell.precision]).values())


if __name__ == "__main__":
    sys.exit(main())
