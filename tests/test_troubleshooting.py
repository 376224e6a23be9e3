"""docs/troubleshooting.md quotes messages that the code has, and none about machines is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmscale"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Calls that make a message about machines, each with the place of the message among the arguments.
MAKERS = {
    "red": 1,
    "yellow": 1,
    "Outcome": 1,
    "_refuse": 0,
    "Refused": 0,
    "_Refused": 0,
    "_on_lost": 0,
    "MachineError": 0,
    "UnreachableError": 0,
    "TransientError": 0,
    "OutOfMemory": 0,
}
#: Errors that are about machines if an OSError caused them, a file of `MACHINE_FILES` raises them, or they say so.
ERRORS = ("ConfigError", "DataError", "CheckpointError", "DamagedError", "OSError")
MACHINE_FILES = (
    "cluster/launch/*.py",
    "cluster/hosts.py",
    "cluster/hosts.py",
    "cluster/doctor/report.py",
    "cluster/doctor/diagnose.py",
    "engine/launcher_variables.py",
    "engine/process_group.py",
    "data/storage/shared_object.py",
    "data/storage/objects.py",
    "data/storage/faults.py",
    "data/shards/cache.py",
    "checkpoint/remote_run.py",
    "checkpoint/load.py",
    "untrusted/hub.py",
)
ABOUT_MACHINES = re.compile(
    r"damaged|altered|truncated|changed (\.\.\. times|since this)|was replaced|nother (process|writer)|\bof memory\b|"
    r"on GPUs|compute capability|could not be downloaded|Ray cluster|other machines|cannot be fetched|GiB"
)
#: Beginnings of messages about a good end, or about a flag or file that the message itself corrects.
EXEMPT = (
    "every rank ended with status 0",
    "WARNING: --env",
    "WARNING: --profile",
    "WARNING: this machine has no NVIDIA",
    "... is .... Legal: seconds from",
    "ds_config ... does not exist",
    "--config ...",
    "--input ... does not exist",
    "Shards of ... bytes cannot hold",
    "Start one, with",
    "Give the launcher",
    "WARNING: torch compiled nothing",
    " by process ",
    "... is .... Legal: seconds from ",
)
OS_ERRORS = re.compile(r"\b(OSError|\w*(Permission|NotFound|Timeout|Connection|BlockingIO)\w*)\b")
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


def pieces(message: str) -> list[str]:
    """Return the fixed parts of a message, without code marks and with single spaces."""
    parts = (" ".join(part.replace("`", "").split()).strip(" .:;,()'\"") for part in message.split("..."))
    return [part for part in parts if part]


def telling_sentence(message: str) -> list[str]:
    """Return the fixed parts of the first sentence that identifies the message; the fix follows in later ones."""
    for sentence in re.split(r"\. (?=[A-Z`.-])", message.removeprefix("WARNING: ")):
        fixed = [piece for piece in pieces(sentence) if re.search("[A-Za-z]", piece)]
        if any(len(piece) >= LEAST for piece in fixed):
            return fixed
    return []


class Module:
    """A file of the package, with the strings that its names may have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        self.is_about_machines = any(path.match(f"llmscale/{pattern}") for pattern in MACHINE_FILES)

    def messages(self, node: ast.expr, scope: ast.AST, depth: int = 4) -> Iterator[str]:
        """Yield the strings that an expression may be, also through variables and functions of the module."""
        text = flatten(node)
        if depth == 0 or telling_sentence(text):
            yield text
        elif isinstance(node, (ast.JoinedStr, ast.IfExp, ast.BinOp)):
            for inner in ast.iter_child_nodes(node):
                value = inner.value if isinstance(inner, ast.FormattedValue) else inner
                if isinstance(value, ast.expr):
                    yield from self.messages(value, scope, depth - 1)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from self.messages(node.func.value, scope, depth - 1)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            function = self.functions[node.func.id]
            for inner in ast.walk(function):
                if isinstance(inner, ast.Return) and inner.value:
                    yield from self.messages(inner.value, function, depth - 1)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            known = assigned(scope if isinstance(node, ast.Name) else self.tree)
            for value in known.get(ast.unparse(node), ()):
                yield from self.messages(value, scope, depth - 1)

    def made_messages(self) -> Iterator[str]:
        """Yield the messages about machines that the file makes."""
        for call, scope, is_os_error in self.calls():
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            place = MAKERS.get(name, 0)
            for message in self.messages(call.args[place], scope) if len(call.args) > place else ():
                is_about_machines = is_os_error or self.is_about_machines or ABOUT_MACHINES.search(message)
                if name in MAKERS or message.startswith("WARNING: ") or (name in ERRORS and is_about_machines):
                    yield message

    def calls(self) -> Iterator[tuple[ast.Call, ast.AST, bool]]:
        """Yield each call with its function, and whether it is in a handler of an OSError."""
        waiting: list[tuple[ast.AST, ast.AST, bool]] = [(self.tree, self.tree, False)]
        while waiting:
            node, scope, is_os_error = waiting.pop()
            if isinstance(node, ast.Call):
                yield node, scope, is_os_error
            scope = node if isinstance(node, ast.FunctionDef) else scope
            if isinstance(node, ast.ExceptHandler) and node.type:
                is_os_error = bool(OS_ERRORS.search(ast.unparse(node.type)))
            waiting += [(inner, scope, is_os_error) for inner in ast.iter_child_nodes(node)]


