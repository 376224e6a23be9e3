"""`llmscale eval RUN --tasks ...`: validation loss and tasks of a model."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli import flags
from llmscale.config.command_line import Need, flag, local_path, whole_number
from llmscale.config.user_paths import check_output_file, check_task, write_output_file
from llmscale.errors import ConfigError, DataError
from llmscale.terminal.human_numbers import show_value

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from pathlib import Path

    from llmscale.config.command_line import FlagParser
    from llmscale.evaluate.evaluation import Evaluation
    from llmscale.evaluate.lm_eval_tasks import LmEvalTasks
    from llmscale.evaluate.model_source import ModelSource
    from llmscale.evaluate.tasks import TaskFile, TaskResult

#: Metrics that are means of zeros and ones, so that value and number of items give the standard error.
_SHARES = ("acc", "acc_norm", "acc_bytes", "acc_tokens", "exact_match")


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `eval`."""
    parser = subparsers.add_parser("eval")
    flags.add_run_argument(parser)
    flags.add_step(parser)
    flags.add_base(parser)
    flags.add_loss(parser)
    text = (
        "FORMAT=FILE.jsonl, where FORMAT is hellaswag, multiple_choice, likelihood or text; or a task of lm-eval, by "
    )
    flag(parser, "--tasks TASK", f"{text}name or as its YAML file", check_task, [], nargs="+", action="extend")
    flag(parser, "--task-folder DIR", "folder with the YAML files of more tasks for lm-eval", local_path)
    flag(parser, "--chat", "put lm-eval's tasks as conversations, in the model's chat template")
    flag(parser, "--limit N", "use only the first N items of each task", whole_number(1, limits.MAX_SAMPLES))
    flag(parser, "--json FILE", "also write the results to FILE", local_path)
    parser.needs = [*parser.needs, Need("limit task_folder chat", "--tasks TASK")]
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.inventory import use_checkpoint
    from llmscale.evaluate.lm_eval_tasks import go_offline
    from llmscale.evaluate.model_source import find_model
    from llmscale.terminal.status_line import show_if_slow
    from llmscale.untrusted.terminal import print_to_stderr, print_visible

    go_offline()
    files = _read_files(args)
    find = partial(find_model, args.run, print_to_stderr, args.step)
    folder = find()
    named = _named_tasks(args)
    from llmscale.engine.deepspeed_patches import quiet_libraries

    quiet_libraries()
    if named:
        harness = _find_harness(named, args, files)
    else:
        harness = None

    def answer(folder: Path) -> Evaluation:
        source = _open_model(folder, args)
        with show_if_slow("importing torch"):
            import llmscale.evaluate.evaluation  # noqa: F401
        return _evaluate(source, files, harness, args)

    evaluation = use_checkpoint(folder, find, answer)
    for line in result_lines(evaluation):
        print_visible(line)
    if args.json is not None:
        content = json.dumps(evaluation.as_dict(), indent=1, allow_nan=False) + "\n"
        write_output_file("--json", args.json, content)
    return 0


def _read_files(args: argparse.Namespace) -> tuple[TaskFile, ...]:
    """Read the files of items, and check that the results can be written. Raises ConfigError, DataError."""
    from llmscale.evaluate.tasks import load_task_files

    if args.json is not None:
        check_output_file("--json", args.json, overwrite=True)
    files = load_task_files(spec for spec in args.tasks if "=" in spec)
    if args.json is not None:
        _check_apart(args.json, args.run, [file.path for file in files])
    return files


def _named_tasks(args: argparse.Namespace) -> list[str]:
    """Return the tasks of lm-eval. Raises ConfigError for a folder of tasks without one, and for no task or loss."""
    named = [spec for spec in args.tasks if "=" not in spec]
    if args.task_folder is not None and not named:
        raise ConfigError("--task-folder holds tasks that --tasks can name, and it names none. Add a task's name.")
    if args.chat and not named:
        raise ConfigError("--chat puts lm-eval's tasks as conversations, and --tasks names none. Add a task's name.")
    if not args.tasks and not args.val_samples:
        raise ConfigError("nothing to do: --val-samples 0 leaves the loss out, and --tasks names no task.")
    return named


