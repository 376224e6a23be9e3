"""`llmscale reproduce NAME`: data, training, evaluation and report of a recipe, beside published numbers.

A recipe is one TOML file: flags of each command, and published numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from llmscale import limits
from llmscale.cluster.hostfile import parse_hostfile
from llmscale.cluster.launch.ranks import count_gpus, end_with_parent
from llmscale.cluster.remote import search_path
from llmscale.config.bundled_files import BundledFiles, install_command
from llmscale.config.command_line import FlagParser, Need, flag, local_path, nonblank, quantity, whole_number
from llmscale.config.launcher_variables import check_is_only_copy
from llmscale.config.run_config import NonBlank, parse_run_config
from llmscale.config.run_flags import flag_words, model_keys
from llmscale.config.user_paths import check_output_folder
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.errors import ConfigError, DataError, LlmscaleError, write_failure
from llmscale.files.atomic_write import write_durably, write_parts_durably
from llmscale.report.history import load_history
from llmscale.report.run_list import read_run
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.terminal.human_numbers import format_quantity
from llmscale.terminal.table import Column, output_width, table_lines
from llmscale.training.stop_request import STOP_SIGNALS
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, LINE_MAX_BYTES, Rules, load_json, load_toml, parse_json
from llmscale.untrusted.interpreter import module_command
from llmscale.untrusted.terminal import print_visible

RECIPES = BundledFiles("recipes", ".toml")
Flags = Mapping[str, bool | int | float | str | list[str]]
#: Flags by table that `reproduce` gives itself.
_DECIDED = {"data": ("out",), "run": ("data", "text", "run"), "evaluation": ("json",)}
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
_HUB = "hf:"
#: Names within the folder.
_DATA, _RUN, _EVALUATION, _REPORT = "data", "run", "evaluation.json", "report.html"
_RULES = Rules(ConfigError, not_finite=True, large_numbers=True)
#: Most bytes of a downloaded split of items; HellaSwag's validation has 12 MB.
_MOST_ITEM_BYTES = 1 << 30
Numbers = dict[str, float]


def _check_metric(name: str) -> str:
    if not re.fullmatch(r"tokens|hours|GPU-hours|cost|[\w.-]+ \w+", name):
        raise ValueError(
            "must be tokens, hours, GPU-hours, cost, or two words such as 'validation loss' or 'hellaswag acc'"
        )
    return name


class PublishedNumber(BaseModel):
    """A number to compare with."""

    model_config = _STRICT
    metric: Annotated[str, AfterValidator(_check_metric)]
    """tokens, hours, GPU-hours or cost of training; or `validation loss`, `validation bits_per_byte`, `TASK METRIC`."""
    value: float
    source: NonBlank


class Recipe(BaseModel):
    """A recipe. Its tables hold flags of one command each, with underscores."""

    model_config = _STRICT
    title: NonBlank
    data: Flags
    """Flags of `llmscale data prepare`."""
    run: Flags
    """Flags of `llmscale train`."""
    evaluation: Flags = {}
    """Flags of `llmscale eval`. A task's file is relative to the recipe, or hf:DATASET:SPLIT, which is downloaded."""
    plan: Flags = {}
    """Flags of `llmscale plan` about GPUs, for the prediction."""
    published: list[PublishedNumber] = []