@cache
def assigned(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the values that are assigned to each name in a scope, alone or in a tuple."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # type: ignore[attr-defined]
                pairs = list(zip(target.elts, node.value.elts, strict=True))  # type: ignore[attr-defined]
            for name, value in pairs:
                values.setdefault(ast.unparse(name), []).append(value)
    return values


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]


def rows() -> Iterator[list[str]]:
    """Yield the cells of the page's tables."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) in (2, 3) and cells[0] not in ("what you see", "row", "---"):
            yield cells


def doctor_rows() -> Iterator[list[str]]:
    return (cells for cells in rows() if len(cells) == 3 and "`" not in cells[0] and "`" in cells[1])


def quoted_messages() -> Iterator[list[str]]:
    """Yield what each row quotes, in the first column that has quotes: the second one of doctor's rows."""
    for cells in rows():
        yield re.findall(r"`([^`]+)`", cells[0] if len(cells) == 2 or "`" in cells[0] else cells[1])


def contains(text: str, fixed: list[str]) -> bool:
    """Return whether a text has all parts, in their order."""
    at = 0
    for part in fixed:
        if (actual := text.find(part, at)) < 0:
            return False
        at = actual + len(part)
    return True


def test_every_quoted_message_is_in_the_code(modules: list[Module]) -> None:
    strings = (
        node for module in modules for node in ast.walk(module.tree) if isinstance(node, (ast.Constant, ast.JoinedStr))
    )
    texts = {" ".join(pieces(flatten(node))) for node in strings}
    quoted = [message for row in quoted_messages() for message in row]
    quoted = [message for message in quoted if " " in message and not message.startswith("nvidia-smi")]
    assert len(quoted) > 200
    for message in quoted:
        fixed = pieces(message)
        assert fixed and any(contains(text, fixed) for text in texts), message


def test_every_message_about_machines_is_explained(modules: list[Module]) -> None:
    """A row quotes all of the sentence that identifies it."""
    explained = [" ".join(" ... ".join(row).split()) for row in quoted_messages()]
    missing = []
    for module in modules:
        for message in module.made_messages():
            fixed = telling_sentence(message)
            if fixed and not any(contains(row, fixed) for row in explained) and not message.startswith(EXEMPT):
                missing.append(f"{module.path.relative_to(PACKAGE)}: {message}")
    assert not missing


def test_every_row_of_doctor_is_explained(modules: list[Module]) -> None:
    named = {name.strip() for cells in doctor_rows() for name in cells[0].split(",")} - {"(no row)"}
    doctor = [module for module in modules if module.path.parent.name == "doctor"]
    made = {
        call.args[0].value
        for module in doctor
        for call, _, _ in module.calls()
        if getattr(call.func, "id", "") in ("red", "yellow") and isinstance(call.args[0], ast.Constant)
    }
    strings = {node.value for module in doctor for node in ast.walk(module.tree) if isinstance(node, ast.Constant)}
    assert made <= named <= strings
