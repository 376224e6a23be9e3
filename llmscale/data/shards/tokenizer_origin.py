"""origin.json of a prepared set: which tokens stand around its documents, and which of the model's files it keeps."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
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

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        record = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / ORIGIN_NAME).write_text(record + "\n", encoding="utf-8")


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
    name, eot_origin = str(record.get("name")), str(record.get("eot_origin"))
    return TokenizerOrigin(name, eot_token, tuple(bos_tokens), eot_origin, tuple(files))
