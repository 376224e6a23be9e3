"""Tokenizers behind one interface: bytes, tiktoken (GPT-2 or a ranks file), Hugging Face's `tokenizers`.

Text is always ordinary text: `<|endoftext|>` inside a document is encoded as those characters and can never
become the token that ends a document. No library is imported before a tokenizer that needs it is loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.data.shards.set_rules import TOKENIZER_FILES, check_no_links
from llmscale.errors import DataError, did_you_mean

TokenArray = NDArray[np.uint32]

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(ABC):
    """Text to token ids and back. Ids are in [0, vocab_size); `eot_token` never comes out of `encode`."""

    spec: str
    """What `load_tokenizer` was given."""
    vocab_size: int
    eot_token: int
    sha256: str
    """Identity of the vocabulary and its merges: equal for equal tokenizers, wherever they lie."""
    newline_is_a_border: bool
    """Whether no token crosses a single newline between non-spaces, so that text may be cut behind it."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Token ids of each text, uint32 arrays; special tokens in the text are ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Copy what is needed to load it again into `folder`, which exists.

        Returns a path relative to it for `load_tokenizer`, empty when nothing is needed.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, and end-of-text as id 256."""

    def __init__(self) -> None:
        self.spec = "bytes"
        self.vocab_size = 257
        self.eot_token = 256
        self.sha256 = hashlib.sha256(b"llmscale bytes, end-of-text 256").hexdigest()
        self.newline_is_a_border = True

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        pending = bytearray()
        for token in ids:
            if token == self.eot_token:
                parts += [pending.decode(errors="replace"), END_OF_TEXT]
                pending.clear()
            else:
                pending.append(token)
        return "".join(parts) + pending.decode(errors="replace")

    def save(self, folder: Path) -> str:
        return ""


def load_tokenizer(spec: str) -> Tokenizer:
    """Load `gpt2`, `bytes`, a FILE.tiktoken, a tokenizer.json or a folder that holds one.

    Raises DataError when it does not exist, cannot be downloaded or is damaged.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        from llmscale.data.tokenizers.tiktoken_tokenizer import load_gpt2

        return load_gpt2()
    path = Path(spec)
    if path.suffix == ".tiktoken":
        from llmscale.data.tokenizers.tiktoken_tokenizer import load_ranks_file

        return load_ranks_file(path)
    if path.is_dir() or path.name == "tokenizer.json":
        from llmscale.data.tokenizers.hf_tokenizer import load_huggingface

        return load_huggingface(path)
    raise DataError(
        f"Tokenizer '{spec}' is neither gpt2, bytes, a FILE.tiktoken nor a folder with a tokenizer.json."
        f"{did_you_mean(spec, ['gpt2', 'bytes'])} `llmscale data train-tokenizer` trains one."
    )


def load_set_tokenizer(folder: Path | str, manifest: Manifest | None = None) -> Tokenizer:
    """The tokenizer of a prepared set, from the copy that it keeps. Raises DataError when they differ."""
    manifest = manifest or load_manifest(folder)
    check_no_links(Path(folder), *TOKENIZER_FILES[manifest.tokenizer_files])
    if not manifest.tokenizer_files and manifest.tokenizer != "bytes":
        # Anything else that it names would be a file of this machine.
        raise DataError(f"{folder} keeps no copy of its tokenizer. Prepare the set again with --overwrite.")
    spec = str(Path(folder) / manifest.tokenizer_files) if manifest.tokenizer_files else manifest.tokenizer
    tokenizer = load_tokenizer(spec)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{spec} is not the tokenizer that {folder} was prepared with (sha256 {tokenizer.sha256[:12]}, the "
            f"manifest says {manifest.tokenizer_sha256[:12]}). Prepare the set again with --overwrite."
        )
    return tokenizer
