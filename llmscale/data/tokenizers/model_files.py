"""The files of a published model that its tokenizer consists of, from a folder or the Hub. Data: no code is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.shards.set_rules import TOKENIZER_EXTRAS
from llmscale.data.tokenizers.vocabulary_files import JSON_NAME
from llmscale.errors import DataError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, MAX_BYTES, Rules, parse_json
from llmscale.untrusted.hub import read_hub_files
from llmscale.untrusted.paths import read_regular

CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
#: Read for what they say of end-of-text, and not kept.
_MODEL_NAMES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class ModelFiles:
    """What was read, so that nothing depends on the folder afterwards."""

    name: str
    """The folder as the user named it, or the Hub's NAME@COMMIT."""
    tokenizer_json: bytes
    others: dict[str, bytes]
    """By file name; those that there are."""

    def extras(self) -> dict[str, bytes]:
        """The others that belong to the tokenizer and go where it goes."""
        return {name: self.others[name] for name in TOKENIZER_EXTRAS if name in self.others}

    def record(self, name: str) -> dict[str, object]:
        """The JSON object in one of the others; empty when there is no such file. Raises DataError."""
        if name not in self.others:
            return {}
        # Some models on the Hub have Infinity as a limit, most tokenizers 10^30.
        rules = Rules(DataError, max_bytes=CONFIG_MAX_BYTES, not_finite=True, large_numbers=True)
        return parse_json(self.others[name], rules, f"{self.name}/{name}")

    def chat_template(self) -> str:
        """All that is known of how the model's chats are written, templates one after the other; never run."""
        inside = self.record(CONFIG_NAME).get("chat_template")
        return self.others.get(TEMPLATE_NAME, b"").decode(errors="replace") + (
            json.dumps(inside, ensure_ascii=False) if inside else ""
        )


def read_folder(folder: Path) -> ModelFiles:
    """Raises DataError when there is no tokenizer.json, or a file cannot be read."""
    if not (folder / JSON_NAME).is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        raise DataError(
            f"{folder} holds no {JSON_NAME}{f', only {slow[0]}' if slow else ''}. A slow tokenizer can be converted "
            "where transformers is installed, with `AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)`."
        )
    names = (*TOKENIZER_EXTRAS, *_MODEL_NAMES)
    others = {name: _read(folder / name) for name in names if (folder / name).is_file()}
    return ModelFiles(str(folder), _read(folder / JSON_NAME), others)


def read_hub(name: str) -> ModelFiles:
    """Raises DataError when the model cannot be had, or has no tokenizer.json."""
    found = read_hub_files(name, JSON_NAME, (*TOKENIZER_EXTRAS, *_MODEL_NAMES), MAX_BYTES, DataError)
    return ModelFiles(found.name, found.contents.pop(JSON_NAME), found.contents)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"Cannot read the tokenizer {path}: {error.strerror}.") from None
