"""What the manifest of a set may say. No torch, no Streaming.

Whoever wrote a set chose every value of its manifest: what is opened, for a remote set what is written, and how large
arrays become. So each is held against what `llmscale data prepare` writes, and anything else refuses the set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from llmscale.errors import DataError
from llmscale.untrusted.paths import find_link

TokenDtype = Literal["uint16", "uint32"]
Compression = Literal["", "zstd"]
#: Fast enough to check a shard when it is first read: 65 MB in 9 to 14 ms from the page cache. Streaming's name of the
#: algorithm.
HASH_ALGORITHM = "xxh3_64"
#: Where a prepared set keeps its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ORIGIN_NAME = "origin.json"
#: Files beside a model's tokenizer.json that a set keeps where the model has them, for the export; origin.json lists
#: them.
TOKENIZER_EXTRAS = (
    TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
#: What `tokenizer_files` may say, and with it every file that a set's tokenizer needs; a tokenizer without files is
#: `bytes`. Sets of older versions have tokenizer.json.
TOKENIZER_FILES = {
    "": (),
    f"{TOKENIZER_FOLDER}/ranks.tiktoken": (f"{TOKENIZER_FOLDER}/ranks.tiktoken",),
    f"{TOKENIZER_FOLDER}/tokenizer.json": (
        f"{TOKENIZER_FOLDER}/tokenizer.json",
        f"{TOKENIZER_FOLDER}/{TOKENIZER_CONFIG_NAME}",
    ),
    f"{TOKENIZER_FOLDER}/{ORIGIN_NAME}": (f"{TOKENIZER_FOLDER}/tokenizer.json", f"{TOKENIZER_FOLDER}/{ORIGIN_NAME}"),
}
#: Sixty times the largest vocabulary in use: tables of this many rows are made before a token is read.
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQ_LEN = 1 << 30
#: Streaming stores offsets within a shard as uint32.
MAX_SHARD_BYTES = (1 << 32) - 1
_SPLIT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
SHARD_NAME = re.compile(r"shard\.[0-9]{5,9}\.mds")
#: A hash by that algorithm.
HASH = re.compile(r"[0-9a-f]{16}")
REMEDY = "Prepare the set again with --overwrite."
LINK_REMEDY = "A set holds plain files only; copy one made of links with `cp -rL`."


def check_split_names(splits: Iterable[str], where: str) -> None:
    """Names of splits are names of folders. Raises DataError."""
    for name in splits:
        if not _SPLIT_NAME.fullmatch(name) or name == TOKENIZER_FOLDER:
            raise DataError(f"{where}: {name[:80]!r} is no name of a split. Legal: letters, digits, - and _. {REMEDY}")


def check_range(where: str, name: str, value: int, lowest: int, highest: int) -> None:
    """Raises DataError."""
    if not lowest <= value <= highest:
        raise DataError(f"{where}: {name} is {value}, and must be {lowest} to {highest}. {REMEDY}")


def check_choice(where: str, name: str, value: object, legal: Iterable[object]) -> None:
    """Raises DataError."""
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
