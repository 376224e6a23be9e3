"""The manifest of a prepared dataset: source, tokenizer, settings and shards. Imports neither torch nor Streaming.

`manifest.json` is written last, so a folder with one is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

from llmscale.errors import DataError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json, parse_json
from llmscale.untrusted.paths import read_regular

TokenDtype = Literal["uint16", "uint32"]
Compression = Literal["", "zstd"]
#: Windows of the stream of all tokens, rows that start at a document, or one conversation a row.
PackingName = Literal["stream", "best-fit", "pad"]
#: Tokens of a conversation that are targets.
TrainOn = Literal["assistant", "all"]
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
#: Streaming's name of the algorithm, which takes 9 to 14 ms for 65 MB from the page cache.
HASH_ALGORITHM = "xxh3_64"
#: Folder of a dataset's tokenizer.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ORIGIN_NAME = "origin.json"
#: Files beside a model's tokenizer.json that a dataset keeps, if they exist, for exports; origin.json lists them.
TOKENIZER_EXTRAS = (
    TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
#: Legal values of `tokenizer_files`, each with the files that the tokenizer needs; `bytes` needs none.
TOKENIZER_FILES = {
    "": (),
    f"{TOKENIZER_FOLDER}/ranks.tiktoken": (f"{TOKENIZER_FOLDER}/ranks.tiktoken",),
    f"{TOKENIZER_FOLDER}/{ORIGIN_NAME}": (f"{TOKENIZER_FOLDER}/tokenizer.json", f"{TOKENIZER_FOLDER}/{ORIGIN_NAME}"),
}
#: Sixty times the largest vocabulary in use; tables of this many rows are allocated.
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQ_LEN = 1 << 30
#: Streaming stores offsets within a shard as uint32.
MAX_SHARD_BYTES = (1 << 32) - 1
_SPLIT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
SHARD_NAME = re.compile(r"shard\.[0-9]{5,9}\.mds")
#: Form of a hash by HASH_ALGORITHM.
HASH = re.compile(r"[0-9a-f]{16}")
REMEDY = "Prepare the dataset again with --overwrite."


def check_split_names(splits: Iterable[str], where: str) -> None:
    """Names of splits are names of folders. Raises DataError."""
    for name in splits:
        if not _SPLIT_NAME.fullmatch(name) or name == TOKENIZER_FOLDER:
            raise DataError(f"{where}: {name[:80]!r} is not a split name. Legal: letters, digits, - and _. {REMEDY}")


def check_range(where: str, name: str, value: int, lowest: int, highest: int) -> None:
    """Raises DataError."""
    if not lowest <= value <= highest:
        raise DataError(f"{where}: {name} is {value}, and must be {lowest} to {highest}. {REMEDY}")


def check_choice(where: str, name: str, value: object, legal: Iterable[object]) -> None:
    """Raises DataError."""
    if value not in legal:
        known = ", ".join(repr(choice) for choice in legal)
        raise DataError(f"{where}: {name} is {str(value)[:80]!r}. Legal: {known}. {REMEDY}")


MANIFEST_NAME = "manifest.json"
#: Marker of an unfinished dataset in a store; it holds the request.
UNFINISHED_NAME = "unfinished.json"
#: Incremented whenever older code could misread the folder.
FORMAT_VERSION = 1
#: Version and size limit of a manifest that only names the folder with the dataset.
_POINTER_VERSION, _MAX_POINTER_BYTES = 2, 512
#: Form of that folder's name.
GENERATION = r"set-[0-9a-f]{12}"

#: Everything that decides a dataset's contents, by flag of `prepare`.
PrepareRequest = dict[str, str | int | float | bool | None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file, uncompressed."""

    name: str
    """File name within the split's folder."""
    bytes: int
    """Exact size of the file."""
    hash: str
    """Hexadecimal hash of the file by hash_algorithm."""
    num_samples: int
    """Windows in the shard."""


