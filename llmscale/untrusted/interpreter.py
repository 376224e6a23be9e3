"""Start Python so that it imports nothing from the working folder, which may hold untrusted files.

`-m` and `-c` put the working folder first on the search path, and so do the children of multiprocessing: a `socket.py`
in a folder of crawled text would run in every worker. Python 3.11 has PYTHONSAFEPATH, which children inherit; before
3.11, code given to `-c` removes the folder from the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_SAFE_PATH = "PYTHONSAFEPATH"
#: Removes the working folder from the path of this process and its children. Python has loaded `os` and `sys` by then.
_PROTECT = f"import os, sys; sys.path[:1] = filter(None, sys.path[:1]); os.environ['{_SAFE_PATH}'] = '1'; "
#: Runs the module that the first argument names, as `-m` does.
RUN_MODULE = _PROTECT + "del sys.argv[0]; import runpy; runpy._run_module_as_main(sys.argv[0])"
#: Runs the code after the next `-c`.
_RUN_CODE = _PROTECT + "del sys.argv[1]; exec(sys.argv.pop(1))"


def protect_children() -> None:
    """Keep the working folder off the search path of every child that this process starts, and of theirs.

    Empty entries of PYTHONPATH, left by `export PYTHONPATH=$PYTHONPATH:/x`, mean that folder too. Idempotent.
    """
    os.environ[_SAFE_PATH] = "1"
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = drop_empty(os.environ["PYTHONPATH"])
    if sys.version_info < (3, 11):
        from multiprocessing import util  # needed before Python 3.11 only

        # multiprocessing appends `-c CODE` to these.
        flags = [*subprocess._args_from_interpreter_flags(), "-c", _RUN_CODE]  # type: ignore[attr-defined]
        util._args_from_interpreter_flags = lambda: flags  # type: ignore[attr-defined]


def drop_empty(search_path: str) -> str:
    """Return a PYTHONPATH without its empty entries."""
    return os.pathsep.join(filter(None, search_path.split(os.pathsep)))


def module_command(module: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of `python -m module arguments` without the working folder on its search path."""
    return [sys.executable, *flags, "-c", RUN_MODULE, module, *arguments]


def code_command(code: str) -> list[str]:
    """Return the command line of `python -c code` without the working folder on its search path."""
    return [sys.executable, "-c", f"{_PROTECT}\n{code}"]
