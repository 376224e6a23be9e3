"""Make a tokenizer from a text: byte-level BPE with GPT-2's pattern, or its characters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from llmscale.data.prepare.output_folder import new_folder
from llmscale.data.prepare.sources.source import Source
from llmscale.data.tokenizers.hugging_face import (
    CONFIG_NAME,
    JSON_NAME,
    HuggingFaceTokenizer,
    ModelFiles,
    load_huggingface,
)
from llmscale.data.tokenizers.load_tokenizer import CHARACTERS
from llmscale.data.tokenizers.save_for_transformers import describe_for_transformers
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, cut_text
from llmscale.errors import DataError
from llmscale.terminal.progress import Progress, show_progress
from llmscale.terminal.status_line import StatusLine

#: The 256 byte values and end-of-text.
SMALLEST_VOCAB = 257
_PIECE_CHARACTERS = 1 << 16


def train_tokenizer(
    source: Source, out: Path, vocab_size: int, *, most_characters: int | None = None, at_most: bool = False
) -> HuggingFaceTokenizer:
    """Learn merges from a source's documents and write tokenizer.json and tokenizer_config.json to `out`.

    Deterministic. With `most_characters`, only documents that begin within these are read. The folder is written
    atomically. Raises DataError when it exists, or when the text is too small for `vocab_size` unless that is `at_most`
    wanted.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"--vocab-size must be at least {SMALLEST_VOCAB} (256 bytes and end-of-text), not {vocab_size}."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists. Choose another --out, or remove it.")
    with new_folder(out, replace=False) as partial:
        _train(source, vocab_size, partial, most_characters or sys.maxsize, at_most)
    return load_huggingface(out)


def make_character_tokenizer(source: Source, *, parse_special: bool = False) -> HuggingFaceTokenizer:
    """Return a tokenizer of the characters of a source's documents, in the order of their code points.

    Any other character becomes the tokens of its bytes in UTF-8, which follow them, so that every text is encoded
    without loss. Raises DataError.
    """
    from tokenizers import Tokenizer, decoders, models

    characters: set[str] = set()
    with show_progress(f"Collecting the characters of {source.name}") as progress, StatusLine() as learning:
        for text in _texts(source, progress, learning, sys.maxsize):
            characters.update(text)
    pieces = [*sorted(characters), *(f"<0x{value:02X}>" for value in range(256))]
    fast = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([END_OF_TEXT])
    config = describe_for_transformers(bos=END_OF_TEXT, eos=END_OF_TEXT)
    files = ModelFiles(CHARACTERS, fast.to_str().encode(), {CONFIG_NAME: config.encode()})
    return HuggingFaceTokenizer(files, parse_special=parse_special)


def _train(source: Source, vocab_size: int, folder: Path, most_characters: int, at_most: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with show_progress(f"Training on {source.name}") as progress, StatusLine() as learning:
        fast.train_from_iterator(_texts(source, progress, learning, most_characters), trainer)
    if fast.get_vocab_size() < vocab_size and not at_most:
        raise DataError(
            f"{source.name} is too small for {vocab_size} tokens: only {fast.get_vocab_size()} could be learnt. Use "
            f"--vocab-size {fast.get_vocab_size()} or less, or more text."
        )
    fast.save(str(folder / JSON_NAME))
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _texts(source: Source, progress: Progress, learning: StatusLine, most_characters: int) -> Iterator[str]:
    """Yield documents in pieces, which give the same tokens (none crosses a border); then start `learning`."""
    num_characters = 0
    for text in source.documents():
        yield from cut_text(text, _PIECE_CHARACTERS)
        num_characters += len(text)
        progress.show(num_characters, source.read_bytes, source.total_bytes)
        if num_characters >= most_characters:
            break
    progress.clear()
    learning.begin("all text is read; learning the tokens")