def _open_model(folder: Path, args: argparse.Namespace) -> ModelSource:
    """Verify the model, and open its datasets. Raises DataError if they are missing, and nothing else is asked for."""
    from llmscale.evaluate.model_source import open_model
    from llmscale.terminal.progress import show_progress
    from llmscale.untrusted.terminal import print_to_stderr

    with show_progress("Verifying the checkpoint") as verified:
        with_sets = args.val_samples > 0
        source = open_model(folder, args.data, verified.add, with_sets=with_sets, base=args.base)
    if source.sets is None and args.val_samples:
        if not args.tasks:
            raise DataError(source.no_sets)
        print_to_stderr(f"no validation loss: {source.no_sets}")
    return source


def _check_apart(out: Path, model: Path, items: Sequence[Path]) -> None:
    """Refuse to write the results over items, or over a file of the run. Raises ConfigError."""
    from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
    from llmscale.cli.report import check_apart

    place = out.resolve()
    folder = model.resolve()
    if place in (path.resolve() for path in items):
        raise ConfigError(f"--json {out} is a file of items; name another file.")
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS_NAME else folder
    check_apart(f"--json {out}", place, run, "evaluation.json")


def _find_harness(named: Sequence[str], args: argparse.Namespace, files: Sequence[TaskFile]) -> LmEvalTasks:
    """Return lm-eval's tasks. Raises ConfigError as `find_tasks` does, and for a file with the name of a task."""
    from llmscale.evaluate.lm_eval_tasks import find_tasks
    from llmscale.terminal.status_line import show_if_slow

    with show_if_slow("importing lm-eval and its tasks"):
        harness = find_tasks(named, args.task_folder, args.limit)
    for file in files:
        if file.name in harness.result_names:
            raise ConfigError(
                f"{file.path} and a task of lm-eval are both named '{file.name}', and so would be their results. "
                "Evaluate them one after the other."
            )
    return harness


def _evaluate(
    source: ModelSource, files: Sequence[TaskFile], harness: LmEvalTasks | None, args: argparse.Namespace
) -> Evaluation:
    """Evaluate, with a progress bar for each part."""
    from llmscale.evaluate.evaluation import evaluate
    from llmscale.terminal.progress import Progress, count_words, show_progress

    with ExitStack() as stack:
        bars: list[tuple[str, Progress]] = []

        def add(what: str, total: int | None, count: int) -> None:
            if not bars or bars[-1][0] != what:
                stack.close()
                bars.append((what, stack.enter_context(show_progress(what, total, count_words("sequences")))))
            bars[-1][1].add(count)

        return evaluate(
            source,
            files,
            harness,
            add,
            limit=args.limit,
            val_samples=args.val_samples,
            batch_size=args.batch_size,
            chat=args.chat,
        )


def result_lines(evaluation: Evaluation) -> Iterator[str]:
    """Yield a line per number, and below HellaSwag the numbers of published models of that size."""
    from llmscale.evaluate.evaluation import total_loss

    source = evaluation.source
    size = source.shape.num_parameters
    active = source.shape.active_parameters
    step = "" if source.step is None else f", step {source.step:,}"
    yield f"{source.folder}{step}, {size:,} parameters{f' ({active:,} active)' if active != size else ''}"
    rows: list[tuple[str, str, str, str]] = []
    if evaluation.losses:
        count = f"{sum(loss.num_samples for loss in evaluation.losses):,} sequences"
        rows += [
            ("validation", name, show_value(value), count) for name, value in total_loss(evaluation.losses).items()
        ]
    if len(evaluation.losses) > 1:
        rows += [(loss.name, "loss", f"{loss.loss:.4f}", f"{loss.num_samples:,} of them") for loss in evaluation.losses]
    for task in evaluation.tasks:
        rows += _task_rows(task)
        if task.task == "hellaswag" and evaluation.published:
            rows += [
                (other.model, name, f"{value:.4f}", f"published: {other.source}")
                for other in evaluation.published
                for name, value in other.values.items()
            ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, metric, value, note in rows:
        yield f"{name:<{widths[0]}}  {metric:<{widths[1]}}  {value:<{widths[2]}}  {note}".rstrip()
    yield from evaluation.notes


def _task_rows(task: TaskResult) -> Iterator[tuple[str, str, str, str]]:
    for metric, value in task.values.items():
        text = show_value(value)
        if metric.partition(" ")[0] in _SHARES and task.num_items > 1:
            # The sample standard error of a mean of zeros and ones, as in lm-eval.
            text += f" +- {math.sqrt(max(0.0, value * (1 - value)) / (task.num_items - 1)):.4f}"
        yield task.task, metric, text, f"{task.num_items:,} items" if task.num_items else ""
