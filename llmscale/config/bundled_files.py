"""The ds_configs and hostfiles that are part of llmscale, by name. No torch.

`llmscale/ds_configs` and `llmscale/hostfiles` are links to the repository's own folders, and plain folders in a wheel.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from llmscale.errors import ConfigError, LlmscaleError
from llmscale.suggestions import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_ONE = "README.md"
#: Distributions of modules that are named otherwise.
_DISTRIBUTIONS = {
    "azure": "azure-storage-blob",
    "botocore": "boto3",
    "google": "google-cloud-storage",
    "pynvml": "nvidia-ml-py",
    "streaming": "mosaicml-streaming",
}


@dataclass(frozen=True)
class BundledFiles:
    """All files of one kind."""

    folder_name: str
    """Name of the folder, in the repository and in the package."""
    suffix: str
    """Suffix of the file names; may be empty."""

    @property
    def folder(self) -> Path:
        return _PACKAGE / self.folder_name

    def names(self) -> list[str]:
        """Return the names of all files, without suffix."""
        return sorted(self._name_of(file) for file in self.folder.glob(f"*{self.suffix}") if file.name != _NOT_ONE)

    def find(self, given: Path) -> Path:
        """Return the file that `given` names: an existing file, else llmscale's own file, else `given`.

        llmscale's own files are found as NAME, NAME.json and, as in the repository, ds_configs/NAME.json.
        """
        name = self._name_of(given)
        # A folder of that name, such as a run called zero2, does not count.
        is_there = os.path.lexists(given) and not given.is_dir()
        if given.parent not in (Path(), Path(self.folder_name)) or is_there or name not in self.names():
            return given
        return self.folder / f"{name}{self.suffix}"

    def why_missing(self, given: Path) -> str:
        """Return a hint for a missing file: the nearest name, and the files in its folder or llmscale's names."""
        folder = given.parent
        if self.suffix and folder.name:
            beside = sorted(file.name for file in folder.glob(f"*{self.suffix}"))
        else:
            beside = []
        if beside:
            return f"{did_you_mean(given.name, beside)} Files in {folder}: {', '.join(beside)}."
        names = self.names()
        hint = did_you_mean(self._name_of(given), names)
        return f"{hint} llmscale's own: {', '.join(names)} (in {self.folder})."

    def _name_of(self, file: Path) -> str:
        return file.name.removesuffix(self.suffix)


DS_CONFIGS = BundledFiles("ds_configs", ".json")
HOSTFILES = BundledFiles("hostfiles", "")


def is_checkout() -> bool:
    """Return whether this llmscale is a checkout of its repository, not an installed wheel."""
    return (_PACKAGE.parent / "pyproject.toml").is_file()


def is_in_checkout() -> bool:
    """Return whether the current folder is the checkout: `deepspeed llmscale/train.py` works there alone."""
    return is_checkout() and Path.cwd() == _PACKAGE.parent


def import_extra(module: str, needed_by: str, extras: str, error: type[LlmscaleError] = ConfigError) -> ModuleType:
    """Import a module of an extra. Raises `error`, which begins with `needed_by`, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise error(f"{needed_by} needs {module.partition('.')[0]}: `{install_command(extras)}`.") from None


def install_command(extras: str) -> str:
    """Return the pip command that installs `extras` (`eval`, `train,data`) for this llmscale, which is not on an index.

    For an installed wheel these are the missing requirements of the extras.
    """
    if is_checkout():
        folder = _PACKAGE.parent
        return "pip install -e " + shlex.quote(f"{'.' if is_in_checkout() else folder}[{extras}]")
    from importlib import metadata  # slow to import

    pattern = rf"(([\w.-]+)[^;]*);.*extra == [\"']({extras.replace(',', '|')})[\"']"
    of_extras = [match for need in metadata.requires("llmscale") or () if (match := re.match(pattern, need))]
    missing = [match for match in of_extras if not [*metadata.distributions(name=match[2])]]
    needed = shlex.join(dict.fromkeys(match[1].strip() for match in missing or of_extras))
    return f"pip install {needed}  # extra {extras}"


def explain_missing(error: BaseException, extra: str) -> ConfigError | None:
    """Return the error that names the extra of a module that is not installed, or None for any other error.

    `extra` is named if the module is in several.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from importlib import metadata  # slow to import

    module = error.name.partition(".")[0]
    distribution = re.sub(r"[-_.]+", "-", _DISTRIBUTIONS.get(module, module)).lower()
    try:
        needs = metadata.requires("llmscale") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        extras = [extra]
    else:
        matches = (re.match(r"([\w.-]+)[^;]*;.*extra == [\"']([\w-]+)[\"']", need) for need in needs)
        extras = [match[2] for match in matches if match and match[1].lower().replace("_", "-") == distribution]
    if not extras:
        return None
    extra = extra if extra in extras else extras[0]
    return ConfigError(f"this needs {module}, which comes with the extra {extra}: `{install_command(extra)}`.")
