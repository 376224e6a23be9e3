"""Documents in a stream of tokens: what lies between two end-of-text tokens, whatever the pieces it is stored in."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, cast

import numpy as np

from llmscale.data.prepare.sources.source import (
    Document,
    InputFile,
    LocalFile,
    Place,
    ReadOptions,
    Record,
    Rejected,
    Source,
    TokenRules,
    lacks_field,
    opened,
    within_budget,
)
from llmscale.data.shards.compressed import DamagedError, most_unpacked_bytes, open_zstd, unfolds
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import is_plain_name

#: A longer document is several, so that memory stays bounded where no token ends one.
MOST_TOKENS = 1 << 22


def need_rules(rules: TokenRules | None, name: str) -> TokenRules:
    """Raises DataError where only text will do."""
    if rules is None:
        raise DataError(f"{name} holds tokens, and text is needed.")
    return rules


def documents_in(
    pieces: Iterable[tuple[Place, TokenArray]], offset: int, rules: TokenRules, name: str
) -> Iterator[Document]:
    """Documents of consecutive pieces, the first of which is read from token `offset` on. Places are (*piece, offset).

    End-of-text and begin-of-text are taken away, and what is empty then. Raises DataError for a token that the
    tokenizer does not have.
    """
    waiting: list[TokenArray] = []
    place: Place = ()
    for piece, tokens in pieces:
        _check(tokens, rules, name)
        begin, offset = offset, 0
        for end in (np.flatnonzero(tokens[begin:] == rules.eot_token) + begin).tolist():
            place = (*piece, end + 1)
            yield from _document([*waiting, tokens[begin:end]], place, rules)
            waiting, begin = [], end + 1
        waiting.append(tokens[begin:])
        place = (*piece, len(tokens))
        if sum(map(len, waiting)) >= MOST_TOKENS:
            yield from _document(waiting, place, rules)
            waiting = []
    yield from _document(waiting, place, rules)


def _document(parts: list[TokenArray], place: Place, rules: TokenRules) -> Iterator[Document]:
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    begin = len(rules.bos_tokens)
    if begin and tuple(tokens[:begin].tolist()) == rules.bos_tokens:
        tokens = tokens[begin:]
    if len(tokens):
        yield Document(tokens.astype(np.uint32), place)


def _check(tokens: TokenArray, rules: TokenRules, name: str) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < rules.vocab_size:
        wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
        raise DataError(
            f"{name} holds the token {wrong}, and the tokenizer has {rules.vocab_size:,}. Give the tokenizer that it "
            "was made with by --tokenizer."
        )


_HEADER_BYTES = 256 * 4
_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_PIECE_TOKENS = 1 << 20


def read_tokens(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Places are (piece, token). Raises DataError: cut short, tokens of another tokenizer."""
    rules = need_rules(rules, name)
    piece, offset = start or (0, 0)
    head = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype = _DTYPES.get((magic, version)) if len(head) == _HEADER_BYTES else None
    if dtype is None:
        if magic in (20240520, 20240801):
            raise DataError(f"{name} is a file of llm.c's of version {version}, which is not known. Known: 1 and 7.")
        if rules.vocab_size > 1 << 16:
            raise DataError(
                f"{name} has no header of llm.c, so it is read as nanoGPT's uint16, and the tokenizer has "
                f"{rules.vocab_size:,} tokens. Give the tokenizer that it was made with."
            )
        yield from documents_in(_pieces(file, head, "<u2", name, None, piece), offset, rules, name)
    else:
        yield from documents_in(_pieces(file, b"", dtype, name, count, piece), offset, rules, name)


def _pieces(
    file: BinaryIO, head: bytes, dtype: str, name: str, count: int | None, first: int
) -> Iterator[tuple[Place, TokenArray]]:
    """From piece `first` on; `head` was read already. Raises DataError when there are not `count` tokens."""
    piece_bytes = _PIECE_TOKENS * np.dtype(dtype).itemsize
    number = num_tokens = 0
    while data := head + _read_bytes(file, piece_bytes - len(head)):
        head = b""
        if len(data) % np.dtype(dtype).itemsize:
            raise DataError(f"{name} is cut short, or no file of tokens: it ends within a token.")
        tokens = np.frombuffer(data, dtype)
        num_tokens += len(tokens)
        if number >= first:
            yield (number,), tokens
        number += 1
    if count is not None and num_tokens != count:
        raise DataError(f"{name} is cut short: {num_tokens:,} tokens, and its header says {count:,}.")


def _read_bytes(file: BinaryIO, count: int) -> bytes:
    """So many bytes, fewer at the end only."""
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


INDEX_NAME = "index.json"
#: Streaming's shards have 64 MiB unless asked for more; they are read whole.
_MOST_SHARD_BYTES = 1 << 30
_TOKENS_NAME = "tokens"
#: By the byte that stands before an array whose type its column leaves open, and by name.
_ARRAY_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_ARRAY_TYPES = {"uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
          "uint64": "<u8", "int64": "<i8"}  # fmt: skip


