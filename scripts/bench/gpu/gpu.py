"""Everything that only a GPU can show, in one command of under 25 minutes: speed, memory, and how good estimates are.

    scripts/bench/gpu.sh                                # installs, then runs this with the same flags
    scripts/bench/gpu.sh --nanogpt ../nanoGPT           # without it nanoGPT is cloned from GitHub
    python -m scripts.bench.gpu.gpu --device cpu        # tiny models: shows that it works, and no speed

One GPU: GPT-2 124M to 1.5B, Llama 3's 1B and 8B, ZeRO 0-3, offload, compiled and eager; nanoGPT's train.py with the
same micro-batch and step, in turns; cells of memory_grid.py. Every cell is a process of its own: train.py from its
command line, killed when enough steps are seen. Printed is the median over its steps after the first three. A failed
cell is a line of the table. Cells without time left are listed.

After every cell the result files are written again: gpu_NAME.json, .txt and .md (the README's table). Output of failed
cells is in gpu_NAME.log. A cell that runs out of memory is tried again with a smaller micro-batch. --resume takes the
measured cells of an earlier command's JSON. The last lines of the table are the constants that estimates assume, beside
their measured values.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmscale.config.hardware import model_flops_utilisation
from llmscale.config.run_arguments import parse_run_config
from llmscale.files.atomic_write import write_output
from llmscale.memory.estimate import CONTEXT_BYTES, RESERVED_PER_ALLOCATED, MemoryEstimate
from llmscale.planning import compilation, kernels
from llmscale.planning.kernels import kernel_efficiency
from llmscale.planning.step_time import OWN_KERNELS, TokenWork, token_work
from llmscale.training.start import Start, estimate_run, prepare_start
from scripts.bench.gpu.cells import Cell, Device, find_device, list_cpu_cells, list_gpu_cells, why_it_does_not_fit
from scripts.bench.gpu.processes import (
    OUT_OF_MEMORY,
    WARM_STEPS,
    Enough,
    Step,
    Watched,
    cell_environment,
    find_nanogpt,
    nanogpt_options,
    run_nanogpt,
    run_train,
    save_nanogpt_data,
)
from scripts.bench.gpu.results import (
    MFU_FORMULA,
    Constant,
    compile_seconds,
    constant_lines,
    context_bytes,
    fit_efficiency,
    heading,
    judge_targets,
    readme_table,
    replace_table,
    reserved_per_allocated,
    row_line,
    saved_element_bytes,
)
from scripts.bench.harness import REPOSITORY, describe_machine, machine_line, prepare_text, words
from scripts.bench.memory import memory_grid

#: Longest time of a cell.
CELL_LIMIT_S = 360.0
#: Most bytes of a failed process's output that are kept.
MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Command line of a cell, and its memory estimate."""

    micro_batch_size: int
    checkpointing: str
    arguments: list[str]
    run: Start
    estimate: MemoryEstimate | None


