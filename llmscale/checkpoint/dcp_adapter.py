"""Fragments: the part of a flattened tensor that one rank holds, and how torch.distributed.checkpoint (DCP) sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from llmscale.engine.zero_layout import ShardView
from llmscale.engine.zero_shards import state_views
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Fragment(ShardView):
    """A ShardView that DCP can ask for its chunks.

    Every stage and world size cuts the same flat tensor in other places; when loading, DCP reads what overlaps. `local`
    is a live view when loading and a copy on the host when saving.
    """

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.local.numel():
            return []
        return [ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=torch.Size([self.local.numel()]))]

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=torch.Size([self.total]),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


def engine_fragments(engine: DeepSpeedEngine) -> dict[str, Fragment]:
    """Everything this rank owns, by '<state>/<name>'; see zero_shards.state_views."""
    return {key: Fragment(view.local, view.start, view.total) for key, view in state_views(engine).items()}


class FragmentSavePlanner(DefaultSavePlanner):
    """Writes fragments; what several ranks hold alike is written by one of them."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class FragmentLoadPlanner(DefaultLoadPlanner):
    """Fills fragments in place. Raises CheckpointError for a tensor that is not stored, or has another size."""

    def set_up_planner(
        self,
        state_dict: Mapping[str, Fragment],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The base class would flatten nested dicts of tensors here; fragments are already flat.
        self.state_dict = self.original_state_dict = dict(state_dict)
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items = []
        for fqn, fragment in self.state_dict.items():
            entry = stored.get(fqn)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint has no '{fqn}': it belongs to another model or optimizer.")
            if entry.size != torch.Size([fragment.total]):
                raise CheckpointError(
                    f"'{fqn}' has {entry.size.numel()} elements in the checkpoint and {fragment.total} in the model. "
                    "The model's shape or vocabulary differs from the checkpoint's."
                )
            items += create_read_items_for_chunk_list(fqn, entry, fragment.__create_chunk_list__())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local
