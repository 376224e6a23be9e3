"""The scripts in scripts/bench start, and the shortest run of those that measure gives every number they promise."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.speed import scale_model
from tests import warm_start
from tests.conftest import HANG_S, REPOSITORY, words

BENCH = REPOSITORY / "scripts" / "bench"
SCRIPTS = {
    path.stem: ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in BENCH.glob("*/*.py")
    if 'if __name__ == "__main__"' in path.read_text()
}


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_start.run(
        [sys.executable, "-m", SCRIPTS[name], *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


#: Runs modules as scripts in one process, which imports once what they need.
RUN_ALL = """
import contextlib, io, json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv, output, errors, status = words, io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(words[0], run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            errors.write(end.code if isinstance(end.code, str) else "")
    print(json.dumps([status, output.getvalue(), errors.getvalue()]))
"""


def run_all(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Run scripts, each a name and its arguments; return status, output and errors of each."""
    commands_of_modules = json.dumps([[SCRIPTS[name], *arguments] for name, *arguments in commands])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN_ALL, commands_of_modules]
    answer = warm_start.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return [tuple(json.loads(line)) for line in answer.stdout.splitlines()]


def test_help_says_how_to_run_each_script() -> None:
    for module, (status, output, _) in zip(
        SCRIPTS.values(), run_all(*([name, "--help"] for name in SCRIPTS)), strict=True
    ):
        assert status == 0 and f"python -m {module}" in output


def test_readme_describes_every_script_and_every_result_has_a_script() -> None:
    readme = (BENCH / "README.md").read_text()
    assert [module for module in SCRIPTS.values() if f"| `{module.removeprefix('scripts.bench.')}" not in readme] == []
    results = list(BENCH.glob("*/*.txt"))
    assert len(results) >= 20
    for result in results:
        command = result.read_text().splitlines()[0]
        assert command.startswith("$ python -m scripts.bench."), result
        assert command.split()[3] in SCRIPTS.values(), result
        assert f"({result.relative_to(BENCH)})" in readme, result


@pytest.mark.slow
def test_init_from_memory_measures_every_rank(tmp_path: Path) -> None:
    answer = run_script("init_from_memory", "--folder", str(tmp_path / "model"), "--model", "tiny-1m", "--ranks", "2")
    assert answer.returncode == 0, answer.stderr
    lines = [line for line in answer.stdout.splitlines() if line.startswith("rank ")]
    assert [line[:11] for line in sorted(lines)] == ["rank 0 of 2", "rank 1 of 2"]
    assert all("MiB more while reading" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [["gpt2-124m-z0-bf16-mb4"], ["gpt2-124m-z0-bf16-mb4", "gpt2-124m-z3-bf16-mb16-full"]])
def test_memory_grid_compares_every_estimator_with_the_same_peak(cells: list[str], tmp_path: Path) -> None:
    answer = run_script(
        "memory_grid", "--measure", "dry-run", "--json", str(tmp_path / "result.json"), "--only", *cells
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["cell"] for row in result["rows"]] == cells
    assert result["measured_by"] == "dry-run"
    for row in result["rows"]:
        assert row["estimates"]["llmscale"] == pytest.approx(row["peak_bytes"], rel=0.03)
        # DeepSpeed's estimator knows stages 2 and 3 alone, and counts no activations.
        theirs = row["estimates"]["deepspeed"]
        assert theirs is None if "-z0-" in row["cell"] else theirs < row["peak_bytes"]
    assert result["reserve"]["cells"] == len(cells)
    assert 0 < result["reserve"]["median"] <= result["reserve"]["worst"] < 0.5
    counts = {name: errors["cells"] for name, errors in result["errors"].items()}
    assert counts == {
        "llmscale": len(cells),
        "deepspeed": len(cells) - 1,
        "cookbook": len(cells),
        "accelerate": len(cells),
    }


def test_memory_grid_has_at_least_forty_cells_of_every_stage() -> None:
    (status, _, errors), (_, text, _) = run_all(["memory_grid", "--only", "no-such-cell"], ["memory_grid", "--help"])
    assert status == 2 and "--only: no cell is called no-such-cell" in errors
    cells = [word.strip(",") for word in text.split() if "-bf16-mb" in word]
    assert len(cells) >= 40
    assert {cell.split("-z")[1][0] for cell in cells} == {"0", "1", "2", "3"}
    assert any("gpt3-6.7b" in cell for cell in cells)


