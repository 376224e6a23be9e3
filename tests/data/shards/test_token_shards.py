from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.shards import token_shards
from llmscale.data.shards.cache import SetLocation, fetch_tokenizer, open_set
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.shards.verify_shards import find_damage
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.errors import DataError
from tests import warm_start
from tests.conftest import HANG_S


@pytest.fixture
def copied(shared_set: Path, tmp_path: Path) -> Path:
    """A set that a test may damage."""
    return Path(shutil.copytree(shared_set, tmp_path / "set"))


def _all(location: SetLocation, split: str = "train") -> np.ndarray:
    shards = TokenShards(location, split)
    return shards.read(np.arange(len(shards)))


def _delete(shard: Path) -> None:
    shard.unlink()


def _truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 3)


def _lengthen(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"xyz")


def _replace_by_folder(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


def _flip_byte(shard: Path) -> None:
    contents = bytearray(shard.read_bytes())
    contents[-5] ^= 0x40
    shard.write_bytes(contents)


DAMAGE_SEEN_AT_OPENING = [
    (_delete, "is missing"),
    (_truncate, r"is truncated: 4,0\d\d bytes instead of 4,0\d\d"),
    (_lengthen, "is too long"),
    (_replace_by_folder, "is a folder, not a regular file"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGE_SEEN_AT_OPENING)
def test_damage_is_seen_when_the_set_is_opened(copied: Path, damage: Callable[[Path], None], text: str) -> None:
    shard = copied / "train" / "shard.00001.mds"
    damage(shard)
    with pytest.raises(DataError, match=text) as caught:
        TokenShards(open_set(str(copied)), "train")
    assert str(shard) in str(caught.value)
    assert "prepare the dataset again with --overwrite" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "text"), [(_flip_byte, "was altered"), (_truncate, "is truncated"), (_delete, "is missing")]
)
def test_damage_after_opening_is_seen_before_a_sample_is_used(
    copied: Path, damage: Callable[[Path], None], text: str
) -> None:
    shards = TokenShards(open_set(str(copied)), "train")
    shards.read(np.array([0]))
    damage(copied / "train" / "shard.00001.mds")
    with pytest.raises(DataError, match=rf"shard\.00001\.mds {text}"):
        shards.read(np.arange(len(shards)))


def _replace(shard: Path, change: Callable[[bytes], bytes]) -> None:
    """By another file, as rsync does."""
    (shard.parent / "new").write_bytes(change(shard.read_bytes()))
    os.replace(shard.parent / "new", shard)


def _write_over(shard: Path, change: Callable[[bytes], bytes]) -> None:
    """In place, as cp does."""
    shard.write_bytes(change(shard.read_bytes()))


def _zero(contents: bytes) -> bytes:
    return contents[:1000] + bytes(len(contents) - 1000)


USED = "shard.00000.mds"


