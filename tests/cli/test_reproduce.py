"""`llmscale reproduce`: the plan of a recipe, its table, and all of it on a small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.cli import reproduce
from llmscale.cli.main import main
from llmscale.cli.reproduce import RECIPES, _download_step
from llmscale.errors import DataError
from llmscale.untrusted.documents import LINE_MAX_BYTES
from tests.conftest import HANG_S, REPOSITORY

RECIPE = """
title = "a test"
[data]
input = ["{text}"]
tokenizer = "bytes"
seq_len = 32
[run]
ds = "zero1"
model = "tiny-1m"
n_layer = 1
n_head = 2
n_embd = 32
global_batch_size = 4
steps = {steps}
save_every = 20
log_every = 1
val_every = 0
num_workers = 0
[evaluation]
val_samples = 8
tasks = ["hellaswag=items.jsonl"]
[[published]]
metric = "hellaswag acc_tokens"
value = 0.25
source = "somebody, table 3"
"""
ITEM = '{"ctx": "the quick", "endings": ["brown fox", "lazy dog"], "label": 0}\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """`recipe(steps)` writes a recipe; `change` is a replacement in its text."""

    def write(steps: int = 3, change: tuple[str, str] = ("", "")) -> Path:
        (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog. " * 2000)
        (tmp_path / "items.jsonl").write_text(ITEM)
        text = RECIPE.format(text=tmp_path / "text.txt", steps=steps)
        (tmp_path / "mine.toml").write_text(text.replace(*change) if change[0] else text)
        return tmp_path / "mine.toml"

    return write


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_dry_run_prints_every_command(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", name, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for step in ("data: llmscale data prepare", "training: llmscale train", "evaluation: llmscale eval"):
        assert f"\n{step} " in out
    assert (", cost $" in out) == ("plan" in (RECIPES.folder / f"{name}.toml").read_text())
    assert not list(tmp_path.iterdir())


def test_on_hosts_it_launches_and_plans_for_them(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    words = [
        "reproduce",
        "--recipe",
        str(recipe(change=("size = 4", "size = 8"))),
        "--hostfile",
        str(tmp_path / "hosts"),
    ]
    assert main([*words, "--gpu", "a100-80gb", "--price-per-gpu-hour", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"training: llmscale launch --hostfile {tmp_path}/hosts -- --data " in out
    assert "--num-nodes 2 --gpu a100-80gb --price-per-gpu-hour 2.0 --num-gpus 4" in out
    assert "--n-layer 1" in out and "cost" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seq_len", "seqlen"), r"mine.toml: unknown argument '--seqlen'. Did you mean '--seq-len'\?"),
        (("steps", "stepps"), r"mine.toml: unknown argument '--stepps'. Did you mean '--steps'\?"),
        (("0.25", '"high"'), r"published.0.value = 'high': must be a valid number"),
        (("title", "titel"), r"mine.toml: 'title' is missing"),
        (("[[published]]", "[[publishd]]"), r"'publishd' is not an entry of a recipe. Did you mean 'published'\?"),
        (("steps = 3", "steps = 0"), r"mine.toml: steps = '0': must be greater than or equal to 1"),
        (("steps = 3", "steps = [3]"), r"mine.toml: run.steps = \[3\]: must be a text, a number, true"),
        (("steps = 3", 'steps = 3\nrun = "elsewhere"'), "run.run is decided by --out. Remove it"),
        (("hellaswag acc_tokens", "gpu hours spent"), "metric = .*: must be tokens, hours, GPU-hours, cost"),
        (("items.jsonl", "absent.jsonl"), "absent.jsonl cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_entry_is_one_line(
    recipe: Callable[..., Path], change: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "--recipe", str(recipe(change=change)), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_lists_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "gpt2-124"]) == 2
    assert "Did you mean 'gpt2-124m'? Legal: gpt2-1.5b, gpt2-124m, gpt3-125m, nano" in capsys.readouterr().err


@pytest.fixture
def done(recipe: Callable[..., Path], trained_run: Path, tmp_path: Path) -> Iterator[list[str]]:
    """The command for a folder in which every step was done."""
    out = tmp_path / "out"
    shutil.copytree(trained_run, out / "run")
    (out / "data").mkdir()
    (out / "data" / "manifest.json").write_text("{}")
    values = {"validation": {"loss": 3.5, "num_samples": 8}, "tasks": {"hellaswag": {"values": {"acc_tokens": 0.5}}}}
    (out / "evaluation.json").write_text(json.dumps({"step": 3, **values}))
    (out / "report.html").write_text("")
    yield ["reproduce", "--recipe", str(recipe()), "--out", str(out)]


def test_the_table_compares_what_is_done(done: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(done) == 0
    out = capsys.readouterr().out
    assert "training: done" in out and "report: done" in out
    rows = {line[:24].strip(): line.split() for line in out.splitlines() if line}
    assert rows["hellaswag acc_tokens"] == [
        "hellaswag",
        "acc_tokens",
        "-",
        "0.5000",
        "0.2500",
        "somebody,",
        "table",
        "3",
    ]
    assert rows["validation loss"][2:] == ["-", "3.5000", "-"]
    assert rows["tokens"][1:] == ["-", "384", "-"]


def test_a_folder_keeps_to_its_recipe(
    done: list[str], recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(done) == 0
    recipe(steps=4)
    assert main(done) == 2
    assert "was begun with another recipe" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "recipe.toml").mkdir(parents=True)
    assert main(["reproduce", "--recipe", str(recipe()), "--out", str(tmp_path / "out")]) == 2
    assert f"Cannot write {tmp_path / 'out' / 'recipe.toml'}: Is a directory." in capsys.readouterr().err


class _Records:
    """Records of a stranger, the second of which may raise."""

    def __init__(self, second: object) -> None:
        self.second = second

    def __iter__(self) -> Iterator[object]:
        yield {"ctx": "a", "label": 0}
        if isinstance(self.second, Exception):
            raise self.second
        yield self.second


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"ctx": "b"}, None),
        ({"ctx": "b" * LINE_MAX_BYTES}, "hf:org/items:validation: item 2 is beyond the limits of "),
        (ValueError("no such split\n\x1b[2J"), "hf:org/items:validation cannot be read: no such split. Put its items"),
        (None, "needs the `datasets` library: "),
    ],
)
def test_items_are_written_in_one_piece_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: object, said: str | None
) -> None:
    library = SimpleNamespace(load_dataset=lambda *_, **__: _Records(second)) if second is not None else None
    monkeypatch.setitem(sys.modules, "datasets", library)
    path = tmp_path / "items.jsonl"
    action = _download_step("hf:org/items:validation", path).action
    assert action is not None
    if said is None:
        action()
        assert [json.loads(line)["ctx"] for line in path.read_text().splitlines()] == ["a", "b"]
        return
    with pytest.raises(DataError, match=re.escape(said)):
        action()
    assert list(tmp_path.iterdir()) == []


def test_items_beyond_the_limit_of_all_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: _Records({"ctx": "b"})))
    monkeypatch.setattr(reproduce, "_MOST_ITEM_BYTES", 30)
    action = _download_step("hf:org/items:validation", tmp_path / "items.jsonl").action
    assert action is not None
    with pytest.raises(DataError, match="item 2 is beyond the limits"):
        action()
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_a_signal_ends_has_the_status_of_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(reproduce, "module_command", lambda *_: ends)
    assert reproduce.run_command(["train"], []) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_interrupted_at_two_places_it_ends_with_a_table(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Ctrl-C in training, SIGKILL in training, and then to the end; what was done is not done again."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "llmscale", "reproduce", "--recipe", str(recipe(steps=200)), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def last_step() -> int:
        lines = (
            (out / "run" / "metrics.jsonl").read_text().splitlines() if (out / "run" / "metrics.jsonl").exists() else []
        )
        return max((json.loads(line).get("step") or 0 for line in lines), default=0)

    for number, at in ((signal.SIGINT, 30), (signal.SIGKILL, 90)):
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + HANG_S
        while last_step() < at and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=HANG_S)[0]
        if number == signal.SIGINT:
            assert process.returncode == 130, said
            assert "stopped by SIGINT in training. The same command continues." in said
    end = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S)
    for _ in range(60):
        if end.returncode == 0:
            break
        # The ranks of the killed command still save.
        time.sleep(1)
        end = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert end.returncode == 0, end.stdout + end.stderr
    assert "data: done" in end.stdout
    assert "hellaswag acc_tokens" in end.stdout and "somebody, table 3" in end.stdout
    assert (out / "report.html").is_file()
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert again.stdout.count(": done") == 4


@pytest.mark.slow
def test_nano_ends_near_the_loss_of_its_table(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "llmscale", "reproduce", "nano", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    # The text differs between versions of Python.
    assert found["validation"]["loss"] == pytest.approx(2.3614, abs=0.1)
