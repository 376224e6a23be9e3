"""Write the language reference and the docstrings of this Python's standard library as JSON lines."""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
#: Folders without docstrings of the library: installed packages and tests.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
#: Module of the language reference that `help()` shows: one dictionary of texts.
REFERENCE = STDLIB / "pydoc_data/topics.py"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents() -> Iterator[str]:
    """Yield every topic of the reference and, for each module, its docstrings."""
    for path in sorted(STDLIB.rglob("*.py")):
        if EXCLUDED.intersection(path.relative_to(STDLIB).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        if path == REFERENCE:
            topics = next(node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)))
            yield from dict.fromkeys(map(without_tables, ast.literal_eval(topics).values()))
        else:
            found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
            yield "\n\n".join(filter(None, found))


def without_tables(text: str) -> str:
    """Return a text without the rows and rules of its tables, and without underlining."""
    return "\n".join(line for line in text.split("\n") if not re.match(r"\s*([|+]|[-=*~^\"' ]+$)", line))


def main() -> None:
    # Renamed when it is complete: quickstart.sh uses an existing file.
    out = Path(sys.argv[1])
    part = out.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents() if text), encoding="utf-8")
    part.rename(out)


if __name__ == "__main__":
    main()
