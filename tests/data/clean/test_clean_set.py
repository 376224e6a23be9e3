"""`data clean` as a whole: nothing is lost unseen, the same on any number of workers, whole or not there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.cli import data, data_clean
from llmscale.config.command_line import FlagParser
from llmscale.data.clean.annotate import STEP_NAMES, CleanOptions, TokenizerName
from llmscale.data.clean.run import clean
from llmscale.data.clean.stages import CleanResult
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.clean_folder import MANIFEST_NAME, load_clean_manifest
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests import warm_start
from tests.conftest import HANG_S
from tests.data.clean.conftest import MakeProse, Write, files_of, kept_of, removed_of


def _clean(source: Path, out: Path, options: CleanOptions, workers: int = 1, **more: int) -> CleanResult:
    return clean(open_source(str(source)), out, options, num_workers=workers, **more)


def test_everything_is_kept_or_can_be_looked_at(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> None:
    path, options = crawl
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    cleaned = _clean(path, tmp_path / "out", options)
    kept, removed = kept_of(tmp_path / "out"), removed_of(tmp_path / "out")
    gone = {step: {r["id"] for r in records if r["removed"] == "document"} for step, records in removed.items()}
    assert [step for step, records in removed.items() if not records] == []
    assert len(gone["exact"]) == 20 and 15 <= len(gone["near"]) <= 20
    # Every document is in one place.
    ids = [number for numbers in gone.values() for number in numbers]
    assert len(ids) == len(set(ids)) and not set(ids) & {r["id"] for r in kept}
    assert set(ids) | {r["id"] for r in kept} == set(range(len(texts)))
    for records in removed.values():
        for record in records:
            part = str(record["text"])
            assert part.split("\n")[0] in texts[record["id"]] and record["rule"]
            if "duplicate_of" in record:
                assert record["duplicate_of"] < record["id"] and record["duplicate_of"] not in gone["exact"]
    changed = {r["id"] for step in ("c4", "decontaminate") for r in removed[step] if r["removed"] == "part"}
    unchanged = [r for r in kept if r["id"] not in changed]
    assert len(unchanged) > 100
    # c4 puts a line behind another, and that is all that happens to documents of which it takes none.
    assert all(r["text"] == "\n".join(line for line in texts[r["id"]].split("\n") if line) for r in unchanged)
    # In the order of the input.
    order = [(r["id"], r.get("piece", 0)) for r in kept]
    assert order == sorted(order) and any("piece" in r for r in kept)
    assert cleaned.kept.documents == len(kept)


def test_manifest_adds_up(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> None:
    path, options = crawl
    cleaned = _clean(path, tmp_path / "out", options)
    manifest = load_clean_manifest(tmp_path / "out")
    assert manifest is not None
    steps = manifest["steps"]
    assert [step["step"] for step in steps] == list(options.steps)  # type: ignore[index,union-attr]
    for key in ("documents", "words", "bytes"):
        left = manifest["taken_in"][key]  # type: ignore[index]
        for step in steps:  # type: ignore[union-attr]
            assert step["taken_in"][key] == left
            left -= step["removed"][key]
        # Pieces of one document are several.
        pieces = sum(r.get("piece", 0) == 1 for r in kept_of(tmp_path / "out")) if key == "documents" else 0
        assert manifest["kept"][key] == left + pieces  # type: ignore[index]
    texts = [str(record["text"]) for record in kept_of(tmp_path / "out")]
    assert cleaned.kept.words == sum(len(text.split()) for text in texts)
    assert cleaned.kept.bytes == sum(len(text.encode()) for text in texts)


def test_any_number_of_workers_gives_the_same_bytes(
    crawl: tuple[Path, CleanOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = crawl
    monkeypatch.setattr("llmscale.data.prepare.tokenise.BATCH_CHARACTERS", 20_000)
    outs = [tmp_path / f"out{workers}" for workers in (1, 2)]
    for workers, out in enumerate(outs, start=1):
        _clean(path, out, options, workers, shard_bytes=50_000)
    assert files_of(outs[0]) == files_of(outs[1])
    assert len(list(outs[0].glob("documents-*"))) > 3


def test_a_clean_set_stays_as_it_is(tmp_path: Path, make_prose: MakeProse, write_jsonl: Write) -> None:
    rng = random.Random(7)
    texts = [make_prose(rng, rng.randint(80, 400)) for _ in range(300)]
    items = write_jsonl(tmp_path / "evaluation.jsonl", [make_prose(rng, 60) for _ in range(50)])
    options = CleanOptions(
        steps=("exact", "gopher-repetition", "gopher-quality", "fineweb", "near", "decontaminate"),
        decontaminate=(items,),
    )
    cleaned = _clean(write_jsonl(tmp_path / "crawl.jsonl", texts), tmp_path / "out", options)
    assert cleaned.kept == cleaned.taken_in and [r["text"] for r in kept_of(tmp_path / "out")] == texts


def test_prepare_takes_what_is_left_and_nothing_that_was_removed(
    crawl: tuple[Path, CleanOptions], tmp_path: Path
) -> None:
    path, options = crawl
    _clean(path, tmp_path / "all" / "out", options)
    texts = [r["text"] for r in kept_of(tmp_path / "all" / "out")]
    for spec in ("all/out", "all", "all/**/*.zst", "all/out/*"):
        assert list(open_source(str(tmp_path / spec)).documents()) == texts
    with pytest.raises(DataError, match="only files that `data clean` removed match"):
        open_source(str(tmp_path / "all" / "*" / "removed" / "*"))
    assert len(list(open_source(str(tmp_path / "all" / "out" / "removed" / "01*")).documents())) == 20
    made = prepare(
        open_source(str(tmp_path / "all" / "out")),
        tmp_path / "set",
        load_tokenizer("bytes"),
        PrepareOptions(seq_len=64),
        num_workers=1,
    )
    assert sum(split.num_documents for split in made.manifest.splits.values()) == len(texts)


def test_the_same_again_is_there_already(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> None:
    path, options = crawl
    out = tmp_path / "out"
    _clean(path, out, options)
    before = files_of(out)
    assert _clean(path, out, options).reused and files_of(out) == before
    with pytest.raises(DataError, match=r"cleaned differently: --steps .*--overwrite"):
        _clean(path, out, CleanOptions(steps=("exact",)))
    assert files_of(out) == before
    assert not clean(open_source(str(path)), out, CleanOptions(steps=("exact",)), num_workers=1, overwrite=True).reused
    assert files_of(out) != before and not list(tmp_path.glob(".out*"))


def test_what_is_something_else_is_not_replaced(tmp_path: Path, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["text one"])
    for name in ("folder", "file"):
        out = tmp_path / name
        if name == "folder":
            out.mkdir()
            (out / MANIFEST_NAME).write_text("{}")
        else:
            out.write_text("mine")
        with pytest.raises(DataError, match="not written by"):
            clean(open_source(str(path)), out, CleanOptions(steps=("exact",)), num_workers=1, overwrite=True)


def test_records_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good one"}\nno json\n{"text": "\xff"}\n{"text": "good two"}\n{"text": ""}\n')
    steps = CleanOptions(steps=("exact",))
    with pytest.raises(DataError, match=r"line 2.*--max-rejected"):
        _clean(path, tmp_path / "out", steps)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".out*"))
    assert _clean(path, tmp_path / "out", steps, max_rejected=2).mark.num_rejected == 2
    assert len((tmp_path / "out.rejected.jsonl").read_text().splitlines()) == 2
    assert [r["text"] for r in kept_of(tmp_path / "out")] == ["good one", "good two"]
    with pytest.raises(DataError, match="--max-rejected"):
        clean(open_source(str(path)), tmp_path / "out", steps, num_workers=1, overwrite=True, max_rejected=1)
    assert len((tmp_path / "out.rejected.jsonl").read_text().splitlines()) == 2, "of the set that stays"
    path.write_text('{"title": "x"}\n')
    with pytest.raises(DataError, match=r"no field 'text'\. Its fields: title"):
        _clean(path, tmp_path / "other", steps)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match="--skip-undecodable"):
        _clean(tmp_path / "latin.txt", tmp_path / "other", steps)
    assert not (tmp_path / "other").exists()


def test_nothing_left_says_who_took_it(tmp_path: Path, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["def f(x): return x", "x = 1"])
    with pytest.raises(DataError, match=r"gopher-quality took 2 of them \(gopher_short_doc 2\)"):
        _clean(path, tmp_path / "out", CleanOptions(steps=("exact", "gopher-quality")))
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="has no text"):
        _clean(tmp_path / "empty.jsonl", tmp_path / "out", CleanOptions(steps=("exact",)))


KILLED = """
import sys, time
from pathlib import Path
from llmscale.data.clean import run, stages
from llmscale.data.clean.run import clean
from llmscale.data.clean.annotate import CleanOptions
from llmscale.data.prepare import tokenise
from llmscale.data.prepare.sources.open_source import open_source
tokenise.BATCH_CHARACTERS = 10_000
annotate = stages.annotate_batch
def slowly(*args, **more):
    time.sleep(0.02)
    print("batch", flush=True)
    return annotate(*args, **more)
