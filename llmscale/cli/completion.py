"""`llmscale completion bash|zsh|fish`: print a script for completion, which starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from llmscale.config.command_line import FittingHelp, local_path, path_or_url, run_place
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser

SHELLS = ("bash", "zsh", "fish")
_INSTALL = """\
  bash   llmscale completion bash > \\
    ~/.local/share/bash-completion/completions/llmscale
         or, for this shell alone:
    source <(llmscale completion bash)
  zsh    llmscale completion zsh > "${fpath[1]}/_llmscale"
  fish   llmscale completion fish > \\
    ~/.config/fish/completions/llmscale.fish
"""


class _AsWritten(argparse.RawDescriptionHelpFormatter, FittingHelp):
    """Help whose description and epilog keep their lines."""


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `completion`."""
    parser = subparsers.add_parser(
        "completion",
        description="Prints a script for your shell. To install it:",
        epilog=_INSTALL,
        formatter_class=_AsWritten,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="bash|zsh|fish", help="shell")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs shtab: `pip install shtab`.") from None
    parser = _full_parser()
    from llmscale.config.run_keys import path_keys

    names = _known_names()
    paths = {f"--{key.replace('_', '-')}" for key in path_keys()}
    for action in _actions(parser):
        option = next((word for word in action.option_strings if word.startswith("--")), "")
        is_path = action.type in (local_path, path_or_url, run_place) or option in paths
        if action.choices:
            known = []
        else:
            known = names.get(option, [])
        if is_path:
            completion = _names_and_files(option, known) if known else shtab.FILE
            action.complete = completion  # type: ignore[attr-defined]  # shtab's
        elif known:
            action.choices = known
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _full_parser() -> FlagParser:
    """Return the parser with all commands and flags, those of a run included."""
    from llmscale.cli.main import COMMANDS, add_command, new_parser
    from llmscale.cli.train import add_own_flags
    from llmscale.config.run_arguments import add_run_config_flags

    parser, subcommands = new_parser()
    for name in COMMANDS:
        if name == "train":
            # cli/train.py adds its flags when it runs.
            train = subcommands.add_parser(name, help=COMMANDS[name].purpose)
            add_own_flags(train)
            add_run_config_flags(train)
        else:
            add_command(name, subcommands)
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _known_names() -> dict[str, list[str]]:
    """Return the names that complete a flag's value, by flag."""
    from llmscale.cli.flags import LIST
    from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES
    from llmscale.config.hardware import GPUS, INTERCONNECTS
    from llmscale.config.presets import PRESETS
    from llmscale.config.run_config import RunConfig
    from llmscale.config.run_flags import literal_words

    literals = {key: [*literal_words(field.annotation)] for key, field in RunConfig.model_fields.items()}
    return {f"--{key.replace('_', '-')}": values for key, values in literals.items()} | {
        "--model": [*PRESETS],
        "--gpu": [*(gpu.name for gpu in GPUS), LIST],
        "--interconnect": [*(network.name for network in INTERCONNECTS), LIST],
        "--ds": DS_CONFIGS.names(),
        "--hostfile": HOSTFILES.names(),
        "--tokenizer": ["gpt2", "bytes", "characters"],
    }


def _names_and_files(option: str, names: Iterable[str]) -> dict[str, object]:
    """Return a completion for shtab by names that llmscale knows and by files."""
    function = f"_llmscale{option.replace('-', '_')}"
    words = " ".join(names)
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{words} (__fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"\n}}\n',
            "zsh": f"{function}() {{\n  _alternative 'names:name:({words})' 'files:file:_files'\n}}\n",
        },
    }