@dataclass
class Bench:
    """One run of this script over its cells."""

    args: argparse.Namespace
    device: Device
    folder: Path
    deadline: float
    machine: dict[str, object]
    nanogpt: Path | str
    """Folder of nanoGPT, or the reason why it is missing."""
    rows: list[dict] = field(default_factory=list)
    resumed: dict[str, dict] = field(default_factory=dict)
    """Rows that an earlier command measured, by cell."""
    sets: dict[int, Path] = field(default_factory=dict)
    """Prepared datasets by seq_len."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run_all(self, cells: Sequence[Cell]) -> None:
        """Run every cell that there is time for."""
        for number, cell in enumerate(cells, 1):
            expected = expected_s(cell, self.rows)
            row = self.resumed.get(cell.name) or {
                **describe_cell(cell),
                "problem": f"no time: {max(0, self.left_s):.0f} s left, {expected:.0f} needed",
            }
            if cell.name not in self.resumed and self.left_s >= expected:
                print(f"[{number}/{len(cells)}, {self.left_s / 60:.0f} min left] {cell.name} ...", flush=True)
                began = time.monotonic()
                row = {**describe_cell(cell), **self.attempt(cell, number)}
                row["wall_s"] = time.monotonic() - began
            self.rows.append(row)
            print(row_line(row), flush=True)
            self.save()

    def attempt(self, cell: Cell, number: int) -> dict:
        """Measure a cell; any error becomes the problem of its row."""
        try:
            return self.measure(cell, number)
        # A command of the toolkit that fails exits with its output.
        except (Exception, SystemExit) as error:
            return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}

    def measure(self, cell: Cell, number: int) -> dict:
        """Return the numbers of a cell, or its problem."""
        limit_s = min(self.left_s, CELL_LIMIT_S)
        if cell.kind == "grid":
            return self.measure_grid(cell, limit_s)
        if cell.kind == "nanogpt" and isinstance(self.nanogpt, str):
            return {"problem": self.nanogpt}
        sizes = self.micro_batch_sizes(cell)
        for attempt in range(1, len(sizes) + 1):
            place = self.folder / f"cell-{number}-{attempt}"
            place.mkdir()
            plan = self.choose_plan(cell, place, sizes)
            if isinstance(plan, str):
                return {"problem": plan}
            watched = self.watch(cell, plan, place, limit_s)
            if watched.problem is None:
                return self.numbers(cell, plan, watched.steps)
            self.keep_log(f"{cell.name}, micro-batch {plan.micro_batch_size}: {watched.problem}", place / "log")
            sizes = [size for size in sizes if size < plan.micro_batch_size]
            limit_s = min(self.left_s, CELL_LIMIT_S)
            if watched.problem != OUT_OF_MEMORY or not sizes or limit_s < cell.least_s:
                break
        return {"problem": f"micro-batch {plan.micro_batch_size}: {watched.problem}"}

    def micro_batch_sizes(self, cell: Cell) -> list[int]:
        """Return the sizes to try, largest first; of compared cells none above that of another one."""
        others = [row["micro_batch_size"] for row in self.rows if row["compared"] and "micro_batch_size" in row]
        largest = min(others) if cell.compared and others else max(cell.micro_batch_sizes)
        return [size for size in cell.micro_batch_sizes if size <= largest]

    def watch(self, cell: Cell, plan: Plan, place: Path, limit_s: float) -> Watched:
        """Run the process of a cell."""
        enough = Enough(self.args.measure_s)
        # The first turn of a cell begins with empty caches, its second turn with those of the first.
        environment = cell_environment(self.folder / "compiled" / replace(cell, turn=1).name.replace(" ", "-"))
        if cell.kind == "train":
            tokens = plan.run.resolved.plan.tokens_per_step
            return run_train(plan.arguments, tokens, place, enough, limit_s, environment)
        options = self.nanogpt_options(cell, plan, place)
        return run_nanogpt(self.nanogpt, options, place, enough, limit_s, environment)

    def keep_log(self, title: str, log: Path) -> None:
        """Append the end of a failed process's output to the log beside the results."""
        if self.args.out and log.exists():
            with (self.args.out / f"gpu_{self.device.label}.log").open("ab") as all_logs:
                all_logs.write(f"== {title}\n".encode() + log.read_bytes()[-MAX_LOG_BYTES:] + b"\n")

    def measure_grid(self, cell: Cell, limit_s: float) -> dict:
        grid_cell = next(one for one in memory_grid.list_cells() if one.name == cell.model)
        row = memory_grid.measure(grid_cell, "gpu" if self.device.kind == "cuda" else "dry-run", limit_s)
        estimates = row.get("estimates")
        return {**row, "cell": cell.name, **({"estimate_bytes": estimates["llmscale"]} if estimates else {})}

    def choose_plan(self, cell: Cell, place: Path, sizes: Sequence[int]) -> Plan | str:
        """Return the largest micro-batch of `sizes` that fits by the estimate, or why none does.

        Recomputation is used only where a micro-step without it has fewer than 8,192 tokens.
        """
        ds = place / "ds.json"
        ds.write_text(json.dumps(cell.ds_config(self.device.precision)))
        # nanoGPT has no recomputation.
        modes = ("none",) if cell.compared else ("none", "selective", "full")
        choices = [(mode, micro) for mode in modes for micro in sizes]
        long_enough = [choice for choice in choices if choice[1] * cell.seq_len >= 8192]
        problem = "nothing fits"
        for mode, micro in [*long_enough, *(choice for choice in choices if choice not in long_enough)]:
            arguments = self.train_arguments(cell, ds, micro, mode, place)
            run = prepare_start(parse_run_config(arguments), 1)
            estimate = estimate_run(run, self.device.capability)
            problem = why_it_does_not_fit(estimate, self.device)
            if problem is None:
                return Plan(micro, mode, arguments, run, estimate)
        return f"micro-batch {micro}, recomputation {mode}: {problem}"

    def train_arguments(self, cell: Cell, ds: Path, micro: int, mode: str, place: Path) -> list[str]:
        global_batch = cell.tokens_per_step // cell.seq_len
        settings = (
            f"--model {cell.model} --vocab-size {cell.vocab_size} --precision {self.device.precision} "
            f"--global-batch-size {global_batch} --micro-batch-size {micro} --activation-checkpointing {mode} "
            f"--compile {'on' if cell.compiled else 'off'} "
            "--steps 1000000 --warmup-steps 10 --log-every 1 --save-every 0 --val-every 0"
        )
        layers = ["--n-layer", str(cell.n_layer)] if cell.n_layer else []
        places = ["--ds", str(ds), "--data", str(self.prepared(cell.seq_len)), "--run", str(place / "run")]
        return [*words(settings), *layers, *places]

    def prepared(self, seq_len: int) -> Path:
        """Return a dataset with windows of that length. Tokens are bytes; the model keeps its preset's vocabulary."""
        if seq_len not in self.sets:
            folder = self.folder / f"text-{seq_len}"
            folder.mkdir()
            self.sets[seq_len] = prepare_text(folder, seq_len)
        return self.sets[seq_len]

    def nanogpt_options(self, cell: Cell, plan: Plan, place: Path) -> dict[str, object]:
        """Write nanoGPT's data from the same dataset; return its settings."""
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
        """Return the numbers of a cell's steps."""
        resolved = plan.run.resolved
        tokens, counted = resolved.plan.tokens_per_step, steps[WARM_STEPS:]
        rates = [tokens / step.seconds for step in counted]
        rate, is_ours = statistics.median(rates), cell.kind == "train"
        passes = [step.passes_s for step in counted if step.passes_s is not None]
        gpu = self.device.gpu
        micro_tokens = resolved.plan.micro_batch_size * resolved.shape.seq_len
        work = token_work(resolved.shape, micro_tokens, resolved.precision, resolved.checkpointing, OWN_KERNELS)
        flops = resolved.shape.flops_per_token
        return {
            "micro_batch_size": plan.micro_batch_size,
            "checkpointing": plan.checkpointing,
            "tokens_per_step": tokens,
            "tokens_per_second": rate,
            "tokens_per_second_range": [min(rates), max(rates)],
            "mfu": model_flops_utilisation(rate, flops, self.device.name, is_16bit=gpu is not None),
            "flops_per_token": flops,
            "work": asdict(work),
            "passes_s_per_token": statistics.median(passes) / tokens if is_ours else None,
            "elements_per_token": work.block_bytes / OWN_KERNELS.element_bytes,
            "peak_bytes": steps[-1].peak_bytes,
            "estimate_bytes": plan.estimate.allocated_bytes
            if plan.estimate and is_ours and self.device.kind == "cuda"
            else None,
            "first_step_s": steps[0].seconds,
            "steps": len(counted),
        }

    def constants(self) -> list[Constant]:
        """Return the constants of the estimates with the values that the rows show."""
        source = f"scripts/bench/gpu.sh on one {self.device.name}"
        pairs, grid = compile_pairs(self.rows), [row for row in self.rows if row["kind"] == "grid"]
        if self.device.kind != "cuda":
            pairs, grid = [], []  # a CPU shows nothing about a GPU
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

    def efficiency(self) -> dict[str, Any]:
        """Return the fractions of the peak that kernels reached, beside those that planning assumes of this GPU."""
        gpu = self.device.gpu
        if gpu is None:
            return {"measured": None}
        eager = [row for row in self.rows if row.get("passes_s_per_token") and not row["compiled"]]
        works = [(TokenWork(**row["work"]), row["passes_s_per_token"]) for row in eager if row["offload"] == "none"]
        assumed, fitted = kernel_efficiency(gpu), fit_efficiency(works, gpu)
        measured = dict(zip(("matmul", "attention"), fitted, strict=True)) if fitted else None
        return {"home": "llmscale/planning/kernels.py", "assumed": asdict(assumed), "measured": measured}

    def save(self) -> None:
        """Write all result files, each atomically."""
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
        if self.args.write_readme:
            readme = REPOSITORY / "README.md"
            write_output(readme, replace_table(readme.read_text(), table))

    def targets(self) -> list[str]:
        gpu = self.device.gpu
        return judge_targets(self.rows, gpu.name if gpu else None, is_gpu=self.device.kind == "cuda")

    def closing(self) -> list[str]:
        """Return the lines below the table."""
        efficiency = self.efficiency()
        fitted = efficiency["measured"]
        parts = "not measured" if not fitted else ", ".join(f"{key} {value:.2f}" for key, value in fitted.items())
        gpu = self.device.gpu
        peak = f"{gpu.dense_16bit_flops / 1e12:g} TFLOP/s" if gpu else "not known for this device"
        return [
            *self.targets(),
            *constant_lines([asdict(constant) for constant in self.constants()]),
            f"parts of the peak that eager kernels reached: {parts}",
            f"{MFU_FORMULA} rate: {peak}",
            machine_line(self.machine),
        ]