run.annotate_batch = slowly
if __name__ == "__main__":
    source, evaluation, out = sys.argv[1:]
    steps = ("exact", "c4", "near", "decontaminate")
    options = CleanOptions(steps=steps, decontaminate=(Path(evaluation),))
    clean(open_source(source), Path(out), options, num_workers=2, shard_bytes=20_000)
"""


def test_killed_it_gives_the_same_when_started_again(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> None:
    """SIGKILL leaves no result, the workers follow, and the same command gives what an undisturbed one does."""
    path, options = crawl
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(path), str(options.decontaminate[0])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with warm_start.Process([*command, str(tmp_path / "out")], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == b"batch\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert children and not (tmp_path / "out").exists() and len(list(tmp_path.glob(".out.partial-clean"))) == 1
    end_s = time.monotonic() + HANG_S
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    for name in ("out", "whole"):
        warm_start.run([*command, str(tmp_path / name)], env=environment, check=True, timeout=HANG_S)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole") and not list(tmp_path.glob(".out*"))


def _call(*words: str | Path) -> int:
    parser = FlagParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", "clean", *map(str, words)])
    status: int = args.handler(args)
    return status


def test_command(crawl: tuple[Path, CleanOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, options = crawl
    words = ["--input", path, "--out", tmp_path / "out", "--decontaminate", options.decontaminate[0], "--workers", "1"]
    assert _call(*words) == 0
    output = capsys.readouterr()
    assert (
        "duplicate_of" in output.out and "evaluation_ngram" in output.out and "up to 502 bytes of memory" in output.err
    )
    assert "of the words between whitespace" in output.out
    manifest = load_clean_manifest(tmp_path / "out")
    assert manifest is not None and manifest["request"]["--steps"] == ",".join(options.steps)  # type: ignore[index]
    assert _call(*words) == 0
    assert "Already cleaned" in capsys.readouterr().out


def test_help_names_the_steps() -> None:
    assert ",".join(STEP_NAMES) == data_clean._STEPS and set(data_clean._FOR_PROSE) < set(STEP_NAMES)


def test_examples_are_safe_to_show(tmp_path: Path, write_jsonl: Write, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(
        tmp_path / "in" / "x\x1b[2J\n\u202e.jsonl", ["\x1b]0;title\x07 one", "\x1b]0;title\x07 one", "two \u202e"]
    )
    (tmp_path / "in" / "x\x1b.bad\n").touch()
    out = tmp_path / "out"
    assert _call("--input", tmp_path / "in", "--out", out, "--steps", "exact", "--workers", "1") == 0
    output = capsys.readouterr()
    assert "\\x1b]0;title\\x07 one" in output.out
    assert not {"\x1b", "\x07", "\u202e"} & set(output.out + output.err)
    assert kept_of(out)[1]["text"] == "two \u202e"


def test_tokens_are_those_that_prepare_packs(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> None:
    path, options = crawl
    counted = replace(options, tokenizer=TokenizerName("bytes"))
    cleaned = _clean(path, tmp_path / "out", counted, workers=2)
    plain = _clean(path, tmp_path / "plain", options)
    tokens = 0
    for report, same in zip(cleaned.reports, plain.reports, strict=True):
        assert (report.taken_in.words, report.removed.words) == (same.taken_in.words, same.removed.words)
        tokens += report.removed.tokens
    assert cleaned.kept.tokens + tokens == cleaned.taken_in.tokens
    # A byte is a token, and every document has an end.
    assert cleaned.taken_in.tokens == cleaned.taken_in.bytes + cleaned.taken_in.documents
    manifest, without = load_clean_manifest(tmp_path / "out"), load_clean_manifest(tmp_path / "plain")
    assert manifest is not None and without is not None
    assert manifest["kept"]["tokens"] == cleaned.kept.tokens and "tokens" not in without["kept"]  # type: ignore
    prepared = prepare(
        open_source(str(tmp_path / "out")),
        tmp_path / "set",
        load_tokenizer("bytes"),
        PrepareOptions(seq_len=64),
        num_workers=1,
    )
    splits = prepared.manifest.splits.values()
    assert sum(split.num_tokens for split in splits) == cleaned.kept.tokens
    with pytest.raises(DataError, match="contents of --tokenizer"):
        _clean(path, tmp_path / "out", options)
