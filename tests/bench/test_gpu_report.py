from __future__ import annotations

import pytest
from gpu_report import BEGIN, END, constant_lines, judge_targets, readme_table, replace_table, row_line


def row(**values: object) -> dict[str, object]:
    usual = {
        **{"kind": "train", "cell": "cell", "model": "gpt2-124m", "n_layer": None, "turn": 1, "compared": True},
        **{
            "micro_batch_size": 16,
            "checkpointing": "none",
            "tokens_per_second": 5e5,
            "mfu": 0.45,
            "first_step_s": 40.0,
        },
        **{"peak_bytes": 8 * 2**30, "estimate_bytes": 9 * 2**30},
    }
    return {**usual, **values}


def test_a_row_says_its_numbers_or_why_it_has_none() -> None:
    line = row_line(row())
    for words in ("500,000", "45.0%", "8.00", "9.00", "+12.5%"):
        assert words in line
    assert "not measured: out of memory" in row_line({"cell": "large", "kind": "train", "problem": "out of memory"})
    assert "-" in row_line(row(mfu=None, peak_bytes=None, estimate_bytes=None))
    grid = row_line(row(kind="grid", reserved_bytes=2**33, outside_torch_bytes=2**29))
    assert "reserved 8.00, outside 0.50" in grid


def test_targets_are_met_not_met_or_not_measured() -> None:
    rows = [row(mfu=0.51), row(model="gpt2-1.5b", mfu=0.5499), {**row(model="llama3-8b"), "problem": "out of memory"}]
    rows[2].pop("mfu")
    rows += [row(kind="nanogpt", tokens_per_second=4e5, mfu=0.9)]
    lines = judge_targets(rows, "h100-80gb")
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["met", "NOT met", "not measured", "met"]
    assert "1.25 times" in lines[3]


def test_the_slower_turn_of_the_comparison_counts() -> None:
    rows = [row(kind=kind, turn=turn, tokens_per_second=rate) for kind, turn, rate in (
        ("train", 1, 110.0), ("nanogpt", 1, 100.0), ("nanogpt", 2, 100.0), ("train", 2, 99.0), ("train", 3, 500.0),
    )]  # fmt: skip
    assert "NOT met, 1.10, 0.99 times" in judge_targets(rows, "h100-80gb")[3]


def test_a_part_of_a_model_is_told_and_does_not_meet_its_target() -> None:
    line = judge_targets([row(model="llama3-8b", n_layer=8, mfu=0.7)], "h100-80gb")[2]
    assert "not measured (8 of its 32 blocks without offload: 70.0%)" in line


@pytest.mark.parametrize("gpu", [None, "a100-80gb"])
def test_another_device_is_not_what_the_targets_are_for(gpu: str | None) -> None:
    assert "the targets are for one H100" in judge_targets([], gpu)[-1]


def test_a_cpu_meets_no_target() -> None:
    lines = judge_targets([row(mfu=None), row(kind="nanogpt", mfu=None)], None, is_gpu=False)
    assert [line.endswith(": not measured") for line in lines[:4]] == [True] * 4
    assert "a CPU" in lines[4]


def test_the_table_takes_the_place_of_the_one_before() -> None:
    readme = f"# Title\n\n{BEGIN}\nold\n{END}\n\nAfter\n"
    table = readme_table(
        [row(cell="gpt2-124m, ZeRO-1"), {"cell": "x", "problem": "no time"}], "H100", ["a target: met"]
    )
    new = replace_table(readme, table)
    assert new.startswith("# Title\n\n<!--")
    assert new.endswith(f"{END}\n\nAfter\n")
    assert "old" not in new
    assert "| gpt2-124m, ZeRO-1 | 16 | 500,000 | 45.0% | 8.00 | 9.00 |" in new
    assert "no time" not in new
    assert replace_table(new, table) == new


@pytest.mark.parametrize("readme", ["# Title\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
def test_a_readme_without_its_markers_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="gpu-table:begin"):
        replace_table(readme, "")


def test_constants_are_shown_beside_what_is_assumed() -> None:
    constants = [
        {"home": "a.py", "name": "A", "assumed": 1.1, "measured": 1.25},
        {"home": "b.py", "name": "B", "assumed": 2, "measured": None},
    ]
    assert constant_lines(constants) == ["a.py A: assumed 1.1, measured 1.25", "b.py B: assumed 2, not measured"]