def find_recipe(name: str) -> Path:
    """Return llmscale's own recipe of that name. Raises ConfigError."""
    names = RECIPES.names()
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(f"'{name}' is not a recipe.{hint} Legal: {', '.join(names)}, or --recipe FILE.")
    return RECIPES.folder / f"{name}{RECIPES.suffix}"


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; the commands check their flags. Raises ConfigError naming the first wrong entry."""
    where = f"recipe {path}"
    try:
        return Recipe.model_validate(load_toml(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), where))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "constrained")))
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(name, Recipe.model_fields)
            raise ConfigError(f"{where}: '{name}' is not an entry of a recipe.{hint}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}: '{name}' is missing.") from None
        if len(first["loc"]) > 2 and first["loc"][0] != "published":
            table, key = first["loc"][:2]
            rule = "must be a text, a number, true, false or a list of texts"
            raise ConfigError(f"{where}: {table}.{key} = {first['input']!r}: {rule}.") from None
        raise ConfigError(f"{where}: {describe_invalid(name, first)}") from None


def add_parser(subcommands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `reproduce`."""
    parser = subcommands.add_parser(
        "reproduce",
        description="Prepare the data of a recipe, train, evaluate, write a report, and print a table beside published "
        "numbers. Interrupt it at any place: the same command continues, and repeats nothing that is done. Exit "
        "status: 0 finished, 128 + N stopped by signal N, else that of the step that failed.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(RECIPES.names()))
    flag(parser, "--recipe FILE", "recipe of your own (docs/reproduce.md)", local_path)
    flag(parser, "--out DIR", "folder of everything; default: reproduced/NAME", local_path)
    flag(parser, "--hostfile FILE|NAME", "hosts to train on, by `llmscale launch`; default: this machine", local_path)
    num_gpus = whole_number(1, limits.MAX_GPUS_PER_NODE)
    flag(parser, "--num-gpus N", "GPUs or processes of this machine; default: all GPUs", num_gpus)
    flag(parser, "--gpu NAME", "GPU for the prediction; default: the recipe's", nonblank)
    flag(parser, "--price-per-gpu-hour USD", "price for the cost; default: the recipe's", quantity(1e-4, 1e6))
    flag(parser, "--dry-run", "print the commands and the prediction, and do nothing")
    parser.needs = [Need("num_gpus", "with --hostfile", lambda args: not args.hostfile)]
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    check_is_only_copy(os.environ, "llmscale reproduce")
    if (args.name is None) == (args.recipe is None):
        legal = f"{', '.join(RECIPES.names())}, or --recipe FILE"
        raise ConfigError(f"reproduce what? Name one recipe: {legal}.")
    path = args.recipe or find_recipe(args.name)
    project = _Project(path, load_recipe(path), args.out or Path("reproduced") / path.stem, args)
    steps = list(project.steps())
    planning = project.plan_words()
    _check_flags(project, [*(step.words for step in steps), planning])
    predicted = _predict(planning)
    print_visible(f"{path.stem}: {project.recipe.title}")
    print_visible(f"prediction: {_shown(planning) if planning else 'none without GPUs; --gpu NAME assumes one'}")
    if predicted:
        print_visible("  " + ", ".join(f"{name} {_show(name, value)}" for name, value in predicted.items()))
    if "gpu" in project.recipe.plan and not args.hostfile and not count_gpus():
        print_visible("WARNING: this machine has no NVIDIA GPU, and the recipe is made for some.")
    if not args.dry_run:
        _claim(project)
    for step in steps:
        if not args.dry_run and step.is_done():
            print_visible(f"{step.name}: done")
            continue
        print_visible(f"{step.name}: {_shown(step.words) if step.words else 'download'}", flush=True)
        if not args.dry_run and (status := _carry_out(step)):
            return status
    if not args.dry_run:
        lines = table_lines(_COLUMNS, list(_rows(project, predicted)), output_width())
        print_visible("\n".join(["", *lines, "", f"report: {project.out / _REPORT}"]))
    return 0


@dataclass(frozen=True)
class _Step:
    """One part of the work."""

    name: str
    words: Sequence[str]
    """Command of llmscale."""
    is_done: Callable[[], bool]
    """Reads from the files on disk whether it is done."""
    action: Callable[[], None] | None = None
    """Action of this process in place of a command."""


@dataclass(frozen=True)
class _Project:
    """A recipe, and the folder of what is made by it."""

    path: Path
    recipe: Recipe
    out: Path
    args: argparse.Namespace

    def steps(self) -> Iterator[_Step]:
        """Yield all steps in order."""
        data, run, evaluation, report = (self.out / name for name in (_DATA, _RUN, _EVALUATION, _REPORT))
        words = ["data", "prepare", *_words({**self.recipe.data, "out": str(data)})]
        yield _Step("data", words, (data / MANIFEST_NAME).is_file)
        tasks: list[str] = []
        for task in map(str, _listed(self.recipe.evaluation.get("tasks", []))):
            name, equals, source = task.partition("=")
            path = self.path.parent / source
            if source.startswith(_HUB):
                path = self.out / f"{name}.jsonl"
                yield _download_step(source, path)
            tasks.append(f"{name}={path}" if equals else task)
        start = ["train", *(_words({"num_gpus": self.args.num_gpus}) if self.args.num_gpus else [])]
        if self.args.hostfile:
            start = ["launch", "--hostfile", str(self.args.hostfile), "--"]
        words = [*start, *_words({"data": str(data), "run": str(run), **self.recipe.run})]
        yield _Step("training", words, lambda: _finished_step(run) is not None)
        words = ["eval", str(run), *_words({**self.recipe.evaluation, "tasks": tasks, "json": str(evaluation)})]
        yield _Step("evaluation", words, lambda: _load(evaluation).get("step", -1) == _finished_step(run))
        words = ["report", str(run), "--html", str(report)]
        yield _Step("report", words, lambda: _is_newer(report, evaluation))

    def task_files(self) -> Iterator[str]:
        """Yield the tasks whose items are not downloaded."""
        for task in map(str, _listed(self.recipe.evaluation.get("tasks", []))):
            name, equals, source = task.partition("=")
            if equals and not source.startswith(_HUB):
                yield f"{name}={self.path.parent / source}"

    def plan_words(self) -> list[str]:
        """Return the command that predicts time and cost, or nothing without GPUs. Raises ConfigError."""
        recipe, args = self.recipe, self.args
        given = {key: getattr(args, key) for key in ("gpu", "num_gpus", "price_per_gpu_hour") if getattr(args, key)}
        if args.hostfile:
            hosts = parse_hostfile(args.hostfile)
            given |= {"num_nodes": len(hosts), "num_gpus": hosts[0].slots}
        flags = {"num_nodes": 1, **recipe.plan, **given}
        if "gpu" not in flags:
            return []
        config = parse_run_config(_words(recipe.run))
        seq_len = int(str(recipe.data.get("seq_len", 1024)))
        batch = config.global_batch_size or (config.global_batch_tokens or 0) // seq_len
        tokens = config.tokens or (config.steps or 0) * batch * seq_len
        if not batch or not tokens:
            raise ConfigError(
                f"recipe {self.path}: a prediction needs run.global_batch_size, and run.steps or run.tokens."
            )
        model = {"model": config.model, **{key: recipe.run[key] for key in model_keys() if key in recipe.run}}
        flags = {**model, "seq_len": seq_len, "tokens": tokens, "global_batch_size": batch, **flags}
        return ["plan", *_words(flags)]


def _words(flags: Flags) -> list[str]:
    """Return a table of a recipe as flags."""
    return [word for key, value in flags.items() for one in _listed(value) for word in flag_words(key, one)]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _check_flags(project: _Project, commands: Sequence[Sequence[str]]) -> None:
    """Let every command parse its words and read its items, before the first one starts. Raises ConfigError."""
    from llmscale.cli.main import build_parser
    from llmscale.evaluate.tasks import load_task_files

    try:
        for table, keys in _DECIDED.items():
            for key in keys:
                if key in getattr(project.recipe, table):
                    raise ConfigError(f"{table}.{key} is decided by --out. Remove it.")
        parse_run_config(_words(project.recipe.run))
        for words in commands:
            if words[:1] in (["data"], ["eval"], ["plan"]):
                build_parser(words).parse_args(words)
        load_task_files(project.task_files())
    except LlmscaleError as error:
        raise ConfigError(f"recipe {project.path}: {error}") from None


def _finished_step(run: Path) -> int | None:
    """Return the last step of a finished run, else None."""
    found = read_run(run)
    return found.step if found.state == "finished" and found.step == found.total_steps else None


def _shown(words: Sequence[str]) -> str:
    return f"llmscale {shlex.join(words)}"


def _is_newer(path: Path, other: Path) -> bool:
    return path.is_file() and path.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _load(path: Path) -> Mapping[str, object]:
    """Return the contents of a JSON file, or nothing."""
    try:
        return load_json(path, _RULES)
    except (OSError, LlmscaleError):
        return {}


def _download_step(source: str, path: Path) -> _Step:
    """Return the step that writes a split of a dataset on the Hub as JSON lines."""
    name, _, split = source.removeprefix(_HUB).rpartition(":")

    def download() -> None:
        try:
            from datasets import load_dataset

            records = load_dataset(name, split=split, streaming=True, trust_remote_code=False)
            write_parts_durably(path, _item_lines(records, path))
        except ImportError:
            raise DataError(f"{source} needs the `datasets` library: `{install_command('data')}`.") from None
        except LlmscaleError as error:
            raise DataError(f"{source}: {error}") from None
        except Exception as error:  # the client raises many classes
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise DataError(f"{source} cannot be read: {why}. Put its items into {path} as JSON lines.") from error

    return _Step(f"items of {source} in {path}", (), path.is_file, download)


def _item_lines(records: Iterable[object], path: Path) -> Iterator[str]:
    """Yield a stranger's records as JSON lines. Raises DataError beyond the limits."""
    left = _MOST_ITEM_BYTES
    for number, record in enumerate(records, 1):
        line = json.dumps(record) + "\n"
        left -= len(line)
        if len(line) > LINE_MAX_BYTES or left < 0:
            raise DataError(
                f"item {number:,} is beyond the limits of {LINE_MAX_BYTES >> 20} MiB an item and "
                f"{_MOST_ITEM_BYTES >> 20:,} MiB in all. Name a smaller split, or put items into {path} as JSON lines."
            )
        yield line


def _claim(project: _Project) -> None:
    """Keep the recipe in the folder. Raises LlmscaleError if the folder belongs to another one, or is not writable."""
    check_output_folder("--out", project.out)
    kept = project.out / "recipe.toml"
    try:
        contents = project.path.read_bytes()
        if kept.is_file() and kept.read_bytes() != contents:
            raise ConfigError(f"--out {project.out} was begun with another recipe ({kept}). Name another --out.")
        project.out.mkdir(parents=True, exist_ok=True)
        write_durably(kept, contents)
    except OSError as error:
        raise write_failure(error, kept) from None


def _carry_out(step: _Step) -> int:
    """Do a step, and return 0 if it is done and nobody asked to stop."""
    received: list[int] = []
    status = 0
    if step.action:
        step.action()
    else:
        status = run_command(step.words, received)
    if received:
        print_visible(f"stopped by {signal.Signals(received[0]).name} in {step.name}. The same command continues.")
        return 128 + received[0]
    if step.is_done():
        return 0
    print_visible(f"{step.name} is not done. The same command continues.")
    return status or 1


def run_command(words: Sequence[str], received: list[int]) -> int:
    """Run `llmscale ...`, note signals in `received` and pass them on, and return its status, 128 + N for signal N."""
    # In a separate session, Ctrl-C in the terminal reaches this process alone, which passes it on once.
    process = subprocess.Popen(
        module_command("llmscale", *words),
        env={**os.environ, "PYTHONPATH": search_path(os.environ.get("PYTHONPATH"))},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    numbers = [number for number in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        status = process.wait()
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _predict(words: Sequence[str]) -> Numbers:
    """Return what `llmscale plan` says of the run. Raises ConfigError."""
    if not words:
        return {}
    done = subprocess.run(module_command("llmscale", *words, "--json"), capture_output=True, text=True)
    if not done.stdout:
        raise ConfigError(f"llmscale plan: {done.stderr.strip().removeprefix('error: ')}")
    plan = parse_json(done.stdout, _RULES, "llmscale plan")
    run = plan.get("run")
    found = {"tokens": plan["tokens"], **(run if isinstance(run, dict) else {})}
    names = {"tokens": "tokens", "hours": "hours", "gpu_hours": "GPU-hours", "cost_usd": "cost"}
    return {names[key]: value for key, value in found.items() if key in names and isinstance(value, (int, float))}


def _measure(project: _Project) -> Numbers:
    """Return the numbers of the evaluation and of training, without starts and the time between them."""
    evaluation = _load(project.out / _EVALUATION)
    tasks, parts = evaluation.get("tasks"), {"validation": evaluation.get("validation")}
    parts |= {name: task["values"] for name, task in tasks.items()} if isinstance(tasks, dict) else {}
    numbers = {
        f"{part} {name}": value
        for part, values in parts.items()
        for name, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, float)
    }
    history = load_history(project.out / _RUN)
    hours = sum(seconds for use, seconds in history.wall.seconds.items() if use != "starts") / 3600
    numbers |= {"tokens": max(history.tokens_seen.values()), "hours": hours}
    _, start = history.of_kind("event", "start")[-1]
    if start.get("device") != "cpu":
        numbers["GPU-hours"] = hours * int(str(start["world_size"]))
        price = project.args.price_per_gpu_hour or project.recipe.plan.get("price_per_gpu_hour")
        numbers |= {"cost": numbers["GPU-hours"] * float(str(price))} if price else {}
    return numbers


_COLUMNS = (
    *(Column("", is_text=True), Column("predicted"), Column("here"), Column("published")),
    Column("source", is_text=True, least=20),
)


def _rows(project: _Project, predicted: Numbers) -> Iterator[list[str]]:
    """Yield a row per number: predicted, measured here, published."""
    here, published = _measure(project), {number.metric: number for number in project.recipe.published}
    for name in dict.fromkeys([*here, *predicted, *published]):
        found = published.get(name)
        values = (predicted.get(name), here.get(name), found.value if found else None)
        shown = ("-" if value is None else _show(name, value) for value in values)
        yield [name, *shown, found.source if found else ""]


def _show(name: str, value: float) -> str:
    if name == "tokens":
        return format_quantity(value)
    if name == "cost":
        return f"${value:,.2f}"
    return f"{value:.4f}" if " " in name else f"{value:,.2f}"
