from __future__ import annotations

import pytest

from llmscale.architecture.layers import ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.muon_plan import Matrix, Part, matrices_of, plan_rounds
from llmscale.config.optimizers import ADAMW, MUON, parse_rule, undivided_name
from llmscale.errors import ConfigError

MODEL = GPTShape(2, 2, 8, 100, 4).architecture


def test_adamw_holds_three_fp32_numbers_of_every_weight() -> None:
    """The K = 12 of Rajbhandari et al. 2020."""
    assert ADAMW.state_bytes(MODEL) == 12 * MODEL.num_parameters
    assert ADAMW.state_bytes_per_weight(MODEL) == 12
    assert ADAMW.step_bytes_per_weight(MODEL) == 12 + 12 + 4


def test_what_has_one_dimension_does_not_decay() -> None:
    groups = dict(ADAMW.group_tensors(ParameterTensors(MODEL).all))
    assert {group.name: group.decays for group in groups} == {"decay": True, "no_decay": False}
    for group, tensors in groups.items():
        assert all((len(tensor.parameter.shape) > 1) == group.decays for tensor in tensors)
    assert sum(map(len, groups.values())) == len(ParameterTensors(MODEL).all)


def test_a_group_without_parameters_is_left_out() -> None:
    vectors = [tensor for tensor in ParameterTensors(MODEL).all if tensor.kind == "vector"]
    assert [group.name for group, _ in ADAMW.group_tensors(vectors)] == ["no_decay"]


def test_muon_holds_four_bytes_less_of_every_matrix_element() -> None:
    matrices = MODEL.elements_by_kind["matrix"]
    assert MUON.state_bytes(MODEL) == ADAMW.state_bytes(MODEL) - 4 * matrices
    groups = dict(MUON.group_tensors(ParameterTensors(MODEL).all))
    assert [(group.name, group.decays) for group in groups] == [("muon", True), ("decay", True), ("no_decay", False)]
    of_muon = groups[MUON.groups[0]]
    assert all(tensor.block is not None and len(tensor.parameter.shape) == 2 for tensor in of_muon)
    assert sum(tensor.elements for tensor in of_muon) == matrices


def test_muons_matrix_products_are_counted_per_q_k_and_v() -> None:
    """Blocks of width 8: four of 8 x 8, the MLP's two of 8 x 32."""
    square, wide = (5 * (4 * 8 * 8 * columns + 2 * 8**3) for columns in (8, 32))
    assert MUON.step_flops(MODEL) == 2 * (4 * square + 2 * wide)
    assert ADAMW.step_flops(MODEL) == 0


TENSORS = ParameterTensors(MODEL)


def test_patterns_divide_groups_and_the_first_that_matches_counts() -> None:
    rules = [parse_rule("wte*:lr=0.1x:decay=0"), parse_rule("*.weight:decay=0.5"), parse_rule("*.bias:lr=2x")]
    divided = MUON.with_matrix_factor(3).with_rules(rules, ["blocks.0.*"], TENSORS.all)
    group = divided.group_of("embedding", "wte.weight")
    assert (group.learning_rate_factor, group.weight_decay(0.1), undivided_name(group.name)) == (0.1, 0.0, "decay")
    group = divided.group_of("matrix", "blocks.1.mlp.up.weight")
    assert (group.learning_rate_factor, group.weight_decay(0.1), group.is_orthogonalised) == (3, 0.5, True)
    group = divided.group_of("vector", "ln_f.bias")
    assert (group.learning_rate_factor, group.weight_decay(0.1)) == (2, 0.0)
    frozen = sum(tensor.elements for tensor in TENSORS.all if tensor.block == 0)
    adam = ADAMW.with_rules((), ["blocks.0.*"], TENSORS.all)
    assert adam.state_bytes(MODEL) == 12 * (MODEL.num_parameters - frozen)
    assert adam.checkpoint_bytes(MODEL) == adam.state_bytes(MODEL) + 4 * frozen


@pytest.mark.parametrize(
    ("rules", "frozen", "words"),
    [
        ([], ["wte.weights"], "--freeze 'wte.weights' matches no parameter. Names near it: wte.weight"),
        (["block.*:lr=1x"], [], "--param-group 'block.*' matches no parameter"),
        (["w*:lr=1x", "wte*:lr=2x"], [], "'wte*' matches only parameters that an earlier pattern or --freeze"),
        (["wte*:lr=1x"], ["w*"], "'wte*' matches only parameters that an earlier pattern or --freeze"),
        ([], ["*"], "leaves no parameter to train"),
    ],
)
def test_patterns_without_effect_are_refused(rules: list[str], frozen: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ADAMW.with_rules([parse_rule(rule) for rule in rules], frozen, TENSORS.all)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "text", ["wte*", ":lr=1x", "wte*:lr=0.1", "wte*:lr=-1x", "wte*:decay=nanx", "w:rate=1x", "w:lr=1x:lr=2x"]
)
def test_an_ill_formed_rule_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 'wte\*:lr=0.1x:decay=0'"):
        parse_rule(text)


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
