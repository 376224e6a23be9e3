"""The `llmscale` command: one subcommand per module of this folder."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from llmscale import __version__
from llmscale.config.bundled_files import explain_missing
from llmscale.config.command_line import FlagParser
from llmscale.config.user_paths import url_of
from llmscale.error_handling import run_cli
from llmscale.terminal.colour import paint

_DESCRIPTION = "Train a GPT under DeepSpeed ZeRO on anything from one CPU to many nodes, and never lose a sample."
_PYDANTIC_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Command(NamedTuple):
    """A subcommand."""

    purpose: str
    """Description in the list of commands."""
    example: str
    """Words of an example, after `llmscale`."""
    is_fast: bool = False
    """Run by `fast_start`: the command computes one answer and ends."""


#: Commands in the order of the questions that they answer; each is a module of this folder.
COMMANDS = {
    "plan": Command(
        "what a budget trains, or what a model costs: size, tokens, steps, hours, money, disk",
        "plan --budget-usd 10000 --gpu h100-80gb --price-per-gpu-hour 2.5",
        is_fast=True,
    ),
    "estimate": Command(
        "which ZeRO stage, offload and micro-batch fit your GPUs, and how fast they are",
        "estimate --model gpt2-1.5b --gpu a100-80gb --num-gpus 8",
        is_fast=True,
    ),
    "data": Command(
        "turn text into shards that stream and resume; inspect and check them",
        "data prepare --input 'texts/*.txt' --out data/mine",
    ),
    "doctor": Command("check hosts, network, disks and configuration before a launch", "doctor --ds zero2"),
    "train": Command(
        "train on this machine, on all of its GPUs", "train --ds zero2 --data data/mine --model gpt2-124m"
    ),
    "launch": Command(
        "train on many hosts, and continue when one of them fails",
        "launch --hostfile hosts -- --ds zero3 --data data/mine --model gpt2-1.5b",
    ),
    "ladder": Command(
        "train a ladder of sizes, fit a scaling law of your own, and predict larger runs",
        "ladder plan --flops 1e18 --data data/mine --out ladder",
    ),
    "runs": Command("every run below a folder: step, loss, state, command", "runs"),
    "report": Command(
        "curves and results of runs: in the terminal, as a page, a picture or JSON", "report runs/default"
    ),
    "replay": Command(
        "one step once more: the loss of each of its samples, the gradient of each parameter",
        "replay runs/default --step 612",
    ),
    "eval": Command(
        "validation loss, HellaSwag and lm-eval's tasks, straight from a checkpoint",
        "eval runs/default --tasks hellaswag=hellaswag_val.jsonl",
    ),
    "sample": Command("talk to a model, or generate text from a run's newest weights", "sample runs/default"),
    "export": Command(
        "a run's newest weights and tokenizer for Hugging Face transformers", "export runs/default --to exported"
    ),
    "prune": Command(
        "set two of every four weights of linear layers to zero: a folder for transformers",
        "prune runs/default --to pruned",
    ),
    "checkpoint": Command("list, show, verify and compare checkpoints", "checkpoint list runs/default"),
    "schema": Command("JSON schema of a run file or a mixture, for editors", "schema run"),
    "completion": Command("print the script that completes all of this in bash, zsh or fish", "completion bash"),
}


def new_parser() -> tuple[FlagParser, argparse._SubParsersAction[FlagParser]]:
    """Return the parser of `llmscale`, and the object to add its subcommands to."""
    parser = FlagParser(
        prog="llmscale",
        description=_DESCRIPTION,
        example=f"llmscale {COMMANDS['train'].example}",
        epilog="Training itself: llmscale train --ds zero2 (--help all lists every key). llmscale alone "
        "shows an example of each.",
    )
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    return parser, parser.add_subparsers(metavar="COMMAND", required=True)


def add_command(name: str, subcommands: argparse._SubParsersAction[FlagParser]) -> None:
    """Import one subcommand, and add its parser with an example."""
    importlib.import_module(f"llmscale.cli.{name}").add_parser(subcommands)
    # argparse does not list a command that was added without a help text.
    subcommands._choices_actions.append(subcommands._ChoicesPseudoAction(name, (), COMMANDS[name].purpose))
    parser = subcommands.choices[name]
    _describe(parser, COMMANDS[name].purpose)
    parser.example = f"llmscale {COMMANDS[name].example}"


def build_parser(argv: Sequence[str]) -> FlagParser:
    """Return the parser for `argv`; parsed arguments have `handler`, which returns the exit status.

    Only the named subcommand is imported, so that an estimate does not wait for the supervisor's modules.
    """
    parser, subcommands = new_parser()
    name = _command_name(argv)
    if name in COMMANDS:
        add_command(name, subcommands)
    else:
        for other, command in COMMANDS.items():
            subcommands.add_parser(other, help=command.purpose)
    return parser


def _command_name(argv: Sequence[str]) -> str:
    return next((word for word in argv if not word.startswith("-")), "")


def _describe(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Use the entry in the list of commands as description, for a parser and its subcommands without one."""
    parser.description = parser.description or f"{purpose[0].upper()}{purpose[1:]}."
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                _describe(action.choices[listed.dest], listed.help or listed.dest)


