"""A published model's tokenizer: its ids, its ends of documents, and what of it is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from llmscale.data.tokenizers.hugging_face import load_huggingface, load_saved
from llmscale.errors import DataError
from tests.data.tokenizers.conftest import AWKWARD, SPECIAL, TEMPLATE, MakeModel

Files = dict[str, dict[str, object]]
S, EOT, IM_START, IM_END = range(600, 604)


@pytest.mark.parametrize(
    ("files", "token", "message"),
    [
        ({"config": {"eos_token": "<s>"}}, S, "eos_token of tokenizer_config.json"),
        ({"config": {"eos_token": {"content": "<s>"}}}, S, "eos_token of tokenizer_config.json"),
        ({"special_tokens_map": {"eos_token": "<s>"}}, S, "eos_token of special_tokens_map.json"),
        ({"config": {"eos_token": None}}, EOT, "no file names one, and tokenizer.json has it"),
        ({"hf_config": {"eos_token_id": S}}, S, "eos_token_id of config.json"),
        ({"generation_config": {"eos_token_id": [S]}}, S, "eos_token_id of generation_config.json"),
        (
            {"config": {"eos_token": "<s>"}, "hf_config": {"eos_token_id": S}},
            S,
            "eos_token of tokenizer_config.json and eos_token_id of config.json",
        ),
        (
            {
                "config": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
                "generation_config": {"eos_token_id": [IM_END, EOT]},
            },
            EOT,
            "eos_token_id of generation_config.json; '<|im_end|>' ends a turn of its chats",
        ),
    ],
)
def test_what_the_files_agree_on(files: Files, token: int, message: str, make_model: MakeModel) -> None:
    tokenizer = load_huggingface(_make(make_model, files))
    assert tokenizer.eot_token == token
    text = tokenizer.tokens()[token]
    assert tokenizer.describe_ends() == f"Documents end with {text!r} ({token}, {message})."


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [IM_END, EOT]}},
            r"names several end-of-text tokens: '<\|im_end\|>' \(eos_token of tokenizer_config\.json and "
            r"eos_token_id of generation_config\.json\); '<\|endoftext\|>' \(.*\)\. Choose one with --eot-token\.",
        ),
        ({"config": {"eos_token": "<eos>"}}, r"names the token '<eos>', which tokenizer\.json lacks\..*--eot-token"),
        ({"hf_config": {"eos_token_id": 99_999}}, r"config\.json names the token 99999, which .* lacks"),
        ({"hf_config": {"eos_token_id": "2"}}, r"eos_token_id of config\.json names the token '2', which"),
        (
            {"config": {"eos_token": "<s>", "add_bos_token": "yes"}},
            r"add_bos_token is 'yes', and must be true or false",
        ),
    ],
)
def test_what_is_not_decidable_is_asked_for(files: Files, text: str, make_model: MakeModel) -> None:
    folder = _make(make_model, files)
    with pytest.raises(DataError, match=text):
        load_huggingface(folder)
    if "add_bos" not in text:
        chosen = load_huggingface(folder, eot_token="<|im_start|>")
        assert (chosen.eot_token, chosen.ends.origin) == (IM_START, "--eot-token")


def _make(make_model: MakeModel, files: Files) -> Path:
    folder = make_model(**{name: record for name, record in files.items() if name != "hf_config"})
    if "hf_config" in files:
        make_model(name="other", config=files["hf_config"])
        (folder.parent / "other" / "tokenizer_config.json").rename(folder / "config.json")
    return folder


MARKERS = (*SPECIAL, "<tool_call>", "<|fim|>")


def _theirs(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


def test_ids_are_those_of_transformers(make_model: MakeModel) -> None:
    pytest.importorskip("transformers")
    folder = make_model(config={"eos_token": "<|endoftext|>"})
    ours = load_huggingface(folder)
    for text in (*AWKWARD, Path(__file__).read_text().replace("<|fim|>", "")):
        assert ours.encode(text) == _theirs(folder, text)
        assert ours.decode(ours.encode(text)) == text


def test_special_tokens_and_markers_in_a_text_are_text(make_model: MakeModel) -> None:
    tokenizer = load_huggingface(make_model(config={"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    ids = {text: token for token, text in tokenizer.tokens().items()}
    forbidden = {ids[text] for text in MARKERS}

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from([*MARKERS, "<", "|", "endoftext", ">", " ", "a", "\n"])).map("".join))
    def is_text(text: str) -> None:
        assert not forbidden & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text

    is_text()
    assert ids["<b>"] in tokenizer.encode("<b>bold</b>"), "an added token that is no marker is how the model reads text"


def test_special_tokens_are_parsed_where_that_was_asked(make_model: MakeModel) -> None:
    folder = make_model(config={"eos_token": "<|endoftext|>", "chat_template": TEMPLATE})
    tokenizer = pickle.loads(pickle.dumps(load_huggingface(folder, parse_special=True)))
    ids = {text: token for token, text in tokenizer.tokens().items()}
    assert tokenizer.encode("<|im_start|>") == [ids["<|im_start|>"]]
    assert tokenizer.encode("a<|endoftext|>") == [*tokenizer.encode("a"), tokenizer.eot_token]
    assert not tokenizer.newline_is_a_border


def test_tokens_that_a_unigram_model_would_make_of_text_are_cut(tmp_path: Path) -> None:
    """Its pieces hold </s>, with the best score of all."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -9.0) for letter in "</s>ab ")]
    fast = FastTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = load_huggingface(tmp_path)
    assert tokenizer.eot_token == 2
    for text in ("a</s>b<s>", "</s></s>", "<s>"):
        assert not {1, 2} & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text
    assert 0 in tokenizer.encode("z"), "what is unknown is no forgery"


