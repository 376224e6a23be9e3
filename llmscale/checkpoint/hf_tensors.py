"""Published weights, read slice by slice into what a rank has of each parameter: never a whole tensor, nor a file.

safetensors gives slices of a file that is mapped into memory, and so does torch for a `pytorch_model.bin`, which is
read with `weights_only`: it may hold tensors and plain values, and no code. A file is mapped anew for each parameter,
so that what was read of it does not stay with the process.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from llmscale.checkpoint.hf_files import (
    PICKLE_SUFFIX,
    StoredTensor,
    WeightsFiles,
    collect_tensors,
    list_safetensors,
)
from llmscale.checkpoint.hf_match import Piece
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError

#: Elements that are converted and looked at together: 64 MiB in fp32.
_CHUNK = 1 << 24
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class Sliceable(Protocol):
    """A stored tensor of which parts can be read."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


def list_tensors(weights: WeightsFiles) -> dict[str, StoredTensor]:
    """Every tensor that the files hold. Raises CheckpointError."""
    if not weights.are_pickles:
        return list_safetensors(weights)
    stored = collect_tensors(
        StoredTensor(name, file, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
        for file in weights.files
        for name, tensor in _load_pickle(file).items()
    )
    weights.check_index(stored)
    return stored


def fill_view(view: ShardView, pieces: Sequence[Piece]) -> None:
    """Fill what this rank has of a parameter from the stored tensors that make it.

    Rows that no tensor has are padding of the vocabulary and become zeros: no token reads them and no gradient reaches
    them, so they stay zeros under any weight decay, and the model depends on the folder alone. Rows of theirs behind
    our last one (positions of a longer context) are left out. Raises CheckpointError for weights that are no numbers.
    """
    local = view.local
    covered = 0
    for piece in sorted(pieces, key=lambda piece: piece.first_row):
        columns = piece.shape[1] if len(piece.shape) == 2 else 1
        first = piece.first_row * columns
        start = max(view.start, first)
        stop = min(view.start + local.numel(), first + piece.num_rows * columns)
        if start < stop:
            _fill_range(local.narrow(0, start - view.start, stop - start), piece, columns, start - first)
            covered += stop - start
    if covered < local.numel():
        # The pieces lie end to end from the first row on.
        local[covered:].zero_()


def _fill_range(local: Tensor, piece: Piece, columns: int, start: int) -> None:
    """Fill `local` [n] with elements [start, start + n) of the piece's rows."""
    with _opened(piece.stored) as stored:
        at = 0
        for rows, cols in _rectangles(start, start + local.numel(), columns):
            part = _read(stored, piece, rows, cols)
            target = local.narrow(0, at, part.numel())
            target.view(part.shape).copy_(part)
            at += part.numel()
            if not torch.isfinite(target).all():
                raise CheckpointError(
                    f"{piece.stored.file}: '{piece.stored.name}' holds values that are no finite numbers: the weights "
                    "are of a run that diverged, or the file is damaged. Name other weights."
                )


def _read(stored: Sliceable, piece: Piece, rows: slice, columns: slice) -> Tensor:
    """A rectangle of the piece, as ours."""
    rows = slice(rows.start + piece.wanted.skipped_rows, rows.stop + piece.wanted.skipped_rows)
    if len(piece.shape) == 1:
        return stored[(rows,)]
    if piece.wanted.transposed:
        return stored[columns, rows].t()
    return stored[rows, columns]


def _rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Elements [start, stop) of a matrix laid out row by row, as (rows, columns) of at most _CHUNK elements."""
    while start < stop:
        row, column = divmod(start, columns)
        whole_rows = min((stop - start) // columns, max(1, _CHUNK // columns))
        if column or not whole_rows:
            end = min(columns, column + stop - start)
            yield slice(row, row + 1), slice(column, end)
            start += end - column
        else:
            yield slice(row, row + whole_rows), slice(0, columns)
            start += whole_rows * columns


@contextmanager
def _opened(tensor: StoredTensor) -> Iterator[Sliceable]:
    """The stored tensor, for slices, while its file is mapped into memory."""
    if tensor.file.suffix == PICKLE_SUFFIX:
        yield _load_pickle(tensor.file)[tensor.name]
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(tensor.file, framework="pt") as file:
            yield cast("Sliceable", file.get_slice(tensor.name))
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{tensor.file}: '{tensor.name}' cannot be read: {reason}.") from None


def _load_pickle(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a `pytorch_model.bin`, mapped into memory; code in it is not run. Raises CheckpointError."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} holds more than tensors, which only its own code could read, and that is never run. Name a folder "
            "with safetensors."
        ) from None
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # torch's own unpickler meets bytes of somebody else's: it raises whatever it stumbles on
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}".strip()
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Save it as safetensors with transformers' save_pretrained."
        ) from None
    is_table = isinstance(values, dict) and all(
        isinstance(value, Tensor) and value.layout == torch.strided for value in values.values()
    )
    if not is_table:
        raise CheckpointError(f"{path} is no table of tensors. Name a folder that save_pretrained wrote.")
    return {str(name): tensor.detach() for name, tensor in values.items()}
