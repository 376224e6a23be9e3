"""A set whose author means harm: whatever it names, it is refused, and nothing is changed.

The manifests are signed (their fingerprint is right), as those of an attacker would be.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from llmscale.cli.main import main
from llmscale.data.shards.cache import fetch_tokenizer, open_set
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, load_manifest
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.errors import DataError
from tests.hostile_records import Record, set_at


@pytest.fixture
def home(shared_set: Path, tmp_path: Path) -> Path:
    """A folder with a set in it, and beside it what an attacker would like to read or replace."""
    shutil.copytree(shared_set, tmp_path / "home" / "data" / "set")
    (tmp_path / "home" / "secret").write_text("secret")
    (tmp_path / "home" / "data" / "victim.mds").write_text("untouched")
    return tmp_path / "home"


def _sign(folder: Path, change: Callable[[Record], None]) -> None:
    """Change a manifest as somebody would who knows how its fingerprint is made."""
    path = folder / MANIFEST_NAME
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    try:
        splits = {
            name: [[shard.get(key) for key in ("name", "bytes", "hash", "num_samples")] for shard in split["shards"]]
            for name, split in record["splits"].items()
        }
        signed = Manifest.fingerprint.fget(_Signable(record, splits))  # type: ignore[attr-defined]
        path.write_text(json.dumps({**record, "fingerprint": signed}))
    except (AttributeError, TypeError, KeyError):
        pass  # not even the shape of a manifest


class _Signable:
    """What Manifest.fingerprint looks at, unchecked."""

    def __init__(self, record: Record, splits: dict[str, list]) -> None:
        self.__dict__.update(record)
        from llmscale.data.shards.manifest import ShardInfo

        class Split:
            def __init__(self, shards: list) -> None:
                self.shards = [ShardInfo(*shard) for shard in shards]

        self.splits = {name: Split(shards) for name, shards in splits.items()}


def _use(folder: str) -> None:
    """Everything that reads a set."""
    location = open_set(folder)
    fetch_tokenizer(location)
    load_set_tokenizer(location.folder, location.manifest)
    for split in location.manifest.splits:
        shards = TokenShards(location, split)
        shards.read(np.arange(len(shards)))


def _tree(home: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(home.rglob("*"))}


def _refused(home: Path) -> str:
    """Check that a set is refused, and that neither its own folder nor anything beside it is changed."""
    before = _tree(home)
    with pytest.raises(DataError) as caught:
        _use(str(home / "data" / "set"))
    assert _tree(home) == before
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500
    return str(caught.value)


def _rename_split(name: str) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record["splits"][name] = record["splits"].pop("val")

    return change


_FIRST = ("splits", "train", "shards", 0)
_NAMES = (
    "../victim.mds",
    # Nowhere: were it used, nothing of this machine would be lost.
    "/no-such-folder/shard.mds",
    "",
    "x\0y",
    "\x1b[2J",
    "index.json",
)
HOSTILE_MANIFESTS: dict[str, Callable[[Record], None]] = {
    **{f"shard {name!a}": set_at(*_FIRST, "name", to=name) for name in _NAMES},
    **{f"split {name!a}": _rename_split(name) for name in (*_NAMES[:-1], "tokenizer", ".locks", "a" * 300)},
    **{
        f"tokenizer_files {name!a}": set_at("tokenizer_files", to=name)
        for name in (
            "../../secret",
            "tokenizer/../../x.tiktoken",
            "\0",
        )
    },
    "tokenizer of this machine": set_at("tokenizer", to="/no-such-folder"),
    "shard twice": set_at(*_FIRST, "name", to="shard.00001.mds"),
    "shard name of a number": set_at(*_FIRST, "name", to=7),
    "negative bytes": set_at(*_FIRST, "bytes", to=-1),
    "huge bytes": set_at(*_FIRST, "bytes", to=10**15),
    "samples beyond the bytes": set_at(*_FIRST, "num_samples", to=10**9),
    "hash_algorithm": set_at("hash_algorithm", to="__builtins__"),
    "compression": set_at("compression", to="gz"),
    "dtype": set_at("dtype", to="object"),
    "seq_len": set_at("seq_len", to=10**12),
    "vocab_size": set_at("vocab_size", to=10**12),
    "eot_token": set_at("eot_token", to=-1),
    "max_token_id": set_at("splits", "train", "max_token_id", to=10**9),
    "num_samples": set_at("splits", "train", "num_samples", to=10**15),
    "no splits": set_at("splits", to={}),
    "splits a list": set_at("splits", to=[]),
    "no shards": set_at("splits", "train", "shards", to=[]),
    "a shard null": set_at(*_FIRST, to=None),
    "version": set_at("format_version", to={"a": ["x" * 10**5]}),
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_hostile_manifests(name: str, home: Path) -> None:
    _sign(home / "data" / "set", HOSTILE_MANIFESTS[name])
    assert "was altered" not in _refused(home), "refused for the signature, not for what it says"


def test_the_attack_itself_is_well_formed(home: Path) -> None:
    """A signed set without a change is read, so what is refused above is refused for its change."""
    _sign(home / "data" / "set", lambda record: None)
    _use(str(home / "data" / "set"))


HOSTILE_INDEXES: dict[str, Callable[[Record], None]] = {
    **{f"raw {name!a}": set_at("shards", 0, "raw_data", "basename", to=name) for name in _NAMES},
    **{
        f"zip {name!a}": set_at(
            "shards", 0, "zip_data", to={"basename": name, "bytes": 9, "hashes": {"xxh3_64": "0" * 16}}
        )
        for name in _NAMES
    },
    "pickle": set_at("shards", 0, "column_encodings", to=["pkl"]),
    "array of any size": set_at("shards", 0, "column_encodings", to=["ndarray:uint16"]),
    "format": set_at("shards", 0, "format", to="json"),
    "compression": set_at("shards", 0, "compression", to="gz"),
    "hashes": set_at("shards", 0, "hashes", to=["md5"]),
    "no hash": set_at("shards", 0, "raw_data", "hashes", to={}),
    "huge bytes": set_at("shards", 0, "raw_data", "bytes", to=10**15),
    "shard null": set_at("shards", 0, to=None),
    "too few": set_at("shards", to=[]),
    "large": set_at("padding", to="x" * 10**6),
}


@pytest.mark.parametrize("name", HOSTILE_INDEXES)
def test_hostile_indexes(name: str, home: Path) -> None:
    path = home / "data" / "set" / "train" / "index.json"
    record = json.loads(path.read_text())
    HOSTILE_INDEXES[name](record)
    path.write_text(json.dumps(record))
    _refused(home)


def test_a_shard_unpacks_to_its_bytes_and_no_more(make_set: Callable[..., Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(make_set(compression="zstd"), tmp_path / "set"))
    packed = copied / "train" / "shard.00000.mds.zstd"
    bomb = zstandard.compress(bytes(1 << 30), 19)
    assert len(bomb) < 40_000
    index = json.loads((copied / "train" / "index.json").read_text())
    index["shards"][0]["zip_data"] |= {"bytes": len(bomb), "hashes": {"xxh3_64": _xxh3(bomb)}}
    (copied / "train" / "index.json").write_text(json.dumps(index))
    packed.write_bytes(bomb)
    with pytest.raises(DataError, match="damaged"):
        _use(str(copied))
    # A shard large enough for its compressed file to be believed.
    small = zstandard.compress(bytes(64 << 20), 19)
    assert len(small) < 5000
    index["shards"][0]["zip_data"] |= {"bytes": len(small), "hashes": {"xxh3_64": _xxh3(small)}}
    (copied / "train" / "index.json").write_text(json.dumps(index))
    packed.write_bytes(small)
    with pytest.raises(DataError, match=r"it unpacks to more than its 4,0\d\d bytes"):
        _use(str(copied))
    assert all(path.stat().st_size < 10_000 for path in copied.rglob("*.mds*"))


def test_offsets_within_a_shard(home: Path) -> None:
    """Streaming would read as many bytes as two offsets are apart: up to 4 GiB."""
    folder = home / "data" / "set"
    shard = folder / "train" / "shard.00000.mds"
    contents = bytearray(shard.read_bytes())
    contents[4:12] = np.array([64, 2**32 - 1], "<u4").tobytes()
    shard.write_bytes(contents)
    digest = _xxh3(bytes(contents))
    _sign(folder, set_at(*_FIRST, "hash", to=digest))
    index = json.loads((folder / "train" / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"]["xxh3_64"] = digest
    (folder / "train" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"does not hold \d+ windows of 17 tokens"):
        _use(str(folder))


def test_a_cache_limit_never_removes_a_local_sets_own_files(make_set: Callable[..., Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(make_set(compression="zstd"), tmp_path / "set"))
    before = {path.name for path in copied.rglob("*.zstd")}
    shards = TokenShards(open_set(str(copied)), "train", cache_limit_bytes=5000)
    shards.read(np.arange(len(shards)))
    assert {path.name for path in copied.rglob("*.zstd")} == before


@pytest.mark.parametrize("command", [["data", "inspect"], ["data", "verify"]])
def test_what_a_set_says_of_itself_is_shown_as_text(
    command: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "data" / "set"
    _sign(folder, set_at("source", to="\x1b]0;owned\x07\u202e"))
    assert load_manifest(folder).source == "\x1b]0;owned\x07\u202e"
    assert main([*command, str(folder)]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert command[1] == "verify" or r"\x1b]0;owned\x07\u202e" in captured.out


def _xxh3(contents: bytes) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(contents)
