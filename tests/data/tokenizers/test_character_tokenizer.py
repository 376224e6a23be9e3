"""`--tokenizer characters`: the characters of a text, and bytes for all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from llmscale.cli.main import main
from llmscale.data.prepare.text_cache import TextRequest
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.tokenizers.save_for_transformers import save_for_transformers
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

TEXT = "Grüße an alle!\n" * 60


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    (folder / "a.txt").write_text(TEXT)
    flags = ["--tokenizer", "characters", "--seq-len", "16", "--out", str(folder / "set")]
    assert main(["data", "prepare", "--input", str(folder / "a.txt"), *flags]) == 0
    return folder / "set"


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Tokenizer:
    return load_set_tokenizer(prepared)


def test_a_character_of_the_text_is_one_token_in_the_order_of_code_points(tokenizer: Tokenizer) -> None:
    characters = sorted(set(TEXT))
    assert tokenizer.encode("".join(characters)) == list(range(len(characters)))
    assert tokenizer.vocab_size == len(characters) + 256 + 1
    assert tokenizer.eot_token == tokenizer.vocab_size - 1


@pytest.mark.parametrize("text", [TEXT, "ω 🙂\t\r\n", "  two  spaces ", "<0x41>", END_OF_TEXT, "\x00"])
def test_every_text_is_encoded_without_loss(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == sum(1 if letter in TEXT else len(letter.encode()) for letter in text)
    assert tokenizer.eot_token not in ids


def test_an_export_has_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_for_transformers(tokenizer, tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (TEXT, "ω 🙂\t<0x41>"):
        assert fast.encode(text).ids == tokenizer.encode(text)
        assert fast.decode(tokenizer.encode(text)) == text


def test_a_text_to_train_on_has_them_too(prepared: Path) -> None:
    folder = TextRequest(str(prepared.parent / "a.txt"), "characters", 16, prepared.parent / "cache").open(
        may_prepare=True
    )
    assert load_manifest(folder).tokenizer_sha256 == load_manifest(prepared).tokenizer_sha256
