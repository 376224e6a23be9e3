from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.config.run_config import build_run_config
from llmscale.config.user_paths import (
    check_other_run,
    check_other_run_or_name,
    check_output_file,
    check_output_folder,
    check_own_run,
    check_task,
    check_task_file,
    copies_folder,
    copy_of,
    is_view,
    read_prompts,
    shown,
    url_of,
)
from llmscale.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a file, a folder, a link to nothing, and a folder without permission."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_overwrite(flag: str, path: Path) -> None:
    check_output_file(flag, path, overwrite=True)


@pytest.mark.parametrize("check", [with_overwrite, check_output_folder])
def test_a_place_without_permission_is_refused(
    check: Callable[[str, Path], None], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may not be written to"):
        check("--to", Path("folder/new"))


@pytest.mark.parametrize("task", ["items.jsonl", "dir/items", "file", "helaswag=x.jsonl", "text= ", "a b"])
def test_a_task_that_is_none_is_refused_with_the_formats(task: str, place: Path) -> None:
    for check in (check_task, check_task_file):
        with pytest.raises(ConfigError, match=r"is not a task.*hellaswag=FILE\.jsonl"):
            check(task)
    with pytest.raises(ConfigError, match="is not a task"):
        build_run_config({"eval_tasks": [task]})


def test_tasks_are_files_names_and_yamls_that_exist(place: Path) -> None:
    (place / "mine.yaml").touch()
    for task in ("text=items.jsonl", "hellaswag=a=b.jsonl", "arc_easy", "mmlu_pro.v2-(x)", "mine.yaml"):
        assert check_task(task) == task
    with pytest.raises(ConfigError, match=r"task other\.yaml: there is no such file"):
        check_task("other.yaml")


def test_lines_and_objects_are_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("the quick\r\n\n  brown fox\nÄ 😀", encoding="utf-8")
    assert read_prompts(lines) == ["the quick", "  brown fox", "Ä 😀"]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "a\\nb"}\n{"prompt": "", "id": 1}\n', encoding="utf-8")
    assert read_prompts(objects) == ["a\nb", ""]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("long.txt", b"x" * (1 << 20) + b"x", "line 1 has 1,048,577 characters; at most 1,048,576 are read"),
        ("other.jsonl", b'{"text": "a"}\n', 'other.jsonl, line 1 has no text in "prompt"'),
        ("number.jsonl", b'{"prompt": 3}\n', 'has no text in "prompt"'),
        ("surrogate.jsonl", b'{"prompt": "\\ud800"}\n', "is not UTF-8 text"),
    ],
)
def test_what_is_no_prompt_is_one_clear_line(tmp_path: Path, name: str, contents: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path / name)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    for path, message in ((tmp_path, "is a folder"), (large, "is larger than")):
        with pytest.raises(ConfigError, match=rf"--prompts {path} cannot be read: {message}"):
            read_prompts(path)


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSCALE_RUNS", str(tmp_path / "copies"))
    return tmp_path / "copies"


@pytest.mark.parametrize("url", ["s3://b/run", "gs://b/runs/a b", "az://c/ü/x", "s3://b/run/checkpoints/step-00000004"])
def test_a_url_and_its_copies_lead_to_each_other(url: str, copies: Path) -> None:
    scheme, _, path = url.partition("://")
    assert copy_of(url, "train") == copies / "train" / scheme / path
    assert copy_of(f"{url}/", "view") == copies / "view" / scheme / path
    for kind in ("train", "view"):
        copy = copy_of(url, kind)
        assert (url_of(copy), shown(copy), is_view(copy)) == (url, url, kind == "view")
        assert url_of(copy / "metrics.jsonl") == f"{url}/metrics.jsonl"


@pytest.mark.parametrize(
    "url",
    [
        "hf://user/run",
        "S3://b/run",
        "s3://b/",
        "s3://b/../run",
        "s3://b/a?version=1",
        "s3://key:secret@b/run",
        f"s3://b/{'x' * 201}",
        "s3://b/\x1b[31m",
    ],
)
def test_no_run_can_have_this_url(url: str, copies: Path) -> None:
    for check in (check_own_run, check_other_run, check_other_run_or_name):
        with pytest.raises(ValueError):
            check(url)


def test_paths_and_names_remain_what_they_are(copies: Path) -> None:
    assert check_own_run("runs/x") == check_other_run("runs/x") == Path("runs/x")
    assert check_other_run_or_name("auto") == "auto" and check_other_run_or_name("hf:gpt2") == "hf:gpt2"
    assert url_of(Path("runs/x")) is None and shown(Path("runs/x")) == "runs/x"
    for folder in (copies, copies / "train" / "s3" / "bucket", copies / "train" / "hf" / "a" / "b"):
        assert url_of(folder) is None
    assert url_of(copies / "train" / "s3" / "b" / ".." / ".." / ".." / ".." / "x") is None


def test_runs_are_written_and_read_in_different_copies(copies: Path) -> None:
    assert check_own_run("s3://b/run") == copies / "train" / "s3" / "b" / "run"
    assert check_other_run("s3://b/run") == copies / "view" / "s3" / "b" / "run"
    assert check_other_run_or_name("s3://b/run") == str(copies / "view" / "s3" / "b" / "run")


def test_copies_are_in_the_cache_unless_the_environment_names_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSCALE_RUNS", "here")
    assert copies_folder() == Path.cwd() / "here"
    monkeypatch.delenv("LLMSCALE_RUNS")
    assert copies_folder() == Path.home() / ".cache/llmscale/runs"
