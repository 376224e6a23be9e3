"""Recipes of `llmscale reproduce`: flags of each command and published numbers, in one TOML file. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from llmscale.config.bundled_files import BundledFiles
from llmscale.config.run_config import NonBlank
from llmscale.errors import ConfigError
from llmscale.suggestions import describe_invalid, did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_toml

RECIPES = BundledFiles("recipes", ".toml")
Flags = Mapping[str, bool | int | float | str | list[str]]
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PublishedNumber(BaseModel):
    """A number to compare with."""

    model_config = _STRICT
    metric: Annotated[str, StringConstraints(pattern=r"^(tokens|hours|GPU-hours|cost|[\w.-]+ \w+)$")]
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
        raise ConfigError(f"{where}: {describe_invalid(name, first)}") from None
