#!/usr/bin/env python3
"""Count packed lines of llmscale/ by kind, and refuse more than there are today: a ceiling here only sinks.

Also refuse names in the docstring of a function that its file does not know, such as a parameter that was renamed.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Most lines of each kind in llmscale/.
CEILINGS = {
    "a, b = x, y": 21,
    "branch or f-string inside an f-string": 75,
    "call with 6 or more positional arguments": 134,
    "constant below the first definition": 79,
    "nested x if c else y": 1,
    "number * truth": 12,
    "replace() of a frozen object": 187,
    "x if c else y": 1257,
}
#: A name between backticks.
_NAMED = re.compile(r"`([a-z_][a-z0-9_]*)`")
#: Names of other programs, values and commands that docstrings may have.
_OTHERS = {
    "activation_checkpointing", "best", "bos_token", "communication_data_type", "datasets", "eval", "exp_avg",
    "json_schema_extra", "load_state_dict", "load_universal", "pkl", "selective", "shm_comm", "train",
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> int:
    counts: Counter[str] = Counter()
    texts = {path: path.read_text() for path in sorted((ROOT / "llmscale").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    defined = {node.name for node in nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    unknown: list[str] = []
    for path, tree in trees.items():
        counts += count_kinds(tree)
        for line, name in unknown_names(tree, texts[path]):
            if name not in defined | _OTHERS:
                unknown.append(f"{path.relative_to(ROOT)}:{line}: `{name}`")
    too_many = {kind: number for kind, number in counts.items() if number > CEILINGS.get(kind, number)}
    for kind, number in too_many.items():
        print(f"{number} of '{kind}', and the ceiling is {CEILINGS[kind]}: unpack the new ones.")
    for place in unknown:
        print(f"{place} is named by a docstring, and its file has no such name.")
    for kind, ceiling in CEILINGS.items():
        print(f"{counts[kind]:6d} of at most {ceiling:5d}  {kind}")
    return 1 if too_many or unknown else 0


def count_kinds(tree: ast.Module) -> Counter[str]:
    """Count the packed lines of a file by kind."""
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        counts.update(kinds_of(node))
    definitions = [node.lineno for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
    if definitions:
        constants = [
            node for node in tree.body if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
        ]
        counts["constant below the first definition"] += sum(node.lineno > definitions[0] for node in constants)
    return counts


def kinds_of(node: ast.AST) -> Iterator[str]:
    """Yield the kinds of packed line that a node is."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield "a, b = x, y"
    if isinstance(node, ast.IfExp):
        yield "x if c else y"
        if any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node):
            yield "nested x if c else y"
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        if any(isinstance(inner, (ast.IfExp, ast.JoinedStr)) for part in parts for inner in ast.walk(part)):
            yield "branch or f-string inside an f-string"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _is_truth(node.left, node.right):
        yield "number * truth"
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "replace":
            yield "replace() of a frozen object"
        if sum(not isinstance(argument, ast.Starred) for argument in node.args) >= 6:
            yield "call with 6 or more positional arguments"


def _is_truth(*sides: ast.expr) -> bool:
    return any(isinstance(side, (ast.Compare, ast.BoolOp)) for side in sides)


def unknown_names(tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name for each name in a function's docstring that the code of its file never has."""
    words = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and not token.string.startswith('"""')):
            words.update(re.findall(r"\w+", token.string))
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            for name in _NAMED.findall(ast.get_docstring(node) or ""):
                if name not in words:
                    yield node.lineno, name


if __name__ == "__main__":
    sys.exit(main())
