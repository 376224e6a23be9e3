"""A family of transformers' decoders: its shapes and tensors, and a typed reader of its config.json. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.errors import ConfigError
from llmscale.suggestions import shown

#: Upper limits of widths and vocabularies, of layers, of a layer's experts, and of all layers' experts.
_MOST = 1 << 30
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 4096
_MOST_EXPERTS_OF_ALL = 1 << 16
#: Our activations by their names in transformers.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
#: Their names of gelu_tanh by entry: GPT-2's is computed step by step, each rounded to the weights' type.
_GELU_TANH = {"activation_function": "gelu_new", "hidden_act": "gelu_pytorch_tanh"}
_T = TypeVar("_T", str, int)
#: Fields of GPTShape by name.
Fields = dict[str, object]


class Keys:
    """Typed entries of a transformers config.json.

    Methods raise ConfigError with the name of an entry that is missing or wrong. null counts as absent.
    """

    def __init__(self, config: Mapping[str, object], source: str) -> None:
        """`source`: the file's name in error messages."""
        self._config = config
        self.source = source

    def _get(self, name: str, default: object) -> object:
        value = self._config.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self._config.get(name) is not None

    def mentions(self, name: str) -> bool:
        """Return whether an entry exists, null included."""
        return name in self._config

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST, of: str = "any model"
    ) -> int:
        """Return an integer from `least` to `most`, which is the limit `of` models such as this one."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            if value is None:
                problem = "is missing"
            else:
                problem = f"is {shown(value)}"
            raise ConfigError(f"{self.source}: {name} {problem}; an integer from {least} on is needed.")
        if value > most:
            raise ConfigError(f"{self.source}: {name} is {value}, more than the {most:,} of {of}.")
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """Return a number of layers, limited because every layer is visited."""
        return self.count(name, most=_MOST_LAYERS)

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            # Integers of a file may be larger than any float.
            or not 0 < value <= sys.float_info.max
        ):
            raise ConfigError(f"{self.source}: {name} is {shown(value)}, not a positive number.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {shown(value)}, not true or false.")
        return value

    def choice(self, name: str, legal: Mapping[str, str], default: object, fix: str = "") -> str:
        """Return the value of `legal` for this entry's text. An error ends with `fix`."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in legal:
            raise ConfigError(f"{self.source}: {name} is {shown(value)}; llmscale has {', '.join(legal)}.{fix}")
        return legal[value]

    def section(self, name: str) -> Keys | None:
        """Return a nested object; None when it is missing."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} is {shown(value)}, not an object.")
        return Keys(value, f"{self.source}: {name}")

    def require_flat(self) -> None:
        """Refuse an object within the entries, such as one for each kind of layer."""
        for name, value in self._config.items():
            if isinstance(value, dict):
                raise ConfigError(f"{self.source}: {shown(name)} is an object of its own, which llmscale cannot read.")

    def items(self, name: str, kind: type[_T]) -> list[_T]:
        """Return a list of items of a type; empty when it is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise ConfigError(f"{self.source}: {name} is {shown(value)}, not a list of {kind.__name__}.")
        return value

    def require(self, name: str, only: object) -> None:
        """Refuse any value except `only`, the family's default and the one that llmscale's model computes with."""
        value = self._config.get(name)
        # True equals 1.
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            alone = "none" if only is None else f"{only!r} alone"
            raise ConfigError(f"{self.source}: {name} is {shown(value)}; llmscale's model has {alone}.")

    def heads(self, width: str = "hidden_size", heads: str = "num_attention_heads") -> tuple[int, int]:
        """Return the model's width and its number of query heads, a divisor of it unless head_dim is given."""
        n_embd = self.count(width)
        n_head = self.count(heads)
        if not self.has("head_dim") and n_embd % n_head:
            raise ConfigError(f"{self.source}: {width} {n_embd} is not divisible by {heads} {n_head}.")
        return n_embd, n_head


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a family's files, and where its elements are in our model."""

    name: str
    """Name in the files."""
    parameter: str
    """Name of our parameter, as in a state dict of llmscale.model.gpt. Empty: ours has none, and zeros are written."""
    shape: tuple[int, ...]
    """Shape in the files."""
    first_row: int = 0
    """First row in our parameter, which may hold several of the family's tensors."""
    transposed: bool = False
    """True when the files have [inputs, outputs] and ours is [outputs, inputs]."""
    skipped_rows: int = 0
    """First rows in the files that ours lacks; zeros are written for them."""
    is_fp32: bool = False
    """True when the files have fp32 whatever the other tensors have."""