@dataclass(frozen=True)
class SplitManifest:
    """Contents of a split."""

    num_documents: int
    """Documents, each followed by one end-of-text token."""
    num_text_bytes: int
    """UTF-8 bytes of the documents' text."""
    num_tokens: int
    """Number of tokens, end-of-text included."""
    num_samples: int
    """Windows of seq_len + 1 tokens. Neighbours in a text share one token, so that no token is a target twice."""
    tail_tokens: int
    """Tokens after the last full window, too few for another one, which are not trained on."""
    max_token_id: int
    """Largest token id in the split."""
    unigram_entropy_nats: float
    """Entropy of the token frequencies in nats: the loss of a model that knows only frequencies."""
    shards: tuple[ShardInfo, ...]
    cropped_tokens: int = 0
    """Tokens that best-fit packing cut off at the ends of windows, which are not trained on."""

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, which converts nats per token into bits per byte."""
        return self.num_text_bytes / self.num_tokens


@dataclass(frozen=True)
class ChatFacts:
    """Conversations of a dataset. Its shards have a column `mask`, 1 for each token that is a target."""

    template: str
    """Jinja template that made text of the conversations."""
    train_on: TrainOn
    """Tokens that are targets."""
    masks_documents: bool
    """True if a row holds several conversations, each of which ends with the only end-of-text token in it."""
    num_targets: dict[str, int]
    """Targets by split."""
    left_out: dict[str, int]
    """Conversations that were left out, by reason."""


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared dataset."""

    tokenizer: str
    """Tokenizer as the user named it."""
    tokenizer_files: str
    """Relative path of the dataset's copy of it; empty for one without files."""
    tokenizer_sha256: str
    """Hash of the vocabulary and its merges."""
    vocab_size: int
    """Number of tokens; ids are below it."""
    eot_token: int
    """End-of-text token, which follows every document."""
    seq_len: int
    """Positions that a model sees; windows hold one token more."""
    dtype: TokenDtype
    """Stored type of tokens."""
    hash_algorithm: str
    """Algorithm of the shard hashes, by Streaming's name."""
    compression: str
    """Compression of the shard files by Streaming's name, or empty."""
    source: str
    """Source of the documents as the user named it."""
    request: PrepareRequest
    """Settings and source fingerprint of this dataset."""
    skipped_documents: int
    """Documents skipped because they could not be decoded."""
    empty_documents: int
    """Documents skipped because they are empty."""
    splits: dict[str, SplitManifest]
    counts_own_bytes: bool = False
    """True if each part of a document that was cut for validation has the bytes of its own tokens. Older datasets have
    the average of the whole document there."""
    chat: ChatFacts | None = None
    """Facts about conversations; None for text, all of whose tokens are targets."""

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides what sample k is, shard hashes included."""
        identity = {
            "tokenizer_sha256": self.tokenizer_sha256,
            "vocab_size": self.vocab_size,
            "eot_token": self.eot_token,
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "hash_algorithm": self.hash_algorithm,
            "splits": {
                name: [dataclasses.astuple(shard) for shard in split.shards] for name, split in self.splits.items()
            },
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def is_shuffled(self) -> bool:
        """True if the windows of `train` were shuffled when written."""
        return self.request.get("--no-shuffle") is False

    @property
    def is_best_fit(self) -> bool:
        """True if windows start at documents, False if they are consecutive parts of the text."""
        return self.request.get("--packing") == "best-fit"

    @property
    def note_on_bytes(self) -> str:
        """Return a warning if bytes per token are an average of both splits, else an empty text."""
        train, val = self.splits.get("train"), self.splits.get("val")
        if self.counts_own_bytes or train is None or val is None or self.tokenizer == "bytes":
            return ""
        # True where a single document was cut; counts of whole documents agree so well by chance only.
        average = (train.num_text_bytes + val.num_text_bytes) / (train.num_tokens + val.num_tokens)
        if abs(val.num_text_bytes - average * val.num_tokens) > 2 * average * val.num_documents:
            return ""
        return (
            "bytes per token, and so bits per byte, are an average of training and validation text: an older llmscale "
            "cut a document for validation. `llmscale data prepare` counts those of each."
        )

    @property
    def columns(self) -> dict[str, object]:
        """The columns of a shard as Streaming's index describes them, whose fixed sizes reveal a short shard."""
        return shard_columns(self.dtype, self.seq_len, has_mask=self.chat is not None)

    @property
    def window_bytes(self) -> int:
        """Stored bytes of one sample: seq_len + 1 tokens, and their mask if there is one."""
        return (self.seq_len + 1) * (_ITEM_BYTES[self.dtype] + (self.chat is not None))

    def to_json(self) -> str:
        record = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            **dataclasses.asdict(self),
        }
        if self.chat is None:
            del record["chat"]
        return json.dumps(record, indent=1) + "\n"


def shard_columns(dtype: str, seq_len: int, *, has_mask: bool) -> dict[str, object]:
    """Return the columns of a shard as Streaming's index describes them; it orders them by name."""
    kinds = {"mask": "uint8", "tokens": dtype} if has_mask else {"tokens": dtype}
    return {
        "column_names": list(kinds),
        "column_encodings": [f"ndarray:{kind}:{seq_len + 1}" for kind in kinds.values()],
        "column_sizes": [(seq_len + 1) * _ITEM_BYTES[kind] for kind in kinds.values()],
    }


