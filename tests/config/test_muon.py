from __future__ import annotations

from llmscale.config.optimizers import Matrix, Part, matrices_of, plan_rounds


def test_a_parameter_of_several_matrices_is_taken_apart() -> None:
    """q of 4 rows, k and v of 2, on two ranks whose border lies within k."""
    parts = (Part(0, 0, 13), Part(1, 13, 11))
    actual = list(matrices_of((4, 2, 2), 3, parts))
    assert [(begin, matrix.rows, matrix.columns) for begin, matrix in actual] == [(0, 4, 3), (12, 2, 3), (18, 2, 3)]
    q, k, v = (matrix for _, matrix in actual)
    assert q.parts == (Part(0, 0, 12),)
    assert k.parts == (Part(0, 0, 1), Part(1, 1, 5))
    assert v.parts == (Part(1, 0, 6),)
    assert [matrix.is_cut for matrix in (q, k, v)] == [False, True, False]
    assert k.part_of(1) == Part(1, 1, 5)
    assert v.part_of(0) is None


def test_every_cut_matrix_is_brought_together_once_by_one_that_has_a_part() -> None:
    halves = (Part(0, 0, 8), Part(1, 8, 8))
    matrices = [Matrix(4, 4, halves)] * 3 + [Matrix(16, 2, (Part(1, 0, 16), Part(2, 16, 16)))]
    rounds = plan_rounds(matrices)
    assert sorted(index for owned in rounds for index in owned.values()) == [0, 1, 2, 3]
    for owned in rounds:
        for rank, index in owned.items():
            assert matrices[index].part_of(rank) is not None
    assert len(rounds) == 2, "no rank has two in a round, and none waits while another has two more"


def test_equal_pieces_are_shared_out_evenly() -> None:
    quarters = tuple(Part(rank, 4 * rank, 4) for rank in range(4))
    rounds = plan_rounds([Matrix(4, 4, quarters)] * 10)
    assert [len(owned) for owned in rounds] == [4, 4, 2]


def test_flops_of_newton_schulz_are_those_of_its_products() -> None:
    """Five steps: X X^T of 2 x 3, a square of 2 x 2, and 2 x 2 times 2 x 3; a tall matrix is turned."""
    assert Matrix(2, 3, ()).newton_schulz_flops == 5 * (2 * 2 * 3 * 2 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)
    assert Matrix(3, 2, ()).newton_schulz_flops == Matrix(2, 3, ()).newton_schulz_flops
