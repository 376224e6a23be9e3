from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.hugging_face import load_saved
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, ByteTokenizer, TiktokenTokenizer, Tokenizer, cut_text
from llmscale.data.tokenizers.train_tokenizer import train_tokenizer
from llmscale.errors import DataError

TEXTS = [
    "",
    "Hello world, it's 2 o'clock.\n\n  indented\n",
    "naïve 你好 🙂\t\r\n",
    END_OF_TEXT,
    f"a{END_OF_TEXT}b",
    "\0\x7f",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(f"the cat {n} sat on the mat, isn't it?\n\tdef f(x): return x\n" for n in range(200)))
    return path


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Path:
    """Folder of a small tokenizer."""
    train_tokenizer(open_source(str(corpus)), corpus.parent / "trained", 300)
    return corpus.parent / "trained"


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiktoken file with the 256 bytes and a few merges."""
    ranks = {bytes([value]): value for value in range(256)}
    for token in (b"th", b"the", b" t", b" the", b"\n\n", b"  ", b"12"):
        ranks[token] = len(ranks)
    folder = tmp_path_factory.mktemp("ranks")
    TiktokenTokenizer("made", ranks).save(folder)
    return folder / "ranks.tiktoken"


@pytest.fixture(params=["bytes", "tiktoken", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, trained: Path, ranks_file: Path) -> Tokenizer:
    return load_tokenizer({"bytes": "bytes", "tiktoken": str(ranks_file), "huggingface": str(trained)}[request.param])


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_special_text_is_ordinary(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_token not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "huggingface"])
def test_end_of_text_in_a_text_is_parsed_where_that_was_asked(kind: str, trained: Path, ranks_file: Path) -> None:
    spec = {"bytes": "bytes", "tiktoken": str(ranks_file), "huggingface": str(trained)}[kind]
    tokenizer = load_tokenizer(spec, parse_special=True)
    plain = load_tokenizer(spec)
    eot = tokenizer.eot_token
    assert tokenizer.encode(f"a{END_OF_TEXT}b{END_OF_TEXT}") == [*plain.encode("a"), eot, *plain.encode("b"), eot]
    assert tokenizer.sha256 == plain.sha256
    with pytest.raises(DataError, match=r"--eot-token '?<s>"):
        load_tokenizer(spec, eot_token="<s>")


def test_end_of_text_decodes_to_its_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eot_token]) == f"a{END_OF_TEXT}"


def test_saved_copy_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved = tokenizer.save(tmp_path)
    again = (
        load_saved(tmp_path / saved)
        if saved == "origin.json"
        else load_tokenizer(str(tmp_path / saved) if saved else "bytes")
    )
    assert (again.sha256, again.vocab_size, again.eot_token) == (
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eot_token,
    )
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


@given(st.text(alphabet="ab1 \n\t.'é\u2028", max_size=80), st.integers(1, 10))
@settings(max_examples=300, deadline=None)
def test_cut_text_encodes_to_the_same_tokens(cut_tokenizers: list[Tokenizer], text: str, limit: int) -> None:
    pieces = list(cut_text(text, limit))
    assert "".join(pieces) == text
    for tokenizer in cut_tokenizers:
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.fixture(scope="module")
def cut_tokenizers(trained: Path, ranks_file: Path) -> list[Tokenizer]:
    tokenizers = [load_tokenizer(str(trained)), load_tokenizer(str(ranks_file))]
    assert all(tokenizer.newline_is_a_border for tokenizer in tokenizers)
    return tokenizers


def test_training_is_deterministic(corpus: Path, trained: Path, tmp_path: Path) -> None:
    train_tokenizer(open_source(str(corpus)), tmp_path / "again", 300)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_training_refuses_what_it_cannot_do(corpus: Path, trained: Path, tmp_path: Path) -> None:
    source = open_source(str(corpus))
    with pytest.raises(DataError, match="already exists"):
        train_tokenizer(source, trained, 300)
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(source, tmp_path / "small", 256)
    with pytest.raises(DataError, match=r"too small for 9999 tokens: only \d+ could be learnt"):
        train_tokenizer(source, tmp_path / "big", 9999)
    assert not any(tmp_path.iterdir())


def test_trained_tokenizer_opens_in_transformers_format(trained: Path) -> None:
    config = json.loads((trained / "tokenizer_config.json").read_text())
    assert config["eos_token"] == END_OF_TEXT


def test_eos_token_of_the_config_is_taken(trained: Path, tmp_path: Path) -> None:
    record = json.loads((trained / "tokenizer.json").read_text())
    record["added_tokens"][0]["content"] = "</s>"
    record["model"]["vocab"]["</s>"] = record["model"]["vocab"].pop(END_OF_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"no end-of-text token.*eos_token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(str(tmp_path)).eot_token == 0


def test_text_that_the_model_merges_into_end_of_text_is_cut(tmp_path: Path) -> None:
    """A vocabulary may hold end-of-text as an ordinary word, which documents must not be able to write."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    fast = Fast(models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("a </s> b") == [2, 0, 0, 3]
    assert not tokenizer.newline_is_a_border


def test_ranks_file_damage_is_located(ranks_file: Path, tmp_path: Path) -> None:
    lines = ranks_file.read_text().splitlines()
    path = tmp_path / "bad.tiktoken"
    for damaged, text in [
        ([*lines[:3], "!!! 3", *lines[4:]], "line 4"),
        (lines[1:], "ranks must be 0 to"),
        ([line.replace("AA== 0", "QUE= 0") for line in lines], "single byte"),
    ]:
        path.write_text("\n".join(damaged))
        with pytest.raises(DataError, match=text):
            load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("no/such.tiktoken", "The tokenizer"),
        ("/no/such", "train-tokenizer"),
        ("hf:such", r"such is not a file or folder here"),
    ],
)
def test_unknown_tokenizers_say_what_is_legal(spec: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=text):
        load_tokenizer(spec)


def test_gpt2_that_cannot_be_downloaded_says_what_to_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    import tiktoken.registry

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"could not be downloaded.*FILE\.tiktoken.*train-tokenizer.*bytes"):
        load_tokenizer("gpt2")


def test_bytes_are_utf8() -> None:
    assert ByteTokenizer().encode("é") == [0xC3, 0xA9]
