"""origin.json of a prepared set: which tokens stand around its documents, and which of the model's files it keeps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.data.shards.set_rules import ORIGIN_NAME, REMEDY, TOKENIZER_EXTRAS
from llmscale.errors import DataError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json


@dataclass(frozen=True)
class TokenizerOrigin:
    """Where a set's tokenizer comes from."""

    name: str
    """The folder as the user named it, or the Hub's NAME@COMMIT."""
    eot_token: int
    bos_tokens: tuple[int, ...]
    eot_origin: str
    """What says that this is end-of-text, for people."""
    files: tuple[str, ...]
    """Kept beside tokenizer.json; names of TOKENIZER_EXTRAS."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Of these files; sets of older versions have none."""

    def check(self, name: str, contents: bytes | None, where: str) -> None:
        """Whether a file of the set is what was kept; `contents` is None where it is not there. Raises DataError."""
        if contents is None:
            raise DataError(f"{where}/{name} is missing. {REMEDY}")
        if self.sha256.get(name, _sha256(contents)) != _sha256(contents):
            raise DataError(f"{where}/{name} was altered: it is not the file that the set was prepared with. {REMEDY}")

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        record = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / ORIGIN_NAME).write_text(record + "\n", encoding="utf-8")


def hash_files(contents: Mapping[str, bytes]) -> dict[str, str]:
    """By name."""
    return {name: _sha256(data) for name, data in contents.items()}


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def load_origin(path: Path) -> TokenizerOrigin:
    """Raises DataError for what `prepare` does not write."""
    try:
        record = load_json(path, Rules(DataError, REMEDY, max_bytes=CONFIG_MAX_BYTES, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist. {REMEDY}") from None
    eot_token, bos_tokens, files = record.get("eot_token"), record.get("bos_tokens"), record.get("files")
    if type(eot_token) is not int or not isinstance(bos_tokens, list) or not isinstance(files, list):
        raise DataError(f"{path} was altered: eot_token, bos_tokens or files is wrong. {REMEDY}")
    for token in bos_tokens:
        if type(token) is not int:
            raise DataError(f"{path}: {str(token)[:40]!r} of bos_tokens is no token. {REMEDY}")
    for name in files:
        if name not in TOKENIZER_EXTRAS:
            raise DataError(f"{path} names the file {str(name)[:80]!r}. Legal: {', '.join(TOKENIZER_EXTRAS)}. {REMEDY}")
    hashes = record.get("sha256", {})
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise DataError(f"{path} was altered: sha256 is no object of hashes. {REMEDY}")
    name, eot_origin = str(record.get("name")), str(record.get("eot_origin"))
    return TokenizerOrigin(name, eot_token, tuple(bos_tokens), eot_origin, tuple(files), hashes)
