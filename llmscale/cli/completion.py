"""`llmscale completion bash|zsh|fish`: the script by which a shell completes commands, flags, names and paths.

The script holds everything: completing starts no Python.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from llmscale.config import flag_type
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser

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
#: Flags of train.py that name files or folders.
_PATH_KEYS = ("config", "ds", "data", "data_cache", "run", "resume", "init_from")


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `completion`."""
    parser = subparsers.add_parser(
        "completion",
        description="Prints a script for your shell. To install it:",
        epilog=_INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="bash|zsh|fish", help="whose script")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs shtab: `pip install shtab`.") from None
    parser = _whole_parser()
    names, paths = _known_names(), {f"--{key.replace('_', '-')}" for key in _PATH_KEYS}
    for action in _actions(parser):
        option = next((word for word in action.option_strings if word.startswith("--")), "")
        is_path = action.type in (flag_type.path, flag_type.path_or_url) or option in paths
        if option in names and not action.choices:
            _set_completion(action, _names_and_files(option, names[option]) if is_path else names[option])
        elif is_path:
            _set_completion(action, shtab.FILE)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _whole_parser() -> FlagParser:
    """Every command with all of its flags, train.py's included."""
    from llmscale.cli.main import COMMANDS, add_command, new_parser
    from llmscale.cli.train import add_own_flags
    from llmscale.config.arguments import add_run_config_flags

    parser, subcommands = new_parser()
    for name in COMMANDS:
        if name == "train":
            # Its own parser hands every word on.
            train = subcommands.add_parser(name, help=COMMANDS[name])
            add_own_flags(train)
            add_run_config_flags(train)
        else:
            add_command(name, subcommands)
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of all below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _known_names() -> Mapping[str, Iterable[str]]:
    """What stands for a flag's value, by the flag."""
    from llmscale.cli.flags import LIST
    from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES
    from llmscale.config.hardware import GPUS
    from llmscale.config.interconnect import INTERCONNECTS
    from llmscale.config.presets import PRESETS
    from llmscale.config.run_config import RunConfig

    literals = {key: tuple(_literals(field.annotation)) for key, field in RunConfig.model_fields.items()}
    return {f"--{key.replace('_', '-')}": values for key, values in literals.items() if values} | {
        "--model": PRESETS,
        "--gpu": [*(gpu.name for gpu in GPUS), LIST],
        "--interconnect": [*(network.name for network in INTERCONNECTS), LIST],
        "--ds": DS_CONFIGS.names(),
        "--hostfile": HOSTFILES.names(),
        "--tokenizer": ["gpt2", "bytes"],
    }


def _literals(annotation: object) -> Iterator[str]:
    """The words of a Literal, wherever it stands in a type."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from (str(word) for word in typing.get_args(annotation))
    else:
        for inner in typing.get_args(annotation):
            yield from _literals(inner)


def _set_completion(action: argparse.Action, completion: object) -> None:
    """In the way of shtab: words are choices, everything else its own attribute."""
    if isinstance(completion, dict) and "bash" in completion:
        action.complete = completion  # type: ignore[attr-defined]  # shtab's
    else:
        action.choices = list(completion)  # type: ignore[call-overload]  # an iterable of names


def _names_and_files(option: str, names: Iterable[str]) -> dict[str, object]:
    """For shtab: names that llmscale knows, and files."""
    function, words = f"_llmscale{option.replace('-', '_')}", " ".join(names)
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{words} (__fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"\n}}\n',
            "zsh": f"{function}() {{\n  _alternative 'names:name:({words})' 'files:file:_files'\n}}\n",
        },
    }
