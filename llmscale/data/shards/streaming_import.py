"""Import the parts of MosaicML Streaming that llmscale uses; no other module imports it.

`import streaming` runs `streaming/__init__.py`, which pulls in `streaming.vision` (torchvision: fails to import beside
a CPU build of torch), `streaming.text` (transformers) and the dataset and loader classes: 1.5 to 6 s. llmscale needs
what decodes and unpacks other programs' shards. These are submodules of `streaming.base` that import none of that (0.1
s). So both packages are entered without running their `__init__`: placeholder modules with the right `__path__` replace
them while the submodules load. A later `import streaming` runs the real `__init__` and finds these submodules loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from llmscale.config.bundled_files import install_command
from llmscale.errors import DataError

_PACKAGES = ("streaming", "streaming.base")


@functools.cache
def streaming_module(name: str) -> ModuleType:
    """Return the module `streaming.base.<name>`, imported without its packages' `__init__`.

    Raises DataError when mosaicml-streaming is not installed.
    """
    with _bare_packages():
        # Its modules import each other in a circle, which works only when entered here.
        importlib.import_module("streaming.base.format")
        return importlib.import_module(f"streaming.base.{name}")


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Provide `streaming` and `streaming.base` as packages whose `__init__` has not run."""
    placed = []
    try:
        path = None
        for name in _PACKAGES:
            if name in sys.modules:
                path = list(sys.modules[name].__path__)
                continue
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is None or spec.submodule_search_locations is None:
                raise DataError(
                    "mosaicml-streaming is not installed, and only it reads these shards. "
                    f"Install it with `{install_command('train,data')}`."
                )
            sys.modules[name] = importlib.util.module_from_spec(spec)
            placed.append(name)
            path = list(spec.submodule_search_locations)
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)
