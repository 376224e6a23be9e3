"""gpu.py's cells one after the other: plan, run, numbers, and result files after each."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import memory_grid
import numpy as np
from engine_overhead import prepare_text
from gpu_calibration import (
    Constant,
    compile_seconds,
    context_bytes,
    fit_efficiency,
    make_patch,
    reserved_per_allocated,
    saved_element_bytes,
)
from gpu_cells import Cell
from gpu_device import Device, why_it_does_not_fit
from gpu_nanogpt import nanogpt_options, run_nanogpt, save_nanogpt_data
from gpu_report import (
    MFU_FORMULA,
    constant_lines,
    heading,
    judge_targets,
    machine_line,
    readme_table,
    replace_table,
    row_line,
)
from gpu_run import WARM_STEPS, Enough, Step, cell_environment, run_train
from memory_cells import list_cells
from paced_ranks import REPOSITORY

from llmscale.config.hardware import model_flops_utilisation
from llmscale.config.run_config import parse_run_config
from llmscale.files.atomic_write import write_output
from llmscale.memory.estimate import CONTEXT_BYTES, RESERVED_PER_ALLOCATED, MemoryEstimate
from llmscale.planning import compilation, kernels
from llmscale.planning.compute_time import OWN_KERNELS, TokenWork, token_work
from llmscale.planning.kernels import kernel_efficiency
from llmscale.training.memory_report import estimate_run
from llmscale.training.prepare_run import PreparedRun, prepare_run

#: No cell takes longer.
CELL_LIMIT_S = 360.0


@dataclass(frozen=True)
class Plan:
    """How a cell is run."""

    micro_batch_size: int
    checkpointing: str
    arguments: list[str]
    run: PreparedRun
    estimate: MemoryEstimate | None


@dataclass
class Bench:
    """One run of this script."""

    args: argparse.Namespace
    device: Device
    folder: Path
    deadline: float
    machine: dict[str, object]
    nanogpt: Path | str
    """Its folder, or why there is none."""
    rows: list[dict] = field(default_factory=list)
    works: list[tuple[TokenWork, float]] = field(default_factory=list)
    """Work and seconds per token of eager passes on a GPU."""
    sets: dict[int, Path] = field(default_factory=dict)
    """Prepared text by its seq_len."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run_all(self, cells: Sequence[Cell]) -> None:
        """Every cell that there is time for."""
        for number, cell in enumerate(cells, 1):
            expected = expected_s(cell, self.rows)
            row = {
                **describe_cell(cell),
                "problem": f"no time: {max(0, self.left_s):.0f} s left, {expected:.0f} needed",
            }
            if self.left_s >= expected:
                print(f"[{number}/{len(cells)}, {self.left_s / 60:.0f} min left] {cell.name} ...", flush=True)
                began = time.monotonic()
                row = {**describe_cell(cell), **self.attempt(cell, number)}
                row["wall_s"] = time.monotonic() - began
            self.rows.append(row)
            print(row_line(row), flush=True)
            self.save()

    def attempt(self, cell: Cell, number: int) -> dict:
        """`measure`; whatever goes wrong is this cell's problem."""
        try:
            return self.measure(cell, number)
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}

    def measure(self, cell: Cell, number: int) -> dict:
        """Its numbers, or its problem."""
        limit_s = min(self.left_s, CELL_LIMIT_S)
        if cell.kind == "grid":
            return self.measure_grid(cell, limit_s)
        if cell.kind == "nanogpt" and isinstance(self.nanogpt, str):
            return {"problem": self.nanogpt}
        place = self.folder / f"cell-{number}"
        place.mkdir()
        plan = self.choose_plan(cell, place)
        if isinstance(plan, str):
            return {"problem": plan}
        enough = Enough(self.args.measure_s)
        # Empty for every cell, but for its second turn.
        environment = cell_environment(self.folder / "compiled" / replace(cell, turn=1).name.replace(" ", "-"))
        tokens = plan.run.resolved.plan.tokens_per_step
        if cell.kind == "train":
            watched = run_train(plan.arguments, tokens, place, enough, limit_s, environment)
        else:
            options = self.nanogpt_options(cell, plan, place)
            watched = run_nanogpt(self.nanogpt, options, place, enough, limit_s, environment)
        if watched.problem:
            return {"problem": watched.problem}
        return self.numbers(cell, plan, watched.steps)

    def measure_grid(self, cell: Cell, limit_s: float) -> dict:
        grid_cell = next(one for one in list_cells() if one.name == cell.model)
        row = memory_grid.measure(grid_cell, "gpu" if self.device.kind == "cuda" else "dry-run", limit_s)
        estimates = row.get("estimates")
        return {**row, "cell": cell.name, **({"estimate_bytes": estimates["llmscale"]} if estimates else {})}

    def choose_plan(self, cell: Cell, place: Path) -> Plan | str:
        """The largest micro-batch that the estimate says fits, without recomputation if a micro-step is still long
        enough then; or why nothing does."""
        ds = place / "ds.json"
        ds.write_text(json.dumps(cell.ds_config(self.device.precision)))
        # nanoGPT knows no recomputation.
        modes = ("none",) if cell.compared else ("none", "selective", "full")
        choices = [(mode, micro) for mode in modes for micro in cell.micro_batch_sizes]
        long_enough = [choice for choice in choices if choice[1] * cell.seq_len >= 8192]
        problem = "nothing fits"
        for mode, micro in [*long_enough, *(choice for choice in choices if choice not in long_enough)]:
            arguments = self.train_arguments(cell, ds, micro, mode, place)
            run = prepare_run(parse_run_config(arguments), 1)
            estimate = estimate_run(run, self.device.capability)
            problem = why_it_does_not_fit(estimate, self.device)
            if problem is None:
                return Plan(micro, mode, arguments, run, estimate)
        return f"micro-batch {micro}, recomputation {mode}: {problem}"

    def train_arguments(self, cell: Cell, ds: Path, micro: int, mode: str, place: Path) -> list[str]:
        global_batch = cell.tokens_per_step // cell.seq_len
        layers = ["--n-layer", str(cell.n_layer)] if cell.n_layer else []
        return [
            *("--ds", str(ds), "--data", str(self.prepared(cell.seq_len)), "--model", cell.model, *layers),
            *("--vocab-size", str(cell.vocab_size), "--precision", self.device.precision),
            *("--global-batch-size", str(global_batch), "--micro-batch-size", str(micro)),
            *("--activation-checkpointing", mode, "--compile", "on" if cell.compiled else "off"),
            *("--steps", "1000000", "--warmup-steps", "10", "--log-every", "1", "--save-every", "0"),
            *("--val-every", "0", "--run", str(place / "run")),
        ]

    def prepared(self, seq_len: int) -> Path:
        """Text in windows of that length, bytes for tokens: the model's vocabulary is the preset's all the same."""
        if seq_len not in self.sets:
            folder = self.folder / f"text-{seq_len}"
            folder.mkdir()
            self.sets[seq_len] = prepare_text(folder, seq_len)
        return self.sets[seq_len]

    def nanogpt_options(self, cell: Cell, plan: Plan, place: Path) -> dict[str, object]:
        """And its data: windows of the same set."""
        from llmscale.data.shards.token_shards import TokenShards

        shape, batch = plan.run.resolved.shape, plan.run.resolved.plan
        shards = TokenShards(plan.run.sets.first, "train")
        windows = shards.read(np.arange(min(len(shards), 2000)))
        save_nanogpt_data(windows, place / "data" / "bench", shape.padded_vocab_size)
        return nanogpt_options(
            device=self.device.kind,
            compiled=cell.compiled,
            **{key: getattr(shape, key) for key in ("n_layer", "n_head", "n_embd", "seq_len")},
            micro_batch=plan.micro_batch_size,
            micro_steps=batch.gradient_accumulation_steps,
        )

    def numbers(self, cell: Cell, plan: Plan, steps: Sequence[Step]) -> dict:
        """What a cell's steps say."""
        resolved = plan.run.resolved
        tokens, counted = resolved.plan.tokens_per_step, steps[WARM_STEPS:]
        rates = [tokens / step.seconds for step in counted]
        rate, is_ours = statistics.median(rates), cell.kind == "train"
        passes = [step.passes_s for step in counted if step.passes_s is not None]
        gpu = self.device.gpu
        micro_tokens = resolved.plan.micro_batch_size * resolved.shape.seq_len
        work = token_work(resolved.shape, micro_tokens, resolved.precision, resolved.checkpointing, OWN_KERNELS)
        if is_ours and gpu and not cell.compiled and cell.offload == "none":
            self.works.append((work, statistics.median(passes) / tokens))
        flops = resolved.shape.flops_per_token
        return {
            "micro_batch_size": plan.micro_batch_size,
            "checkpointing": plan.checkpointing,
            "tokens_per_step": tokens,
            "tokens_per_second": rate,
            "tokens_per_second_range": [min(rates), max(rates)],
            "mfu": model_flops_utilisation(rate, flops, self.device.name, is_16bit=gpu is not None),
            "flops_per_token": flops,
            "elements_per_token": work.block_bytes / OWN_KERNELS.element_bytes,
            "peak_bytes": steps[-1].peak_bytes,
            "estimate_bytes": plan.estimate.allocated_bytes
            if plan.estimate and is_ours and self.device.kind == "cuda"
            else None,
            "first_step_s": steps[0].seconds,
            "steps": len(counted),
        }

    def constants(self) -> list[Constant]:
        """What the rows say about what is assumed."""
        source = f"scripts/bench/gpu.sh on one {self.device.name}"
        pairs, grid = compile_pairs(self.rows), [row for row in self.rows if row["kind"] == "grid"]
        if self.device.kind != "cuda":
            pairs, grid = [], []  # a CPU says nothing of a GPU's
        memory, planning = "llmscale/memory/estimate.py", "llmscale/planning"
        steps = [
            (eager["elements_per_token"], 1 / eager["tokens_per_second"], 1 / compiled["tokens_per_second"])
            for eager, compiled in pairs
        ]
        saved_bytes = saved_element_bytes(steps, self.device.gpu) if self.device.gpu else None
        firsts = [(eager["first_step_s"], compiled["first_step_s"]) for eager, compiled in pairs]
        return [
            Constant("CONTEXT_BYTES", memory, CONTEXT_BYTES, context_bytes(grid), source),
            Constant("RESERVED_PER_ALLOCATED", memory, RESERVED_PER_ALLOCATED, reserved_per_allocated(grid), source),
            Constant(
                "_COMPILE_S", f"{planning}/compilation.py", compilation._COMPILE_S, compile_seconds(firsts), source
            ),
            Constant(
                "_COMPILED_SAVES_BYTES", f"{planning}/kernels.py", kernels._COMPILED_SAVES_BYTES, saved_bytes, source
            ),
        ]

    def efficiency(self) -> dict[str, object]:
        """What of the peak kernels reached, beside what planning assumes of this GPU; its fit to 209 runs of others
        stays, and a GPU without one can be given this."""
        gpu = self.device.gpu
        if gpu is None:
            return {"measured": None}
        assumed, fitted = kernel_efficiency(gpu), fit_efficiency(self.works, gpu)
        measured = dict(zip(("matmul", "attention"), fitted, strict=True)) if fitted else None
        return {"home": "llmscale/planning/kernels.py", "assumed": asdict(assumed), "measured": measured}

    def save(self) -> None:
        """All result files, each whole."""
        constants = self.constants()
        targets = self.targets()
        result = {
            "machine": self.machine,
            "device": asdict(self.device),
            "mfu": MFU_FORMULA,
            "targets": targets,
            "constants": [asdict(constant) for constant in constants],
            "efficiency": self.efficiency(),
            "rows": self.rows,
        }
        table = readme_table(self.rows, self.device.name, targets)
        if self.args.out:
            place = self.args.out / f"gpu_{self.device.label}"
            write_output(place.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
            write_output(
                place.with_suffix(".txt"), "\n".join([heading(), *map(row_line, self.rows), *self.closing()]) + "\n"
            )
            write_output(place.with_suffix(".md"), table)
            write_patch(place.with_suffix(".patch"), make_patch(REPOSITORY, constants))
        if self.args.write_readme:
            readme = REPOSITORY / "README.md"
            write_output(readme, replace_table(readme.read_text(), table))

    def targets(self) -> list[str]:
        gpu = self.device.gpu
        return judge_targets(self.rows, gpu.name if gpu else None, is_gpu=self.device.kind == "cuda")

    def closing(self) -> list[str]:
        """What is said below the table."""
        efficiency = self.efficiency()
        fitted = efficiency["measured"]
        found = "not measured" if not fitted else ", ".join(f"{key} {value:.2f}" for key, value in fitted.items())
        gpu = self.device.gpu
        peak = f"{gpu.dense_16bit_flops / 1e12:g} TFLOP/s" if gpu else "not known for this device"
        return [
            *self.targets(),
            *constant_lines([asdict(constant) for constant in self.constants()]),
            f"parts of the peak that eager kernels reached: {found}",
            f"{MFU_FORMULA} rate: {peak}",
            machine_line(self.machine),
        ]


def describe_cell(cell: Cell) -> dict[str, object]:
    keys = ("kind", "model", "n_layer", "zero_stage", "offload", "compiled", "turn", "compared")
    return {"cell": cell.name, **{key: getattr(cell, key) for key in keys}}


def expected_s(cell: Cell, rows: Sequence[dict]) -> float:
    """Wall seconds that a cell will take: as long as those of its kind took, or the least that it is known to."""
    alike = [
        row["wall_s"]
        for row in rows
        if "problem" not in row
        and (row["kind"], row["compiled"], row["offload"]) == (cell.kind, cell.compiled, cell.offload)
    ]
    return max(cell.least_s, statistics.median(alike)) if alike else cell.least_s


def compile_pairs(rows: Sequence[dict]) -> list[tuple[dict, dict]]:
    """Cells of train.py that differ in nothing but the compiler: eager, compiled."""
    keys = ("model", "n_layer", "zero_stage", "offload", "micro_batch_size", "checkpointing", "tokens_per_step")
    measured = [row for row in rows if row["kind"] == "train" and "tokens_per_second" in row and row["turn"] == 1]
    return [
        (eager, compiled)
        for eager in measured
        for compiled in measured
        if not eager["compiled"] and compiled["compiled"] and all(eager[key] == compiled[key] for key in keys)
    ]


def write_patch(path: Path, patch: str) -> None:
    """No file where nothing was measured."""
    if patch:
        write_output(path, patch)
    else:
        path.unlink(missing_ok=True)