@pytest.mark.parametrize("limit", [128, 1], ids=["open", "closed"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_delete, "is missing"),
        (partial(_replace, change=_zero), "was altered"),
        (partial(_replace, change=lambda data: data[:2000]), "is truncated"),
        (partial(_replace, change=lambda data: data), ""),
        (partial(_write_over, change=_zero), "was altered"),
        (partial(_write_over, change=lambda data: data[:2000]), "is truncated"),
        (partial(_write_over, change=lambda data: data), ""),
    ],
    ids=["removed", "replaced", "replaced by less", "replaced by itself", "over", "cut", "over by itself"],
)
def test_what_happens_to_a_shard_in_use_never_gives_wrong_tokens(
    change: Callable[[Path], None], message: str, limit: int, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is open keeps its bytes, whatever takes its name; one that was closed meanwhile, or is written to, is
    checked again."""
    monkeypatch.setattr(token_shards, "_MOST_OPEN", limit)
    shards = TokenShards(open_set(str(copied)), "train")
    expected = _all(open_set(str(copied)))
    first = np.arange(20)
    assert np.array_equal(shards.read(first), expected[first])
    shards.read(np.array([len(shards) - 1]))  # another shard
    change(copied / "train" / USED)
    keeps = limit > 1 and not (isinstance(change, partial) and change.func is _write_over)
    if keeps or not message:
        assert np.array_equal(shards.read(first), expected[first])
    else:
        with pytest.raises(DataError, match=rf"{USED} {message}".replace(".", r"\.")):
            shards.read(first)


@pytest.mark.parametrize(
    ("contents", "text"),
    [(None, "index.json is missing"), ("{}", "is damaged"), ('{"shards": []}', "does not describe the shards")],
)
def test_damaged_index(copied: Path, contents: str | None, text: str) -> None:
    index = copied / "train" / "index.json"
    index.unlink() if contents is None else index.write_text(contents)
    with pytest.raises(DataError, match=text):
        TokenShards(open_set(str(copied)), "train")


def test_verify_finds_every_damaged_shard(copied: Path) -> None:
    _flip_byte(copied / "train" / "shard.00001.mds")
    _delete(copied / "train" / "shard.00002.mds")
    manifest = open_set(str(copied)).manifest
    damage = {file.path.name: text for file, text in find_damage(copied, "train", manifest) if text}
    assert damage.keys() == {"shard.00001.mds", "shard.00002.mds"}
    assert "was altered" in damage["shard.00001.mds"]


def test_ids_outside_the_set(shared_set: Path) -> None:
    shards = TokenShards(open_set(str(shared_set)), "val")
    for wrong in (-1, len(shards)):
        with pytest.raises(DataError, match=r"Sample ids must be in 0\.\."):
            shards.read(np.array([wrong]))


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_remote_sets_are_fetched_shard_by_shard(
    make_set: Callable[..., Path], tmp_path: Path, compression: str
) -> None:
    source = make_set(compression=compression)
    location = open_set(str(source), tmp_path / "cache")
    shards = TokenShards(location, "train")
    assert not list(location.folder.glob("train/*.mds*"))
    first = shards.read(np.array([0]))
    assert [path.name for path in location.folder.glob("train/*.mds*")] == ["shard.00000.mds"]
    everything = _all(location)
    assert np.array_equal(everything[:1], first)
    assert np.array_equal(everything, _all(open_set(str(source))))
    fetch_tokenizer(location)
    assert load_set_tokenizer(location.folder).spec == "bytes"


def test_a_damaged_remote_shard_is_an_error_and_never_stays_in_the_cache(copied: Path, tmp_path: Path) -> None:
    _flip_byte(copied / "train" / "shard.00001.mds")
    location = open_set(str(copied), tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(DataError, match=r"shard shard\.00001\.mds of .* is damaged at its source, twice"):
            _all(location)
        assert not list(location.folder.glob("train/shard.00001*"))


def test_a_missing_remote_shard(copied: Path, tmp_path: Path) -> None:
    _delete(copied / "train" / "shard.00001.mds")
    with pytest.raises(DataError, match=r"Cannot fetch .*/train/shard\.00001\.mds: there is no such file"):
        _all(open_set(str(copied), tmp_path / "cache"))


@pytest.mark.parametrize("damage", [_flip_byte, _truncate])
def test_what_a_crash_left_in_the_cache_is_fetched_again(
    shared_set: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    location = open_set(str(shared_set), tmp_path / "cache")
    expected = _all(location)
    damage(location.folder / "train" / "shard.00001.mds")
    assert np.array_equal(_all(location), expected)


def test_a_cache_that_cannot_be_written_is_named(shared_set: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match="Choose another --data-cache"):
        open_set(str(shared_set), tmp_path / "file" / "cache")


def test_cache_limit(shared_set: Path, tmp_path: Path) -> None:
    location = open_set(str(shared_set), tmp_path / "cache")
    limited = TokenShards(location, "train", cache_limit_bytes=10_000)
    order = np.random.default_rng(0).permutation(len(limited))
    windows = np.concatenate([limited.read(order[i : i + 4]) for i in range(0, len(order), 4)])
    assert np.array_equal(windows, _all(open_set(str(shared_set)))[order])
    cached = sum(path.stat().st_size for path in location.folder.glob("train/*.mds"))
    assert 0 < cached <= 10_000


def test_a_set_prepared_anew_under_the_same_name_shares_no_file(make_set: Callable[..., Path], tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    for seed in (1, 2):
        shutil.rmtree(remote, ignore_errors=True)
        fresh = make_set(seed=seed)
        shutil.copytree(fresh, remote)
        assert np.array_equal(_all(open_set(str(remote), tmp_path / "cache")), _all(open_set(str(fresh))))


READ_ALL = """
import sys
from pathlib import Path
import numpy as np
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.token_shards import TokenShards
shards = TokenShards(open_set(sys.argv[1], Path(sys.argv[2])), "train")
print(shards.read(np.arange(len(shards))).astype(np.int64).sum())
"""


def test_processes_share_a_cache(shared_set: Path, tmp_path: Path) -> None:
    """Two runs on one host, two ranks of one run: no shared memory, no leader."""
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", READ_ALL, str(shared_set), str(tmp_path / "cache")]
    processes = [warm_start.Process(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    sums = {int(process.communicate(timeout=HANG_S)[0]) for process in processes}
    assert sums == {int(_all(open_set(str(shared_set))).astype(np.int64).sum())}
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "locals" in name or "filelock" in name}


def test_full_cache_disk_that_looked_free(shared_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up during the download: the copy fails half-way, and nothing of it stays."""
    location = open_set(str(shared_set), tmp_path / "cache")

    def copy(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy", copy)
    with pytest.raises(DataError, match=r"is full: shard shard\.00000\.mds.*needs .* bytes"):
        _all(location)
    assert not list(location.folder.glob("train/shard*"))


def test_full_cache_disk(make_set: Callable[..., Path], small_disk: Callable[[int], Path]) -> None:
    with pytest.raises(DataError, match=r"(disk of the data cache .* is full|Cannot write the data cache)"):
        _all(open_set(str(make_set(600)), small_disk(24 << 10)))


def test_an_unknown_scheme_is_named_with_the_legal_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nonsense://x begins with nonsense://, which is unknown\. Legal: s3://BUCKET"):
        open_set("nonsense://x", tmp_path / "cache")
