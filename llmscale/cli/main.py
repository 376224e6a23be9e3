"""The `llmscale` command: one subcommand per file or package of this folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from llmscale import __version__
from llmscale.config.flag_parser import FlagParser
from llmscale.last_words import guarded

#: In the order of the questions that they answer; each is a module of this folder, or a package with a `command`.
COMMANDS = ("plan", "estimate", "data", "doctor", "train", "launch", "report", "sample", "checkpoint")
PACKAGES = ("plan", "estimate")


def build_parser(argv: Sequence[str]) -> FlagParser:
    """The subcommand that `argv` names, or all; each sets `handler`, from parsed arguments to the exit status.

    Only what is needed is imported: an estimate must not wait for the supervisor's modules.
    """
    parser = FlagParser(
        prog="llmscale",
        description="Train a GPT under DeepSpeed ZeRO on anything from one CPU to many nodes, and never lose a sample.",
        epilog="Training itself: llmscale train --ds ds_configs/zero2.json (--help lists every key).",
    )
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in argv[:1] if argv and argv[0] in COMMANDS else COMMANDS:
        module = f"{name}.command" if name in PACKAGES else name
        importlib.import_module(f"llmscale.cli.{module}").add_parser(subcommands)
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
