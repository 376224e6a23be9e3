"""What `--input` may be: files, folders, patterns, archives, pipes, several of them, and what this machine has."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from llmscale.data.prepare.output_folder import rejected_path
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources import open_source as opening
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.sources.source import Document, Rejected
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests import warm_start
from tests.data.prepare.conftest import json_lines


def _documents(spec: Path | str, **options: str | bool | None) -> list[str]:
    return list(open_source(str(spec), **options).documents())


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.md", "a/b/c.py", ".hidden.txt", ".git/x.txt", "picture.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _documents(tmp_path) == ["a/b/c.py", "a/z.md", "b.txt"]
    assert _documents(tmp_path, glob="*.png") == ["picture.png"]
    assert _documents(tmp_path, glob="a/*") == ["a/b/c.py", "a/z.md"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": 1', r"line 3: not valid JSON \(Expecting ',' delimiter at character 12\)"),
        ('{"body": "x"}', r"line 3: no field 'text'\. Its fields: body"),
        ('{"text": 3}', "line 3: the field 'text' holds int, not text"),
        ("[1]", "line 3: expected a JSON object, found list"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=text) as caught:
        _documents(path)
    assert str(path) in str(caught.value)


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude42"}\n')
    assert _documents(path) == ["a\ufffdb", "🙂"]
    path.write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}\n')
    [conversation] = _documents(path, is_chat=True, text_field="messages")
    assert json.loads(conversation)["messages"][0]["content"] == "a\ufffd"


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    parquet.write_table(pyarrow.table({"body": ["y", None]}), tmp_path / "b.parquet")
    assert _documents(tmp_path, text_field="body") == ["x", "y", ""]


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        _documents(tmp_path / "a.parquet")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its files have a known suffix"):
        open_source(str(tmp_path))


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == before
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert open_source(str(tmp_path)).fingerprint() != before


def test_standard_library_is_tens_of_megabytes_of_text() -> None:
    source = open_source("python-stdlib")
    assert source.total_bytes is not None and source.total_bytes > 10_000_000
    texts = source.documents()
    assert sum(len(next(texts)) for _ in range(20)) > 10_000


def test_hugging_face_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder goes through the same loader as the hub's names."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert _documents(f"hf:{tmp_path / 'data'}") == ["a", "b"]
    with pytest.raises(DataError, match=r"no field 'body'\. Its fields: text"):
        _documents(f"hf:{tmp_path / 'data'}", text_field="body")
    with pytest.raises(DataError, match=r"Cannot read hf:.*split test"):
        _documents(f"hf:{tmp_path / 'data'}", hf_split="test")


SMALL = PrepareOptions(seq_len=8, val_fraction=0)


def _tar(path: Path, members: dict[str, bytes], change: Callable[[tarfile.TarFile], None] | None = None) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, contents in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            archive.addfile(info, io.BytesIO(contents))
        if change is not None:
            change(archive)
    return path


def test_inputs_are_read_in_the_order_given_and_patterns_sorted(tmp_path: Path) -> None:
    (tmp_path / "crawl" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        (tmp_path / "crawl" / name).write_bytes(json_lines([name]))
    (tmp_path / "own.txt").write_text("own")
    source = open_source(str(tmp_path / "own.txt"), f"{tmp_path}/crawl/*.jsonl", f"{tmp_path}/crawl/**/c.*")
    assert list(source.documents()) == ["own", "a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert source.total_bytes == source.read_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(DataError, match="no file matches"):
        open_source(f"{tmp_path}/*.nothing")


def test_a_pattern_does_not_match_what_the_command_writes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["own"]))
    out = tmp_path / "set"
    before = open_source(f"{tmp_path}/**/*.jsonl", out=out).fingerprint()
    out.mkdir()
    for path in (rejected_path(out), out / "b.jsonl"):
        path.write_bytes(json_lines(["written"]))
    (tmp_path / "link").symlink_to(tmp_path)
    for place in (out, tmp_path / "link" / "set"):
        again = open_source(f"{tmp_path}/**/*.jsonl", out=place)
        assert set(again.documents()) == {"own"}
    (tmp_path / "link").unlink()
    assert open_source(f"{tmp_path}/**/*.jsonl", out=out).fingerprint() == before
    with pytest.raises(DataError, match="no file matches"):
        open_source(f"{out}*.jsonl", out=out)


def test_every_source_goes_on_from_every_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one", "two"]) + b"\n\nbad\n" + json_lines(["three"]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(["four", "five"])))
    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(150)]}), tmp_path / "c.parquet",
                        row_group_size=70)  # fmt: skip
    members = {
        "x/1.json": json_lines(["six"]),
        "x/2.jsonl": json_lines(["seven", "eight"]),
        "x/3.json.gz": gzip.compress(json_lines(["nine"])),
    }
    _tar(tmp_path / "d.tgz", members)
    source = open_source(*(str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.tgz")))
    all_records = list(source.records((), None))
    contents = [record.content for record in all_records if isinstance(record, Document)]
    assert contents == [
        "one", "two", "three", "four", "five", *(f"row {n}" for n in range(150)), "six", "seven", "eight", "nine"
    ]  # fmt: skip
    for number in (0, 1, 2, 3, 5, 40, 76, 77, 154, 155, 157, 158, 159):
        assert list(source.records(all_records[number].place, None)) == all_records[number + 1 :], all_records[number]


def test_rejected_records_are_counted_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = "a good line of text that is long enough "
    bad = [b'{"text": 1}', b'{"body": "x"}', b"{", b'{"text": "caf\xe9"}', b"[1]"]
    lines = [json.dumps({"text": good + str(number)}).encode() for number in range(20)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*lines[:10], *bad, *lines[10:]]) + b"\n")
    with pytest.raises(DataError, match=r"line 11: the field 'text' holds int.*--max-rejected 100"):
        prepare(open_source(str(path)), tmp_path / "set", load_tokenizer("bytes"), SMALL)
    assert not rejected_path(tmp_path / "set").exists()
    with pytest.raises(DataError, match=r"line 14: not UTF-8 .*3 were rejected before it"):
        prepare(open_source(str(path)), tmp_path / "set", load_tokenizer("bytes"), SMALL, max_rejected=3)
    prepared = prepare(open_source(str(path)), tmp_path / "set", load_tokenizer("bytes"), SMALL, max_rejected=5)
    assert prepared.num_rejected == prepared.manifest.skipped_documents == 5
    assert prepared.manifest.splits["train"].num_documents == 20
    records = [json.loads(line) for line in rejected_path(tmp_path / "set").read_text().splitlines()]
    assert [record["contents"] for record in records] == [line.decode(errors="backslashreplace") for line in bad]
    assert [record["where"] for record in records] == [f"{path}, line {number}" for number in range(11, 16)]
    assert records[1]["reason"] == "no field 'text'. Its fields: body"


def test_a_file_without_the_field_is_an_error_whatever_the_limit(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "x", "id": 1}\n')
    with pytest.raises(DataError, match=r"Its fields: body, id; name one with --text-field"):
        prepare(open_source(str(tmp_path)), tmp_path.parent / "out", load_tokenizer("bytes"), SMALL, max_rejected=9)


def test_parquet_rows_that_are_not_utf8(tmp_path: Path) -> None:
    texts = pyarrow.array([b"good", b"caf\xe9", b"fine"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    good, bad, fine = open_source(str(tmp_path / "a.parquet")).records((), None)
    assert isinstance(bad, Rejected) and bad.contents == b"caf\xe9" and "row 1" in bad.where
    assert isinstance(good, Document) and isinstance(fine, Document) and fine.content == "fine"


def _links(archive: tarfile.TarFile) -> None:
    for name, kind, target in [("l.txt", tarfile.SYMTYPE, "/etc/passwd"), ("h.txt", tarfile.LNKTYPE, "../x"),
                               ("d.txt", tarfile.CHRTYPE, ""), ("p.txt", tarfile.FIFOTYPE, "")]:  # fmt: skip
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)


def test_of_an_archive_only_files_are_read_and_nothing_is_unpacked(tmp_path: Path) -> None:
    members = {"../../escape.txt": b"text", "/abs.txt": b"more", ".hidden.txt": b"no", "a.png": b"no"}
    source = open_source(str(_tar(tmp_path / "a.tar", members, _links)))
    assert list(source.documents()) == ["text", "more"]
    assert {one.name.partition(":")[2] for one in source.passed_over} == {
        "l.txt", "h.txt", "d.txt", "p.txt", ".hidden.txt", "a.png"
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("kind", ["bomb", "cut", "none"])
def test_hostile_archives_are_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    if kind == "bomb":
        _tar(path, {"a.txt.gz": gzip.compress(b"a" * (1 << 20)) * 80})
    elif kind == "cut":
        _tar(path, {"a.txt": b"x" * 5000})
        path.write_bytes(path.read_bytes()[:2000])
    else:
        path.write_bytes(b"no archive " * 100)
    with pytest.raises(DataError, match=r"a\.tar.* (is damaged|unpacks to more|Cannot read)"):
        list(open_source(str(path)).documents())


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "text"])
def test_a_pipe(kind: str, tmp_path: Path) -> None:
    contents = {
        "jsonl": json_lines(["one", "two"]),
        "jsonl.gz": gzip.compress(json_lines(["one", "two"])),
        "text": b"one",
    }[kind]
    code = "from llmscale.data.prepare.sources.open_source import open_source\n"
    code += "s = open_source('-'); print(list(s.documents()) == list(s.documents()), *s.documents(), s.fingerprint())"
    command = [sys.executable, "-c", code]
    messages = [
        warm_start.run(command, input=contents, capture_output=True, check=True, env={**os.environ, "TMPDIR": tmp_path})
        for _ in range(2)
    ]
    assert messages[0].stdout == messages[1].stdout
    assert messages[0].stdout.decode().startswith("True one")
    assert not list(tmp_path.iterdir())


def test_a_connection_that_breaks_is_opened_again_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[int] = []

    def open_from(self: opening.HuggingFaceSource, done: int):  # type: ignore[no-untyped-def]
        opened.append(done)
        for number in range(done, 6):
            if number in (2, 4) and opened.count(done) == 1 and done != number:
                raise ConnectionError("reset by peer\nTraceback ...")
            yield {"text": f"record {number}"}

    monkeypatch.setattr(opening.HuggingFaceSource, "_open", open_from)
    monkeypatch.setattr(opening, "RETRY_PAUSES_S", (0.0, 0.0))
    assert list(open_source("hf:some/set").documents()) == [f"record {number}" for number in range(6)]
    assert opened == [0, 2, 4]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "record 2: reset by peer. Trying again in 0 s (1 of 2)." in lines[0]

    def never(self: opening.HuggingFaceSource, done: int):  # type: ignore[no-untyped-def]
        raise TimeoutError("no answer")

    monkeypatch.setattr(opening.HuggingFaceSource, "_open", never)
    with pytest.raises(DataError, match="Cannot read hf:some/set, split train: no answer"):
        list(open_source("hf:some/set").documents())
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text("topics = {'a': 'One.\\n====\\n| x |', 'b': 'One.\\n', 'c': 'Two.'}")
    (tmp_path / "a.py").write_text('"""Reads."""\ndef f():\n    """Writes."""\n')
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "damaged.py").write_text("def")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/other.py").write_text('"""Not read."""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_it_is_docstrings_by_module_and_topics_without_tables(stdlib: Path) -> None:
    source = open_source("python-docs")
    assert [text.strip() for text in source.documents()] == ["Reads.\n\nWrites.", "One.", "One.", "Two."]
    assert source.total_bytes == source.read_bytes


def test_reading_resumes_at_any_place(stdlib: Path) -> None:
    records = list(open_source("python-docs").records((), None))
    for done, record in enumerate(records, start=1):
        assert list(open_source("python-docs").records(record.place, None)) == records[done:]


def test_hosts_with_the_same_library_have_the_same_fingerprint(stdlib: Path) -> None:
    before = open_source("python-docs").fingerprint()
    (stdlib / "a.py").touch()
    assert open_source("python-docs").fingerprint() == before
    (stdlib / "a.py").write_text("")
    assert open_source("python-docs").fingerprint() != before


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="holds no sources of Python's standard library"):
        open_source("python-docs")


@pytest.mark.slow
def test_this_machine_has_megabytes_of_it() -> None:
    assert (open_source("python-docs").total_bytes or 0) > 1_000_000
