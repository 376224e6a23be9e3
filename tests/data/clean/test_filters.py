"""Each rule of Gopher, C4 and FineWeb takes what is beyond its limit; datatrove, where it is there, decides alike."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from llmscale.data.clean import filters as c4
from llmscale.data.clean.filters import (
    C4Filter,
    Changed,
    LanguageFilter,
    Removed,
    Text,
    check_languages,
    filter_fineweb,
    filter_quality,
    filter_repetition,
)
from llmscale.errors import DataError
from tests.data.clean.conftest import MakeProse

C4 = C4Filter(terminal_punctuation=False)
STRICT_C4 = C4Filter(terminal_punctuation=True)


def _rule(finding: Removed | Changed | None) -> str | None:
    return str(finding.why["rule"]) if isinstance(finding, Removed) else None


def shares_of(text: str) -> Iterator[tuple[str, float]]:
    """What the rules on repetition measure."""
    for rule, value, _, _ in c4._measure_repetition(Text(text)):
        yield rule, value


@pytest.fixture
def prose(make_prose: MakeProse) -> str:
    return make_prose(random.Random(0), 300)


def test_prose_passes_all(prose: str) -> None:
    assert filter_repetition(Text(prose)) is None
    assert filter_quality(Text(prose)) is None
    assert filter_fineweb(Text(prose)) is None
    assert _rule(C4(Text(prose))) is None


@pytest.mark.parametrize(
    ("addition", "rule"),
    [
        ("same paragraph here\n\n" * 5, "dup_para_frac"),
        (("\n\n" + " ".join(f"word{number}" for number in range(150))) * 2, "dup_para_char_frac"),
        ("\nsame line" * 20, "dup_line_frac"),
        (" again and" * 100, "top_2_gram"),
        (" this one gram" * 40, "top_3_gram"),
        (" this gram has four" * 30, "top_4_gram"),
    ],
)
def test_repetition(addition: str, rule: str, prose: str) -> None:
    assert _rule(filter_repetition(Text(prose + addition))) == rule


def test_repeated_ngrams_are_counted_once_each_word(prose: str) -> None:
    """A passage that stands twice: its second occurrence is what counts."""
    words = prose.split()
    passage = words[:60]
    text = " ".join([*words, "between", *passage])
    share = sum(map(len, passage)) / len(text)
    finding = filter_repetition(Text(text))
    assert finding is not None and str(finding.why["rule"]).startswith("duplicated_")
    assert float(finding.why["value"]) == pytest.approx(share, rel=0.1)


def test_characters_of_ngrams_are_those_of_their_words_and_for_the_most_frequent_of_spaces_too() -> None:
    single = [f"word{number}" for number in range(100, 140)]
    pair = "red foxes"
    text = " ".join(f"{word} {pair}" for word in single)
    assert dict(shares_of(text))["top_2_gram"] == pytest.approx(len(pair) * len(single) / len(text))
    # Six words stand twice: after the copy of five, one is left that begins no other.
    passage = ["a", "bcd", "efghi", "jk", "lmno", "pqrstu"]
    text = " ".join([*single[:5], *passage, "between", *passage])
    shares = dict(shares_of(text))
    assert shares["duplicated_5_n_grams"] == pytest.approx(len("".join(passage[:5])) / len(text))
    assert shares["duplicated_6_n_grams"] == pytest.approx(len("".join(passage)) / len(text))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("the word and " * 16, "gopher_short_doc"),
        ("the word and " * 34_000, "gopher_long_doc"),
        ("a of be " * 40, "gopher_below_avg_threshold"),
        ("extraordinarily the and " * 40 + "internationalisation " * 60, "gopher_above_avg_threshold"),
        ("the word and hash # " * 40, "gopher_too_many_hashes"),
        ("the word and... " * 40, "gopher_too_many_ellipsis"),
        ("- the word and this\n" * 40, "gopher_too_many_bullets"),
        ("the word and so many others besides that one which ends…\n" * 40, "gopher_too_many_end_ellipsis"),
        ("the word and 1234 5678 " * 40, "gopher_below_alpha_threshold"),
        ("word list nothing else " * 40, "gopher_enough_stop_words"),
    ],
)
def test_quality(text: str, rule: str) -> None:
    assert _rule(filter_quality(Text(text))) == rule


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("This one says Lorem Ipsum to all.", "lorem_ipsum"),
        ("if (this) { that is all }.", "curly_bracket"),
    ],
)
def test_c4_takes_pages(line: str, rule: str, prose: str) -> None:
    assert _rule(C4(Text(f"{prose}\n{line}"))) == rule


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("Please enable Javascript to go on.", "javascript"),
        ("Our site uses cookies for all.", "policy"),
        ("two words", "too_few_words"),
        ("x" * 1001 + " is a long word.", "too_long_word"),
    ],
)
def test_c4_takes_lines_and_keeps_them_to_be_looked_at(line: str, rule: str) -> None:
    page = "\n".join(f"Here is sentence number {number}." for number in range(6))
    finding = C4(Text(f"{page}\n{line}"))
    assert isinstance(finding, Changed)
    assert finding.text == page
    assert [(text, why["rule"]) for text, why in finding.parts] == [(line, rule)]


def test_c4_on_ends_of_lines_and_citations() -> None:
    page = "\n".join(f"Here is sentence number {number} [{number}]." for number in range(6))
    heading = "A heading without an end"
    finding = C4(Text(f"{heading}\n{page}"))
    assert isinstance(finding, Changed) and finding.text.startswith(heading) and "[" not in finding.text
    strict = STRICT_C4(Text(f"{heading}\n{page}\nAnd so it goes on..."))
    assert isinstance(strict, Changed)
    assert [text for text, why in strict.parts if why["rule"] != "citation"] == [heading, "And so it goes on..."]
    assert _rule(C4(Text("One sentence stands here. A second one too."))) == "too_few_sentences"


def test_c4_counts_no_citation_as_a_sentence_and_keeps_them_to_be_looked_at() -> None:
    assert _rule(C4(Text("[1] [2] [3]\n" * 9))) == "too_few_sentences"
    page = "\n".join(f"Here is sentence number {number}." for number in range(5))
    finding = C4(Text(f"{page}\n[1] [2] [3]\nThis has [4] a source.[edit]"))
    assert isinstance(finding, Changed) and finding.text == f"{page}\nThis has  a source."
    assert [(text, why["rule"]) for text, why in finding.parts] == [
        ("[1] [2] [3]", "too_few_words"),
        ("[4] [edit]", "citation"),
    ]


@pytest.mark.parametrize("text", ["!", '."', "[", "[1", "\u3002", "a.", "#", "\n", "- "])
def test_hostile_text_takes_linear_time(text: str) -> None:
    """With a quadratic pattern this would not end."""
    long = text * 300_000 + "x"
    assert len(c4._SENTENCE_END.findall(long)) <= len(long)
    for judge in (filter_repetition, filter_quality, filter_fineweb, C4, STRICT_C4):
        judge(Text(long))


def test_ends_of_sentences() -> None:
    sentence_ends = c4._SENTENCE_END.findall('What?! "So." e.g. this\u3002that\u3002\u3002 Well... (yes!) no...no.')
    assert sentence_ends == ["?!", '."', ".", "\u3002", "\u3002\u3002", "...", "!)", "."]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" \n ", "empty"),
        ("A line that is long enough to count but never ends\n" * 10, "line_punct_ratio"),
        ("Short line.\n" * 10, "short_line_ratio"),
        ("The same line stands here as often as you like.\n" * 3, "char_dup_ratio"),
        ("".join(f"{'x' * 40}{number}.\n" for number in range(20)), "list_ratio"),
    ],
)
def test_fineweb(text: str, rule: str) -> None:
    assert _rule(filter_fineweb(Text(text))) == rule


def test_fineweb_knows_other_scripts_ends() -> None:
    lines = [
        f"这是一个很长的句子它说明了很多东西而且没有任何重复的内容请您慢慢地读完它吧{sign}。" for sign in "甲乙丙丁"
    ]
    assert filter_fineweb(Text("\n".join(lines))) is None


def test_language() -> None:
    english = Text("The committee has decided that the report should be read by every member before the next meeting.")
    german = Text("Der Ausschuss hat beschlossen, dass jedes Mitglied den Bericht vor der nächsten Sitzung lesen soll.")
    keep = LanguageFilter(("en",), 0.5)
    assert keep(english) is None
    finding = keep(german)
    assert finding is not None and finding.why["rule"] == "language" and finding.why["language"] == "de"
    assert LanguageFilter(("en", "de"), 0.5)(german) is None
    finding = LanguageFilter(("en",), 1.0)(Text("well hello"))
    assert finding is not None
    with pytest.raises(DataError, match=r"--languages english is not known.*\ben\b"):
        check_languages(("en", "english"))


def test_a_long_text_is_judged_by_its_beginning_its_middle_and_its_end() -> None:
    begin, middle, end = (letter * 1000 for letter in "abc")
    assert c4._sample(begin + middle + end) == begin + middle + end
    assert c4._sample(f"{begin}x{middle}y{end}") == f"{begin}\n{middle}\n{end}"
    assert c4._sample(f"{begin}{'x' * 5000}{middle}{'y' * 5001}{end}") == f"{begin}\n{middle}\n{end}"


def test_datatrove_decides_alike(make_prose: MakeProse) -> None:
    """On prose, damaged in every way that the rules know."""
    filters = pytest.importorskip("datatrove.pipeline.filters")
    data = pytest.importorskip("datatrove.data")
    pytest.importorskip("spacy")
    rng = random.Random(5)
    pairs = [
        (filter_repetition, filters.GopherRepetitionFilter()),
        (filter_quality, filters.GopherQualityFilter()),
        (filter_fineweb, filters.FineWebQualityFilter()),
        (C4, filters.C4QualityFilter(filter_no_terminal_punct=False)),
    ]
    texts = []
    for _ in range(60):
        words = make_prose(rng, rng.randint(20, 300)).split(" ")
        texts.append(" ".join(words + rng.choices(words, k=rng.randint(0, 200))))
        texts.append(texts[-1].replace(" ", "\n", rng.randint(0, 300)))
    for ours, theirs in pairs:
        agreed = 0
        for number, text in enumerate(texts):
            verdict = theirs.filter(data.Document(text=text, id=str(number)))
            agreed += (verdict is True) == (_rule(ours(Text(text))) is None)
        assert agreed >= 0.98 * len(texts)
