#!/usr/bin/env python3
"""Count phrases, names and tricks that docs/development.md asks to avoid, and fail above the limits.

usage: check_prose.py [--list] [FILE...]

Without FILE: phrases in llmscale/, scripts/, docs/ and the READMEs; names and tricks in llmscale/, scripts/ and tests/,
with their number in each room. --list prints every place.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
#: Docstrings that begin with a word of `STARTS`, in percent of all docstrings.
MAX_START_PERCENT = 0.5
MAX_PLACES = 20
MAX_NAMES_AND_TRICKS = 30

#: Names that say what happened to a value, not what it holds.
EMPTY_NAMES = frozenset({"found", "kept", "said", "shown", "told", "way", "ask", "whole"})
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


def find_names_and_tricks(tree: ast.Module, file: Path) -> Iterator[Place]:
    """Yield variables and parameters with a name of EMPTY_NAMES, and literals that unpack another literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield Place("name without content", file, node.lineno, node.id)
        elif isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield Place("name without content", file, node.lineno, node.arg)
        elif isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield Place("literal unpacked into another", file, node.lineno, ast.unparse(node)[:60])
        elif isinstance(node, ast.Dict):
            inner = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
            for value in inner:
                if isinstance(value, ast.Dict):
                    yield Place("literal unpacked into another", file, value.lineno, ast.unparse(value)[:60])


def room_of(file: Path) -> str:
    """Return the folder of a file, at most two levels deep: llmscale/data, tests/data, scripts."""
    return "/".join(file.relative_to(REPOSITORY).parent.parts[:2])


def check_phrases(files: Iterable[Path], *, lists: bool) -> bool:
    """Print the phrases to avoid in files, and return whether they are within the limits."""
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
    if lists:
        print_places(places)
    counts = Counter(place.kind for place in places)
    percent = 100 * counts["docstring's start"] / max(num_docstrings, 1)
    print(
        f"{num_docstrings} docstrings, {percent:.1f} % with a start to avoid (limit {MAX_START_PERCENT} %); "
        f"{len(places)} places in all (limit {MAX_PLACES})"
    )
    print_counts(counts)
    return percent <= MAX_START_PERCENT and len(places) <= MAX_PLACES


def check_names_and_tricks(files: Iterable[Path], *, lists: bool) -> bool:
    """Print the names and tricks to avoid in files, and return whether they are within the limit."""
    places = [
        place for file in files for place in find_names_and_tricks(ast.parse(file.read_text(encoding="utf-8")), file)
    ]
    if lists:
        print_places(places)
    print(f"{len(places)} names without content and unpacked literals (limit {MAX_NAMES_AND_TRICKS})")
    print_counts(Counter(room_of(place.file) for place in places))
    return len(places) <= MAX_NAMES_AND_TRICKS


def print_places(places: Iterable[Place]) -> None:
    for place in places:
        print(f"{place.file}:{place.line}: {place.kind}: {place.excerpt!r}")


def print_counts(counts: Counter[str]) -> None:
    for name, count in counts.most_common():
        print(f"{count:6} {name}")


def main(words: list[str]) -> int:
    named = [Path(word).resolve() for word in words if word != "--list"]
    scripts = [file for file in REPOSITORY.glob("scripts/**/*.py") if file != Path(__file__).resolve()]
    code = [*REPOSITORY.glob("llmscale/**/*.py"), *scripts]
    readmes = [REPOSITORY / folder / "README.md" for folder in (".", "ds_configs", "hostfiles", "scripts/bench")]
    of_phrases = named or [*code, *REPOSITORY.glob("docs/*.md"), *readmes]
    of_names = named or [*code, *REPOSITORY.glob("tests/**/*.py")]
    lists = "--list" in words
    is_within_limits = [
        check_phrases(of_phrases, lists=lists),
        check_names_and_tricks([file for file in of_names if file.suffix == ".py"], lists=lists),
    ]
    return 0 if all(is_within_limits) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
