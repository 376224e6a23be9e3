"""How a family of transformers' decoders writes a shape and its tensors down. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.errors import ConfigError


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
