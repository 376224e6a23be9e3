"""Where the first weights of a run come from: a checkpoint of llmscale's own, or files that transformers reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from llmscale.checkpoint.hf_read import TensorSlice, fill_view
from llmscale.checkpoint.load import load_weights
from llmscale.engine.collectives import on_all_ranks
from llmscale.engine.zero_shards import refresh_low_precision_weights, weights_to_fill
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class WeightsSource(Protocol):
    """Weights that an engine can be filled with; the optimizer starts anew."""

    @property
    def name(self) -> str:
        """For the log."""

    def load_into(self, engine: DeepSpeedEngine, group: dist.ProcessGroup) -> None:
        """Fill what this rank owns. Collective. Raises CheckpointError on every rank."""


@dataclass(frozen=True)
class CheckpointWeights:
    """Those of a verified checkpoint of ours."""

    folder: Path

    @property
    def name(self) -> str:
        return str(self.folder)

    def load_into(self, engine: DeepSpeedEngine, group: dist.ProcessGroup) -> None:
        load_weights(engine, self.folder, group)


@dataclass(frozen=True)
class PublishedWeights:
    """Those of checked files of transformers."""

    name: str
    pieces: Mapping[str, tuple[TensorSlice, ...]]
    """Of each of our parameters."""
    progress: Callable[[], object]
    """Called before each of them is read."""

    def load_into(self, engine: DeepSpeedEngine, group: dist.ProcessGroup) -> None:
        on_all_ranks(group, lambda: self._fill(engine))
        refresh_low_precision_weights(engine)

    def _fill(self, engine: DeepSpeedEngine) -> None:
        left = set(self.pieces)
        for views in weights_to_fill(engine):
            for name, view in views.items():
                if name not in self.pieces:
                    raise CheckpointError(f"{self.name} has no '{name}': its config.json describes another model.")
                self.progress()
                fill_view(view, self.pieces[name])
                left.discard(name)
        if left:
            raise CheckpointError(f"{self.name} holds '{min(left)}', which this run's model has no place for.")
