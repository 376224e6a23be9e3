"""A family of Hugging Face transformers' models, and where each of its tensors lies in ours. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a family's file."""

    name: str
    """transformers' name."""
    parameter: str
    """Our parameter that holds it."""
    shape: tuple[int, ...]
    """In transformers' file."""
    first_row: int = 0
    """Where its rows begin in our parameter."""
    transposed: bool = False
    """Whether theirs is the transpose of ours, as GPT-2's Conv1D."""
    skipped_rows: int = 0
    """Rows at the beginning of theirs that ours lacks; zeros on export."""


class Family(ABC):
    """One model_type."""

    model_type: str
    architecture: str

    @abstractmethod
    def write(self, shape: GPTShape) -> dict[str, object] | None:
        """The entries of config.json; None when the family cannot express the shape."""

    @abstractmethod
    def tensors(self, shape: GPTShape) -> tuple[HFTensor, ...]:
        """Every tensor of its file."""
