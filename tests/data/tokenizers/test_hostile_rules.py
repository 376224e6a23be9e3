"""tokenizer.json files that would fill the memory or never end, and rules of published models that must load."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import pytest

from llmscale.data.tokenizers.hugging_face import load_huggingface
from llmscale.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz "
END = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEN_TIMES = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
TABLE = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"x" * 100_000 + b"\0").decode()


def sequence(key: str, *rules: object) -> dict[str, object]:
    return {"type": "Sequence", key: list(rules)}


def replace(pattern: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def write(folder: Path, **sections: object) -> Path:
    record: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [{"id": len(LETTERS), "content": "<|endoftext|>", **END}],
        "model": {"type": "BPE", "vocab": {letter: place for place, letter in enumerate(LETTERS)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(record | sections))
    return folder


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"normalizer": sequence("normalizers", *[TEN_TIMES] * 9)}, "makes of one is 1,000,000,000"),
        ({"normalizer": sequence("normalizers", *[sequence("normalizers", TEN_TIMES)] * 3)}, "makes of one is 1,000"),
        ({"normalizer": sequence("normalizers", *[replace(".", "ab")] * 5)}, "makes of one is 243"),
        ({"normalizer": sequence("normalizers", *[{"type": "Lowercase"}] * 1000)}, "number of rules of normalizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": TABLE}}, "makes of one is 100,000"),
        (
            {"normalizer": sequence("normalizers", *[{"type": "NFKD"}, replace("x", "\ufdfa")] * 3)},
            "normalizer with pre_tokenizer makes of one",
        ),
        (
            {"normalizer": TEN_TIMES, "pre_tokenizer": sequence("pretokenizers", *[BYTES] * 2)},
            "normalizer with pre_tokenizer makes of one is 160",
        ),
        ({"post_processor": sequence("processors", *[TEMPLATE] * 9)}, "post_processor makes of one"),
        ({"decoder": sequence("decoders", *[TEN_TIMES] * 9)}, "decoder makes of one"),
        ({"added_tokens": [{"id": 27, "content": "x" * 40_000, **END}]}, "longest token's length is 40,000"),
        ({"added_tokens": [{"id": 27, "content": "x" * 20_000, **END}]}, "squared lengths is 400,000,000"),
        (
            {"model": {"type": "Unigram", "vocab": [["a" * 2000, -1.0], *[[letter, -2.0] for letter in LETTERS[1:]]]}},
            "longest token's length is 2,000. Legal: at most 1,000",
        ),
        (
            {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
            "max_input_chars_per_word is 1,000,000,000",
        ),
        ({"normalizer": {"type": "Replace", "content": 5}}, "is not a tokenizer"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated",
                            "invert": False}}, "cannot encode a text: Onig"),
    ],
)  # fmt: skip
def test_what_fills_the_memory_or_never_ends_is_refused(
    tmp_path: Path, sections: dict[str, object], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json") as refused:
        load_huggingface(write(tmp_path, **sections))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "sections",
    [
        {
            "normalizer": sequence(
                "normalizers", {"type": "Prepend", "prepend": "▁"}, {**TEN_TIMES, "content": "▁"}, {"type": "NFKC"}
            )
        },
        {"normalizer": sequence("normalizers", {"type": "NFKD"}, {"type": "StripAccents"}, replace(" {2,}", " "))},
        {
            "normalizer": sequence("normalizers", {"type": "NFC"}, replace(r"\s+", " "), {"type": "Lowercase"}),
            "pre_tokenizer": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES),
        },
        {"post_processor": {**TEMPLATE, "single": TEMPLATE["single"][:1]}},  # type: ignore[index]
    ],
)
def test_rules_like_those_of_published_models_load(tmp_path: Path, sections: dict[str, object]) -> None:
    assert load_huggingface(write(tmp_path, **sections)).vocab_size == len(LETTERS) + 1