def load_manifest(folder: Path | str) -> Manifest:
    """Read a dataset's manifest. Raises DataError when the folder is missing, empty or not a complete dataset."""
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        contents = read_regular(path, Rules.max_bytes)
    except FileNotFoundError:
        raise DataError(_explain_missing(folder)) from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file; --data takes the folder that `llmscale data prepare` wrote.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    return parse_manifest(contents, str(path))


def parse_manifest(contents: bytes | str, where: str) -> Manifest:
    """Parse a manifest's JSON; `where` names it in errors.

    The file is untrusted: every value is checked before it names a file, sizes an array or is printed. Raises DataError
    for a damaged or impossible manifest.
    """
    record = parse_json(contents, Rules(DataError, REMEDY), where)
    version = record.get("format_version")
    if version == _POINTER_VERSION:
        raise DataError(f"{where} belongs to a store: it names the folder with the dataset. Name that folder.")
    if version != FORMAT_VERSION:
        stated = str(version)[:20]
        raise DataError(f"{where} has format version {stated}; this llmscale reads version {FORMAT_VERSION}. {REMEDY}")
    splits = _field(record, "splits", dict, where)
    check_split_names(splits, where)
    parsed = {name: _parse_split(split, f"{where}, split {name}") for name, split in splits.items()}
    chat = {"chat": _build(ChatFacts, record["chat"], f"{where}, chat")} if record.get("chat") is not None else {}
    manifest = _build(Manifest, {**record, "splits": parsed, **chat}, where)
    if record.get("fingerprint") != manifest.fingerprint:
        raise DataError(f"{where} was altered: its fingerprint does not match its contents. {REMEDY}")
    _check_manifest(manifest, where)
    return manifest


def generation_json(folder: str) -> str:
    """Return a manifest that points to `folder` beside it, which holds the dataset."""
    return json.dumps({"format_version": _POINTER_VERSION, "generation": folder}) + "\n"


def parse_generation(contents: bytes, where: str) -> str:
    """Return the folder that a pointing manifest names; empty for a dataset's manifest. Raises DataError."""
    if len(contents) > _MAX_POINTER_BYTES:
        return ""
    record = parse_json(contents, Rules(DataError, REMEDY), where)
    if record.get("format_version") != _POINTER_VERSION:
        return ""
    folder = record.get("generation")
    if not isinstance(folder, str) or not re.fullmatch(GENERATION, folder):
        raise DataError(f"{where} names the folder {str(folder)[:80]!r}, which cannot hold a dataset. {REMEDY}")
    return folder


def _check_manifest(manifest: Manifest, where: str) -> None:
    """Every value of a manifest whose names and types are right. Raises DataError."""
    if not manifest.splits:
        raise DataError(f"{where} has no splits. {REMEDY}")
    check_range(where, "seq_len", manifest.seq_len, 1, MAX_SEQ_LEN)
    check_range(where, "vocab_size", manifest.vocab_size, 1, MAX_VOCAB_SIZE)
    check_range(where, "eot_token", manifest.eot_token, 0, manifest.vocab_size - 1)
    check_choice(where, "dtype", manifest.dtype, get_args(TokenDtype))
    check_choice(where, "hash_algorithm", manifest.hash_algorithm, (HASH_ALGORITHM,))
    check_choice(where, "compression", manifest.compression, get_args(Compression))
    check_choice(where, "tokenizer_files", manifest.tokenizer_files, TOKENIZER_FILES)
    if manifest.chat is not None:
        _check_chat(manifest.chat, where)
    for split, made in manifest.splits.items():
        _check_split(made, manifest, f"{where}, split {split}")


def _check_chat(chat: ChatFacts, where: str) -> None:
    check_choice(where, "train_on", chat.train_on, get_args(TrainOn))
    for counts in (chat.num_targets, chat.left_out):
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise DataError(f"{where}: the counts of chat are {str(counts)[:80]}, and must be whole numbers. {REMEDY}")