def describe_cell(cell: Cell) -> dict[str, object]:
    keys = ("kind", "model", "n_layer", "zero_stage", "offload", "compiled", "turn", "compared")
    return {"cell": cell.name, **{key: getattr(cell, key) for key in keys}}


def expected_s(cell: Cell, rows: Sequence[dict]) -> float:
    """Return the expected wall seconds of a cell: the median of its kind, at least `least_s`."""
    alike = [
        row["wall_s"]
        for row in rows
        if "problem" not in row
        and (row["kind"], row["compiled"], row["offload"]) == (cell.kind, cell.compiled, cell.offload)
    ]
    return max(cell.least_s, statistics.median(alike)) if alike else cell.least_s


def compile_pairs(rows: Sequence[dict]) -> list[tuple[dict, dict]]:
    """Return pairs (eager, compiled) of train.py's cells that differ in nothing else."""
    keys = ("model", "n_layer", "zero_stage", "offload", "micro_batch_size", "checkpointing", "tokens_per_step")
    measured = [row for row in rows if row["kind"] == "train" and "tokens_per_second" in row and row["turn"] == 1]
    return [
        (eager, compiled)
        for eager in measured
        for compiled in measured
        if not eager["compiled"] and compiled["compiled"] and all(eager[key] == compiled[key] for key in keys)
    ]


