"""Build DeepSpeed's ops on this host, once: `python -m llmscale.cluster.doctor.build_ops pin_memory async_io`.

First removes the locks that it is told are left from dead builds: torch waits for them for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from llmscale.cluster.doctor.ops import NVME_OPS
from llmscale.engine.silence_libraries import quiet_libraries

_BUILDERS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was done in one line each; 1 when an op cannot be built here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(NVME_OPS))
    parser.add_argument("--remove-lock", action="append", default=[], metavar="PATH")
    parser.add_argument("--timeout-s", type=int, default=900)
    args = parser.parse_args(argv)
    for op in args.ops:
        if op not in NVME_OPS:
            parser.error(f"{op} is not one of {', '.join(NVME_OPS)}")
    signal.alarm(args.timeout_s)
    for path in args.remove_lock:
        with contextlib.suppress(FileNotFoundError):  # another host that shares the cache was faster
            os.remove(path)
    if not args.ops:
        return 0
    began = time.perf_counter()
    try:
        build(args.ops)
    except Exception as error:  # a compiler's, a linker's or DeepSpeed's own
        words = str(error).strip().splitlines() or [type(error).__name__]
        print(words[-1], file=sys.stderr)
        return 1
    print(f"{', '.join(args.ops)} built in {time.perf_counter() - began:.0f} s")
    return 0


def build(names: Sequence[str]) -> None:
    """Compile and load each op. Raises what DeepSpeed's builders raise."""
    quiet_libraries()
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in names:
        getattr(builders, _BUILDERS[name])().load(verbose=False)


if __name__ == "__main__":
    sys.exit(main())
