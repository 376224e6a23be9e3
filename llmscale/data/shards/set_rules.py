"""What the manifest of a set may say. No torch, no Streaming.

Whoever wrote a set chose every value of its manifest: what is opened, for a remote set what is written, and how large
arrays become. So each is held against what `llmscale data prepare` writes, and anything else refuses the set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from llmscale.errors import DataError
from llmscale.untrusted.paths import find_link

if TYPE_CHECKING:
    from llmscale.data.shards.manifest import Manifest, SplitManifest

TokenDtype = Literal["uint16", "uint32"]
Compression = Literal["", "zstd"]
#: Fast enough to check a shard when it is first read: 65 MB in 9 to 14 ms from the page cache. Streaming's name of the
#: algorithm.
HASH_ALGORITHM = "xxh3_64"
#: Where a prepared set keeps its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
#: What `tokenizer_files` may say, and with it every file that a set's tokenizer has; a tokenizer without files is
#: `bytes`.
TOKENIZER_FILES = {
    "": (),
    f"{TOKENIZER_FOLDER}/ranks.tiktoken": (f"{TOKENIZER_FOLDER}/ranks.tiktoken",),
    f"{TOKENIZER_FOLDER}/tokenizer.json": (
        f"{TOKENIZER_FOLDER}/tokenizer.json",
        f"{TOKENIZER_FOLDER}/{TOKENIZER_CONFIG_NAME}",
    ),
}
#: Sixty times the largest vocabulary in use: tables of this many rows are made before a token is read.
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQ_LEN = 1 << 30
#: Streaming stores offsets within a shard as uint32.
MAX_SHARD_BYTES = (1 << 32) - 1
_SPLIT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_SHARD_NAME = re.compile(r"shard\.[0-9]{5,9}\.mds")
#: A hash by that algorithm.
HASH = re.compile(r"[0-9a-f]{16}")
REMEDY = "Prepare the set again with --overwrite."
LINK_REMEDY = "A set holds plain files only; copy one made of links with `cp -rL`."


def check_split_names(splits: Iterable[str], where: str) -> None:
    """Names of splits are names of folders. Raises DataError."""
    for name in splits:
        if not _SPLIT_NAME.fullmatch(name) or name == TOKENIZER_FOLDER:
            raise DataError(f"{where}: {name[:80]!r} is no name of a split. Legal: letters, digits, - and _. {REMEDY}")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Every value of a manifest whose names and types are right. Raises DataError."""
    if not manifest.splits:
        raise DataError(f"{where} has no splits. {REMEDY}")
    _check_range(where, "seq_len", manifest.seq_len, 1, MAX_SEQ_LEN)
    _check_range(where, "vocab_size", manifest.vocab_size, 1, MAX_VOCAB_SIZE)
    _check_range(where, "eot_token", manifest.eot_token, 0, manifest.vocab_size - 1)
    _check_choice(where, "dtype", manifest.dtype, get_args(TokenDtype))
    _check_choice(where, "hash_algorithm", manifest.hash_algorithm, (HASH_ALGORITHM,))
    _check_choice(where, "compression", manifest.compression, get_args(Compression))
    _check_choice(where, "tokenizer_files", manifest.tokenizer_files, TOKENIZER_FILES)
    for split, made in manifest.splits.items():
        _check_split(made, manifest, f"{where}, split {split}")


def _check_split(split: SplitManifest, manifest: Manifest, where: str) -> None:
    for name in ("num_documents", "num_text_bytes", "num_tokens", "tail_tokens"):
        _check_range(where, name, getattr(split, name), 0, (1 << 63) - 1)
    _check_range(where, "max_token_id", split.max_token_id, 0, manifest.vocab_size - 1)
    _check_range(where, "num_samples", split.num_samples, 1, split.num_tokens // manifest.seq_len)
    seen: set[str] = set()
    for number, shard in enumerate(split.shards):
        place = f"{where}, shard {number}"
        if not _SHARD_NAME.fullmatch(shard.name):
            raise DataError(f"{place} names the file {shard.name[:80]!r}. Legal: shard.00000.mds and so on. {REMEDY}")
        if shard.name in seen:
            raise DataError(f"{place} names {shard.name} a second time. {REMEDY}")
        seen.add(shard.name)
        if not HASH.fullmatch(shard.hash):
            raise DataError(f"{place}: hash {shard.hash[:40]!r} is no {HASH_ALGORITHM}. {REMEDY}")
        _check_range(place, "bytes", shard.bytes, 1, MAX_SHARD_BYTES)
        _check_range(place, "num_samples", shard.num_samples, 1, shard.bytes // manifest.window_bytes)
    _check_choice(where, "num_samples", split.num_samples, (sum(shard.num_samples for shard in split.shards),))


def _check_range(where: str, name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise DataError(f"{where}: {name} is {value}, and must be {lowest} to {highest}. {REMEDY}")


def _check_choice(where: str, name: str, value: object, legal: Iterable[object]) -> None:
    if value not in legal:
        known = ", ".join(repr(choice) for choice in legal)
        raise DataError(f"{where}: {name} is {str(value)[:80]!r}. Legal: {known}. {REMEDY}")


def check_no_links(folder: Path, *names: str) -> None:
    """Refuse symbolic links among parts of a set, `names` relative to its folder: they lead out of it.

    Raises DataError.
    """
    for name in names:
        link = find_link(folder, name)
        if link is not None:
            raise DataError(f"{link} is a symbolic link. {LINK_REMEDY}")
