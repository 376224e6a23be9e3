"""Processes that a script starts. No torch."""

from __future__ import annotations

import subprocess


def why_it_failed(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that it said, or its status where it said nothing, as one that the kernel killed for memory."""
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"ended with status {done.returncode}"
