"""From argv and a run file to a RunConfig, with one clear line for every mistake. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError
from pydantic_settings import CliSettingsSource

from llmscale.config.flag_parser import FlagParser
from llmscale.config.run_config import CHANGES_THAT_BREAK, RunConfig
from llmscale.errors import ConfigError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: One quantity in two units: a flag for either overrides the file's entry for both.
EXCLUSIVE_KEYS = (
    ("global_batch_size", "global_batch_tokens"),
    ("steps", "tokens"),
    ("warmup_steps", "warmup_tokens"),
    ("decay_steps", "decay_tokens"),
)


def parse_run_config(argv: Sequence[str]) -> RunConfig:
    """The run's configuration: flags over the `--config` file over defaults. Raises ConfigError, SystemExit on
    --help."""
    parser = FlagParser(prog="train.py", description=RunConfig.__doc__)
    source: CliSettingsSource[FlagParser] = CliSettingsSource(
        RunConfig, root_parser=parser, cli_parse_args=_normalise_flags(argv)
    )
    flags = source()
    from_file = load_run_file(Path(flags["config"])) if flags.get("config") else {}
    for key, twin in EXCLUSIVE_KEYS:
        for given, overridden in ((key, twin), (twin, key)):
            if given in flags and overridden not in flags:
                from_file.pop(overridden, None)
    return build_run_config({**from_file, **flags})


def build_run_config(values: dict[str, object]) -> RunConfig:
    """A RunConfig from plain values; ConfigError names the first key that is wrong, its value and what is legal."""
    try:
        config = RunConfig(**values)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "?"
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(key, RunConfig.model_fields)
            raise ConfigError(f"unknown key '{key}'.{hint} `train.py --help` lists all keys.") from None
        raise ConfigError(f"{key} = {first['input']!r}: {first['msg'].lower()}.") from None
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


def load_run_file(path: Path) -> dict[str, object]:
    """The keys of a YAML or TOML run file; ConfigError when it is missing, malformed, or not a mapping."""
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"--config {path}: the suffix says the format, and must be .yaml, .yml or .toml.")
    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid {path.suffix[1:]}: {' '.join(str(error).split())}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold keys and values, not a {type(values).__name__}.")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _normalise_flags(argv: Sequence[str]) -> list[str]:
    """Accept --snake_case for --kebab-case, and drop --local_rank=N: DeepSpeed's launcher passes it, and says the same
    in the environment."""
    flags = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        if not word.startswith("--local-rank="):
            flags.append(word)
    return flags
