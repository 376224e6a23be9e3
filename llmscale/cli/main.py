"""The `llmscale` command: one subcommand per file or package of this folder."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence

from llmscale import __version__
from llmscale.config.flag_parser import FlagParser
from llmscale.error_handling import run_cli
from llmscale.terminal.colour import paint

#: What each is for, in the order of the questions that they answer; each is a module of this folder, or a package with
#: a `command`.
COMMANDS = {
    "plan": "what a budget trains, or what a model costs: size, tokens, steps, hours, money, disk",
    "estimate": "which ZeRO stage, offload and micro-batch fit your GPUs, and how fast they are",
    "data": "turn text into shards that stream and resume; look at and check them",
    "doctor": "check hosts, network, disks and configuration before a launch",
    "train": "train on this machine, on all of its GPUs",
    "launch": "train on many hosts, and go on when one of them fails",
    "runs": "every run below a folder: step, loss, state, command",
    "report": "curves and results of runs: in the terminal, as a page, a picture or JSON",
    "eval": "validation loss, HellaSwag and lm-eval's tasks, straight from a checkpoint",
    "sample": "generate text from a run's newest weights",
    "export": "a run's newest weights and tokenizer for Hugging Face transformers",
    "prune": "half of the weights of linear layers zero, two of every four: a folder for transformers",
    "checkpoint": "list, show, verify and compare checkpoints",
    "completion": "the script by which bash, zsh or fish complete all of this",
}
PACKAGES = ("plan", "estimate")
#: Of every command, what follows `llmscale`.
EXAMPLES = {
    "plan": "plan --budget-usd 10000 --gpu h100-80gb --price-per-gpu-hour 2.5",
    "estimate": "estimate --model gpt2-1.5b --gpu a100-80gb --num-gpus 8",
    "data": "data prepare --input 'texts/*.txt' --out data/mine",
    "doctor": "doctor --ds zero2",
    "train": "train --ds zero2 --data data/mine --model gpt2-124m",
    "launch": "launch --hostfile hosts -- --ds zero3 --data data/mine --model gpt2-1.5b",
    "runs": "runs",
    "report": "report runs/default",
    "eval": "eval runs/default --tasks hellaswag=hellaswag_val.jsonl",
    "sample": "sample runs/default 'Once upon a time'",
    "export": "export runs/default --to exported",
    "prune": "prune runs/default --to pruned",
    "checkpoint": "checkpoint list runs/default",
    "completion": "completion bash",
}
_DESCRIPTION = "Train a GPT under DeepSpeed ZeRO on anything from one CPU to many nodes, and never lose a sample."


def new_parser() -> tuple[FlagParser, argparse._SubParsersAction[FlagParser]]:
    """The `llmscale` command, and where its subcommands are added."""
    parser = FlagParser(
        prog="llmscale",
        description=_DESCRIPTION,
        epilog="Training itself: llmscale train --ds zero2 (--help lists every key). llmscale alone "
        "shows an example of each.",
    )
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    return parser, parser.add_subparsers(metavar="COMMAND", required=True)


def add_command(name: str, subcommands: argparse._SubParsersAction[FlagParser]) -> None:
    """Import one subcommand, and add it with an example."""
    module = f"{name}.command" if name in PACKAGES else name
    importlib.import_module(f"llmscale.cli.{module}").add_parser(subcommands)
    # Without a help text it would be a command that is not shown.
    subcommands._choices_actions.append(subcommands._ChoicesPseudoAction(name, (), COMMANDS[name]))
    parser = subcommands.choices[name]
    _describe(parser, COMMANDS[name])
    parser.epilog = parser.epilog or f"Example: llmscale {EXAMPLES[name]}"


def build_parser(argv: Sequence[str]) -> FlagParser:
    """The subcommand that `argv` names, which sets `handler`, from parsed arguments to the exit status; else all names.

    Only what is needed is imported: an estimate must not wait for the supervisor's modules, nor --help for any.
    """
    parser, subcommands = new_parser()
    name = next((word for word in argv if not word.startswith("-")), "")
    if name in COMMANDS:
        add_command(name, subcommands)
    else:
        for command, purpose in COMMANDS.items():
            subcommands.add_parser(command, help=purpose)
    return parser


def _describe(parser: argparse.ArgumentParser, purpose: str) -> None:
    """What the list of commands says of one, its own --help says too, where it has nothing better."""
    parser.description = parser.description or f"{purpose[0].upper()}{purpose[1:]}."
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for said in action._choices_actions:
                _describe(action.choices[said.dest], said.help or said.dest)


def _overview() -> Iterator[str]:
    """What it can do, with an example of each."""
    import textwrap  # only here: every command would wait for it, and for the next

    from llmscale.terminal.table import output_width

    yield f"llmscale {__version__}. {_DESCRIPTION}"
    yield ""
    indent = " " * (max(map(len, COMMANDS)) + 4)
    for name, purpose in COMMANDS.items():
        first, *rest = textwrap.wrap(purpose, max(30, (output_width() or 120) - len(indent)))
        yield f"  {paint(name, 'bold', sys.stdout)}{indent[len(name) + 2 :]}{first}"
        yield from (indent + line for line in rest)
        yield f"{indent}{paint(f'llmscale {EXAMPLES[name]}', 'dim', sys.stdout)}"
    yield ""
    yield "llmscale COMMAND --help lists every flag of a command."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a user's mistake is one line on stderr and exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        return run_cli(_show_overview)
    if argv[0] == "train":
        # All that follows is parsed with train.py's flags, in cli/train.py.
        argv = ["train", "--", *argv[1:]]
    return run_cli(lambda: _run(argv))


def _show_overview() -> int:
    for line in _overview():
        print(line)
    return 0


def _run(argv: Sequence[str]) -> int:
    args = build_parser(argv).parse_args(argv)
    status: int = args.handler(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
