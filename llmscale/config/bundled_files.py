"""The ds_configs and hostfiles that llmscale brings along, by name. No torch.

`llmscale/ds_configs` and `llmscale/hostfiles` are links to the repository's own folders, and plain folders in a wheel.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from llmscale.suggestions import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_ONE = "README.md"


@dataclass(frozen=True)
class BundledFiles:
    """The files of one kind."""

    folder_name: str
    """In the repository, and in the package."""
    suffix: str
    """Of their names; empty for none."""

    @property
    def folder(self) -> Path:
        return _PACKAGE / self.folder_name

    def names(self) -> list[str]:
        """Of all files, without their suffix."""
        return sorted(self._name_of(file) for file in self.folder.glob(f"*{self.suffix}") if file.name != _NOT_ONE)

    def find(self, given: Path) -> Path:
        """The file that `given` stands for: itself where it exists and is no folder; else the one of this name that
        llmscale brings along, for NAME, NAME.json and, as in the repository, ds_configs/NAME.json; else `given`."""
        name = self._name_of(given)
        # A run's folder may well be called zero2.
        is_there = os.path.lexists(given) and not given.is_dir()
        if given.parent not in (Path(), Path(self.folder_name)) or is_there or name not in self.names():
            return given
        return self.folder / f"{name}{self.suffix}"

    def why_missing(self, given: Path) -> str:
        """Sentences about a file that does not exist: the nearest name, and all there are beside it, else all names."""
        folder = given.parent
        beside = sorted(file.name for file in folder.glob(f"*{self.suffix}")) if self.suffix and folder.name else []
        if beside:
            return f"{did_you_mean(given.name, beside)} Files in {folder}: {', '.join(beside)}."
        names = self.names()
        hint = did_you_mean(self._name_of(given), names)
        return f"{hint} Names that llmscale brings along: {', '.join(names)} (in {self.folder})."

    def _name_of(self, file: Path) -> str:
        return file.name.removesuffix(self.suffix)


DS_CONFIGS = BundledFiles("ds_configs", ".json")
HOSTFILES = BundledFiles("hostfiles", "")


def is_checkout() -> bool:
    """Whether this llmscale is a checkout of its repository, rather than what a wheel installed."""
    return (_PACKAGE.parent / "pyproject.toml").is_file()


def is_in_checkout() -> bool:
    """Return whether the current folder is the checkout: `deepspeed llmscale/train.py` works there alone."""
    return is_checkout() and Path.cwd() == _PACKAGE.parent


def install_command(extras: str) -> str:
    """Return the pip command that adds `extras` (`eval`, `train,data`) to this llmscale, which is on no index: those of
    the checkout, or what the installed wheel needs and does not have."""
    if is_checkout():
        folder = _PACKAGE.parent
        return "pip install -e " + shlex.quote(f"{'.' if is_in_checkout() else folder}[{extras}]")
    from importlib import metadata  # takes longer to import than a command's answer

    pattern = rf"(([\w.-]+)[^;]*);.*extra == [\"']({extras.replace(',', '|')})[\"']"
    found = [match for need in metadata.requires("llmscale") or () if (match := re.match(pattern, need))]
    missing = [match for match in found if not [*metadata.distributions(name=match[2])]]
    return f"pip install {shlex.join(dict.fromkeys(match[1].strip() for match in missing or found))}"
