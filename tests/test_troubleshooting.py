"""docs/troubleshooting.md quotes messages that the code has, and none about machines is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Calls that make a message about machines, each with the place of the message among the arguments.
MAKERS = {"red": 1, "yellow": 1, "MachineError": 0, "UnreachableError": 0, "Outcome": 1, "_refuse": 0, "Refused": 0}
#: Files whose ConfigErrors are about machines, too.
MACHINE_FILES = ("hostfile.py", "remote.py", "facts.py", "diagnose.py", "launcher_variables.py", "process_group.py")
GOOD_END = "every rank ended with status 0"
#: Shortest text that identifies a message.
LEAST = 8


def flatten(node: ast.expr) -> str:
    """Return a string of the source, with ... for what is inserted into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(flatten(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return flatten(node.left) + flatten(node.right)
    return "..."


def nodes() -> Iterator[ast.AST]:
    for path in (ROOT / "llmscale").rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def pieces(message: str) -> list[str]:
    """Return the fixed parts of a message, without code marks and with single spaces."""
    parts = (" ".join(part.replace("`", "").split()).strip(" .:;,()'\"") for part in message.split("..."))
    return [part for part in parts if part]


def quoted_messages() -> Iterator[str]:
    """Yield the messages in the first column that has them: the second one of doctor's rows."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("what you see", "row", "---"):
            column = cells[0] if "`" in cells[0] else cells[1]
            yield from re.findall(r"`([^`]+)`", column)


def test_every_quoted_message_is_in_the_code() -> None:
    texts = [" ".join(pieces(flatten(node))) for node in nodes() if isinstance(node, (ast.Constant, ast.JoinedStr))]
    quoted = [message for message in quoted_messages() if " " in message and not message.startswith("nvidia-smi")]
    assert len(quoted) > 100
    for message in quoted:
        fixed = pieces(message)
        pattern = re.compile(".*".join(map(re.escape, fixed)))
        assert fixed and any(pattern.search(text) for text in texts), message


def test_every_message_about_machines_is_explained() -> None:
    page = " ".join(PAGE.replace("`", "").split())
    missing = []
    for path in (ROOT / "llmscale").rglob("*.py"):
        about_machines = path.parent.name == "launch" or path.name in MACHINE_FILES
        makers = MAKERS | ({"ConfigError": 0} if about_machines else {})
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in makers and len(node.args) > makers[name]:
                fixed = [piece for piece in pieces(flatten(node.args[makers[name]])) if len(piece) >= LEAST]
                # The page may leave out the fix, which follows in a sentence of its own.
                sentences = [piece.partition(". ")[0] for piece in fixed]
                if fixed and not any(sentence in page for sentence in sentences) and fixed != [GOOD_END]:
                    missing.append((path.name, fixed))
    assert not missing