def test_an_end_of_text_that_text_needs_is_refused(make_model: MakeModel) -> None:
    tokenizer = load_huggingface(make_model(config={"eos_token": "!"}))
    with pytest.raises(DataError, match=r"text contains '!', which is the end-of-text token.*--eot-token"):
        tokenizer.encode("hi!")


@pytest.mark.parametrize(
    ("template", "config", "beginning"),
    [
        ("", {}, ()),
        ("<s> $A", {}, ("<s>",)),
        ("<s> $A <|endoftext|>", {"add_bos_token": True}, ("<s>",)),
        ("<s> <|im_start|> $A", {}, ("<s>", "<|im_start|>")),
        ("<s> $A", {"add_bos_token": False}, ()),
        ("", {"add_bos_token": True, "bos_token": "<s>"}, ("<s>",)),
        ("", {"add_bos_token": True}, ()),
        ("<|endoftext|> $A", {}, ()),
    ],
)
def test_documents_begin_as_the_model_saw_them(
    template: str, config: dict[str, object], beginning: tuple[str, ...], make_model: MakeModel, tmp_path: Path
) -> None:
    tokenizer = load_huggingface(make_model(template=template, config={"eos_token": "<|endoftext|>", **config}))
    assert tuple(tokenizer.tokens()[token] for token in tokenizer.bos_tokens) == beginning
    assert all(repr(text) in tokenizer.describe_ends() for text in beginning)
    saved = load_saved(tmp_path / tokenizer.save(tmp_path))
    assert (saved.ends, saved.sha256) == (tokenizer.ends, tokenizer.sha256)


def _added(record: dict[str, list[object]], **entry: object) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    record["added_tokens"].append({**flags, **entry})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: _added(record, id=9_000, content="<x>"), r"states '<x>' as token 9000, .* no gaps"),
        (lambda record: _added(record, id=607, content=""), r"states '' as token 607"),
        (
            lambda record: record["model"].update(dropout=0.1),
            r"model\.dropout is 0\.1, so a text gets different tokens",
        ),
        (lambda record: record["model"].update(type="Own"), r"is not a tokenizer that `tokenizers` can read"),
        (lambda record: record.update(added_tokens="all"), r"model\.vocab or added_tokens is wrong"),
    ],
)
def test_damaged_tokenizers(change: Callable[[dict[str, object]], object], text: str, make_model: MakeModel) -> None:
    folder = make_model(config={"eos_token": "<|endoftext|>"})
    record = json.loads((folder / "tokenizer.json").read_text())
    change(record)
    (folder / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=text):
        load_huggingface(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_slow_tokenizers_say_how_to_convert_them(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(DataError, match=rf"holds no tokenizer\.json, only {name}\. .*save_pretrained"):
        load_huggingface(tmp_path)
