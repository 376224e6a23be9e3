"""Real prepared sets, small enough to prepare in a test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

WORDS = ["der", "die", "das", "und", "in", "nicht", "ein", "auch", "es", "\n", "\t", "你好", "naïve", "🙂"]


def _write_documents(path: Path, num_documents: int, seed: int = 0) -> list[str]:
    """A JSONL file of random documents of very different lengths; returns their texts."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {number}" for number in range(num_documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


MakeSet = Callable[..., Path]


@pytest.fixture(scope="session")
def write_documents() -> Callable[..., list[str]]:
    """The function that writes a JSONL file of random documents."""
    return _write_documents


@pytest.fixture(scope="session")
def make_set(tmp_path_factory: pytest.TempPathFactory) -> MakeSet:
    """Prepares a set of many small shards and returns its folder."""

    def make(num_documents: int = 120, *, seed: int = 0, compression: str = "", seq_len: int = 16) -> Path:
        folder = tmp_path_factory.mktemp("set")
        _write_documents(folder / "documents.jsonl", num_documents, seed)
        options = PrepareOptions(seq_len=seq_len, val_fraction=0.1, shard_bytes=4096, compression=compression)
        source = open_source(str(folder / "documents.jsonl"))
        prepare(source, folder / "set", load_tokenizer("bytes"), options, num_workers=1)
        return folder / "set"

    return make


@pytest.fixture(scope="session")
def shared_set(make_set: MakeSet) -> Path:
    """One set for tests that do not change it."""
    return make_set()
