"""Names of runs in a store, and the folders of their copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.config.user_paths import (
    check_other_run,
    check_other_run_or_name,
    check_own_run,
    copies_folder,
    copy_of,
    is_view,
    shown,
    url_of,
)


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
        "s3:///run",
        "s3://b//run",
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
