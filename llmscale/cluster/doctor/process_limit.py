"""A limit on a whole process, kept by the kernel."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def process_limit(limit_s: int) -> Iterator[None]:
    """The process dies when what is inside takes longer, even if it is stuck where no thread of Python can run."""
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
