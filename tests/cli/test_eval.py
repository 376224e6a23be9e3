from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmscale.cli.eval import result_lines
from tests.evaluate.made_up_items import write_items, write_lm_eval_tasks

Llmscale = Callable[..., Any]
FORMATS = {"hellaswag": "hellaswag", "multiple_choice": "choice", "likelihood": "likelihood", "text": "text"}


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("items")
    write_items(folder)
    write_lm_eval_tasks(folder / "tasks", folder)
    return folder


def task_flags(items: Path) -> list[str]:
    return ["--tasks", *(f"{name}={items / file}.jsonl" for name, file in FORMATS.items())]


def test_a_run_its_checkpoint_and_its_export_have_the_same_results(
    trained_run: Path, tiny_set: Path, items: Path, llmscale: Llmscale, tmp_path: Path
) -> None:
    assert llmscale("export", str(trained_run), "--to", str(tmp_path / "hf")).returncode == 0
    subjects = (trained_run, trained_run / "checkpoints/step-00000003", tmp_path / "hf")
    results = []
    for number, subject in enumerate(subjects):
        out, data = tmp_path / f"{number}.json", () if number < 2 else ("--data", str(tiny_set))
        done = llmscale("eval", str(subject), *task_flags(items), "--json", str(out), "--batch-size", "5", *data)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        results.append(json.loads(out.read_text()))
        assert f"loss           {results[-1]['validation']['loss']:.4f}" in done.stdout
    run, checkpoint, exported = results
    assert run == checkpoint
    assert (run["step"], exported["step"]) == (3, None)
    for key in ("tasks", "validation", "num_parameters", "published_hellaswag"):
        assert exported[key] == run[key]
    assert run["tasks"].keys() == {"hellaswag", "choice", "likelihood", "text"}
    # As many bytes as tokens, but for the ends of documents.
    assert run["validation"]["bits_per_byte"] == pytest.approx(run["validation"]["loss"] / 0.6931, rel=0.01)


def test_tasks_of_lm_eval_run_beside_those_of_files(trained_run: Path, items: Path, llmscale: Llmscale) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    tasks = (f"hellaswag={items / 'hellaswag'}.jsonl", "hella", str(items / "tasks/rolling.yaml"))
    words = ("--task-folder", str(items / "tasks"), "--val-samples", "0", "--limit", "4")
    done = llmscale("eval", str(trained_run), "--tasks", *tasks, *words)
    assert done.returncode == 0, done.stderr
    assert "fatal" not in done.stderr, "git is not asked about a folder that is in no repository"
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    values = {(row[0], row[1]): row[2] for row in rows}
    assert values["hella", "acc"] == values["hellaswag", "acc"]
    assert values["hella", "acc_norm"] == values["hellaswag", "acc_norm"]
    assert ("rolling", "bits_per_byte") in values
    assert not any(row[0] == "validation" for row in rows)
    assert done.stdout.count("4 items") == len(rows)
    # More tokens than the model sees.
    (items / "tasks" / "long.yaml").write_text((items / "tasks" / "written.yaml").read_text().replace("9}", "999}"))
    done = llmscale("eval", str(trained_run), "--tasks", str(items / "tasks/long.yaml"), "--val-samples", "0", "--chat")
    assert done.returncode != 0
    assert "999" in done.stderr and "max_gen_toks in the task's generation_kwargs" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("RUN", "--tasks", "hellaswag=ITEMS/text.jsonl"),
            r'text.jsonl, line 1 has no "ctx", and the format hellaswag needs one: {"ctx"',
        ),
        (("RUN", "--json", "RUN/metrics.jsonl"), "is a file of the run itself"),
        (("RUN", "--tasks", "text=ITEMS/text.jsonl", "--json", "ITEMS/text.jsonl"), "is a file of items"),
        (("RUN", "--val-samples", "0"), "nothing to do"),
        (("RUN", "--task-folder", "x"), "--task-folder needs --tasks"),
        (("EMPTY",), "has no checkpoints yet"),
    ],
)
def test_what_is_wrong_is_said_without_torch(
    words: tuple[str, ...], message: str, trained_run: Path, items: Path, llmscale: Llmscale, tmp_path: Path
) -> None:
    """A run folder has a config.json too, before it has checkpoints."""
    (tmp_path / "empty").mkdir()
    shutil.copy(trained_run / "config.json", tmp_path / "empty")
    places = {"RUN": trained_run, "ITEMS": items, "EMPTY": tmp_path / "empty"}
    for name, place in places.items():
        words = tuple(word.replace(name, str(place)) for word in words)
    done = llmscale("eval", *words, torch_free=True)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_task_that_nobody_knows_is_answered_with_the_nearest(
    trained_run: Path, items: Path, llmscale: Llmscale
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    done = llmscale("eval", str(trained_run), "--tasks", "hellaswg", "--task-folder", str(items / "tasks"))
    assert done.returncode == 2
    assert "task 'hellaswg' is not among" in done.stderr
    assert "Nearest: hellaswag" in done.stderr


def test_a_document_that_the_task_cannot_use_is_named_before_the_model_is_loaded(
    trained_run: Path, items: Path, llmscale: Llmscale, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    lines = (items / "hellaswag.jsonl").read_text().splitlines()
    record = json.loads(lines[2])
    del record["endings"]
    write_lm_eval_tasks(tmp_path / "tasks", tmp_path)
    (tmp_path / "hellaswag.jsonl").write_text("\n".join([*lines[:2], json.dumps(record), *lines[3:]]))
    words = ("eval", str(trained_run), "--tasks", str(tmp_path / "tasks/hella.yaml"))
    done = llmscale(*words)
    assert done.returncode == 2, done.stderr
    assert "task hella: document 2, counted from 0" in done.stderr
    # The two documents before it are fine; then only the name is wrong.
    shutil.copy(items / "choice.jsonl", tmp_path / "hella.jsonl")
    done = llmscale(*words, f"multiple_choice={tmp_path / 'hella.jsonl'}", "--limit", "2")
    assert done.returncode == 2, done.stderr
    assert "both named 'hella'" in done.stderr


@pytest.mark.slow
def test_a_task_whose_data_is_not_here_is_not_fetched(trained_run: Path, llmscale: Llmscale) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    done = llmscale("eval", str(trained_run), "--tasks", "hellaswag")
    assert done.returncode == 2
    assert "task hellaswag cannot be loaded" in done.stderr
    assert "Nothing is fetched from the network" in done.stderr


def test_published_results_stand_below_ours() -> None:
    from types import SimpleNamespace

    from llmscale.evaluate.evaluation import Evaluation
    from llmscale.evaluate.tasks import TaskResult, comparable_results

    shape = SimpleNamespace(num_parameters=124_000_000, active_parameters=124_000_000)
    subject: Any = SimpleNamespace(folder=Path("run"), step=None, shape=shape)
    results = [TaskResult("hellaswag", {"acc": 0.25}, 101)]
    assert len(list(result_lines(Evaluation(subject, (), results)))) == 2, "of some items only, or lm-eval's own"
    lines = list(result_lines(Evaluation(subject, (), results, comparable_results(124_000_000))))
    assert lines[0] == "run, 124,000,000 parameters"
    assert lines[1].split() == ["hellaswag", "acc", "0.2500", "+-", "0.0433", "101", "items"]
    assert lines[2].split()[:4] == ["GPT-2", "124M", "acc", "0.2859"]
    assert any("GPT-3 125M" in line and "0.3370" in line for line in lines)
