"""The `llmscale` command, installed or as `python -m llmscale`."""

from __future__ import annotations

import os.path
import signal
import sys


def run() -> int:
    """Run the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until run_cli answers it, Ctrl-C would print a traceback of our imports.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llmscale.cli.main import main

    return main()


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # `-m` has put the working folder first, where any file could take the place of a library.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.exit(run())
