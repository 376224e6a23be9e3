"""Checkpoints of DeepSpeed's, of any release, stage and ranks, are continued at any other; what is written back too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_cells
from tests.deepspeed_releases import CELLS, RELEASES, losses_after, unpack_release

JOB = Path(__file__).parent / "deepspeed_job.py"
#: Steps after a load.
STEPS = 3
#: Largest difference of losses of about 7, by precision: rounding of another order of sums; of 16-bit weights.
TOLERANCE = {"fp32": 2e-6, "bf16": 0.06, "fp16": 5e-3}
SAMPLE = (
    ("0.14.5", "zero2-fp32", 3),
    ("0.16.9", "zero3-fp32", 1),
    ("0.18.9", "zero0-fp32", 2),
    ("0.19.8", "zero1-bf16", 3),
    ("0.14.5", "zero2-fp16", 1),
)
ALL = tuple(
    (release, cell, stage)
    for release, cell, stage in itertools.product(RELEASES, CELLS, (0, 1, 2, 3))
    if not (cell.endswith("fp16") and stage == 0)
)


def precision_of(cell: str) -> str:
    return cell.split("-")[1]


def run(cells: list[dict[str, Any]], ranks: int) -> dict[str, dict[str, Any]]:
    """Run cells in their order; return the answers by name."""
    answers = run_cells(JOB, [{"name": str(number), **cell} for number, cell in enumerate(cells)], ranks)
    return {answer["cell"]: answer for answer in answers}


def assert_close(losses: list[float], expected: list[float], precision: str) -> None:
    assert len(losses) == len(expected)
    worst = max(abs(here - there) for here, there in zip(losses, expected, strict=True))
    assert worst <= TOLERANCE[precision], (losses, expected)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("releases")
    return {release: unpack_release(release, out) for release in RELEASES}


@pytest.mark.parametrize(
    ("ranks", "loads"),
    [
        (3, SAMPLE),
        pytest.param(1, ALL, marks=pytest.mark.slow),
        pytest.param(2, ALL, marks=pytest.mark.slow),
        pytest.param(3, ALL, marks=pytest.mark.slow),
    ],
    ids=["sample-3", "all-1", "all-2", "all-3"],
)
def test_what_releases_wrote_continues(
    releases: dict[str, Path], ranks: int, loads: tuple[tuple[str, str, int], ...]
) -> None:
    cells = [
        {
            "do": "load",
            "name": f"{release} {cell} {stage}",
            "folder": str(releases[release] / cell),
            "stage": stage,
            "precision": precision_of(cell),
        }
        for release, cell, stage in loads
    ]
    answers = run(cells, ranks)
    for release, cell, stage in loads:
        answer = answers[f"{release} {cell} {stage}"]
        expected = losses_after(releases[release] / cell)
        # The release's own steps are not the same in bf16: only the first loss is of the weights alone.
        assert_close(answer["losses"][:1], expected[:1], precision_of(cell))
        assert_close(answer["losses"], expected, precision_of(cell))
        was = int(cell[4])
        assert (f"ZeRO stage {was} -> {stage}" in answer["changes"]) == (was != stage)
        assert (f"ranks 2 -> {ranks}" in answer["changes"]) == (ranks != 2)


#: (cell, stage that loads it)
RESHARDED = (("zero2-fp32", 3), ("zero3-fp32", 2), ("zero3-fp32", 0))
ALL_RESHARDED = tuple(
    (cell, stage)
    for cell, stage in itertools.product(CELLS, (0, 1, 2, 3))
    if cell != "zero0-fp32" and not (cell.endswith("fp16") and stage == 0)
)


@pytest.mark.parametrize(
    ("ranks", "loads"),
    [
        (3, RESHARDED),
        pytest.param(1, ALL_RESHARDED, marks=pytest.mark.slow),
        pytest.param(3, ALL_RESHARDED, marks=pytest.mark.slow),
    ],
    ids=["sample-3", "all-1", "all-3"],
)
def test_deepspeed_itself_continues_what_was_resharded(
    releases: dict[str, Path], tmp_path: Path, ranks: int, loads: tuple[tuple[str, int], ...]
) -> None:
    cells = []
    for cell, stage in loads:
        out = str(tmp_path / f"{cell}-{stage}")
        common = {"stage": stage, "precision": precision_of(cell)}
        source = str(releases["0.19.8"] / cell)
        cells.append({"do": "convert", "to": "native", "name": f"write {out}", "folder": source, "out": out, **common})
        cells.append({"do": "load_by_deepspeed", "name": out, "folder": out, "universal": False, **common})
    answers = run(cells, ranks)
    for cell, stage in loads:
        losses = answers[str(tmp_path / f"{cell}-{stage}")]["losses"]
        assert_close(losses, losses_after(releases["0.19.8"] / cell), precision_of(cell))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["universal", "import"])
def test_a_universal_folder_and_an_imported_one_continue(releases: dict[str, Path], tmp_path: Path, to: str) -> None:
    cells = []
    for cell in ("zero2-fp32", "zero3-fp32"):
        out = str(tmp_path / cell)
        source = str(releases["0.19.8"] / cell)
        cells.append({"do": "convert", "to": to, "name": f"write {cell}", "folder": source, "out": out})
        for stage in (1, 2, 3):
            common = {"stage": stage, "precision": "fp32", "folder": out}
            if to == "import":
                cells.append({"do": "load_imported", "name": f"{cell} {stage}", **common})
                continue
            cells.append({"do": "load", "name": f"{cell} {stage}", **common})
            if stage < 3:
                name = f"{cell} {stage} by DeepSpeed"
                cells.append({"do": "load_by_deepspeed", "name": name, "universal": True, **common})
    for name, answer in run(cells, 3).items():
        if not name.startswith("write"):
            assert_close(answer["losses"], losses_after(releases["0.19.8"] / name.split()[0]), "fp32")


#: Layouts that DeepSpeed writes, with what differs from the ordinary one.
VARIANTS: dict[str, dict[str, Any]] = {
    "round-robin": {"stage": 2, "built": {"zero_optimization": {"round_robin_gradients": True}}},
    "aligned": {"stage": 2, "built": {"zero_optimization": {"parameter_alignment": True}}},
    "sub-groups": {"stage": 3, "built": {"zero_optimization": {"sub_group_size": 60}}},
    "offload-2": {"stage": 2, "built": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
    "offload-3": {"stage": 3, "built": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
    "momentum-0": {"stage": 0, "built": {"optimizer": "momentum"}},
    "momentum-3": {"stage": 3, "built": {"optimizer": "momentum"}},
    "rmsprop-1": {"stage": 1, "built": {"optimizer": "rmsprop"}},
    "tagged": {"stage": 2, "arguments": {"tag": "best"}},
    "outsider": {"stage": 2, "built": {"has_outsider": True}},
}


@pytest.mark.slow
def test_every_layout_that_deepspeed_writes_continues(tmp_path: Path) -> None:
    writes = [
        {"do": "write", "name": name, "precision": "fp32", "folder": str(tmp_path / name), **variant}
        for name, variant in VARIANTS.items()
    ]
    expected = run(writes, 2)
    loads = []
    for name, variant in VARIANTS.items():
        kept = {key: value for key, value in variant.get("built", {}).items() if key in ("optimizer", "has_outsider")}
        loads += [
            {
                "do": "load",
                "name": f"{name} {stage}",
                "folder": str(tmp_path / name),
                "stage": stage,
                "precision": "fp32",
                "built": kept,
            }
            for stage in (0, 1, 2, 3)
        ]
    for name, answer in run(loads, 3).items():
        # Stage 0 clips by a norm that counts what the optimizer has not, too: its steps are others.
        steps = 1 if name == "outsider 0" else STEPS
        assert_close(answer["losses"][:steps], expected[name.split()[0]]["losses"][:steps], "fp32")


@pytest.mark.slow
def test_frozen_weights_that_were_left_out_stay_as_the_script_made_them(tmp_path: Path) -> None:
    writes = [
        {
            "do": "write",
            "name": f"{stage}",
            "precision": "fp32",
            "stage": stage,
            "folder": str(tmp_path / f"{stage}"),
            "arguments": {"exclude_frozen_parameters": True},
        }
        for stage in (2, 3)
    ]
    run(writes, 2)
    loads = [{"do": "load", "name": f"{stage}", **_cell(tmp_path / f"{stage}", 1)} for stage in (2, 3)]
    for answer in run(loads, 3).values():
        assert [line for line in answer["changes"] if "as the script made it" in line] == [
            "frozen.weight stays as the script made it",
            "frozen.bias stays as the script made it",
        ]


def _cell(folder: Path, stage: int) -> dict[str, Any]:
    return {"folder": str(folder), "stage": stage, "precision": "fp32"}


@pytest.mark.slow
def test_a_trainable_parameter_that_deepspeed_lost_is_named(tmp_path: Path) -> None:
    built = {"has_outsider": True}
    run([{"do": "write", "built": built, **_cell(tmp_path, 3)}], 2)
    (answer,) = run([{"do": "load", "built": built, **_cell(tmp_path, 2)}], 3).values()
    assert "WARNING: DeepSpeed did not save it: outsider stays as the script made it" in answer["changes"]


def test_another_model_is_refused_on_every_rank_before_a_weight_changes(releases: dict[str, Path]) -> None:
    folder = releases["0.19.8"]
    cells = [
        {"do": "refuse", "name": "model", "built": {"has_outsider": True}, **_cell(folder / "zero2-fp32", 2)},
        {"do": "refuse", "name": "tag", "arguments": {"tag": "../x"}, **_cell(folder / "zero2-fp32", 1)},
        {"do": "refuse", "name": "none", "arguments": {"tag": "best"}, **_cell(folder / "zero2-fp32", 0)},
    ]
    answers = run(cells, 2)
    assert all(answer["is_unchanged"] for answer in answers.values())
    assert "has no 'frozen/outsider'" in answers["model"]["error"]
    assert "does not name a folder" in answers["tag"]["error"]
    assert "no *_model_states.pt" in answers["none"]["error"]


def test_another_global_batch_is_reported(releases: dict[str, Path]) -> None:
    cell = {"do": "load", "built": {"gradient_accumulation_steps": 1}, **_cell(releases["0.19.8"] / "zero2-fp32", 2)}
    (answer,) = run([cell], 3).values()
    assert answer["changes"] == ["ranks 2 -> 3", "global batch 6 -> 3"]


@pytest.mark.slow
def test_fp16_of_stage_0_gives_its_weights_alone(tmp_path: Path) -> None:
    run([{"do": "write", **_cell(tmp_path, 0), "precision": "fp16"}], 2)
    cells = [
        {"do": "refuse", "name": "all", **_cell(tmp_path, 2)},
        {"do": "load", "name": "weights", "arguments": {"weights_only": True}, **_cell(tmp_path, 2)},
    ]
    answers = run(cells, 3)
    assert "fp16 at ZeRO stage 0" in answers["all"]["error"]
    assert answers["weights"]["changes"] == ["weights only"]


@pytest.mark.parametrize(
    ("verified", "stages"),
    [
        (False, ((2, 3),)),
        pytest.param(True, ((2, 3),), marks=pytest.mark.slow),
        pytest.param(True, tuple(itertools.product((0, 1, 2, 3), repeat=2)), marks=pytest.mark.slow),
        pytest.param(False, tuple(itertools.product((0, 1, 2, 3), repeat=2)), marks=pytest.mark.slow),
    ],
)
def test_own_calls_within_the_block_continue_on_other_ranks(
    tmp_path: Path, verified: bool, stages: tuple[tuple[int, int], ...]
) -> None:
    common = {"do": "elastic", "verified": verified, "precision": "fp32"}
    sources = sorted({before for before, _ in stages})
    saves = [
        {**common, "saves": True, "name": f"{stage}", "stage": stage, "folder": str(tmp_path / f"{stage}")}
        for stage in sources
    ]
    expected = run(saves, 2)
    loads = [
        {
            **common,
            "saves": False,
            "name": f"{before} {stage}",
            "stage": stage,
            "folder": str(tmp_path / f"{before}"),
        }
        for before, stage in stages
    ]
    for name, answer in run(loads, 3).items():
        before = name.split()[0]
        assert_close(answer["losses"], expected[before]["losses"], "fp32")
        place = tmp_path / before / "global_step3"
        assert (place / "checkpoints").is_dir() == verified