def _check_split(split: SplitManifest, manifest: Manifest, where: str) -> None:
    for name in ("num_documents", "num_text_bytes", "num_tokens", "tail_tokens", "cropped_tokens"):
        check_range(where, name, getattr(split, name), 0, (1 << 63) - 1)
    check_range(where, "max_token_id", split.max_token_id, 0, manifest.vocab_size - 1)
    # Rows of conversations are padded.
    most_samples = split.num_tokens if manifest.chat else split.num_tokens // manifest.seq_len
    check_range(where, "num_samples", split.num_samples, 1, most_samples)
    # A window begins with the last token of the one before in a stream, in other packings at most.
    least = split.num_tokens - split.num_samples * (manifest.seq_len + 1)
    lost, most = split.tail_tokens + split.cropped_tokens, least + split.num_samples - 1
    if manifest.chat is not None:
        check_choice(where, "tail_tokens + cropped_tokens", lost, (0,))
    elif manifest.is_best_fit:
        check_range(where, "tail_tokens + cropped_tokens", lost, least, most)
    else:
        check_choice(where, "tail_tokens", lost, (most,))
    # The bounds are one distinct token and equally frequent tokens, with room for rounding.
    if not -1e-6 <= split.unigram_entropy_nats <= math.log(manifest.vocab_size) + 1e-6:
        raise DataError(
            f"{where}: unigram_entropy_nats is {split.unigram_entropy_nats:g}, and must be 0 to the logarithm of the "
            f"{manifest.vocab_size:,} tokens. {REMEDY}"
        )
    seen: set[str] = set()
    for number, shard in enumerate(split.shards):
        place = f"{where}, shard {number}"
        if not SHARD_NAME.fullmatch(shard.name):
            raise DataError(f"{place} names the file {shard.name[:80]!r}. Legal: shard.00000.mds and so on. {REMEDY}")
        if shard.name in seen:
            raise DataError(f"{place} names {shard.name} a second time. {REMEDY}")
        seen.add(shard.name)
        if not HASH.fullmatch(shard.hash):
            raise DataError(f"{place}: hash {shard.hash[:40]!r} is no {HASH_ALGORITHM}. {REMEDY}")
        check_range(place, "bytes", shard.bytes, 1, MAX_SHARD_BYTES)
        check_range(place, "num_samples", shard.num_samples, 1, shard.bytes // manifest.window_bytes)
    check_choice(where, "num_samples", split.num_samples, (sum(shard.num_samples for shard in split.shards),))


def _parse_split(record: object, where: str) -> SplitManifest:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object.")
    shards = _field(record, "shards", list, where)
    parsed = tuple(_build(ShardInfo, shard, f"{where}, shard {number}") for number, shard in enumerate(shards))
    return _build(SplitManifest, {**record, "shards": parsed}, where)


def _build(kind: type[_T], record: object, where: str) -> _T:
    """A dataclass from a JSON object; every field without a default must be there with its type."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, found {type(record).__name__}.")
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "TokenDtype": str, "PrepareRequest": dict}
    kinds |= {"TrainOn": str, "dict[str, int]": dict}
    values: dict[str, object] = {
        field.name: _field(record, field.name, kinds.get(str(field.type), object), where)
        for field in dataclasses.fields(cast(type, kind))
        if field.name in record or field.default is dataclasses.MISSING
    }
    return kind(**values)


def _field(record: dict[str, object], name: str, kind: type[_T], where: str) -> _T:
    if name not in record:
        raise DataError(f"{where}: the field {name} is missing. {REMEDY}")
    value = record[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DataError(f"{where}: {name} must be {kind.__name__}, not {str(value)[:80]!r}. {REMEDY}")
    return value


def _explain_missing(folder: Path) -> str:
    make = (
        f"Make it with `llmscale data prepare --input PATH --out {folder}`; --input python-docs is text that every "
        "machine has."
    )
    partial = sorted(folder.parent.glob(f".{folder.name}.partial-*")) if folder.parent.is_dir() else []
    note = f" (an interrupted prepare left {partial[0].name} beside it: run it again)" if partial else ""
    if ".partial-" in folder.name:
        return f"{folder} is unfinished work of an interrupted `llmscale data prepare`; run the same command again."
    if not folder.exists():
        return f"Data folder {folder} does not exist{note}. {make}"
    if not any(folder.iterdir()):
        return f"Data folder {folder} is empty{note}. {make}"
    if (folder.parent / MANIFEST_NAME).is_file():
        return f"{folder} is a part of the dataset in {folder.parent}. Give that folder."
    if (folder / "index.json").exists() or any(folder.glob("*/index.json")):
        return (
            f"{folder} holds MDS shards but no {MANIFEST_NAME}: they were not written by `llmscale data prepare`, so "
            "their tokenizer and windows are unknown. Prepare the dataset from its text."
        )
    return (
        f"{folder} is not a prepared dataset: it has no {MANIFEST_NAME}. If it holds text, train on it with `--text "
        f"{folder}`, or make a dataset with `llmscale data prepare --input {folder} --out OUT`."
    )


def get_split(manifest: Manifest, split: str, where: str) -> SplitManifest:
    """Return the manifest of one split. Raises DataError with the existing splits."""
    if split not in manifest.splits:
        remedy = " Prepare the dataset again with --val-fraction above 0." if split == "val" else ""
        raise DataError(f"{where} has no split '{split}', only {', '.join(sorted(manifest.splits))}.{remedy}")
    return manifest.splits[split]


def check_set_matches(
    manifest: Manifest,
    where: str,
    *,
    vocab_size: int,
    seq_len: int,
    tokenizer_sha256: str | None = None,
) -> None:
    """Refuse a dataset that does not match this model, before anything is built.

    `where` names the data folder in messages; `tokenizer_sha256` is that of a run's own tokenizer. Raises DataError
    with both values.
    """
    if manifest.seq_len != seq_len:
        raise DataError(
            f"{where} was prepared for seq_len {manifest.seq_len}, the model has positions for {seq_len} tokens. "
            f"Prepare the text again with `llmscale data prepare --seq-len {seq_len}`."
        )
    largest = max(split.max_token_id for split in manifest.splits.values())
    if largest >= vocab_size:
        raise DataError(
            f"{where} holds token ids up to {largest}, beyond the model's vocab_size {vocab_size}. Prepare the text "
            "with the model's tokenizer."
        )
    if manifest.vocab_size != vocab_size:
        raise DataError(
            f"{where} was prepared with the tokenizer {manifest.tokenizer} of {manifest.vocab_size} tokens, the model "
            f"has vocab_size {vocab_size}. Prepare the text with the model's tokenizer, or use another dataset."
        )
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise DataError(
            f"{where} was prepared with another tokenizer ({manifest.tokenizer}, sha256 "
            f"{manifest.tokenizer_sha256[:12]}) than the model's (sha256 {tokenizer_sha256[:12]}). "
            "Prepare the text with the model's tokenizer."
        )


@dataclass(frozen=True)
class TokenizerOrigin:
    """Origin of a dataset's tokenizer."""

    name: str
    """Folder as the user named it, or the Hub's NAME@COMMIT."""
    eot_token: int
    bos_tokens: tuple[int, ...]
    eot_origin: str
    """Text on what names this end-of-text token."""
    files: tuple[str, ...]
    """Names of TOKENIZER_EXTRAS that are kept beside tokenizer.json."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Hashes of these files."""

    def check(self, name: str, contents: bytes | None, where: str) -> None:
        """Check a kept file's contents, None for a missing one. Raises DataError."""
        if contents is None:
            raise DataError(f"{where}/{name} is missing. {REMEDY}")
        if self.sha256.get(name, _sha256(contents)) != _sha256(contents):
            raise DataError(f"{where}/{name} was altered: the dataset was prepared with another file. {REMEDY}")

    def save(self, folder: Path) -> None:
        """Write origin.json. Raises OSError."""
        record = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / ORIGIN_NAME).write_text(record + "\n", encoding="utf-8")


