"""A checkpoint whose author means harm, signed as ours are: nothing outside of it is opened, nothing large is made."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.inventory import list_checkpoints, read_state
from llmscale.checkpoint.manifest import find_damage, load_manifest
from llmscale.checkpoint.run_state import load_run_state
from llmscale.checkpoint.tensor_files import DTYPES, StoredWeights, find_elements
from llmscale.cli.main import main
from llmscale.errors import CheckpointError
from tests.checkpoint.written import load_full_weights
from tests.hostile_records import Record, set_at


@pytest.fixture
def checkpoint(save_steps: Callable, tmp_path: Path) -> Path:
    save_steps(3)
    return list_checkpoints(tmp_path / "run")[0]


def _sign(folder: Path, change: Callable[[Record], None]) -> None:
    """Change the manifest, and its hash with it."""
    import xxhash

    stored = json.loads((folder / "manifest.json").read_text())
    change(stored["manifest"])
    stored["xxh3_128"] = xxhash.xxh3_128(json.dumps(stored["manifest"], sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(stored))


_NAMES = (
    "../state.json",
    # Nowhere: were it used, nothing of this machine would be lost.
    "/no-such-folder/state.json",
    "..",
    "",
    "a/b",
    "x\0y",
    "__0_0.distcp\n",
    "\x1b[2J",
    "manifest.json",
    7,
    None,
)


@pytest.mark.parametrize(
    "change",
    [
        *(set_at("files", 0, "name", to=name) for name in _NAMES),
        *(set_at("files", 0, "num_bytes", to=value) for value in (-1, "9", None, True)),
        *(set_at("files", to=value) for value in ({}, None, [None], [[]], "x")),
        *(set_at("step", to=value) for value in (-1, "7", None, 1.5, [], True)),
        *(set_at("history", to=value) for value in (-1, "1", None, True)),
        *(set_at("branches", to=value) for value in (None, {}, [3], [[1]], [[1, -2]], [[1, "2"]], [[1, 2, 3]])),
        *(set_at("validation", to=value) for value in (3, {"loss": 1.0}, {"loss": "1", "samples": ""})),
        set_at("created", to=7),
        set_at("more", to=7),
        set_at("format", to=9),
    ],
)
def test_hostile_manifests(change: Callable[[Record], None], checkpoint: Path) -> None:
    _sign(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        load_manifest(checkpoint)
    assert "does not match its hash" not in str(caught.value)
    assert find_damage(checkpoint) == str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.json", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_links_and_devices_in_a_checkpoint(name: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    os.rename(checkpoint / name, tmp_path / "moved")
    if kind == "pipe":
        os.mkfifo(checkpoint / name)
    else:
        (checkpoint / name).symlink_to(tmp_path / "moved" if kind == "link" else "/dev/zero")
    assert "not a regular file" in str(find_damage(checkpoint))
    for read in (load_full_weights, read_state):
        if (name == "state.json") == (read is read_state) and name != "manifest.json":
            with pytest.raises(CheckpointError, match="not a regular file"):
                read(checkpoint)


_CHUNK = ("master/w", "chunks", 0)


@pytest.mark.parametrize(
    "change",
    [
        *(set_at(*_CHUNK, 2, to=name) for name in _NAMES),
        set_at(*_CHUNK, 2, to="__7_0.distcp"),
        *(
            set_at(
                "master/w", "chunks", to=[[0, end, "__0_0.distcp", 0, 2000], [begin, 400, "__0_0.distcp", 2000, 1600]]
            )
            for end, begin in ((500, 600), (700, 600))
        ),
        *(set_at(*_CHUNK, 0, to=start) for start in (-1, 1, 10**15, "0", None)),
        *(set_at(*_CHUNK, 1, to=elements) for elements in (-1, 0, 10**15, 10**30, "9", True)),
        *(set_at(*_CHUNK, 3, to=offset) for offset in (-1, 10**9, 10**30)),
        *(set_at(*_CHUNK, 4, to=length) for length in (-1, 0, 10, 10**9)),
        *(set_at("master/w", "size", to=size) for size in (-1, 0, 1000.0, 10**15, 10**30, "9", None)),
        *(set_at("master/w", "dtype", to=dtype) for dtype in ("load", "__class__", "complex128", None, [], 3)),
        *(set_at("master/w", "chunks", to=chunks) for chunks in ([], None, {}, "x", [None], [[]], [[0, 1]], [3])),
        lambda index: index["master/w"]["chunks"].append("x"),
        lambda index: index["master/w"]["chunks"].append(["0", 1, "__0_0.distcp", 0, 9]),
        set_at("master/w", to=None),
        set_at("master/w", "more", to=1),
        lambda index: index.__setitem__("master/v", index["master/w"]),
        lambda index: index["master/w"].update(size=2000, chunks=index["master/w"]["chunks"] * 2),
    ],
)
def test_hostile_indexes(change: Callable[[Record], None], checkpoint: Path) -> None:
    index = json.loads((checkpoint / "tensors.json").read_text())
    change(index)
    (checkpoint / "tensors.json").write_text(json.dumps(index))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in (load_full_weights, StoredWeights):
        with pytest.raises(CheckpointError, match=r"tensors\.json|__7_0\.distcp"):
            load(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    "change",
    [
        *(
            set_at(key, to=value)
            for key in ("step", "samples_seen", "tokens_seen")
            for value in (-1, "7", None, 1.5, True)
        ),
        *(set_at(key, to=value) for key in ("identity", "config") for value in (None, [], "x", 3)),
        *(set_at("optimizer_scalars", to=value) for value in ({"a": 1}, {"a": {"b": "c"}}, [])),
        set_at("loss_scaler", to={"scale": "x"}),
        set_at("precision", to=3),
        *(set_at("wandb_run_id", to=value) for value in ("../x", "\x1b", 3)),
    ],
)
def test_hostile_states(change: Callable[[Record], None], checkpoint: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=re.escape(f"{checkpoint}/state.json: ")):
        load_run_state(checkpoint)


def _archive(*, compression: int = zipfile.ZIP_STORED, elements: int | None = None, twice: bool = False) -> bytes:
    """100 ones as torch.save writes them, and then changed."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(100), saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for member in source.infolist():
            contents = source.read(member)
            if member.filename.endswith("data.pkl") and elements is not None:
                assert b"Kd" in contents
                contents = contents.replace(b"Kd", b"J" + elements.to_bytes(4, "little"))
            target.writestr(member.filename, contents)
    return changed.getvalue()


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (b"", "no tensor as torch.save"),
        (b"x" * 1000, "no tensor as torch.save"),
        (_archive(compression=zipfile.ZIP_DEFLATED), "compressed tensor"),
        (_archive(elements=10**9), "does not hold a flat tensor"),
        (_archive()[:-30], "no tensor as torch.save"),
    ],
    ids=["empty", "noise", "compressed", "elements", "torn"],
)
def test_archives_that_unfold_or_lie(archive: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        find_elements(io.BytesIO(b"before" + archive + b"after"), 6, len(archive), "float32", 100, "here")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("elements", [1, 3, 70_000])
def test_archives_of_every_dtype_are_read(dtype: torch.dtype, elements: int) -> None:
    saved = io.BytesIO()
    torch.save(torch.zeros(elements, dtype=dtype), saved)
    archive = saved.getvalue()
    file = io.BytesIO(b"before" + archive + b"after")
    name = str(dtype).removeprefix("torch.")
    begin = find_elements(file, 6, len(archive), name, elements, "here")
    assert set(file.getvalue()[begin : begin + elements * dtype.itemsize]) == {0}


def test_what_a_checkpoint_says_is_shown_as_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _sign(checkpoint, set_at("precision", to="\x1b]0;owned\x07"))
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    assert main(["checkpoint", "show", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert r"\x1b]0;owned\x07" in output
