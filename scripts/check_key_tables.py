#!/usr/bin/env python3
"""Check that no list of run keys is kept by hand beside their declarations.

usage: check_key_tables.py

A table is a tuple, list, set, or dict of constants, that names at least three keys of a run, or a text of such names.
The declaration of a key has its behaviour (llmscale/keys.py), so that a new key cannot be forgotten; tables of other
facts are in _REASONS. Prints every other table, and reasons without a table. Exit status 1 if any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from llmscale.config.run_flags import describe_keys  # noqa: E402

#: Names of keys in one table.
_LEAST = 3
#: Tables that stay, by file and name, each with the reason.
_REASONS = {
    "architecture/shape.py: GPTShape.__post_init__": "numbers that a shape needs, vocabulary and context among them",
    "architecture/shape.py: GPTShape.changed": "widths that follow n_embd in their ratio",
    "cli/estimate.py: _EXCLUSIVE": "flags of estimate, which the keys are among",
    "cli/estimate.py: _OF_HF_MODULE": "keys of a model that is simulated, the shape being a file's",
    "cli/estimate.py: _OF_MODULE": "keys of a module that is simulated",
    "config/deepspeed/foreign.py": "keys that DeepSpeed's own optimizer and scheduler blocks set",
    "config/resolve.py: _OF_OPTIMIZER": "keys that an optimizer block of a ds_config sets",
    "training/start.py: _check_model": "numbers that name the same blocks in several ways",
    "cli/ladder.py: _COLUMNS": "columns of a table for people",
    "config/describe_defaults.py: SIZES": "the numbers that name a model's size to people",
    "planning/scaling_ladder.py": "what a run file of the ladder sets",
    "numerics/block.py: cut_block.neutral": "keys of length and batch, for which a check has its own values",
    "numerics/plain.py: LOSS_SETTINGS": "settings of the loss that the plain model computes",
    "training/run_folder.py: OWN_FOLDERS": "names of folders, which some keys share",
}


def tables(path: Path, names: set[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield line, name and keys of each outermost table in a file."""

    def visit(node: ast.AST, where: str) -> Iterator[tuple[int, str, list[str]]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            where = f"{where}.{ast.unparse(target)}".lstrip(".")
        words = _words(node)
        keys = [word for word in dict.fromkeys(words) if word in names]
        if len(keys) >= _LEAST and len(keys) * 4 >= len(set(words)):
            yield node.lineno, where, keys  # type: ignore[attr-defined]
            return
        for inner in ast.iter_child_nodes(node):
            yield from visit(inner, where)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def _words(node: ast.AST) -> list[str]:
    """Return the words of a table as names of keys; none for any other node."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [word for part in node.elts for word in _words_within(part)]
    if isinstance(node, ast.Dict) and all(isinstance(value, ast.Constant) for value in node.values):
        return [word for key in node.keys if key is not None for word in _words_within(key)]
    return _words_within(node) if isinstance(node, ast.Constant) else []


def _words_within(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = [word.removeprefix("--").replace("-", "_") for word in re.split(r"[ ,]+", node.value)]
        return words if all(re.fullmatch(r"[a-z]\w*", word) for word in words) else []
    return [word for inner in ast.iter_child_nodes(node) for word in _words_within(inner)]


#: Declarations themselves; presets and readers of config.json, which hold values; names of other tools.
_DECLARATIONS = ("config/run_config.py", "config/presets.py", "architecture/families/", "suggestions.py")


def main() -> int:
    names = {*describe_keys()}
    package, used, problems = REPOSITORY / "llmscale", set(), []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file.startswith(_DECLARATIONS):
            continue
        for line, where, keys in tables(path, names):
            reason = next((known for known in (f"{file}: {where}", file) if known in _REASONS), None)
            used.add(reason)
            if reason is None:
                problems.append(f"llmscale/{file}:{line}: {where or 'module'} lists {', '.join(keys)}")
    problems += [f"{known}: no such table" for known in _REASONS if known not in used]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