class Entry(NamedTuple):
    """An entry of config.json, and the field of GPTShape that it holds."""

    name: str
    field: str
    default: object = None
    """Value of a missing entry, or a function that computes it from the entries and the fields so far; None: required.
    Its type is the entry's: an integer (from 0 on if it is 0), a float, a bool or an activation's name."""

    def read(self, keys: Keys, fields: Fields) -> object:
        default: Any
        if callable(self.default):
            default = self.default(keys, fields)
        else:
            default = self.default
        if self.field == "activation":
            return keys.choice(self.name, ACTIVATIONS, default)
        if self.field == "attention_bias":
            return "all" if keys.flag(self.name, default) else "none"
        if self.field == "n_layer":
            return keys.layers(self.name)
        if self.field == "num_experts":
            # Those of all layers are visited.
            most = min(_MOST_EXPERTS, _MOST_EXPERTS_OF_ALL // keys.layers())
            return keys.count(self.name, default, most=most, of="any model of this depth")
        if isinstance(default, bool):
            return keys.flag(self.name, default)
        if isinstance(default, float):
            return keys.number(self.name, default)
        return keys.count(self.name, default, least=0 if default == 0 else 1)

    def write(self, shape: GPTShape) -> object:
        value = getattr(shape, self.field)
        if self.field == "activation":
            return _GELU_TANH[self.name] if value == "gelu_tanh" else value
        if self.field == "attention_bias":
            return value == "all"
        if isinstance(self.default, bool):
            return bool(value)
        return value


@dataclass(frozen=True, eq=False)
class Family:
    """One model_type of transformers."""

    model_type: str
    architecture: str
    """transformers' class."""
    entries: tuple[Entry, ...]
    """In order: the last of two with one name is written."""
    tensors: Callable[[GPTShape], Iterator[HFTensor]]
    """Every tensor of the files."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields that are the same in all its models."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Entries that get the dropout, which is not read."""
    read_more: Callable[[Keys, Fields], Fields] = lambda keys, fields: {}
    """Function from the entries, and the fields that they gave, to further fields. Raises ConfigError."""
    write_more: Callable[[GPTShape], dict[str, object]] = lambda shape: {}
    """Function from a shape to further entries."""
    adds: str = ""
    """Field of biases that the family always has: those that a shape lacks are zeros in its files."""

    def read(self, keys: Keys) -> Fields:
        """Return fields of GPTShape, without the dropout. Raises ConfigError for features that ours lacks."""
        names = {entry.field: entry.name for entry in self.entries}
        keys.heads(names["n_embd"], names["n_head"])
        fields = dict(self.fixed)
        for entry in self.entries:
            fields[entry.field] = entry.read(keys, fields)
        return fields | self.read_more(keys, fields)

    def write(self, shape: GPTShape) -> dict[str, object]:
        """Return a config.json's entries, even if the family lacks some of the shape: see `lost`."""
        written = {entry.name: entry.write(shape) for entry in self.entries}
        return written | dict.fromkeys(self.dropouts, shape.dropout) | self.write_more(shape)

    def adds_to(self, shape: GPTShape) -> bool:
        """Return whether the family's files contain biases that the shape lacks."""
        return bool(self.adds) and shape != shape.changed({self.adds: True})

    def lost(self, shape: GPTShape) -> list[str]:
        """Return the fields that this family's config.json cannot express, as `positions learned`.

        Returns all fields when the shape cannot be written at all.
        """
        described = {key: f"{key} {getattr(shape, key)}" for key in SHAPE_KEYS}
        try:
            of_training = [key for key, behaviour in SHAPE_KEYS.items() if behaviour.of_model == "training"]
            wanted = replace(shape, **{key: getattr(GPTShape, key) for key in of_training})
            # Without a block that has it, the MLP's width means nothing.
            if shape.num_experts and all(map(shape.is_sparse, range(shape.n_layer))):
                wanted = replace(wanted, mlp_width=shape.expert_width)
            if self.adds:
                wanted = wanted.changed({self.adds: True})
            read = build_shape(self.read(Keys(self.write(wanted), self.model_type)))
        except ConfigError:
            return list(described.values())
        return [described[key] for key in SHAPE_KEYS if getattr(read, key) != getattr(wanted, key)]


def stacked(parts: Mapping[str, int], parameter: str, columns: int, *, bias: bool) -> Iterator[HFTensor]:
    """Yield the family's linear layers (name -> rows) that are stacked in one of ours."""
    first = 0
    for name, rows in parts.items():
        yield HFTensor(f"{name}.weight", f"{parameter}.weight", (rows, columns), first)
        if bias:
            yield HFTensor(f"{name}.bias", f"{parameter}.bias", (rows,), first)
        first += rows
