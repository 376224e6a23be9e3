"""Killed at any moment, the same command goes on, and the set is the undisturbed one to the last byte."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from llmscale.data.prepare import output_folder, tokenise
from llmscale.data.prepare.output_folder import open_work_folder, rejected_path
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests import warm_start
from tests.conftest import HANG_S

#: What is kept every 30 s is kept all the time here, and shards take long enough to be killed between.
PREPARE = """
import sys, time
from pathlib import Path
from llmscale.data.prepare import split_writer, tokenise
from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
source, out, workers, compression, shuffle, packing = sys.argv[1:]
tokenise.CHECKPOINT_INTERVAL_S = 0.02
tokenise.BATCH_CHARACTERS = 50_000
split_writer._BUFFER_TOKENS = 10_000
split_writer.BUFFER_BYTES = 200_000
gather = tokenise.gather
def slowly(*args):
    for batch in gather(*args):
        time.sleep(0.01)
        yield batch
tokenise.gather = slowly
write_shard = split_writer.ShardFiles._write_shard
def write_slowly(self, number, parts):
    time.sleep(0.02)
    return write_shard(self, number, parts)
split_writer.ShardFiles._write_shard = write_slowly
options = PrepareOptions(
    seq_len=64,
    val_fraction=0.02,
    shard_bytes=262_144,
    compression=compression,
    shuffle=shuffle == "shuffle",
    packing=packing,
)
print("ready", flush=True)
prepare(open_source(source), Path(out), load_tokenizer("bytes"), options, num_workers=int(workers), max_rejected=99)
"""


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write_corpus(folder: Path, num_documents: int) -> Path:
    """Some documents are rejected, empty or copies."""
    rng = random.Random(3)
    folder.mkdir()
    lines = []
    for number in range(num_documents):
        text = f"document {number}: " + " ".join(rng.choices(["der", "die", "das", "\u4f60"], k=rng.randint(1, 900)))
        lines.append(json.dumps({"text": "" if number % 50 == 7 else text}))
        if number % 100 == 50:
            lines.append("no json")
    (folder / "a.jsonl").write_text("\n".join(lines[: len(lines) // 2]))
    (folder / "b.jsonl").write_text("\n".join(lines[len(lines) // 2 :]))
    (folder / "c.txt").write_text("a text file. " * 3000)
    return folder


@pytest.mark.parametrize(
    ("compression", "shuffle", "packing", "num_kills"),
    [
        ("", "shuffle", "stream", 1),
        ("", "shuffle", "best-fit", 1),
        pytest.param("zstd", "in order", "stream", 8, marks=pytest.mark.slow),
    ],
    ids=["plain", "best-fit", "zstd"],
)
def test_it_goes_on_and_ends_as_if_nothing_had_happened(
    compression: str, shuffle: str, packing: str, num_kills: int, tmp_path: Path
) -> None:
    corpus = _write_corpus(tmp_path / "in", 1500)
    (tmp_path / "run.py").write_text(PREPARE)
    undisturbed, out = tmp_path / "undisturbed" / "set", tmp_path / "killed" / "set"

    def command(folder: Path, workers: int) -> list[str]:
        settings = (str(workers), compression, shuffle, packing)
        return [sys.executable, str(tmp_path / "run.py"), str(corpus), str(folder), *settings]

    begin_s = time.monotonic()
    warm_start.run(command(undisturbed, 2), check=True)
    took_s = time.monotonic() - begin_s
    rng = random.Random(compression)
    errors = ""
    for number in range(num_kills):
        process = warm_start.Process(command(out, 1 + number % 3), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        if number:
            time.sleep(rng.uniform(0, took_s / 3))
        else:
            _wait_for_state(process, out)
        process.send_signal(signal.SIGKILL)
        errors += process.stderr.read().decode()
        process.wait()
    done = warm_start.run(command(out, 3), check=True, capture_output=True, text=True)
    errors += done.stderr
    assert "Resuming after" in errors
    assert _files(undisturbed) == _files(out)
    assert rejected_path(undisturbed).read_bytes() == rejected_path(out).read_bytes()
    assert len(rejected_path(out).read_text().splitlines()) == 15
    assert sorted(path.name for path in out.parent.iterdir()) == ["set", "set.rejected.jsonl"]


def test_a_killed_prepare_leaves_nothing_that_looks_whole_and_other_input_begins_anew(tmp_path: Path) -> None:
    corpus = _write_corpus(tmp_path / "in", 3000)
    (tmp_path / "run.py").write_text(PREPARE)
    out = tmp_path / "sets" / "set"
    command = [sys.executable, str(tmp_path / "run.py"), str(corpus), str(out), "2", "", "shuffle", "stream"]
    process = warm_start.Process(command)
    _wait_for_state(process, out)
    process.send_signal(signal.SIGSTOP)
    options = PrepareOptions(seq_len=64, val_fraction=0.02, shard_bytes=262_144)
    with pytest.raises(DataError, match="Another process is writing"):
        prepare(open_source(str(corpus)), out, load_tokenizer("bytes"), options, max_rejected=99)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with pytest.raises(DataError, match="an interrupted prepare left"):
        load_manifest(out)
    (corpus / "b.jsonl").unlink()
    done = warm_start.run(command, check=True, capture_output=True, text=True)
    assert "with different settings or input" in done.stderr
    assert load_manifest(out).splits["train"].num_documents < 1501
    assert sorted(path.name for path in out.parent.iterdir()) == ["set", "set.rejected.jsonl"]


def _wait_for_state(process: subprocess.Popen[bytes], out: Path) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not list(out.parent.glob(".set.partial-*/state.json")):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)


def test_work_that_was_never_kept_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_work_folder(tmp_path / "new" / "set", {}) as work:
        (work.path / "train.windows").write_bytes(b"half")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_killed_behind_the_set_it_is_made_again_and_not_out_of_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is in its place and the work folder is still there: what the state speaks of is no longer in it."""
    monkeypatch.setattr(tokenise, "CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 20_000)
    source = str(_write_corpus(tmp_path / "corpus", 60))
    options = PrepareOptions(seq_len=64, val_fraction=0.1)

    def make() -> None:
        prepare(open_source(source), tmp_path / "set", load_tokenizer("bytes"), options, overwrite=True, max_rejected=9)

    with monkeypatch.context() as patch:
        patch.setattr(output_folder, "shutil", mock.Mock(rmtree=mock.Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            make()
    undisturbed = _files(tmp_path / "set")
    assert output_folder.work_folder_of(tmp_path / "set").joinpath("state.json").exists()
    assert any(name.endswith(".mds") for name in undisturbed)
    make()
    assert _files(tmp_path / "set") == undisturbed
    assert not output_folder.work_folder_of(tmp_path / "set").exists()
