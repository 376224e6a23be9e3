"""What a command does without that answers at once."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def quick_answer() -> Iterator[None]:
    """No garbage collector: what a prediction makes, it keeps until it ends, and nobody looks through it then. No
    plugins of pydantic, which would read the entry points of every installed package."""
    was_enabled, plugins = gc.isenabled(), os.environ.get(_PLUGINS)
    gc.disable()
    os.environ.setdefault(_PLUGINS, "__all__")
    try:
        yield
    finally:
        # Or the first collection, that of the process's end at the latest, would go through all of it.
        gc.freeze()
        if was_enabled:
            gc.enable()
        if plugins is None:
            del os.environ[_PLUGINS]
