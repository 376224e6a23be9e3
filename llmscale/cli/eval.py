"""`llmscale eval RUN --tasks ...`: how good a model is."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config import flag_type, limits
from llmscale.errors import ConfigError
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser
    from llmscale.evaluate.evaluation import Evaluation
    from llmscale.evaluate.task_scores import TaskResult

#: Accuracies, whose standard error follows from their value and the number of items.
_SHARES = ("acc", "acc_norm", "acc_bytes", "acc_tokens", "exact_match")
_TERMINAL_INTERVAL_S, _LINE_INTERVAL_S = 0.2, 5.0


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `eval`."""
    parser = subparsers.add_parser("eval")
    parser.add_argument(
        "run",
        type=flag_type.path,
        metavar="RUN",
        help="run folder of train.py, one checkpoint of it, or a folder of transformers",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help="FORMAT=FILE.jsonl, where FORMAT is hellaswag, multiple_choice, likelihood or text; or a task of "
        "lm-eval's, by name or as its YAML",
    )
    parser.add_argument(
        "--task-folder", type=flag_type.path, metavar="DIR", help="with the YAMLs of more tasks for lm-eval"
    )
    parser.add_argument(
        "--data",
        type=flag_type.path_or_url,
        metavar="SET",
        help="prepared set whose validation split the loss is taken on (default: the run's own)",
    )
    parser.add_argument(
        "--val-samples",
        type=flag_type.whole(0, limits.MAX_SAMPLES),
        default=256,
        help="sequences that the loss is taken on, spread over the split; 0: no loss (default %(default)s)",
    )
    parser.add_argument(
        "--limit", type=flag_type.whole(1, limits.MAX_SAMPLES), help="take only so many items of each task"
    )
    parser.add_argument(
        "--step",
        type=flag_type.whole(0, limits.MAX_STEPS),
        default=None,
        help="the run's checkpoint of this step (default: its newest)",
    )
    parser.add_argument(
        "--batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        default=8,
        help="sequences at once; results do not depend on it (default %(default)s)",
    )
    parser.add_argument("--json", type=flag_type.path, metavar="FILE", help="write the results there too")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.evaluate.lm_eval_tasks import go_offline
    from llmscale.evaluate.subject import find_subject
    from llmscale.evaluate.task_files import is_task_file, load_task_files
    from llmscale.untrusted.terminal import print_visible

    def report(line: str) -> None:
        print_visible(line, file=sys.stderr, flush=True)

    go_offline()
    if args.json is not None:
        _check_output(args.json)
    files = load_task_files(spec for spec in args.tasks if is_task_file(spec))
    folder = find_subject(args.run, report, args.step)
    named = [spec for spec in args.tasks if not is_task_file(spec)]
    if args.task_folder is not None and not named:
        raise ConfigError("--task-folder holds tasks that --tasks can name, and it names none. Add a task's name.")
    if not args.tasks and not args.val_samples:
        raise ConfigError("nothing to do: --val-samples 0 leaves the loss out, and --tasks names no task.")
    # From here on it takes a while: torch and lm-eval are imported, and the checkpoint is read.
    from llmscale.engine.silence_libraries import quiet_libraries
    from llmscale.evaluate.evaluation import Request, evaluate
    from llmscale.evaluate.lm_eval_tasks import find_tasks
    from llmscale.evaluate.subject import open_subject
    from llmscale.terminal.progress import show_progress

    quiet_libraries()
    harness = find_tasks(named, args.task_folder, args.limit) if named else None
    if harness is not None:
        for file in files:
            if file.name in harness.result_names:
                raise ConfigError(
                    f"{file.path} and a task of lm-eval are both named '{file.name}', and so would be their results. "
                    "Evaluate them one after the other."
                )
    with show_progress("Verifying the checkpoint") as verified:
        subject = open_subject(folder, args.data, verified.add)
    if subject.sets is None and args.val_samples:
        if not args.tasks:
            raise ConfigError(
                f"{folder} is a folder of transformers and names no set. Name one with --data, or --tasks."
            )
        report("no validation loss: a folder of transformers names no set; --data does")
    request = Request(
        [file.first(args.limit) for file in files], harness, args.limit, args.val_samples, args.batch_size
    )
    counter = _Counter()
    evaluation = evaluate(subject, request, counter.add)
    counter.clear()
    for line in result_lines(evaluation):
        print_visible(line)
    if args.json is not None:
        from llmscale.files.whole import write_output

        try:
            write_output(args.json, json.dumps(evaluation.as_dict(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {args.json} cannot be written: {error.strerror}. Name another file.") from None
    return 0


def _check_output(path: Path) -> None:
    """Refuse, before anything is computed, a file that cannot be written."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder. Name a file.")
    if not folder.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {folder}. Make it, or name another file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written: permission denied. Name another file.")


def result_lines(evaluation: Evaluation) -> Iterator[str]:
    """A line for each number, and below HellaSwag's what published models of that size have."""
    from llmscale.evaluate.evaluation import total_loss
    from llmscale.evaluate.task_scores import show_value

    subject = evaluation.subject
    size = subject.shape.num_parameters
    step = "" if subject.step is None else f", step {subject.step:,}"
    yield f"{subject.folder}{step}, {size:,} parameters"
    rows: list[tuple[str, str, str, str]] = []
    if evaluation.losses:
        count = f"{sum(loss.num_samples for loss in evaluation.losses):,} sequences"
        rows += [
            ("validation", name, show_value(value), count) for name, value in total_loss(evaluation.losses).items()
        ]
    if len(evaluation.losses) > 1:
        rows += [(loss.name, "loss", f"{loss.loss:.4f}", f"{loss.num_samples:,}") for loss in evaluation.losses]
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


def _task_rows(task: TaskResult) -> Iterator[tuple[str, str, str, str]]:
    from llmscale.evaluate.task_scores import show_value

    for metric, value in task.values.items():
        shown = show_value(value)
        if metric.partition(" ")[0] in _SHARES and task.num_items > 1:
            # Of a mean of zeros and ones, as lm-eval has it.
            shown += f" +- {math.sqrt(max(0.0, value * (1 - value)) / (task.num_items - 1)):.4f}"
        yield task.task, metric, shown, f"{task.num_items:,} items" if task.num_items else ""


class _Counter:
    """Sequences that are done, on stderr: a line that renews itself on a terminal, else one now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._what, self._count, self._shown_s = "", 0, time.monotonic()

    def add(self, what: str, total: int | None, count: int) -> None:
        """`count` more, of `total` where that is known."""
        self._count = count + (self._count if what == self._what else 0)
        self._what = what
        if time.monotonic() - self._shown_s < (_TERMINAL_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S):
            return
        self._shown_s = time.monotonic()
        begin, end = ("\r\x1b[2K", "") if self._is_terminal else ("", "\n")
        of = "" if total is None else f" of {total:,}"
        print(f"{begin}{make_visible_line(what)}: {self._count:,}{of} sequences", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
