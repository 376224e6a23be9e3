"""gigatoken is only taken where it gives the tokenizer's own tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.prepare import encoder as encoders
from llmscale.data.prepare.encoder import GigatokenEncoder, ReferenceEncoder, choose_encoder
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.hugging_face import load_huggingface
from llmscale.data.tokenizers.load_tokenizer import CHARACTERS
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, ByteTokenizer, TiktokenTokenizer, Tokenizer
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import DataError

pytest.importorskip("gigatoken")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of GPT-2's kind, from texts in which letters, digits, spaces and signs are merged."""
    folder = tmp_path_factory.mktemp("trained")
    rng = random.Random(1)
    words = [
        "the",
        "The",
        " and",
        "don't",
        "I'LL",
        "12",
        "2024",
        "\n\n",
        "    ",
        "==",
        "();",
        "naïve",
        "日本",
        "🙂",
        "é",
    ]
    lines = [json.dumps({"text": "".join(rng.choices(words, k=300))}) for _ in range(60)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    train_tokenizer(open_source(str(folder / "in.jsonl")), folder / "bpe", 420)
    return folder / "bpe"


def _changed(trained: Path, folder: Path, change: Callable[[dict], None]) -> Tokenizer:
    record = json.loads((trained / "tokenizer.json").read_text())
    change(record)
    (folder / "tokenizer.json").write_text(json.dumps(record))
    (folder / "tokenizer_config.json").write_bytes((trained / "tokenizer_config.json").read_bytes())
    return load_huggingface(folder)


def _split_by(pattern: str, normalizer: str | None = None) -> Callable[[dict], None]:
    def change(record: dict) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        record["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        record["normalizer"] = {"type": normalizer} if normalizer else None

    return change


def _add_tokens(record: dict) -> None:
    """Code models have runs of spaces; chat models markers, which are text."""
    size = len(record["model"]["vocab"])
    for place, (text, special) in enumerate([("      ", False), ("<|im_start|>", True), ("<tag>", False)]):
        entry = {"id": size + place, "content": text, "special": special, "single_word": False, "lstrip": False}
        record["added_tokens"].append({**entry, "rstrip": False, "normalized": False})


KINDS: dict[str, Callable[[dict], None]] = {
    "gpt2": lambda record: None,
    "llama3": _split_by(LLAMA3),
    "qwen2": _split_by(QWEN2, "NFC"),
    "added tokens": _add_tokens,
}


def _texts(count: int) -> list[str]:
    rng = random.Random(7)
    parts = [
        *(chr(rng.randrange(0x20, 0x3000)) for _ in range(300)),
        "the",
        " The",
        "\n",
        "\n\n",
        "  ",
        "      ",
        "\t",
        "'s",
        "'LL",
        "don't",
        "123456",
        "<|im_start|>",
        "<tag>",
        "===",
        "🙂",
        "日本語",
        "e\u0301",
        "\u00a0",
        "\u2028",
        "\x85",
        END_OF_TEXT,
        "naïve",
        "_x",
        "\r\n",
        "\u017f",
        "\u212a",
        "\u0131",
    ]
    return ["".join(rng.choices(parts, k=rng.randint(0, 80))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_tokenizers_own_tokens_or_is_not_taken(kind: str, trained: Path, tmp_path: Path) -> None:
    tokenizer = _changed(trained, tmp_path, KINDS[kind])
    encoder, why_slow = choose_encoder(tokenizer, "auto", [])
    assert isinstance(encoder, GigatokenEncoder), why_slow
    texts = _texts(2000)
    for text, ours, theirs in zip(texts, encoder.encode(texts), tokenizer.encode_batch(texts), strict=True):
        assert np.array_equal(ours, theirs), repr(text)


def test_a_ranks_file_and_its_special_token(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_RENEWED_CHARACTERS", 10_000)  # loaded anew in between
    ranks = {bytes([value]): value for value in range(256)} | {b"th": 256, b"the": 257, b" the": 258, b"  ": 259}
    texts = _texts(500)
    for parse_special in (False, True):
        tokenizer = TiktokenTokenizer("own", ranks, parse_special=parse_special)
        encoder, why_slow = choose_encoder(tokenizer, "gigatoken", texts)
        assert why_slow == ""
        encoded = encoder.encode(texts)
        assert all(map(np.array_equal, encoded, tokenizer.encode_batch(texts)))
        assert any((array == tokenizer.eot_token).any() for array in encoded) == parse_special


def test_what_it_cannot_or_gets_wrong_falls_back_with_a_word(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = _changed(trained, tmp_path, _split_by(r"[aeiou]+|[^aeiou]+"))
    encoder, why_slow = choose_encoder(odd, "auto", ["hello world"])
    assert isinstance(encoder, ReferenceEncoder)
    assert "not gigatoken: " in why_slow
    with pytest.raises(DataError, match="--encoder gigatoken cannot encode with"):
        choose_encoder(odd, "gigatoken", ["hello world"])
    good = load_huggingface(trained)
    assert isinstance(choose_encoder(good, "reference", [])[0], ReferenceEncoder)
    assert choose_encoder(ByteTokenizer(), "auto", [])[1] == ""
    monkeypatch.setattr(good, "spec", CHARACTERS)
    assert choose_encoder(good, "auto", [])[1] == ""
    monkeypatch.undo()

    class Wrong(GigatokenEncoder):
        def encode(self, texts: list[str]) -> list[np.ndarray]:  # type: ignore[override]
            return [array[::-1] if "world" in text else array for text, array in zip(
                texts, super().encode(texts), strict=True)]  # fmt: skip

    monkeypatch.setattr(encoders, "GigatokenEncoder", Wrong)
    encoder, why_slow = choose_encoder(good, "auto", ["fine", "hello world"])
    assert isinstance(encoder, ReferenceEncoder)
    assert "'hello world'" in why_slow
