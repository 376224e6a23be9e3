"""`--text`: prepared once, found again by its contents."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.data.prepare.text_cache import TextRequest
from llmscale.data.shards.manifest import load_manifest
from llmscale.errors import DataError


@pytest.fixture
def request_(tmp_path: Path) -> TextRequest:
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text(f"some words of {name}, " * 200)
    return TextRequest(str(tmp_path / "text"), "bytes", 16, tmp_path / "cache")


def was_prepared(captured: pytest.CaptureFixture[str]) -> int:
    return captured.readouterr().err.count("preparing ")


def test_a_later_start_finds_it_and_reads_nothing(
    request_: TextRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"^it is not prepared on this host yet.* --text is '\S+text'"):
        request_.open(may_prepare=False)
    assert not (tmp_path / "cache").exists()
    folder = request_.open(may_prepare=True)
    assert was_prepared(capsys) == 1
    monkeypatch.setattr("llmscale.data.prepare.text_cache.opened", lambda file: pytest.fail("read again"))
    assert request_.open(may_prepare=False) == folder


def test_the_same_contents_with_other_times_are_the_same_dataset(
    request_: TextRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request_.open(may_prepare=True)
    os.utime(tmp_path / "text" / "a.txt", (1, 1))
    assert request_.open(may_prepare=True) == folder
    assert was_prepared(capsys) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.write_text(text.read_text().replace("words", "lines")),
        lambda text: text.rename(text.with_name("c.txt")),
    ],
    ids=["contents", "name"],
)
def test_another_text_is_another_dataset(
    request_: TextRequest, tmp_path: Path, change: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request_.open(may_prepare=True)
    change(tmp_path / "text" / "a.txt")
    assert request_.open(may_prepare=True) != folder
    assert was_prepared(capsys) == 2


def test_other_settings_are_other_datasets(request_: TextRequest) -> None:
    settings = (request_, replace(request_, seq_len=17), replace(request_, tokenizer=None))
    folders = [each.open(may_prepare=True) for each in settings]
    assert len(set(folders)) == 3
    assert [load_manifest(folder).seq_len for folder in folders] == [16, 17, 16]


def test_a_tokenizer_is_trained_on_enough_text(
    request_: TextRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmscale.data.prepare.text_cache._BYTES_PER_ENTRY", 64)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(500)]
    (tmp_path / "text" / "long.txt").write_text(" ".join(draw.choices(words, k=8_000)))
    manifest = load_manifest(replace(request_, tokenizer=None).open(may_prepare=True))
    assert manifest.vocab_size == 512
    assert manifest.splits["train"].bytes_per_token > 1.5


def test_one_prepares_and_the_others_wait(request_: TextRequest, capsys: pytest.CaptureFixture[str]) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(request_.open(may_prepare=True))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3 and len(set(paths)) == 1
    assert was_prepared(capsys) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("-", "stdin can be read only once"), ("nowhere", "does not exist"), ("{}/cache", "are inside one another")],
)
def test_refusals_name_the_flag(request_: TextRequest, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cache").mkdir()
    with pytest.raises(DataError, match=f"{message}.* --text is "):
        replace(request_, text=text.format(tmp_path)).open(may_prepare=True)
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_names_the_flag(request_: TextRequest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Not a directory.* with --data-cache"):
        replace(request_, cache=tmp_path / "file" / "cache").open(may_prepare=True)


def test_text_that_is_not_utf8_is_skipped_if_asked(
    request_: TextRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text" / "c.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"c\.txt is not UTF-8 text.*--skip-undecodable"):
        request_.open(may_prepare=True)
    manifest = load_manifest(replace(request_, skip_undecodable=True).open(may_prepare=True))
    assert manifest.skipped_documents == 1
    assert "Skipped 1 text (not UTF-8): c.txt." in capsys.readouterr().err
    with pytest.raises(DataError, match="is not UTF-8 text"):
        request_.open(may_prepare=True)
