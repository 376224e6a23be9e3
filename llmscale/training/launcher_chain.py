"""The launchers above a rank. When one of them is gone, nobody passes signals on any more, and the ranks of a run that
was meant to end would train on. Linux' /proc; no torch.

Only launchers count, told by their command lines: a shell, `nohup`, tmux or ssh that ends leaves a run as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmscale.untrusted.interpreter import RUN_MODULE

#: Set by `llmscale train` for its ranks: its own process id. They need not look for it, and know when it was gone
#: before they could.
LAUNCHER_VARIABLE = "LLMSCALE_LAUNCHER"
_COMMANDS = frozenset(("deepspeed", "ds", "torchrun", "accelerate", "llmscale"))
#: What `python -m` can name, and what those commands run in turn, with the name to show.
_MODULES = {
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed.launcher.launch",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "llmscale": "llmscale",
    "llmscale.cli.main": "llmscale",
}


@dataclass(frozen=True)
class Launcher:
    """One process above this one."""

    pid: int
    name: str
    started: str
    """The kernel's word for when it was started: process ids are used again."""

    @property
    def is_gone(self) -> bool:
        """It has ended, whether or not its parent has noticed."""
        stat = _stat(self.pid)
        return stat is None or stat.started != self.started or stat.state in "ZX"

    def describe(self) -> str:
        """For a line of output."""
        return f"{self.name}, process {self.pid}"


def find_launchers() -> list[Launcher]:
    """From the rank's own parent upwards, as far as launchers reach. One that should be there and is not any more comes
    with a start time that no process has."""
    named = os.environ.get(LAUNCHER_VARIABLE, "")
    if named.isdigit():
        stat = _stat(int(named)) if int(named) == os.getppid() else None
        return [Launcher(int(named), "llmscale train", stat.started if stat else "")]
    chain: list[Launcher] = []
    pid = os.getppid()
    while pid > 0 and (stat := _stat(pid)) is not None:
        arguments = _arguments(pid)
        name = launcher_name(arguments)
        if name is not None:
            chain.append(Launcher(pid, name, stat.started))
        elif chain or not _belongs_to_rank(pid):
            break
        pid = stat.parent
    if chain and _has_lost_its_runner(chain[-1]):
        chain.append(Launcher(pid, "deepspeed", ""))
    return chain


def launcher_name(arguments: Sequence[str]) -> str | None:
    """What a command line, in words, runs: a launcher's name, or None."""
    if not arguments:
        return None
    program = os.path.basename(arguments[0])
    if program in _COMMANDS:
        return program
    if not program.startswith("python"):
        return None
    words = iter(arguments[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return _MODULES.get(next(words, ""))
        elif word == "-c":
            return _MODULES.get(next(words, "")) if next(words, "") == RUN_MODULE else None
        elif not word.startswith("-"):
            return _script_name(word)
    return None


def _script_name(script: str) -> str | None:
    """Of a Python script by its path: an installed command, or a module's own file."""
    name = os.path.basename(script)
    if name in _COMMANDS:
        return name
    dotted = script.removesuffix(".py").replace("/", ".")
    return next((shown for module, shown in _MODULES.items() if "." in module and dotted.endswith(f".{module}")), None)


def _has_lost_its_runner(last: Launcher) -> bool:
    """On one node `deepspeed` starts deepspeed.launcher.launch without a node's number, and may be dead before that
    starts its ranks, which takes seconds. Whoever else starts it says the number."""
    if last.name != "deepspeed.launcher.launch":
        return False
    return not any(word.startswith("--node_rank") for word in _arguments(last.pid))


def _belongs_to_rank(pid: int) -> bool:
    """A wrapper between launcher and rank, as a shell script that binds cores, has the rank's environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"RANK={os.environ.get('RANK', '')}".encode() in variables


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    started: str


def _stat(pid: int) -> _Stat | None:
    try:
        # After the command in parentheses, which may itself hold some.
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Stat(words[0], int(words[1]), words[19])
    except (OSError, IndexError, ValueError):
        return None


def _arguments(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words[:-1]]