def _show_overview() -> int:
    """Print every command with an example."""
    import textwrap  # slow to import, like the next one

    from llmscale.terminal.table import output_width

    print(f"llmscale {__version__}. {_DESCRIPTION}\n")
    indent = " " * (max(map(len, COMMANDS)) + 4)
    for name, command in COMMANDS.items():
        first, *rest = textwrap.wrap(command.purpose, max(30, (output_width() or 120) - len(indent)))
        print(f"  {paint(name, 'bold', sys.stdout)}{indent[len(name) + 2 :]}{first}")
        for line in rest:
            print(indent + line)
        print(indent + paint(f"llmscale {command.example}", "dim", sys.stdout))
    print("\nllmscale COMMAND --help lists every flag of a command.")
    return 0


@contextmanager
def fast_start() -> Iterator[None]:
    """Disable the garbage collector, and pydantic's plugins, which read the entry points of every installed package."""
    was_enabled = gc.isenabled()
    plugins = os.environ.get(_PYDANTIC_PLUGINS)
    gc.disable()
    os.environ.setdefault(_PYDANTIC_PLUGINS, "__all__")
    try:
        yield
    finally:
        # Otherwise the collection at the end of the process would visit every object.
        gc.freeze()
        if was_enabled:
            gc.enable()
        if plugins is None:
            del os.environ[_PYDANTIC_PLUGINS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. A user's mistake is one line on stderr and exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        return run_cli(_show_overview)
    if argv[0] == "train":
        # cli/train.py parses all other words, with train.py's flags.
        argv = ["train", "--", *argv[1:]]
    return run_cli(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    command = COMMANDS.get(_command_name(argv))
    # A dry run creates garbage by the gigabyte.
    is_fast = command is not None and command.is_fast and "--dry-run" not in argv
    with fast_start() if is_fast else nullcontext():
        args = build_parser(argv).parse_args(argv)
        try:
            if getattr(args, "is_of_runs", True):
                _fetch_runs(args)
            status: int = args.handler(args)
        except ImportError as error:
            name = _command_name(argv)
            if (missing := explain_missing(error, name if name in ("data", "eval") else "train")) is None:
                raise
            raise missing from None
        return status


def _fetch_runs(args: argparse.Namespace) -> None:
    """Bring the copies of the runs that the arguments name by URL up to date. Raises LlmscaleError."""
    for value in vars(args).values():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and url_of(path):
                from llmscale.checkpoint.remote_run import fetch_run

                fetch_run(path)


if __name__ == "__main__":
    sys.exit(main())
