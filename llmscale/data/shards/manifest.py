"""The manifest of a prepared dataset: source, tokenizer, settings and shards. Imports neither torch nor Streaming.

`manifest.json` is written last, so a folder with one is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from llmscale.errors import DataError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, build, load_json, parse_json
from llmscale.untrusted.paths import read_regular

TokenDtype = Literal["uint16", "uint32"]
Compression = Literal["", "zstd"]
#: Windows of the stream of all tokens, rows that start at a document, or one conversation a row.
PackingName = Literal["stream", "best-fit", "pad"]
#: Tokens of a conversation that are targets.
TrainOn = Literal["assistant", "all"]
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
#: Streaming's name of the algorithm, which takes 9 to 14 ms for 65 MB from the page cache.
HASH_ALGORITHM: Literal["xxh3_64"] = "xxh3_64"
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
MANIFEST_NAME = "manifest.json"
#: Marker of an unfinished dataset in a store; it holds the request.
UNFINISHED_NAME = "unfinished.json"
#: Incremented whenever older code could misread the folder.
FORMAT_VERSION = 1
#: Version and size limit of a manifest that only names the folder with the dataset.
_POINTER_VERSION = 2
_MAX_POINTER_BYTES = 512
#: Form of that folder's name.
GENERATION = r"set-[0-9a-f]{12}"


def _check_split_name(name: str) -> str:
    """Return a split's name, which is also its folder's. Raises ValueError."""
    if not _SPLIT_NAME.fullmatch(name) or name == TOKENIZER_FOLDER:
        raise ValueError("a split has letters, digits, - and _")
    return name


def _check_tokenizer_files(name: str) -> str:
    """Return the path of a dataset's tokenizer. Raises ValueError."""
    if name not in TOKENIZER_FILES:
        raise ValueError(f"legal: {', '.join(map(repr, TOKENIZER_FILES))}")
    return name


def _check_range(where: str, name: str, value: int, lowest: int, highest: int) -> None:
    """Raises DataError."""
    if not lowest <= value <= highest:
        legal = f"{lowest} to {highest}" if lowest != highest else lowest
        raise DataError(f"{where}: {name} is {value}, and must be {legal}. {REMEDY}")


#: Everything that decides a dataset's contents, by flag of `prepare`.
PrepareRequest = dict[str, str | int | float | bool | None]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class ShardInfo:
    """One shard file, uncompressed."""

    name: Annotated[str, Field(pattern=f"^{SHARD_NAME.pattern}$")]
    """File name within the split's folder."""
    bytes: Annotated[int, Field(ge=1, le=MAX_SHARD_BYTES)]
    """Exact size of the file."""
    hash: Annotated[str, Field(pattern=f"^{HASH.pattern}$")]
    """Hexadecimal hash of the file by hash_algorithm."""
    num_samples: _Count
    """Windows in the shard."""


@dataclass(frozen=True)
class SplitManifest:
    """Contents of a split."""

    num_documents: _Count
    """Documents, each followed by one end-of-text token."""
    num_text_bytes: _Count
    """UTF-8 bytes of the documents' text."""
    num_tokens: _Count
    """Number of tokens, end-of-text included."""
    num_samples: _Count
    """Windows of seq_len + 1 tokens. Neighbours in a text share one token, so that no token is a target twice."""
    tail_tokens: _Count
    """Tokens after the last full window, too few for another one, which are not trained on."""
    max_token_id: _Count
    """Largest token id in the split."""
    unigram_entropy_nats: float
    """Entropy of the token frequencies in nats: the loss of a model that knows only frequencies. In conversations
    those of the targets."""
    shards: tuple[ShardInfo, ...]
    cropped_tokens: _Count = 0
    """Tokens that best-fit packing cut off at the ends of windows, which are not trained on."""
    num_target_bytes: _Count | None = None
    """UTF-8 bytes of the windows' targets; None for training splits, conversations and older datasets."""

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token."""
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
    num_targets: dict[str, _Count]
    """Targets by split."""
    left_out: dict[str, _Count]
    """Conversations that were left out, by reason."""
    entropy_of_targets: bool = False
    """True if the unigram entropy is that of the targets; older datasets have that of all tokens."""


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared dataset."""

    tokenizer: str
    """Tokenizer as the user named it."""
    tokenizer_files: Annotated[str, AfterValidator(_check_tokenizer_files)]
    """Relative path of the dataset's copy of it; empty for one without files."""
    tokenizer_sha256: str
    """Hash of the vocabulary and its merges."""
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    """Number of tokens; ids are below it."""
    eot_token: int
    """End-of-text token, which follows every document."""
    seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)]
    """Positions that a model sees; windows hold one token more."""
    dtype: TokenDtype
    """Stored type of tokens."""
    hash_algorithm: Literal["xxh3_64"]
    """Algorithm of the shard hashes, by Streaming's name."""
    compression: Compression
    """Compression of the shard files by Streaming's name, or empty."""
    source: str
    """Source of the documents as the user named it."""
    request: PrepareRequest
    """Settings and source fingerprint of this dataset."""
    skipped_documents: int
    """Documents skipped because they could not be decoded."""
    empty_documents: int
    """Documents skipped because they are empty."""
    splits: Annotated[dict[Annotated[str, AfterValidator(_check_split_name)], SplitManifest], Field(min_length=1)]
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

    def bytes_per_target(self, split: str) -> float | None:
        """Return the bytes of a target, by which a loss in nats is one in bits per byte.

        None for conversations, some of whose tokens are targets, and for a split that is missing. Training splits and
        older datasets have the average of all tokens, also of those that no window holds.
        """
        facts = self.splits.get(split)
        if facts is None or self.chat is not None:
            return None
        if facts.num_target_bytes is None:
            return facts.bytes_per_token
        return facts.num_target_bytes / (facts.num_samples * self.seq_len)

    def unigram_entropy(self, split: str) -> float | None:
        """Return the loss of a model that knows only the frequencies of a split's targets, or None if not known."""
        facts = self.splits.get(split)
        is_known = self.chat is None or self.chat.entropy_of_targets
        return None if facts is None or not is_known else facts.unigram_entropy_nats

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
        train = self.splits.get("train")
        val = self.splits.get("val")
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
    manifest = build(Manifest, record, Rules(DataError, REMEDY), where)
    if record.get("fingerprint") != manifest.fingerprint:
        raise DataError(f"{where} was altered: its fingerprint does not match its contents. {REMEDY}")
    _check_range(where, "eot_token", manifest.eot_token, 0, manifest.vocab_size - 1)
    for name, split in manifest.splits.items():
        _check_split(split, manifest, f"{where}, split {name}")
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