def read_rows(path: Path, device: Device) -> dict[str, dict]:
    """Return the measured rows of an earlier command's JSON, by cell. Exits if they are of another device."""
    try:
        result = json.loads(path.read_text())
        name, rows = result["device"]["name"], {row["cell"]: row for row in result["rows"] if "problem" not in row}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: --resume {path} is not a result of this script: {error!r}") from None
    if name != device.name:
        raise SystemExit(f"error: --resume {path} was measured on {name}, and this is {device.name}")
    return rows


def main() -> int:
    args = parse_arguments()
    # SIGTERM ends cells like Ctrl-C: what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    device = find_device(args.device)
    cells = list_gpu_cells() if device.kind == "cuda" else list_cpu_cells()
    cells = [cell for cell in cells if not args.only or any(words in cell.name for words in args.only)]
    if not cells:
        print(f"--only {' '.join(args.only)}: no cell of {args.device} has these words in its name", file=sys.stderr)
        return 2
    resumed = read_rows(args.resume, device) if args.resume else {}
    # Those that --only leaves out are in the results, too.
    every = list_gpu_cells() if device.kind == "cuda" else list_cpu_cells()
    cells = [cell for cell in every if cell in cells or cell.name in resumed]
    print(f"{device.name}: {len(cells)} cells, {args.minutes:g} minutes, {args.spent_s:.0f} s of them gone", flush=True)
    status = 0
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as scratch:
        folder = Path(scratch)
        deadline = began + 60 * args.minutes - args.spent_s
        machine = describe_machine()
        nanogpt: Path | str = "no cell of nanoGPT is chosen"
        if any(cell.kind == "nanogpt" and cell.name not in resumed for cell in cells):
            nanogpt = find_nanogpt(args.nanogpt, device.kind, folder)
        bench = Bench(args, device, folder, deadline, machine, nanogpt, resumed=resumed)
        print(heading(), flush=True)
        try:
            bench.run_all(cells)
        except KeyboardInterrupt:
            status = 130
            bench.rows += [{**describe_cell(cell), "problem": "stopped before it"} for cell in cells[len(bench.rows) :]]
            bench.save()
    print("\n".join(bench.closing()))
    if args.out:
        print(f"written: {', '.join(map(str, sorted(args.out.glob(f'gpu_{device.label}.*'))))}")
    return status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--minutes", type=float, default=25, help="minutes for all cells (default: 25)")
    parser.add_argument(
        "--measure-s", type=float, help="seconds of steps that are counted per cell (default: 15; 1 on a CPU)"
    )
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cells whose name has these words")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the result files (default: TMPDIR/gpu-bench; on a CPU none)",
    )
    parser.add_argument("--resume", type=Path, metavar="JSON", help="take the cells that an earlier command measured")
    parser.add_argument("--write-readme", action="store_true", help="put the table between its markers in README.md")
    parser.add_argument("--spent-s", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_s is None:
        args.measure_s = 15 if args.device == "cuda" else 1
    if args.out is None and args.device == "cuda":
        args.out = Path(tempfile.gettempdir()) / "gpu-bench"
        args.out.mkdir(exist_ok=True)
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume {args.resume} is not a file: give the gpu_NAME.json of an earlier command")
    if args.out and not args.out.is_dir():
        parser.error(f"--out {args.out} is not a folder")
    if not (0 < args.minutes < math.inf and 0 < args.measure_s < math.inf):
        parser.error("--minutes and --measure-s must be above 0, and finite")
    if args.nanogpt and not (args.nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt {args.nanogpt} has no train.py; git clone https://github.com/karpathy/nanoGPT")
    if args.write_readme and args.device == "cpu":
        parser.error("--write-readme is for what a GPU measured")
    if args.write_readme:
        try:
            replace_table((REPOSITORY / "README.md").read_text(), "")
        except ValueError as error:
            parser.error(f"--write-readme: README.md: {error}")
    return args


if __name__ == "__main__":
    sys.exit(main())
