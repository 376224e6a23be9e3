from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.tokenizers.hugging_face import load_huggingface, load_saved
from llmscale.data.tokenizers.save_for_transformers import generation_ids, save_for_transformers
from llmscale.data.tokenizers.tokenizer import ByteTokenizer, TiktokenTokenizer, Tokenizer
from tests.data.tokenizers.conftest import AWKWARD, TEMPLATE, MakeModel

#: The last is a token that no merge leads to; " the" has two ways, and one of them is the merges'.
TOKENS = (b"th", b"he", b"the", b" t", b" the", b"\n\n", b"  ", b"12", "é".encode(), b"\xe6\x97", b"quick")


@pytest.fixture(params=["bytes", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    ranks = {bytes([255 - value]): value for value in range(256)}
    return TiktokenTokenizer("made", ranks | {token: 256 + place for place, token in enumerate(TOKENS)})


@pytest.mark.parametrize("again", [False, True], ids=["once", "saved, loaded and saved"])
def test_ids_and_end_of_text_are_the_same(tokenizer: Tokenizer, again: bool, tmp_path: Path) -> None:
    save_for_transformers(tokenizer, tmp_path)
    if again:
        save_for_transformers(load_huggingface(tmp_path), tmp_path)
    saved = load_huggingface(tmp_path)
    assert (saved.vocab_size, saved.eot_token) == (tokenizer.vocab_size, tokenizer.eot_token)

    @settings(max_examples=200, deadline=None)
    @given(st.text() | st.text(alphabet="the quick\n12é日\t'sT", max_size=60))
    def same(text: str) -> None:
        assert saved.encode(text) == tokenizer.encode(text)
        assert saved.decode(saved.encode(text)) == text

    same()
    for text in ("then the  other\n\nthe 1212 quick\n quickest", "it's   \n \n  été 日本", " the" * 5):
        assert saved.encode(text) == tokenizer.encode(text)


def test_transformers_loads_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    save_for_transformers(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "the quick  fox , isn't it ?\n\n été"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == tokenizer.eot_token


def test_a_models_files_are_what_they_were(make_model: MakeModel, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
    folder = make_model(template="<s> $A", config=config, special_tokens_map={"eos_token": "<|endoftext|>"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer.model").write_bytes(b"\x80")
    (folder / "tokenizer.py").write_text("raise SystemExit")
    (folder / "config.json").write_text("{}")
    (tmp_path / "set").mkdir()
    tokenizer = load_saved(tmp_path / "set" / load_huggingface(folder).save(tmp_path / "set"))
    out = tmp_path / "out"
    out.mkdir()
    save_for_transformers(tokenizer, out)
    files = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("config.json", "tokenizer.py")
    }
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    theirs = AutoTokenizer.from_pretrained(out)
    for text in AWKWARD:
        assert theirs(text, split_special_tokens=True).input_ids == [*tokenizer.bos_tokens, *tokenizer.encode(text)]
    assert "<|im_start|>hi" in theirs.apply_chat_template([{"content": "hi"}], tokenize=False)
    ids = generation_ids(tokenizer)
    assert ids == {"bos_token_id": 600, "eos_token_id": 601, "pad_token_id": 603}
    assert ids == {name: getattr(theirs, name) for name in ids}


def test_a_folder_of_tokenizer_json_alone_gets_a_configuration(make_model: MakeModel, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    tokenizer = load_huggingface(make_model(template="<s> $A"))
    save_for_transformers(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert {name: getattr(theirs, name) for name in ("bos_token_id", "eos_token_id")} == generation_ids(tokenizer)
    assert theirs("hi").input_ids == [600, *tokenizer.encode("hi")]
