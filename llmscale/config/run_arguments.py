"""Parse a run's flags and its YAML or TOML file: flags override the file, and the file the defaults. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from llmscale import __version__
from llmscale.config.command_line import FlagParser
from llmscale.config.run_config import EXCLUSIVE_KEYS, RunConfig, build_run_config
from llmscale.config.run_flags import add_run_flags, describe_keys
from llmscale.config.run_keys import needs
from llmscale.config.user_paths import check_path, checked
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_settings

_EXAMPLE = "deepspeed --num_gpus 8 llmscale/train.py --ds zero2 --data data/mine --model gpt2-124m"


def parse_run_config(argv: Sequence[str], parser: FlagParser | None = None) -> RunConfig:
    """Return the run's configuration: flags override the `--config` file, and that the defaults.

    `parser` names the command and may have further flags. Raises ConfigError, and SystemExit after --help.
    """
    flags = parse_run_flags(argv, parser)
    for key, value in flags.items():
        # `null` and `[]` undo a key of the run file; a restart by `launch` needs that.
        if isinstance(value, list):
            flags[key] = [] if value == ["[]"] else [word for text in value for word in text.split(",")]
        elif value == "null":
            flags[key] = None
    file = flags.get("config")
    if file is None:
        from_file = {}
    else:
        from_file = load_run_file(checked(check_path, file, f"config = {file!r}"))
    for key, twin in EXCLUSIVE_KEYS:
        for own, overridden in ((key, twin), (twin, key)):
            if own in flags and overridden not in flags:
                from_file.pop(overridden, None)
    config = build_run_config({**from_file, **flags}, f"--config {flags.get('config')}: ", flags)
    _check_needs(config, flags, from_file)
    return config


def parse_run_flags(argv: Sequence[str], parser: FlagParser | None = None) -> dict[str, object]:
    """Return the values of the keys that flags give. Raises ConfigError for words other than flags of train.py."""
    parser = parser or FlagParser(prog="train.py", example=_EXAMPLE, add_help=False)
    add_run_config_flags(parser)
    text = "show the usual flags; all: every flag"
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="all", choices=["all"], help=text)
    parser.lists_all = "--help all"
    given = vars(parser.parse_args(_normalise_flags(argv)))
    return {key: value for key, value in given.items() if value is not None and key in RunConfig.model_fields}


class _Help(argparse.Action):
    """`--help`: the usual flags in short; `--help all`: every flag with its full text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        """Print the help, and end the program."""
        assert isinstance(parser, FlagParser)
        parser.print_help() if values else _short_help(parser).print_help()
        parser.exit()


def _short_help(parser: FlagParser) -> FlagParser:
    """Return a parser with the usual keys alone, and the flags of `parser` beside the keys."""
    short = FlagParser(prog=parser.prog, example=parser.example, description=parser.description, add_help=False)
    fields = RunConfig.model_fields
    documented = describe_keys()
    names = [key for key, text in documented.items() if text.usual]
    annotations = {key: fields[key].annotation for key in names}
    defaults = {key: fields[key].default for key in names}
    add_run_flags(short, names, annotations=annotations, defaults=defaults, is_short=True)
    for action in parser._actions:
        if action.dest not in (*documented, "version"):
            short._add_action(action)
    return short


def add_run_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add every key of a run as a flag, in the sections of RunConfig, and --version."""
    parser.usage = "%(prog)s [FLAGS]"
    parser.description = parser.description or "Train a GPT under DeepSpeed ZeRO. --config FILE holds any of the flags."
    parser.add_argument("--version", action="version", version=f"llmscale {__version__}")
    fields = RunConfig.model_fields
    for section, keys in groupby(describe_keys().items(), lambda item: item[1].section):
        names = [key for key, _ in keys]
        add_run_flags(
            parser.add_argument_group(section),
            names,
            annotations={key: fields[key].annotation for key in names},
            defaults={key: fields[key].default for key in names if fields[key].default_factory is None},
        )


def _check_needs(config: RunConfig, flags: Collection[str], from_file: Collection[str]) -> None:
    """Raise ConfigError for a key without effect.

    A run file's key may equal its default, and a flag may switch off a feature that the file configures.
    """
    fields = RunConfig.model_fields
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in (*flags, *from_file)}
    changed = [key for key in defaults if getattr(config, key) != defaults[key]]
    for need in needs():
        need.check([key for key in flags if key in changed or defaults[key]], config)
        if not need.others() & {*flags}:
            need.check(changed, config, f"--config {config.config}: ")


def load_run_file(path: Path) -> dict[str, object]:
    """Return the keys of a YAML or TOML run file. Raises ConfigError if it is missing, malformed or not a mapping."""
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"--config {path}: the suffix says the format, and must be .yaml, .yml or .toml.")
    values = load_settings(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), f"--config {path}")
    keys = {str(key).replace("-", "_"): value for key, value in values.items()}
    if len(keys) < len(values):
        twice = next(key for key in keys if sum(str(other).replace("-", "_") == key for other in values) > 1)
        raise ConfigError(f"--config {path}: the key '{twice}' is given twice. Keep one of them.")
    if "config" in keys:
        raise ConfigError(f"--config {path}: a run file cannot name another one ('config'). Copy its keys here.")
    return keys


def _normalise_flags(argv: Sequence[str]) -> list[str]:
    """Accept --snake_case for --kebab-case, and drop --local_rank=N, which DeepSpeed's launcher adds."""
    flags = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        if re.fullmatch(r"--local-rank=[0-9]+", word) is None:
            flags.append(word)
    return flags