def _check_split(split: SplitManifest, manifest: Manifest, where: str) -> None:
    """Raise DataError for numbers of a split that contradict each other or the manifest."""
    _check_range(where, "max_token_id", split.max_token_id, 0, manifest.vocab_size - 1)
    # Rows of conversations are padded.
    if manifest.chat:
        most_samples = split.num_tokens
    else:
        most_samples = split.num_tokens // manifest.seq_len
    _check_range(where, "num_samples", split.num_samples, 1, most_samples)
    # A window begins with the last token of the one before in a stream, in other packings at most.
    least = split.num_tokens - split.num_samples * (manifest.seq_len + 1)
    lost = split.tail_tokens + split.cropped_tokens
    most = least + split.num_samples - 1
    if manifest.chat is not None:
        least = most = 0
    elif not manifest.is_best_fit:
        least = most
    _check_range(where, "tail_tokens + cropped_tokens", lost, least, most)
    # The bounds are one distinct token and equally frequent tokens, with room for rounding.
    if not -1e-6 <= split.unigram_entropy_nats <= math.log(manifest.vocab_size) + 1e-6:
        raise DataError(
            f"{where}: unigram_entropy_nats is {split.unigram_entropy_nats:g}, and must be 0 to the logarithm of the "
            f"{manifest.vocab_size:,} tokens. {REMEDY}"
        )
    for number, shard in enumerate(split.shards):
        most_samples = shard.bytes // manifest.window_bytes
        _check_range(f"{where}, shard {number}", "num_samples", shard.num_samples, 1, most_samples)
    if len({shard.name for shard in split.shards}) < len(split.shards):
        raise DataError(f"{where} names a shard twice. {REMEDY}")
    num_samples = sum(shard.num_samples for shard in split.shards)
    _check_range(where, "num_samples", split.num_samples, num_samples, num_samples)


def _explain_missing(folder: Path) -> str:
    make = (
        f"Make it with `llmscale data prepare --input PATH --out {folder}`; --input python-docs is text that every "
        "machine has."
    )
    if folder.parent.is_dir():
        partial = sorted(folder.parent.glob(f".{folder.name}.partial-*"))
    else:
        partial = []
    if partial:
        note = f" (an interrupted prepare left {partial[0].name} beside it: run it again)"
    else:
        note = ""
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
        if split == "val":
            remedy = " Prepare the dataset again with --val-fraction above 0."
        else:
            remedy = ""
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


def _check_extra(name: str) -> str:
    """Return the name of a file beside a tokenizer. Raises ValueError."""
    if name not in TOKENIZER_EXTRAS:
        raise ValueError(f"legal: {', '.join(TOKENIZER_EXTRAS)}")
    return name


@dataclass(frozen=True)
class TokenizerOrigin:
    """Origin of a dataset's tokenizer."""

    name: str
    """Folder as the user named it, or the Hub's NAME@COMMIT."""
    eot_token: int
    bos_tokens: tuple[int, ...]
    eot_origin: str
    """Text on what names this end-of-text token."""
    files: tuple[Annotated[str, AfterValidator(_check_extra)], ...]
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
    # Older datasets may lack these two.
    values = {"name": "", "eot_origin": "", **record}
    return build(TokenizerOrigin, values, Rules(DataError, REMEDY), str(path))
