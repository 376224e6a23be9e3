from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.config.run_config import build_run_config
from llmscale.errors import DataError
from llmscale.training.inputs import as_plain
from llmscale.untrusted.terminal import make_visible
from tests.terminal_screen import Terminal


def sample(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sample", *words, "--max-new-tokens", "20"]) == 0
    return capsys.readouterr().out


def test_the_command_writes_text_behind_the_prompt_and_nothing_else(trained_run: Path, llmscale: Callable) -> None:
    done = llmscale("sample", str(trained_run), "the quick", "--max-new-tokens", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the quick")
    assert len(done.stdout) > len("the quick\n")


def test_draws_follow_the_seed_and_greedy_needs_none(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained_run)
    one, again, other = (sample(capsys, run, "the", "--seed", seed) for seed in ("1", "1", "2"))
    assert one == again
    assert one != other
    greedy = [sample(capsys, run, "the", "--temperature", "0", "--seed", seed) for seed in ("1", "2")]
    assert greedy[0] == greedy[1]


def test_several_samples_are_numbered_and_differ(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sample(capsys, str(trained_run), "the", "--num-samples", "2")
    _, first, second = text.replace("--- 2 ---", "--- 1 ---").split("--- 1 ---\n")
    assert text.startswith("--- 1 ---\nthe")
    assert second.startswith("the")
    assert first != second


def test_prompts_of_all_kinds_are_one_batch_that_changes_no_text(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained_run)
    (tmp_path / "lines.txt").write_text("quick\n\nover a lazy\r\n")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "two\\nlines", "id": 7}\n')
    prompts = ["the", "many small models learn to re", "quick", "over a lazy"]
    alone = [sample(capsys, run, prompt) for prompt in prompts]
    together = sample(capsys, run, "the", "--prompt", prompts[1], "--prompts", str(tmp_path / "lines.txt"))
    assert together == "".join(f"--- {number} ---\n{text}" for number, text in enumerate(alone, start=1))
    assert sample(capsys, run, "--prompts", str(tmp_path / "lines.jsonl")).startswith("two\nlines")


def test_as_json_a_text_says_what_it_continues_and_why_it_ends(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt", "the", "--prompt", "quick", "--num-samples", "3", "--seed", "5")
    by_batch = [sample(capsys, str(trained_run), *words, "--json", *more) for more in ((), ("--batch-size", "2"))]
    without_cache = sample(capsys, str(trained_run), *words, "--json", "--no-cache")
    assert by_batch[0] == by_batch[1] == without_cache
    texts = [json.loads(line) for line in by_batch[0].splitlines()]
    assert [(text["prompt"], text["sample"], text["seed"]) for text in texts] == [
        (prompt, number, 4 + number) for prompt in ("the", "quick") for number in (1, 2, 3)
    ]
    assert {text["ended_by"] for text in texts} <= {"max_new_tokens", "end_of_text"}
    assert sample(capsys, str(trained_run), "quick", "--seed", "6") == f"quick{make_visible(texts[4]['text'])}\n"


def test_a_checkpoint_can_be_named_and_the_newest_is_taken_else(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = (str(trained_run / "checkpoints" / f"step-0000000{step}") for step in (3, 2))
    by_run = sample(capsys, str(trained_run), "the")
    assert by_run == sample(capsys, newest, "the")
    assert by_run != sample(capsys, older, "the")
    assert sample(capsys, str(trained_run), "the", "--step", "2") == sample(capsys, older, "the")


def test_wrong_folders_and_damage_are_one_clear_line(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shard = next((run / "checkpoints/step-00000003").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    empty = f"{tmp_path} has no checkpoints yet. Name a run folder"
    for folder, message in ((tmp_path, empty), (run, f"{shard} does not match its hash")):
        assert main(["sample", str(folder), "the"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {message}")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x" * 33], "the prompt has 33 tokens, and the model sees 32 (its seq_len). Give the last 32 or fewer."),
        (["a", "--prompt", "x" * 33], "prompt 2 has 33 tokens, and the model sees 32"),
    ],
)
def test_a_prompt_longer_than_the_context_is_refused_before_any_text(
    words: list[str], message: str, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(trained_run), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"error: {message}")


def test_a_run_that_was_moved_needs_no_data_set(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample(capsys, str(trained_run), "the")
    shutil.copytree(trained_run, tmp_path / "moved")
    monkeypatch.setattr("llmscale.evaluate.model_source.open_recorded_sets", no_set)
    monkeypatch.chdir(tmp_path)
    assert sample(capsys, "moved", "the") == expected
    assert main(["export", "moved", "--to", "out"]) == 0
    assert sample(capsys, "out", "the").endswith(expected), "a folder of transformers is a model too"
    for words, done in (((), 2), (("--tasks", f"text={items(tmp_path)}"), 0)):
        assert main(["eval", "moved", *words]) == done
        assert "cannot be opened: gone. Name it with --data SET" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "moved" / "dataset")
    assert main(["sample", "moved", "the"]) == 2
    assert "Its tokenizer is needed: put the set back" in capsys.readouterr().err


def no_set(*arguments: object) -> None:
    raise DataError("gone.")


def items(folder: Path) -> Path:
    (folder / "items.jsonl").write_text('{"text": "the quick brown fox"}\n')
    return folder / "items.jsonl"


def test_the_data_of_a_run_is_recorded_with_its_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for given, recorded in (("a/set", f"{tmp_path}/a/set"), ("s3://b/set", "s3://b/set"), ("/x", "/x")):
        assert as_plain(build_run_config({"data": given}))["data"] == recorded


def test_lines_of_a_pipe_are_prompts(trained_run: Path, llmscale: Callable) -> None:
    words = ("sample", str(trained_run), "--max-new-tokens", "5")
    piped = llmscale(*words, input="the\nquick\n")
    named = llmscale(*words, "--prompt", "the", "--prompt", "quick")
    assert (piped.returncode, piped.stdout) == (0, named.stdout)
    empty = llmscale(*words, input="")
    assert (empty.returncode, empty.stdout) == (2, "")
    assert empty.stderr.startswith("error: no prompt given.")


def is_asking(terminal: Terminal) -> bool:
    return terminal.lines()[terminal.screen.cursor.y] == ">"


def test_a_terminal_is_a_conversation(trained_run: Path) -> None:
    command = [sys.executable, "-m", "llmscale.cli.main", "sample", str(trained_run), "--temperature", "0"]
    with Terminal(command, is_warm=True, OMP_NUM_THREADS="1") as terminal:
        assert terminal.read_until(lambda: is_asking(terminal), 60)
        terminal.send(b"\xff\n")
        for line in ("/tokens 5", "/temperature hot", "the", "x" * 33, "/tokens 100000", "quick"):
            terminal.send(f"{line}\n".encode())
        assert terminal.read_until(lambda: b"\x1b[1mquick\x1b[0m\x1b[32m" in terminal.raw, 60)
        os.kill(terminal.process.pid, signal.SIGINT)  # Ctrl-C, for this is not the program's controlling terminal
        assert terminal.read_until(lambda: is_asking(terminal), 60)
        terminal.send(b"/tokens 5\nthe\n\x04")
        assert terminal.wait() == 0
        text = terminal.text()
    assert "error: /temperature must be a number of at least 0, not 'hot'." in text
    assert "error: the prompt has 33 tokens" in text
    assert "error: the line is not UTF-8 text." in text
    assert b"\x1b[1mthe\x1b[0m\x1b[32m" in terminal.raw
    assert terminal.raw.count(b"\x1b[1mthe\x1b[0m") == 2


def test_without_a_name_the_newest_run_with_a_checkpoint_is_taken(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "--prompt", "the"]) == 2
    assert f"no run below {tmp_path}/runs has a checkpoint" in capsys.readouterr().err
    for name, age_s in (("old", 100), ("new", 0)):
        shutil.copytree(trained_run, tmp_path / "runs" / name)
        for path in (tmp_path / "runs" / name).glob("*"):
            os.utime(path, (time.time() - age_s,) * 2)
    shutil.copytree(trained_run, tmp_path / "runs" / "untrained", ignore=lambda *_: ["checkpoints"])
    assert main(["sample", "--prompt", "the", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().err == "runs/new, the newest of 2 below runs\n"