def hash_files(contents: Mapping[str, bytes]) -> dict[str, str]:
    """Return sha256 hashes by name."""
    return {name: _sha256(data) for name, data in contents.items()}


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def load_origin(path: Path) -> TokenizerOrigin:
    """Read origin.json. Raises DataError for anything that `prepare` does not write."""
    try:
        record = load_json(path, Rules(DataError, REMEDY, max_bytes=CONFIG_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist. {REMEDY}") from None
    eot_token, bos_tokens, files = record.get("eot_token"), record.get("bos_tokens"), record.get("files")
    if type(eot_token) is not int or not isinstance(bos_tokens, list) or not isinstance(files, list):
        raise DataError(f"{path} was altered: eot_token, bos_tokens or files is wrong. {REMEDY}")
    for token in bos_tokens:
        if type(token) is not int:
            raise DataError(f"{path}: {str(token)[:40]!r} of bos_tokens is not a token. {REMEDY}")
    for name in files:
        if name not in TOKENIZER_EXTRAS:
            raise DataError(f"{path} names the file {str(name)[:80]!r}. Legal: {', '.join(TOKENIZER_EXTRAS)}. {REMEDY}")
    hashes = record.get("sha256", {})
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise DataError(f"{path} was altered: sha256 must be an object of hashes. {REMEDY}")
    name, eot_origin = str(record.get("name")), str(record.get("eot_origin"))
    return TokenizerOrigin(name, eot_token, tuple(bos_tokens), eot_origin, tuple(files), hashes)
