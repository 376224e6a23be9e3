"""From argv and a run file to a RunConfig, with one clear line for every mistake. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmscale.config.flag_parser import FlagParser
from llmscale.config.run_config import CHANGES_THAT_BREAK, NEEDS, RunConfig, describe_keys
from llmscale.config.user_paths import check_path
from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_toml, load_yaml

if TYPE_CHECKING:
    from pydantic_settings import CliSettingsSource

#: One quantity in two units: a flag for either overrides the file's entry for both.
EXCLUSIVE_KEYS = (
    ("global_batch_size", "global_batch_tokens"),
    ("steps", "tokens"),
    ("warmup_steps", "warmup_tokens"),
    ("decay_steps", "decay_tokens"),
)


def parse_run_config(argv: Sequence[str], parser: FlagParser | None = None) -> RunConfig:
    """The run's configuration: flags over the `--config` file over defaults. `parser` names the command and may know
    further flags, for --help. Raises ConfigError, SystemExit on --help."""
    from pydantic_settings import SettingsError

    parser = parser or FlagParser(prog="train.py", description=RunConfig.__doc__)
    try:
        flags = _flags_source(parser, _normalise_flags(argv))()
    except SettingsError as error:
        raise ConfigError(f"{' '.join(str(error).split())}. Repeat the flag for several values.") from None
    from_file = load_run_file(_path("config", flags["config"])) if "config" in flags else {}
    for key, twin in EXCLUSIVE_KEYS:
        for given, overridden in ((key, twin), (twin, key)):
            if given in flags and overridden not in flags:
                from_file.pop(overridden, None)
    config = build_run_config({**from_file, **flags})
    _check_needs(config, flags, from_file)
    return config


def _check_needs(config: RunConfig, flags: Collection[str], from_file: Collection[str]) -> None:
    """Refuse a key without effect. Raises ConfigError.

    A run file's key may equal its default, and a flag may switch off what the file sets up.
    """
    fields = RunConfig.model_fields
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in (*flags, *from_file)}
    changed = [key for key in defaults if getattr(config, key) != defaults[key]]
    for need in NEEDS:
        need.check([key for key in flags if key in changed or defaults[key]], config)
        if not need.others() & {*flags}:
            need.check(changed, config, f"--config {config.config}: ")


def add_run_config_flags(parser: argparse.ArgumentParser) -> None:
    """Every key of a run as a flag of `parser`, which may be a subcommand's."""
    _flags_source(parser, None)


def _flags_source(parser: argparse.ArgumentParser, argv: list[str] | None) -> CliSettingsSource:
    """What reads the flags of `argv`; None: nothing is read."""
    # Takes longer to import than everything else of the command line, and `estimate` has flags of its own.
    from pydantic_settings import BaseSettings, CliSettingsSource

    class FromFlags(BaseSettings, RunConfig):  # type: ignore[misc]  # their model_configs are TypedDicts of two names
        """RunConfig as pydantic_settings wants it: nothing is taken from the environment."""

    for key, text in describe_keys().items():
        FromFlags.model_fields[key].description = text
    return CliSettingsSource(
        FromFlags,
        root_parser=parser,
        cli_parse_args=argv,
        cli_prog_name="train.py",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )


def build_run_config(values: dict[str, object]) -> RunConfig:
    """A RunConfig from plain values; ConfigError names the first key that is wrong, its value and what is legal."""
    if isinstance(values.get("compile"), bool):  # YAML's on and off
        values = {**values, "compile": "on" if values["compile"] else "off"}
    for key, value in values.items():
        # pydantic takes true for 1; YAML makes true of yes and on.
        if (
            isinstance(value, bool)
            and key in RunConfig.model_fields
            and RunConfig.model_fields[key].annotation not in (bool, bool | None)
        ):
            raise ConfigError(f"{key} = {value!r}: input should be {_kind(key)}.")
    try:
        config = RunConfig(**values)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "?"
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(key, RunConfig.model_fields)
            raise ConfigError(f"unknown key '{key}'.{hint} `train.py --help` lists all keys.") from None
        raise ConfigError(f"{key} = {first['input']!r}: {_problem(first)}") from None
    for key, twin in EXCLUSIVE_KEYS:
        if getattr(config, key) is not None and getattr(config, twin) is not None:
            raise ConfigError(f"{key} and {twin} say the same thing in other units. Give one of them.")
    for change in config.allow_changed:
        if change not in CHANGES_THAT_BREAK:
            raise ConfigError(
                f"allow_changed = '{change}' is not known.{did_you_mean(change, CHANGES_THAT_BREAK)} "
                f"Legal: {', '.join(CHANGES_THAT_BREAK)}."
            )
    return config


def _problem(detail: ErrorDetails) -> str:
    """What pydantic says as a sentence, and the suggestion where only some words are legal."""
    if detail["type"] == "value_error":
        return f"{detail['ctx']['error']}."
    value, hint = detail["input"], ""
    if detail["type"] == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"{detail['msg'].lower()}.{hint}"


def _kind(key: str) -> str:
    annotation = str(RunConfig.model_fields[key].annotation)
    return "a number" if "int" in annotation or "float" in annotation else "text"


def _path(key: str, text: str) -> Path:
    try:
        return check_path(text)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r}: {error}.") from None


def load_run_file(path: Path) -> dict[str, object]:
    """The keys of a YAML or TOML run file; ConfigError when it is missing, malformed, or not a mapping."""
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"--config {path}: the suffix says the format, and must be .yaml, .yml or .toml.")
    load = load_toml if path.suffix == ".toml" else load_yaml
    try:
        values = load(path, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), f"--config {path}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from None
    keys = {str(key).replace("-", "_"): value for key, value in values.items()}
    if len(keys) < len(values):
        twice = next(key for key in keys if sum(str(other).replace("-", "_") == key for other in values) > 1)
        raise ConfigError(f"--config {path}: the key '{twice}' stands there twice. Keep one of them.")
    if "config" in keys:
        raise ConfigError(f"--config {path}: a run file cannot name another one ('config'). Copy its keys here.")
    return keys


def _normalise_flags(argv: Sequence[str]) -> list[str]:
    """Accept --snake_case for --kebab-case, and drop --local_rank=N: DeepSpeed's launcher passes it, and says the same
    in the environment."""
    flags = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        if re.fullmatch(r"--local-rank=[0-9]+", word) is None:
            flags.append(word)
    return flags
