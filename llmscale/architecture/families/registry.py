"""The families there are. No torch."""

from __future__ import annotations

from llmscale.architecture.families.family import Family
from llmscale.architecture.families.gpt2 import Gpt2
from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError

FAMILIES: dict[str, Family] = {"gpt2": Gpt2()}


def family_of_shape(shape: GPTShape) -> Family:
    """The first family that can express a shape. Raises ConfigError."""
    for family in FAMILIES.values():
        if family.write(shape) is not None:
            return family
    raise ConfigError("no family of transformers expresses this shape.")