@pytest.mark.slow
def test_engine_overhead_compares_loops_that_train_the_same(tiny_set: Path, tmp_path: Path) -> None:
    contestants = ["plain loop", "train.py, ZeRO-2", "train.py, ZeRO-3"]
    if importlib.util.find_spec("accelerate"):
        contestants.append("Trainer, ZeRO-2")
    answer = run_script(
        "engine_overhead",
        "--data",
        str(tiny_set),
        *words("--seq-len 32 --model tiny-1m --layers 1 --batch 4 --sets 1 --rounds 1 --steps 3 --starts 1"),
        "--json",
        str(tmp_path / "result.json"),
        "--only",
        *contestants,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["wall"]) == set(result["processor"]) == set(result["last_losses"]) == set(contestants)
    assert result["wall"]["plain loop"]["ratio"] == 1
    for name in contestants:
        assert result["last_losses"][name] == pytest.approx(result["last_losses"]["plain loop"], rel=1e-4)
        assert name in answer.stdout
    assert {"cpu", "cores", "torch", "deepspeed", "load_average"} <= set(result["machine"])
    assert result["first_step"][0]["seconds"] > 1
    assert "engine" in result["first_step"][0]["phases"]


@pytest.mark.slow
def test_checkpoint_measures_both_ways_of_saving_and_resuming(tmp_path: Path) -> None:
    settings = words("--stages 2 --worlds 2,1 --rounds 1 --layers 1 --width 64")
    answer = run_script("checkpoint", *settings, "--json", str(tmp_path / "result.json"))
    assert answer.returncode == 0, answer.stderr
    stage = json.loads((tmp_path / "result.json").read_text())["stages"]["zero2"]
    saves = {"save ours", "save deepspeed", "save dcp", "convert"}
    same_size = {"resume ours 2 to 2", "resume deepspeed 2 to 2", "resume ours 1 to 1"}
    others = {"resume ours 2 to 1", "resume universal 2 to 1", "resume dcp 2 to 2", "resume dcp 2 to 1"}
    assert set(stage["measurements"]) == saves | same_size | others
    for taken in stage["measurements"].values():
        assert len(taken) == 1
        assert taken[0]["seconds"] > 0
        assert taken[0]["peak_rss_bytes"] > 2**20
    assert 0 < stage["measurements"]["save ours"][0]["held_s"] <= stage["measurements"]["save ours"][0]["seconds"]
    # fp32 weights and two moments: twelve bytes a parameter, whatever the training precision.
    assert stage["measurements"]["save ours"][0]["bytes"] > 12 * stage["parameters"]
    assert "no extra disk" in answer.stdout


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """scale_model's smallest and largest numbers of GPUs, over two of its networks."""
    monkeypatch.setattr(scale_model, "GPUS", (8, 512, 4096))
    monkeypatch.setattr(scale_model, "NETWORKS", scale_model.NETWORKS[:2])


@pytest.mark.slow
def test_scale_model_estimates_every_number_of_gpus_and_says_its_error(
    few_points: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "scale.json", tmp_path / "scale.png"
    scale_model.main(["--model", "gpt2-124m", "--json", str(files[0]), "--plot", str(files[1])])
    points = json.loads(files[0].read_text())["points"]
    assert {point["gpus"] for point in points} == {8, 512, 4096}
    assert {point["stage"] for point in points} >= {"0", "1", "2", "3"}
    assert all(point["tokens_per_second_per_gpu"] > 0 for point in points)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "4,096" in output and "Nothing is measured" in output and "Error of tokens/s" in output


#: What is wrong with a command, and its words.
MISTAKES = {
    "Did you mean 'gpt2-124m'?": "scale_model --model gpt2-125m",
    "GPU 'nosuch' is not in the table": "scale_model --gpu nosuch",
    "and at most": "scale_model --sequences-per-gpu 99999999999999999999",
    "must be .png, .svg, .pdf, not 'picture.nosuch'": "scale_model --plot picture.nosuch",
    "and at most 1, not 'nan'": "recipes muon --share nan",
    "must be a multiple of the windows' 256 tokens, not '1000'": "recipes muon --batch-tokens 1000",
    "not 'inf'": "recipes blocks --learning-rates 1e-3 inf",
    "invalid choice: 'all'": "compile --modes all",
    "the folder no/such does not exist": "ladder --json no/such/folder.json",
    "must be above 0": "gpu --device cpu --minutes nan",
    "--out nowhere is not a folder": "gpu --device cpu --out nowhere",
    "--nanogpt . has no train.py; git clone": "gpu --device cpu --nanogpt .",
    "--write-readme is for what a GPU measured": "gpu --device cpu --write-readme",
}


def test_what_is_wrong_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    result = ["--json", str(tmp_path / "result.json")]
    commands = [words(command) for command in MISTAKES.values()]
    answers = run_all(*([*command, *(() if command[0] in ("gpu", "ladder") else result)] for command in commands))
    for message, (status, _, errors) in zip(MISTAKES, answers, strict=True):
        assert status in (1, 2), message
        assert message in " ".join(errors.split())
    assert not list(tmp_path.iterdir())
