"""Evaluation text is found whatever its case and punctuation, and cut out as GPT-3 did."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.clean.decontaminate import Decontaminated, Decontaminator, find_overlaps, read_evaluation_text
from llmscale.data.clean.filters import Text, plain_words
from llmscale.errors import DataError
from tests.data.clean.conftest import MakeProse


def _ngrams_in(text: str) -> set[tuple[str, ...]]:
    words = plain_words(text)
    return {tuple(words[begin : begin + 13]) for begin in range(len(words) - 12)}


def _decontaminate(evaluation: Path, texts: list[str], most: int = 10) -> dict[int, Decontaminated]:
    ngrams = read_evaluation_text([evaluation])
    counts = np.zeros(len(ngrams.hashes), np.uint32)
    findings = {number: find_overlaps(Text(text), ngrams.hashes) for number, text in enumerate(texts)}
    overlapping = {number: overlaps for number, overlaps in findings.items() if overlaps is not None}
    for overlaps in overlapping.values():
        counts[overlaps.ngrams] += 1
    decontaminate = Decontaminator(ngrams, counts, most)
    return {number: decontaminate(texts[number], overlaps) for number, overlaps in overlapping.items()}


@pytest.fixture
def evaluation(tmp_path: Path, make_prose: MakeProse) -> tuple[Path, list[str]]:
    rng = random.Random(9)
    items = [make_prose(rng, 40) for _ in range(30)]
    path = tmp_path / "evaluation.jsonl"
    path.write_text("".join(json.dumps({"q": {"text": item}, "n": 1, "a": ["yes"]}) + "\n" for item in items))
    return path, items


def test_every_planted_ngram_is_cut_out(evaluation: tuple[Path, list[str]], make_prose: MakeProse) -> None:
    path, items = evaluation
    rng = random.Random(10)
    planted = []
    for item in items:
        words = item.split()
        begin = rng.randrange(len(words) - 12)
        passage = " ".join(words[begin : begin + 13]).upper().replace(" ", ",  ", 5).replace(".", "?!")
        before, behind = make_prose(rng, 150), make_prose(rng, 150)
        planted.append(f"{before} {passage} {behind}")
    clean = [make_prose(rng, 200) for _ in range(100)]
    done = _decontaminate(path, planted + clean)
    assert sorted(done) == list(range(30))
    bad = set().union(*map(_ngrams_in, items))
    for number, document in done.items():
        assert len(document.pieces) == 2
        assert not bad & set().union(*map(_ngrams_in, document.pieces))
        assert all(piece in planted[number] and len(piece) >= 200 for piece in document.pieces)
        [(cut, why)] = document.cuts
        # The passage, and 200 characters on either side of it.
        assert len(cut) == len(str(why["ngram"])) + 400
        assert why["evaluation"] == f"{path}, line {number + 1}"
        assert tuple(plain_words(str(why["ngram"]))) in _ngrams_in(items[number])


def test_twelve_words_are_no_match(evaluation: tuple[Path, list[str]]) -> None:
    path, items = evaluation
    assert not _decontaminate(path, ["before " + " ".join(items[0].split()[:12]) + " behind"])


def test_short_pieces_go_and_many_pieces_take_the_document(
    evaluation: tuple[Path, list[str]], make_prose: MakeProse
) -> None:
    path, items = evaluation
    rng = random.Random(11)
    passages = [" ".join(item.split()[:13]) for item in items]
    filler = make_prose(rng, 100)
    texts = [
        passages[0],
        f"{filler} {passages[1]} {'x' * 250}",
        " ".join(f"{filler} {passage}" for passage in passages[2:12]),
        " ".join(f"{filler} {passage}" for passage in passages[12:22]) + f" {filler}",
    ]
    nothing, short, ten, eleven = _decontaminate(path, texts).values()
    assert nothing.pieces == [] and nothing.cuts[0][1]["rule"] == "no_piece_is_long_enough"
    assert nothing.cuts[0][0] == texts[0]
    assert len(short.pieces) == 1 and [why["rule"] for _, why in short.cuts] == ["evaluation_ngram", "short_piece"]
    assert len(ten.pieces) == 10
    assert eleven.pieces == [] and eleven.cuts[0][1]["rule"] == "too_many_pieces"


def test_phrases_of_many_documents_are_ignored(evaluation: tuple[Path, list[str]], make_prose: MakeProse) -> None:
    path, items = evaluation
    rng = random.Random(12)
    passage = " ".join(items[0].split()[:13])
    texts = [f"{make_prose(rng, 120)} {passage} {passage} {make_prose(rng, 120)}" for _ in range(11)]
    documents = _decontaminate(path, texts)
    assert [document.pieces for document in documents.values()] == [[text] for text in texts]
    assert all(not document.cuts for document in documents.values())
    cut = _decontaminate(path, texts[:10])
    assert all(len(document.pieces) == 2 for document in cut.values())
    assert all(document.cuts for document in _decontaminate(path, texts, most=11).values())


def test_kinds_of_files(tmp_path: Path, make_prose: MakeProse) -> None:
    text = make_prose(random.Random(13), 50)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps([["short"], [{"deep": text}]]).encode()))
    (tmp_path / "b.jsonl").write_text(json.dumps({"a": "too short"}) + "\n\n" + json.dumps({"a": text}) + "\n")
    first = read_evaluation_text([tmp_path / "a.txt"])
    assert set(first.hashes) <= set(read_evaluation_text([tmp_path / "a.jsonl.gz"]).hashes)
    both = read_evaluation_text([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    assert both.num_short == 1 and both.labels[1].endswith("b.jsonl, line 3")
    assert list(both.hashes) == list(first.hashes) and set(both.items.tolist()) == {0}


def test_a_json_list_is_an_item_an_entry(tmp_path: Path, make_prose: MakeProse) -> None:
    rng = random.Random(14)
    texts = [make_prose(rng, 30).replace("e", "\u00e9") + '\n"quoted" end of it' for _ in range(3)]
    entries = [{"q": texts[0]}, ["short", texts[1]], texts[2], 4]
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(entries).encode()))
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    evaluation = read_evaluation_text([path])
    assert evaluation.hashes.tolist() == read_evaluation_text([tmp_path / "same.jsonl"]).hashes.tolist()
    assert list(evaluation.labels) == [f"{path}, entry {number}" for number in (1, 2, 3)] and evaluation.num_short == 1
    (tmp_path / "one.json").write_text(json.dumps({"items": entries}, indent=1))
    assert read_evaluation_text([tmp_path / "one.json"]).labels == [str(tmp_path / "one.json")]


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("a.json", b'["x"]\n["y"]\n', r"a\.json is not JSON: Extra data"),
        ("a.json", b"[" * 100_000, "is not JSON"),
        ("a.jsonl", b'{"text": "x"}\nno json\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"a": "\xff"}\n', "line 1 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b"\0" * 20, "zero bytes"),
        ("a.txt", b"few words", "no text of at least 13 words"),
        ("a.txt", b"", "no text of at least 13 words"),
        ("a.txt.gz", b"no gzip\xff\xfe", "damaged"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, contents: bytes | None, words: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=words):
        read_evaluation_text([tmp_path / name])
    with pytest.raises(DataError, match="cannot be read"):
        read_evaluation_text([tmp_path])
