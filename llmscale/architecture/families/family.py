"""How a family of transformers' decoders writes a shape and its tensors down. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.errors import ConfigError

#: Widths and vocabularies; layers.
_MOST, _MOST_LAYERS = 1 << 30, 10_000
#: Letters of a value in an error.
_MOST_SHOWN = 80


def _shown(value: object) -> str:
    """The beginning of a value, as Python writes it."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Keys:
    """ConfigError names the entry that is missing or wrong. null counts as absent."""

    def __init__(self, config: Mapping[str, object], source: str) -> None:
        """`source`: what the errors call the file."""
        self._config, self.source = config, source

    def has(self, name: str) -> bool:
        return self._config.get(name) is not None

    def mentions(self, name: str) -> bool:
        """Whether it is there, be it as null."""
        return name in self._config

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"is {_shown(value)}"
            raise ConfigError(f"{self.source}: {name} {found}; a positive integer is needed to count parameters.")
        if value > _MOST:
            raise ConfigError(f"{self.source}: {name} is {value}, more than the {_MOST:,} of any model.")
        return value

    def layers(self, name: str) -> int:
        """A number of layers: every one of them is looked at."""
        value = self.count(name)
        if value > _MOST_LAYERS:
            raise ConfigError(f"{self.source}: {name} is {value}, more than the {_MOST_LAYERS:,} of any model.")
        return value

    def number(self, name: str, default: float, *, least: float | None = None) -> float:
        """A positive number, or one of at least `least`."""
        value = self._config.get(name)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not ((value > 0 if least is None else value >= least) and value < math.inf)
        ):
            raise ConfigError(f"{self.source}: {name} is {_shown(value)}, not a positive number.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {_shown(value)}, not true or false.")
        return value

    def choice(self, name: str, legal: Mapping[str, str], default: str) -> str:
        """What `legal` has for this entry's text."""
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in legal:
            raise ConfigError(f"{self.source}: {name} is {_shown(value)}; llmscale has {', '.join(legal)}.")
        return legal[value]

    def section(self, name: str) -> Keys | None:
        """An object within; None where there is none."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} is {_shown(value)}, not an object.")
        return Keys(value, f"{self.source}: {name}")

    def require_known(self, known: Collection[str]) -> None:
        """Refuse entries whose meaning is not known here."""
        for name in self._config:
            if name not in known:
                raise ConfigError(f"{self.source}: {_shown(name)} is not known; llmscale reads {', '.join(known)}.")

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self._config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.source}: {name} is not a list of texts.")
        return value

    def require(self, name: str, only: object) -> None:
        """Refuse any other value than the one that llmscale's model computes with, which is the family's default."""
        value = self._config.get(name)
        if value is not None and value != only:
            raise ConfigError(f"{self.source}: {name} is {_shown(value)}; llmscale's model has {only!r} alone.")

    def heads(self, width: str = "hidden_size", heads: str = "num_attention_heads") -> tuple[int, int]:
        """Width of the residual stream and number of query heads, which must divide it unless head_dim is given."""
        n_embd, n_head = self.count(width), self.count(heads)
        if not self.has("head_dim") and n_embd % n_head:
            raise ConfigError(f"{self.source}: {width} {n_embd} is not divisible by {heads} {n_head}.")
        return n_embd, n_head


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a family's files, and where its elements are in our model."""

    name: str
    """In the files."""
    parameter: str
    """Ours, in a state dict of llmscale.model.gpt. Empty: ours has none, and the file's is zeros."""
    shape: tuple[int, ...]
    """In the files."""
    first_row: int = 0
    """Where its rows begin in our parameter, which may hold several of theirs."""
    transposed: bool = False
    """The files have [inputs, outputs], ours [outputs, inputs]: its rows are the files' columns."""
    skipped_rows: int = 0
    """Rows at its beginning that ours lacks: zeros when they are written."""


@dataclass(frozen=True)
class Family:
    """One model_type of transformers."""

    model_type: str
    architecture: str
    """The class that transformers loads it with."""
    read: Callable[[Keys], dict[str, object]]
    """Entries of a config.json -> fields of GPTShape, all but the dropout. Raises ConfigError for what llmscale's model
    does not compute."""
    write: Callable[[GPTShape], dict[str, object]]
    """The way back, whether or not the family has all of it: `expresses` says so."""
    tensors: Callable[[GPTShape], Iterator[HFTensor]]
    """Every tensor of the files."""
    adds_biases: bool = False
    """The family has biases everywhere; those that a shape lacks are zeros in its files."""

    def adds_to(self, shape: GPTShape) -> bool:
        """Whether its files of this shape hold biases that the shape lacks."""
        return self.adds_biases and shape != shape.changed({"bias": True})

    def expresses(self, shape: GPTShape) -> bool:
        """Whether what is written for this shape reads as this shape again."""
        return not self.lost(shape)

    def lost(self, shape: GPTShape) -> list[str]:
        """Fields of the shape that this family's config.json cannot say, `positions learned`; all of them where it
        cannot be written at all."""
        wanted = replace(shape, dropout=0.0)
        if self.adds_biases:
            wanted = wanted.changed({"bias": True})
        said = {key: f"{key} {getattr(shape, key)}" for key in SHAPE_KEYS}
        try:
            read = build_shape(self.read(Keys(self.write(wanted), self.model_type)))
        except ConfigError:
            return list(said.values())
        return [said[key] for key in SHAPE_KEYS if getattr(read, key) != getattr(wanted, key)]


def stacked(parts: Mapping[str, int], parameter: str, columns: int, *, bias: bool) -> Iterator[HFTensor]:
    """Their linear layers `name -> rows` that are one of ours, one below the other."""
    first = 0
    for name, rows in parts.items():
        yield HFTensor(f"{name}.weight", f"{parameter}.weight", (rows, columns), first)
        if bias:
            yield HFTensor(f"{name}.bias", f"{parameter}.bias", (rows,), first)
        first += rows
