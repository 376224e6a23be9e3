"""What Muon's step takes on a GPU beside the states: the Newton-Schulz iteration, and what ZeRO has cut. No torch.

Follows llmscale/engine/optimizers.py, Muon._orthogonalise, on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmscale.architecture.layers import ParameterTensor
from llmscale.config.deepspeed.schema import Dtype
from llmscale.config.muon import Matrix, Part, matrices_of, plan_rounds
from llmscale.config.optimizers import OptimizerGroup
from llmscale.memory.zero_settings import tensor_bytes


def orthogonalising_bytes(
    group: OptimizerGroup, tensors: Iterable[tuple[ParameterTensor, Sequence[Part]]], *, from_host: bool
) -> int:
    """Most that is alive at once while the updates of the group's `tensors`, of which the ranks have these parts, are
    orthogonalised; 0 where the group's are not. from_host: they are offloaded, and come to the GPU for it."""
    if not group.is_orthogonalised:
        return 0
    matrices = [
        matrix
        for tensor, parts in tensors
        for _, matrix in matrices_of(tensor.parameter.matrix_rows, tensor.parameter.shape[1], parts)
    ]
    here = [
        _newton_schulz_bytes(matrix, group.products_dtype) + (tensor_bytes(matrix.elements, "fp32") if from_host else 0)
        for matrix in matrices
        if not matrix.is_cut and (not matrix.parts or matrix.parts[0].rank == 0)
    ]
    cut = [matrix for matrix in matrices if matrix.is_cut]
    rounds = [_round_bytes(cut, owned, group.products_dtype) for owned in plan_rounds(cut)]
    return max((*here, *rounds), default=0)


def _round_bytes(cut: Sequence[Matrix], owned: dict[int, int], dtype: Dtype) -> int:
    """Muon._bring_together: what rank 0 sends of all matrices, and the one that it receives, whole."""
    parts = (cut[index].part_of(0) for index in owned.values())
    sent = tensor_bytes(sum(part.length for part in parts if part), "fp32")
    if 0 not in owned:
        return sent
    own = cut[owned[0]]
    return sent + tensor_bytes(own.elements, "fp32") + _newton_schulz_bytes(own, dtype)


def _newton_schulz_bytes(matrix: Matrix, dtype: Dtype) -> int:
    """Two iterates and a square of the smaller side, which is when most is alive."""
    square = min(matrix.rows, matrix.columns) ** 2
    return 2 * tensor_bytes(matrix.elements, dtype) + tensor_bytes(square, dtype)
