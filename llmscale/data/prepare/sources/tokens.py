"""Read tokens that another program made, from MDS shards, nanoGPT's `.bin`, llm.c's files or `.npy`: the documents
between end-of-text tokens.

nanoGPT's files are uint16 and nothing else. `.npy` holds one row of integers. llm.c's begin with 256 int32, of which
the first three are a magic number, a version and the number of tokens (dev/data/data_common.py, write_datafile):
20240520, version 1, uint16 for GPT-2; 20240801, version 7, uint32 for Llama 3.

MDS shards, such as llm-foundry's conversion, have a column of tokens or one of text. Only the one column is read, and
decoded by Streaming. One shard is in memory at a time. An index names files anywhere and column encodings, one of which
(`pkl`) runs code: both are checked.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import io
import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType
from typing import BinaryIO, cast

import numpy as np

from llmscale.config.bundled_files import install_command
from llmscale.data.prepare.sources.source import (
    Document,
    InputFile,
    Place,
    ReadOptions,
    Record,
    Rejected,
    Source,
    TokenRules,
    lacks_field,
    opened,
    within_budget,
    without_undecodable,
)
from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds, unpacked
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import is_plain_name

#: A longer document is cut into several, so that memory stays bounded without end-of-text tokens.
MOST_TOKENS = 1 << 22
_HEADER_BYTES = 256 * 4
_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
#: First bytes of llm.c's files, whatever their names.
LLMC_MAGIC = tuple(struct.pack("<2i", magic, version) for magic, version in _DTYPES)
_PIECE_TOKENS = 1 << 20
INDEX_NAME = "index.json"
_COMPRESSIONS = (".zstd", ".br", ".bz2", ".gz", ".snappy")
#: Largest shard, as it is read into memory; Streaming's default is 64 MiB.
_MOST_SHARD_BYTES = 1 << 30
#: Column of tokens, as llm-foundry names it, and as transformers does; the latter is read if no column is the text.
_TOKENS_NAME = "tokens"
_INPUT_IDS_NAME = "input_ids"
#: Encodings of a column of text or tokens.
_ENCODING = re.compile(r"str|bytes|json|ndarray(:u?int(8|16|32|64)(:[1-9]\d*(,[1-9]\d*)*)?)?")


def need_rules(rules: TokenRules | None, name: str) -> TokenRules:
    """Return the rules. Raises DataError when only text is accepted."""
    if rules is None:
        raise DataError(f"{name} holds tokens, but text is needed.")
    return rules


def documents_in(
    pieces: Iterable[tuple[Place, TokenArray]], rules: TokenRules, name: str, offset: int = 0
) -> Iterator[Document]:
    """Yield the documents of consecutive pieces, from token `offset` of the first on. Places are (*piece, offset).

    End-of-text and begin-of-text are removed, and empty documents skipped. Raises DataError for a token that the
    tokenizer lacks.
    """
    waiting: list[TokenArray] = []
    place: Place = ()
    for piece, tokens in pieces:
        _check(tokens, rules, name)
        begin = offset
        offset = 0
        for end in (np.flatnonzero(tokens[begin:] == rules.eot_token) + begin).tolist():
            place = (*piece, end + 1)
            yield from _document([*waiting, tokens[begin:end]], place, rules)
            waiting = []
            begin = end + 1
        waiting.append(tokens[begin:])
        place = (*piece, len(tokens))
        if sum(map(len, waiting)) >= MOST_TOKENS:
            yield from _document(waiting, place, rules)
            waiting = []
    yield from _document(waiting, place, rules)


def _document(parts: list[TokenArray], place: Place, rules: TokenRules) -> Iterator[Document]:
    if parts:
        tokens = np.concatenate(parts)
    else:
        tokens = np.zeros(0, np.uint32)
    begin = len(rules.bos_tokens)
    if begin and tuple(tokens[:begin].tolist()) == rules.bos_tokens:
        tokens = tokens[begin:]
    if len(tokens):
        yield Document(tokens.astype(np.uint32), place)


def _check(tokens: TokenArray, rules: TokenRules, name: str) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < rules.vocab_size:
        if int(tokens.min()) >= 0:
            wrong = int(tokens.max())
        else:
            wrong = int(tokens.min())
        raise DataError(
            f"{name} holds the token {wrong}, and the tokenizer has {rules.vocab_size:,}. Give the tokenizer that it "
            "was made with by --tokenizer."
        )


def read_tokens(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a file of nanoGPT or llm.c. Raises DataError: truncated, tokens of another tokenizer."""
    rules = need_rules(rules, name)
    head = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if len(head) == _HEADER_BYTES:
        dtype = _DTYPES.get((magic, version))
    else:
        dtype = None
    if dtype is None:
        if magic in (20240520, 20240801):
            raise DataError(f"{name} is an llm.c file of the unknown version {version}. Known: 1 and 7.")
        if rules.vocab_size > 1 << 16:
            raise DataError(
                f"{name} has no llm.c header, so it is read as nanoGPT's uint16, but the tokenizer has "
                f"{rules.vocab_size:,} tokens. Give the tokenizer that it was made with."
            )
        _refuse_wide(np.frombuffer(head[: len(head) // 2 * 2], "<u2"), name)
        yield from documents_in(_pieces(file, head, "<u2", name, None), rules, name)
    else:
        yield from documents_in(_pieces(file, b"", dtype, name, count), rules, name)


def has_header(head: bytes, _name: str, _options: ReadOptions) -> bool:
    """Return whether a file of tokens that begins with `head` has llm.c's header."""
    return head.startswith(LLMC_MAGIC)


def _refuse_wide(tokens: TokenArray, name: str) -> None:
    """Raise DataError if every other number is 0: these are integers of 32 or 64 bits, such as Megatron's."""
    if len(tokens) >= 64 and not tokens[1::2].any() and tokens.any():
        raise DataError(
            f"{name} has no llm.c header and holds integers of more than 16 bits, not nanoGPT's uint16. Save them as "
            "one row with numpy.save, in a .npy file."
        )


def _read_array_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the type in a `.npy` file, whose header numpy reads as literals only. Raises ValueError."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format")
    shape, _, dtype = read(file)
    return shape, dtype


def is_token_array(head: bytes, _name: str, _options: ReadOptions) -> bool:
    """Return whether a `.npy` file that begins with `head` holds a row of integers."""
    try:
        shape, dtype = _read_array_header(cast(BinaryIO, io.BytesIO(head)))
    except ValueError:
        return False
    return len(shape) == 1 and dtype.kind in "iu"


def read_npy(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a row of token ids that numpy saved, never with pickle. Raises DataError."""
    rules = need_rules(rules, name)
    try:
        shape, dtype = _read_array_header(file)
    except ValueError as error:
        raise DataError(f"{name} is not a readable .npy file: {str(error).rstrip('.')}.") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{name} holds an array of {dtype} of shape {shape}, not token ids: one row of integers. Save token ids "
            "with numpy.save(FILE, ids.reshape(-1))."
        )
    yield from documents_in(_pieces(file, b"", dtype, name, shape[0]), rules, name)


def _pieces(
    file: BinaryIO, head: bytes, dtype: str | np.dtype, name: str, count: int | None
) -> Iterator[tuple[Place, TokenArray]]:
    """Yield pieces without a place; `head` was read before. Raises DataError unless there are `count` tokens."""
    piece_bytes = _PIECE_TOKENS * np.dtype(dtype).itemsize
    num_tokens = 0
    while data := head + file.read(piece_bytes - len(head)):
        head = b""
        if len(data) % np.dtype(dtype).itemsize:
            raise DataError(f"{name} is truncated or not a token file: it ends within a token.")
        tokens = np.frombuffer(data, dtype)
        num_tokens += len(tokens)
        yield (), tokens
    if count is not None and num_tokens != count:
        raise DataError(f"{name} is truncated: {num_tokens:,} tokens, but its header states {count:,}.")


@dataclass(frozen=True)
class _Shard:
    name: str
    """Name for messages."""
    file: InputFile
    compression: str
    """Suffix of the compression, or an empty string."""
    bytes: int
    """Uncompressed size."""
    samples: int
    column: int
    """Index of the column that is read."""
    column_name: str
    sizes: tuple[int | None, ...]
    """Bytes of each column; None where every sample states them."""
    encoding: str

    @property
    def is_text(self) -> bool:
        """True for text, False for tokens."""
        return self.encoding == "str"


class MdsSource(Source):
    """Samples of shards with Streaming's index.json. Places are (shard, sample, token) or (shard, sample)."""

    def __init__(self, name: str, files: Mapping[str, InputFile], options: ReadOptions) -> None:
        """Read the index. `files` are those beside it and itself, by name.

        Raises DataError for anything unexpected in it, and for a missing shard.
        """
        self.name = name
        self.passed_over = set()
        self._options = options
        self._shards = _load_index(files, options.text_field)
        self.total_bytes = sum(shard.bytes for shard in self._shards)

    def has_fields(self) -> bool:
        """Return whether the column that is read is text, or the one that the user named."""
        return self._shards[0].is_text or self._shards[0].column_name == self._options.text_field

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        size_bytes = sum(shard.file.size_bytes for shard in self._shards)
        records = within_budget(self._records(start, rules), self.name, size_bytes)
        yield from without_undecodable(self, records, self._options)

    def _records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        shard, sample, offset = (*start, 0)[:3] if start else (0, 0, 0)
        if not self._shards[0].is_text:
            rules = need_rules(rules, self.name)
            yield from documents_in(self._tokens(shard, sample), rules, self.name, offset)
            return
        for (number, index), data in self._samples(shard, sample):
            where = f"{self._shards[number].name}, sample {index}"
            place = (number, index + 1)
            try:
                yield Document(data.decode(), place)
            except UnicodeDecodeError as error:
                yield Rejected(
                    where, f"not UTF-8 ({error.reason} at byte {error.start})", data, place, is_undecodable=True
                )

    def fingerprint(self) -> str:
        """Hash every shard's name, size and version, and which column is read."""
        digest = hashlib.sha256()
        for shard in self._shards:
            file = [PurePath(shard.name).name, shard.file.size_bytes, shard.file.version]
            read = [shard.column_name, shard.column, shard.encoding, shard.sizes, shard.samples]
            digest.update(json.dumps([*file, *read]).encode())
        return digest.hexdigest()

    def _tokens(self, shard: int, sample: int) -> Iterator[tuple[Place, TokenArray]]:
        for (number, index), data in self._samples(shard, sample):
            try:
                yield (number, index), _decode(data, self._shards[number].encoding)
            except (ValueError, LookupError, TypeError):
                raise DataError(f"{self._shards[number].name}, sample {index} is not an array of tokens.") from None

    def _samples(self, shard: int, sample: int) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Yield (shard, sample) and the column's bytes, from a sample on. Raises DataError."""
        self.read_bytes = sum(part.bytes for part in self._shards[:shard])
        for number in range(shard, len(self._shards)):
            part = self._shards[number]
            data = _read_shard(part)
            try:
                for index in range(sample, part.samples):
                    yield (number, index), _column(data, index, part)
            except (struct.error, ValueError):
                raise DataError(f"{part.name} is damaged: sample {index} is outside of it.") from None
            del data  # free it before the next shard is read
            sample = 0
            self.read_bytes += part.bytes


def _load_index(files: Mapping[str, InputFile], text_field: str) -> list[_Shard]:
    """Return the shards of an index, at least one. Raises DataError for anything unexpected."""
    where = files[INDEX_NAME].name
    with opened(files[INDEX_NAME]) as index:
        entries = parse_json(index.read(MAX_BYTES + 1), Rules(DataError, max_bytes=MAX_BYTES), where).get("shards")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where} lists no shards.")
    shards = [_parse(entry, files, text_field, f"{where}, shard {number}") for number, entry in enumerate(entries)]
    first = shards[0]
    for number, shard in enumerate(shards):
        # Tokens could be read as text by mistake.
        if (shard.column_name, shard.is_text) != (first.column_name, first.is_text):
            raise DataError(
                f"{where}: shard 0 has {_describe_column(first)}, shard {number} {_describe_column(shard)}. Give each "
                "kind its folder and index."
            )
    return shards


def _describe_column(shard: _Shard) -> str:
    return f"{'text' if shard.is_text else 'tokens'} in the column {shard.column_name}"


def _parse(entry: object, files: Mapping[str, InputFile], text_field: str, where: str) -> _Shard:
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
    wanted = next((name for name in (_TOKENS_NAME, text_field, _INPUT_IDS_NAME) if name in names), text_field)
    if wanted not in names:
        raise DataError(f"{where}: {lacks_field(wanted, list(map(str, names)), 'column')}; name one with --text-field.")
    column = names.index(wanted)
    encoding = str(encodings[column])
    if not _ENCODING.fullmatch(encoding):
        raise DataError(
            f"{where}: the column {wanted} is {encoding[:60]!r}. Legal: bytes (of int64, as llm-foundry writes) or "
            "ndarray for tokens, str for text, json for a list of tokens."
        )
    if isinstance(zip_data, dict):
        zip_name = zip_data.get("basename")
    else:
        zip_name = None
    for name in (basename, zip_name):
        if name is not None and not is_plain_name(name):
            raise DataError(f"{where} names the file {str(name)[:80]!r}, which does not name a file beside it.")
    if zip_name is None:
        compression = ""
    else:
        compression = PurePath(str(zip_name)).suffix
    if compression and compression not in _COMPRESSIONS:
        raise DataError(f"{where}: {zip_name} is not compressed by {', '.join(_COMPRESSIONS)}. Uncompress it.")
    if not 0 < num_bytes <= _MOST_SHARD_BYTES or not 0 <= samples <= num_bytes:
        raise DataError(f"{where} has {num_bytes:,} bytes and {samples:,} samples. Legal: up to 1 GiB.")
    if not all(size is None or (type(size) is int and 0 <= size <= num_bytes) for size in sizes):
        raise DataError(f"{where}: a column's size is invalid.")
    plain = files.get(basename)
    file = plain or (files.get(str(zip_name)) if compression else None)
    if file is None:
        raise DataError(f"{where}: {zip_name or basename} is missing beside it.")
    if num_bytes > most_unpacked_bytes(file.size_bytes):
        raise unfolds(file.name, file.size_bytes)
    compression = "" if plain else compression
    name = f"{where.partition(f'/{INDEX_NAME}')[0]}/{basename}"
    sizes = cast(list[int | None], sizes)
    return _Shard(name, file, compression, num_bytes, samples, column, wanted, tuple(sizes), encoding)


def _read_shard(shard: _Shard) -> bytes:
    """Return a shard's uncompressed contents. Raises DataError: unreadable, of another size, damaged."""
    try:
        with opened(shard.file) as raw:
            if not shard.compression:
                data = raw.read(shard.bytes + 1)
            elif shard.compression in (".br", ".snappy"):
                decompress = streaming_module("compression").decompress
                data = decompress(shard.compression[1:], raw.read(shard.file.size_bytes + 1))
            else:
                with unpacked(raw, shard.name, shard.file.size_bytes) as contents:
                    data = contents.read(shard.bytes + 1)
    except OSError as error:
        raise DataError(f"{shard.name} cannot be read: {error.strerror or error}.") from None
    if len(data) != shard.bytes:
        raise DataError(f"{shard.name} has another size than its index states.")
    return data


def _column(data: bytes, index: int, shard: _Shard) -> bytes:
    """Return one column of a sample, which holds uint32 sizes of the columns without a fixed size, then the columns.
    Raises ValueError."""
    begin, end = struct.unpack_from("<2I", data, 4 + 4 * index)
    sample = data[begin:end]
    open_sizes = sum(size is None for size in shard.sizes)
    stated = iter(struct.unpack_from(f"<{open_sizes}I", sample))
    place = 4 * open_sizes
    for column, size in enumerate(shard.sizes):
        if size is None:
            length = next(stated)
        else:
            length = size
        if column == shard.column:
            if place + length > len(sample):
                raise ValueError
            return sample[place : place + length]
        place += length
    raise ValueError


def _decode(data: bytes, encoding: str) -> TokenArray:
    """Return an array of tokens. Raises ValueError, LookupError, TypeError."""
    if encoding == "bytes":
        return np.frombuffer(data, "<i8")
    tokens = np.ravel(streaming_module("format.mds.encodings").mds_decode(encoding, data))
    if len(tokens) and tokens.dtype.kind not in "iu":
        raise ValueError
    return tokens


@functools.cache
def streaming_module(name: str) -> ModuleType:
    """Return the module `streaming.base.<name>` of mosaicml-streaming. Raises DataError when it is not installed.

    Its packages' `__init__` are left out: they import torchvision, which fails beside a CPU build of torch, and
    transformers, in 1.5 to 6 s. A later `import streaming` runs them, and has the modules that are loaded here.
    """
    package = importlib.util.find_spec("streaming")
    if package is None or package.origin is None:
        raise DataError(
            "mosaicml-streaming is not installed, and only it reads these shards. "
            f"Install it with `{install_command('train,data')}`."
        )
    folder = PurePath(package.origin).parent
    placed = []
    for bare, path in (("streaming", folder), ("streaming.base", folder / "base")):
        if bare not in sys.modules:
            sys.modules[bare] = ModuleType(bare)
            sys.modules[bare].__path__ = [str(path)]
            placed.append(bare)
    try:
        # Its modules import each other in a circle, which works only when entered here.
        importlib.import_module("streaming.base.format")
        return importlib.import_module(f"streaming.base.{name}")
    finally:
        for bare in placed:
            del sys.modules[bare]
