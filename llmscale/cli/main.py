"""The `llmscale` command: one subcommand per file or package of this folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from llmscale import __version__
from llmscale.config.flag_parser import FlagParser
from llmscale.last_words import guarded

#: What each is for, in the order of the questions that they answer; each is a module of this folder, or a package with
#: a `command`.
COMMANDS = {
    "plan": "what a budget trains, or what a model costs: size, tokens, steps, hours, money, disk",
    "estimate": "which ZeRO stage, offload and micro-batch fit your GPUs, and how fast they are",
    "data": "turn text into shards that stream and resume; look at and check them",
    "doctor": "check hosts, network, disks and configuration before a launch",
    "train": "train on this machine, on all of its GPUs",
    "launch": "train on many hosts, and go on when one of them fails",
    "report": "a run's loss curve and results, in the terminal",
    "eval": "validation loss, HellaSwag and lm-eval's tasks, straight from a checkpoint",
    "sample": "generate text from a run's newest weights",
    "export": "a run's newest weights and tokenizer for Hugging Face transformers",
    "prune": "half of the weights of linear layers zero, two of every four: a folder for transformers",
    "checkpoint": "list, show, verify and compare checkpoints",
}
PACKAGES = ("plan", "estimate")


def build_parser(argv: Sequence[str]) -> FlagParser:
    """The subcommand that `argv` names, which sets `handler`, from parsed arguments to the exit status; else all names.

    Only what is needed is imported: an estimate must not wait for the supervisor's modules, nor --help for any.
    """
    parser = FlagParser(
        prog="llmscale",
        description="Train a GPT under DeepSpeed ZeRO on anything from one CPU to many nodes, and never lose a sample.",
        epilog="Training itself: llmscale train --ds ds_configs/zero2.json (--help lists every key).",
    )
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    name = next((word for word in argv if not word.startswith("-")), "")
    if name in COMMANDS:
        module = f"{name}.command" if name in PACKAGES else name
        importlib.import_module(f"llmscale.cli.{module}").add_parser(subcommands)
    else:
        for command, purpose in COMMANDS.items():
            subcommands.add_parser(command, help=purpose)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a user's mistake is one line on stderr and exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"]:
        # All that follows is parsed with train.py's flags, in cli/train.py.
        argv = ["train", "--", *argv[1:]]
    return guarded(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    args = build_parser(argv).parse_args(argv)
    status: int = args.handler(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
