"""The one place that imports MosaicML Streaming, and only the parts of it that llmscale uses.

`import streaming` runs `streaming/__init__.py`, which pulls in `streaming.vision` (torchvision: fails to
import beside a CPU build of torch), `streaming.text` (transformers) and the dataset and loader classes: 1.5
to 6 s. llmscale needs the shard writer, the shard readers, the transport and the hashes, which live in
submodules of `streaming.base` that import none of that (0.1 s beside torch). So the two packages are entered
without running their `__init__`: placeholder modules with the right `__path__` stand in while the submodules
load, and are taken away again afterwards. A later `import streaming` by anybody else therefore runs the real
thing and finds these very submodules already loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from llmscale.config.bundled_files import install_command
from llmscale.errors import DataError

_PACKAGES = ("streaming", "streaming.base")


def set_local_world_size() -> None:
    """Give Streaming the number of ranks on this node under the name that it reads.

    DeepSpeed's launcher exports LOCAL_SIZE, Streaming reads LOCAL_WORLD_SIZE and takes 1 when it is missing,
    which makes every rank a local leader.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ and "LOCAL_SIZE" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"]


@functools.cache
def streaming_module(name: str) -> ModuleType:
    """The module `streaming.base.<name>`, imported without its packages' `__init__`.

    Raises DataError when mosaicml-streaming is not installed.
    """
    set_local_world_size()
    with _bare_packages():
        # Its modules import each other in a circle, which only closes when it is entered here.
        importlib.import_module("streaming.base.format")
        return importlib.import_module(f"streaming.base.{name}")


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Within the block `streaming` and `streaming.base` are packages whose `__init__` has not been run."""
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
                    "mosaicml-streaming is not installed, and the data shards are its format. "
                    f"Install it with `{install_command('train,data')}`."
                )
            sys.modules[name] = importlib.util.module_from_spec(spec)
            placed.append(name)
            path = list(spec.submodule_search_locations)
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)