class MdsFolder(ABC):
    """Where an index and its shards lie."""

    name: str
    """For messages."""

    @abstractmethod
    def read_index(self) -> dict[str, object]:
        """Raises DataError."""

    @abstractmethod
    def find(self, name: str) -> InputFile | None:
        """A file beside the index, by a name without folders."""


class LocalMdsFolder(MdsFolder):
    """Of this machine; no links are followed to shards."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder

    def read_index(self) -> dict[str, object]:
        return load_json(self._folder / INDEX_NAME, Rules(DataError))

    def find(self, name: str) -> InputFile | None:
        path = self._folder / name
        return LocalFile(path, self._folder, follow_links=False) if os.path.lexists(path) else None


@dataclass(frozen=True)
class _Shard:
    name: str
    """For messages."""
    file: InputFile
    is_compressed: bool
    bytes: int
    """When it is not."""
    samples: int
    column: int
    """Of those in a sample, which one is read."""
    column_name: str
    sizes: tuple[int | None, ...]
    """Bytes of each column; None where every sample says."""
    encoding: str

    @property
    def is_text(self) -> bool:
        """And not tokens."""
        return self.encoding == "str"


class MdsSource(Source):
    """The samples of shards with Streaming's index.json. Places are (shard, sample, token) or (shard, sample)."""

    def __init__(self, name: str, folder: MdsFolder, options: ReadOptions) -> None:
        """Raises DataError for an index that says anything unexpected, and when a shard is missing."""
        self.name = name
        self.passed_over = Counter()
        self._shards = _load_index(folder, options.text_field)
        self.total_bytes = sum(shard.bytes for shard in self._shards)

    def has_fields(self) -> bool:
        return self._shards[0].is_text

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        size_bytes = sum(shard.file.size_bytes for shard in self._shards)
        yield from within_budget(self._records(start, rules), self.name, size_bytes)

    def _records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        shard, sample, offset = (*start, 0)[:3] if start else (0, 0, 0)
        if not self._shards[0].is_text:
            rules = need_rules(rules, self.name)
            yield from documents_in(self._tokens(shard, sample), offset, rules, self.name)
            return
        for (number, index), data in self._samples(shard, sample):
            where, place = f"{self._shards[number].name}, sample {index}", (number, index + 1)
            try:
                yield Document(data.decode(), place)
            except UnicodeDecodeError as error:
                yield Rejected(where, f"not UTF-8 ({error.reason} at byte {error.start})", data, place)

    def fingerprint(self) -> str:
        """Of every shard's name, size and time of modification, or whatever changes with it in a store, and of what is
        read of it."""
        digest = hashlib.sha256()
        for shard in self._shards:
            file = [PurePath(shard.name).name, shard.file.size_bytes, shard.file.stamp]
            read = [shard.column_name, shard.column, shard.encoding, shard.sizes, shard.samples]
            digest.update(json.dumps([*file, *read]).encode())
        return digest.hexdigest()

    def _tokens(self, shard: int, sample: int) -> Iterator[tuple[Place, TokenArray]]:
        for (number, index), data in self._samples(shard, sample):
            try:
                yield (number, index), _decode(data, self._shards[number].encoding)
            except (ValueError, IndexError):
                raise DataError(f"{self._shards[number].name}, sample {index} is no array of tokens.") from None

    def _samples(self, shard: int, sample: int) -> Iterator[tuple[tuple[int, int], bytes]]:
        """From a sample on: its shard and place in it, and the column's bytes. Raises DataError."""
        self.read_bytes = sum(part.bytes for part in self._shards[:shard])
        for number in range(shard, len(self._shards)):
            part = self._shards[number]
            data = _read_shard(part)
            try:
                for index in range(sample, part.samples):
                    yield (number, index), _column(data, index, part)
            except (struct.error, ValueError):
                raise DataError(f"{part.name} is damaged: sample {index} does not lie in it.") from None
            del data  # before the next one comes
            sample = 0
            self.read_bytes += part.bytes


def _load_index(folder: MdsFolder, text_field: str) -> list[_Shard]:
    """At least one. Raises DataError for an index that says anything unexpected."""
    entries, where = folder.read_index().get("shards"), f"{folder.name}/{INDEX_NAME}"
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where} lists no shards.")
    shards = [_parse(entry, folder, text_field, f"{where}, shard {number}") for number, entry in enumerate(entries)]
    first = shards[0]
    for number, shard in enumerate(shards):
        # The bytes of tokens may well be read as text.
        if (shard.column_name, shard.is_text) != (first.column_name, first.is_text):
            raise DataError(
                f"{where}: shard 0 has {_describe_column(first)}, shard {number} {_describe_column(shard)}. Give each "
                "kind a folder and an index of its own."
            )
    return shards


