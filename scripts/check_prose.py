#!/usr/bin/env python3
"""Count phrases that docs/development.md asks to avoid, and fail above the limits.

usage: check_prose.py [--list] [FILE...]

Without FILE: llmscale/, scripts/, docs/ and the READMEs. --list prints every place.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
#: Docstrings that begin with a word of `STARTS`, in percent of all docstrings.
MAX_START_PERCENT = 0.5
MAX_PLACES = 20

STARTS = re.compile(r"(Of|As|The same|That|Those|These|What|Where|Whether|Whose|Which|So)\b")
PHRASES = {
    "is none / is no X (is missing)": (
        r"\b(?:is|are|was|were) (?:none|no (?!longer|more|need|way|such|other|different)[a-z]+)\b"
    ),
    "go on (continue, resume)": r"\b(?:go|goes|went|going) on\b",
    "behind (after)": r"\bbehind (?:it|them|the|a|that|each|its)\b",
    "anew (again)": r"\banew\b",
    "lies, stands there (is)": r"\b(?:lies|lie|stands|stand) (?:there|in|beside|below|above|behind|for|on|at|here)\b",
    "with a word (is reported)": r"\bwith(?:out)? a word\b",
    "is said, says so (is reported)": r"\b(?:is said|are said|be said|says so|say so|is told)\b",
    "Of ... at a sentence's start": r"(?:^|\. )Of (?:a|an|the|each|every|one|all|what|some|those|that|it|its)\b",
    "What ... at a sentence's start": r"(?:^|\. )What [a-z]+ ",
    "may pass, taken for, for ever, just now": r"\b(?:may pass|taken? for|for ever|just now)\b",
    "so many, so long": r"\b(?:so many|so long as|for so long)\b(?! that)",
}


class Place(NamedTuple):
    """Occurrence of a phrase to avoid."""

    kind: str
    file: Path
    line: int
    excerpt: str


def find_docstring_starts(docstrings: list[tuple[int, str]], file: Path) -> Iterator[Place]:
    """Yield the docstrings that begin with a word of `STARTS`."""
    for line, text in docstrings:
        if STARTS.match(text):
            yield Place("docstring's start", file, line, text[:60])


def find_phrases(pieces: list[tuple[int, str]], file: Path) -> Iterator[Place]:
    """Yield the phrases to avoid in pieces of text, each given with its first line."""
    for line, piece in pieces:
        for kind, pattern in PHRASES.items():
            for match in re.finditer(pattern, piece, re.MULTILINE):
                excerpt = " ".join(piece[max(0, match.start() - 30) : match.end() + 30].split())
                yield Place(kind, file, line + piece[: match.start()].count("\n"), excerpt)


def read_docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the line and the text of every statement that is only a string."""
    statements = [s for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list) for s in body]
    values = [s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    return [(value.lineno, value.value) for value in values if isinstance(value.value, str)]


def read_prose(text: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Return the lines and texts of a module's comments, and of its strings of several words."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [
        *((node.lineno, str(node.value)) for node in strings if " " in str(node.value)),
        *((number, line.lstrip("#: ")) for number, line in lines if line.startswith("#")),
    ]


def main(words: list[str]) -> int:
    named = [Path(word) for word in words if word != "--list"]
    files = named or [
        *REPOSITORY.glob("llmscale/**/*.py"),
        *(file for file in REPOSITORY.glob("scripts/**/*.py") if file != Path(__file__).resolve()),
        *REPOSITORY.glob("docs/*.md"),
        *(REPOSITORY / folder / "README.md" for folder in (".", "ds_configs", "hostfiles", "scripts/bench")),
    ]
    places: list[Place] = []
    num_docstrings = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".py":
            places += find_phrases([(1, text)], file)
            continue
        tree = ast.parse(text)
        docstrings = read_docstrings(tree)
        num_docstrings += len(docstrings)
        places += [*find_docstring_starts(docstrings, file), *find_phrases(read_prose(text, tree), file)]
    if "--list" in words:
        print(*(f"{place.file}:{place.line}: {place.kind}: {place.excerpt!r}" for place in places), sep="\n")
    counts = Counter(place.kind for place in places)
    percent = 100 * counts["docstring's start"] / max(num_docstrings, 1)
    print(f"{num_docstrings} docstrings, {percent:.1f} % with a start to avoid; {len(places)} places in all")
    print(*(f"{count:6} {kind}" for kind, count in counts.most_common()), sep="\n")
    return int(percent > MAX_START_PERCENT or len(places) > MAX_PLACES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
