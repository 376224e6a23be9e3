"""A checkpoint's weights read range by range: whatever stage and world size cut them, in as little memory as asked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llmscale.checkpoint.json_storage import INDEX_NAME, load_index
from llmscale.checkpoint.tensor_archive import DTYPES, find_elements
from llmscale.engine.zero_shards import MASTER
from llmscale.errors import CheckpointError
from llmscale.untrusted.paths import open_regular

#: Where a parameter's weights are: trained, or frozen. Buffers follow from the model's shape.
_WEIGHTS = (f"{MASTER}/", "frozen/")


class StoredWeights:
    """The master weights and frozen parameters of a checkpoint, each as one flat tensor by the parameter's name."""

    def __init__(self, folder: Path) -> None:
        """Reads the index only. Raises CheckpointError when it is damaged, or a weight is no floating-point number."""
        self._folder = folder
        self._entries: dict[str, dict] = {}
        for key, entry in load_index(folder).items():
            if not key.startswith(_WEIGHTS):
                continue
            if not DTYPES[entry["dtype"]].is_floating_point:
                raise CheckpointError(f"{folder / INDEX_NAME}: the weights '{key[:200]}' are {entry['dtype']}.")
            self._entries[key.partition("/")[2]] = {**entry, "chunks": sorted(entry["chunks"])}

    @property
    def sizes(self) -> dict[str, int]:
        """Elements by parameter."""
        return {name: entry["size"] for name, entry in self._entries.items()}

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """`elements` weights of a parameter from its element `start` on, flat, in fp32.

        Takes their memory, twice where they are stored in another precision. Raises CheckpointError when a file is
        damaged or gone, as of a run that goes on and lets its checkpoint expire.
        """
        entry = self._entries[name]
        weights = torch.empty(elements, dtype=DTYPES[entry["dtype"]])
        for chunk, first, count, place in _overlaps(entry["chunks"], start, elements):
            self._read_into(weights[place : place + count], entry["dtype"], chunk, first, name)
        return weights.float()

    def _read_into(self, part: Tensor, dtype: str, chunk: list, first: int, name: str) -> None:
        """Fill `part` with a chunk's elements from its own element `first` on."""
        _, in_chunk, file_name, offset, num_bytes = chunk
        path = self._folder / file_name
        try:
            with open_regular(path, follow_links=False) as file:
                begin = find_elements(file, offset, num_bytes, dtype, in_chunk, f"{path}, '{name[:200]}',")
                file.seek(begin + first * part.itemsize)
                if file.readinto(part.view(torch.uint8).numpy().data) != part.nbytes:
                    raise CheckpointError(f"{path} ends within '{name[:200]}'.")
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}. A run that goes on deletes what --keep-last and "
                "--keep-every do not keep; name a newer checkpoint."
            ) from None


def _overlaps(chunks: list[list], start: int, elements: int) -> Iterator[tuple[list, int, int, int]]:
    """For a range of a flat tensor, the chunks that hold it in order: (chunk, its first element that is wanted, how
    many of them, their place in the range)."""
    end = start + elements
    index = bisect_right(chunks, start, key=lambda chunk: chunk[0]) - 1
    while start < end:
        begins, in_chunk = chunks[index][:2]
        count = min(end, begins + in_chunk) - start
        yield chunks[index], start - begins, count, elements - (end - start)
        start, index = start + count, index + 1