def _describe_column(shard: _Shard) -> str:
    return f"{'text' if shard.is_text else 'tokens'} in the column {shard.column_name}"


def _parse(entry: object, folder: MdsFolder, text_field: str, where: str) -> _Shard:
    match entry:
        case {
            "format": "mds",
            "column_names": list(names),
            "column_encodings": list(encodings),
            "column_sizes": list(sizes),
            "raw_data": {"basename": str(basename), "bytes": int(num_bytes)},
            "samples": int(samples),
        } if len(names) == len(encodings) == len(sizes):
            zip_data = cast(dict[str, object], entry).get("zip_data")
        case _:
            raise DataError(f"{where} does not describe an MDS shard.")
    wanted = _TOKENS_NAME if _TOKENS_NAME in names else text_field
    if wanted not in names:
        raise DataError(f"{where}: {lacks_field(wanted, list(map(str, names)), 'column')}; name one with --text-field.")
    column = names.index(wanted)
    encoding = str(encodings[column])
    _check_encoding(encoding, wanted, where)
    zip_name = zip_data.get("basename") if isinstance(zip_data, dict) else None
    for name in (basename, zip_name):
        if name is not None and not is_plain_name(name):
            raise DataError(f"{where} names the file {str(name)[:80]!r}, which is no name of a file beside it.")
    if zip_name is not None and not str(zip_name).endswith(".zstd"):
        raise DataError(f"{where}: {zip_name} is compressed, and not by zstd. Uncompress it.")
    if not 0 < num_bytes <= _MOST_SHARD_BYTES or not 0 <= samples <= num_bytes:
        raise DataError(f"{where} has {num_bytes:,} bytes and {samples:,} samples. Legal: up to 1 GiB.")
    if not all(size is None or (type(size) is int and 0 <= size <= num_bytes) for size in sizes):
        raise DataError(f"{where}: a column's size is none.")
    found, is_compressed = folder.find(basename), False
    if found is None and zip_name is not None:
        found, is_compressed = folder.find(str(zip_name)), True
    if found is None:
        raise DataError(f"{where}: there is no {zip_name or basename} beside it.")
    if num_bytes > most_unpacked_bytes(found.size_bytes):
        raise unfolds(found.name, found.size_bytes)
    return _Shard(f"{folder.name}/{basename}", found, is_compressed, num_bytes, samples, column, wanted,
                  tuple(cast(list[int | None], sizes)), encoding)  # fmt: skip


def _check_encoding(encoding: str, name: str, where: str) -> None:
    kind, _, rest = encoding.partition(":")
    dtype = rest.partition(":")[0]
    if encoding in ("str", "bytes") or (kind == "ndarray" and (not dtype or dtype in _ARRAY_TYPES)):
        return
    raise DataError(
        f"{where}: the column {name} is {encoding[:60]!r}. Legal: bytes (of int64, as llm-foundry writes) or ndarray "
        "for tokens, str for text."
    )


def _read_shard(shard: _Shard) -> bytes:
    """Raises DataError: unreadable, of another size, damaged."""
    try:
        with opened(shard.file) as raw:
            contents = open_zstd(raw) if shard.is_compressed else raw
            data = contents.read(shard.bytes + 1)
    except (OSError, DamagedError) as error:
        raise DataError(f"{shard.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if len(data) != shard.bytes:
        raise DataError(f"{shard.name} has another size than its index says.")
    return data


def _column(data: bytes, index: int, shard: _Shard) -> bytes:
    """One column of a sample: uint32 sizes of the columns without a fixed one, then the columns. Raises ValueError."""
    begin, end = struct.unpack_from("<2I", data, 4 + 4 * index)
    sample = data[begin:end]
    open_sizes = sum(size is None for size in shard.sizes)
    stated = iter(struct.unpack_from(f"<{open_sizes}I", sample))
    place = 4 * open_sizes
    for column, size in enumerate(shard.sizes):
        length = next(stated) if size is None else size
        if column == shard.column:
            if place + length > len(sample):
                raise ValueError
            return sample[place : place + length]
        place += length
    raise ValueError


def _decode(data: bytes, encoding: str) -> TokenArray:
    """An array of tokens. Raises ValueError, IndexError."""
    if encoding == "bytes":
        return np.frombuffer(data, "<i8")
    _, dtype, shape = (*encoding.split(":", 2), "", "")[:3]
    code = _ARRAY_TYPES[dtype] if dtype else _ARRAY_DTYPES.get(data[0], "")
    place = 0 if dtype else 1
    if not shape:
        # A byte: number of dimensions above, log2 of the bytes of each below.
        ndim, width = data[place] >> 2, 1 << (data[place] & 3)
        place += 1 + ndim * width
    if not code:
        raise ValueError
    return np.frombuffer(data, code, offset=place)
