"""The demo's text: the language reference and the docstrings of this Python's standard library."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from llmscale.data.prepare.sources.source import Document, Place, Record, Source, TokenRules, walk
from llmscale.errors import DataError

PYTHON_DOCS = "python-docs"
#: Folders without docstrings of the library: installed packages, tests and compiled modules.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
#: Module of the language reference that `help()` shows: one dictionary of texts.
_REFERENCE = "pydoc_data/topics.py"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class PythonDocs(Source):
    """Every topic of the reference, and for each module of the library its docstrings. Places are (texts given,)."""

    name = PYTHON_DOCS

    def __init__(self) -> None:
        """Find the modules. Raises DataError for a Python without the sources of its library."""
        self.passed_over = set()
        self._root = Path(sysconfig.get_path("stdlib"))
        self._modules = [path for path in walk(self._root, _EXCLUDED)[0] if path.suffix == ".py"]
        if not self._modules:
            raise DataError(f"{PYTHON_DOCS}: {self._root} holds no sources of Python's standard library.")

    @cached_property
    def total_bytes(self) -> int:  # type: ignore[override]  # known once the modules are read
        return sum(len(text.encode()) for text in self._texts)

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        (done,) = start or (0,)
        self.read_bytes = 0
        for number, text in enumerate(self._texts, start=1):
            self.read_bytes += len(text.encode())
            if number > done:
                yield Document(text, (number,))

    def has_fields(self) -> bool:
        return False

    def fingerprint(self) -> str:
        """Hash the modules' names and sizes. Hosts with the same Python have the same text."""
        modules = [[path.relative_to(self._root).as_posix(), path.stat().st_size] for path in self._modules]
        return hashlib.sha256(json.dumps(modules).encode()).hexdigest()

    @cached_property
    def _texts(self) -> list[str]:
        return [text for path in self._modules for text in _read_module(path) if text]


def _read_module(path: Path) -> Iterator[str]:
    """Yield a module's docstrings as one text, or the topics of the reference; nothing for one that cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    if path.as_posix().endswith(_REFERENCE):
        topics = next(node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)))
        if topics is not None:
            yield from dict.fromkeys(map(_without_tables, ast.literal_eval(topics).values()))
        return
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    yield "\n\n".join(filter(None, docstrings))


def _without_tables(text: str) -> str:
    """Return a text without the rows and rules of its tables, and without underlining."""
    return "\n".join(line for line in text.split("\n") if not re.match(r"\s*([|+]|[-=*~^\"' ]+$)", line))
