"""Functions of a user's own file, as FILE:FUNCTION names them on the command line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean


def load_function(flag: str, place: str) -> Callable[..., Any]:
    """Run the file of `place`, FILE.py:FUNCTION, and return its function. Raises ConfigError.

    Modules beside the file can be imported by it, as in `python FILE.py`.
    """
    name, _, function = place.rpartition(":")
    path = Path(name)
    if path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(f"{flag} {place}: must be a file and a function in it, such as my_model.py:build.")
    if not path.is_file():
        raise ConfigError(f"{flag} {place}: the file {path} does not exist.")
    module = sys.modules.get(_module_name(path)) or _run(flag, path)
    named = getattr(module, function, None)
    if not callable(named):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(f"{flag} {place}: {path.name} has no function {function!r}.{did_you_mean(function, names)}")
    return named


def call(flag: str, place: str, function: Callable[..., Any]) -> Any:
    """Return what a user's function returns. Raises ConfigError for what it raises."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _described(f"{flag} {place}", error) from error


def _module_name(path: Path) -> str:
    return f"_own_code_{path.resolve()}"


def _run(flag: str, path: Path) -> object:
    """Import a file once, however many of its functions are asked for."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {path}: Python cannot import it.")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _described(f"{flag} {path}", error) from error
    return module


def _described(what: str, error: BaseException) -> ConfigError:
    message = " ".join(str(error).split())[:300]
    return ConfigError(f"{what} raised {type(error).__name__}: {message or 'no message'}")
