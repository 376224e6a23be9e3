from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import main


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


def test_a_checkpoint_can_be_named_and_the_newest_is_taken_else(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = (str(trained_run / "checkpoints" / f"step-0000000{step}") for step in (3, 2))
    by_run = sample(capsys, str(trained_run), "the")
    assert by_run == sample(capsys, newest, "the")
    assert by_run != sample(capsys, older, "the")


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
    for folder, said in ((tmp_path, empty), (run, f"{shard} does not match its hash")):
        assert main(["sample", str(folder), "the"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {said}")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "value", "legal"),
    [
        ("--max-new-tokens", "-1", "a whole number of at least 0"),
        ("--temperature", "-1", "a number of at least 0"),
        ("--temperature", "warm", "a number of at least 0"),
        ("--temperature", "inf", "a number of at least 0 and at most 1e+06"),
        ("--top-k", "0", "a whole number of at least 1"),
        ("--top-k", "2.5", "a whole number of at least 1"),
        ("--top-p", "2", "a number above 0 and at most 1"),
        ("--top-p", "0", "a number above 0 and at most 1"),
        ("--num-samples", "0", "a whole number of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_loaded(
    flag: str, value: str, legal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "no-such-run", "the", f"{flag}={value}"]) == 2
    said = f"error: argument {flag}: must be {legal}, not '{value}'. `llmscale sample --help` lists all flags.\n"
    assert capsys.readouterr().err == said
