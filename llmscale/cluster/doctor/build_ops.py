"""DeepSpeed's compiled ops: which of them a ds_config needs, and building them on this host, once:
`python -m llmscale.cluster.doctor.build_ops pin_memory async_io`. No torch before they are built.

First removes the locks that it is told are left from dead builds: torch waits for them for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence

from llmscale.cluster.doctor.process_limit import process_limit
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.engine.silence_libraries import quiet_libraries

#: llmscale trains with torch's own AdamW. `async_io` reads and writes NVMe files, and loads `pin_memory` itself.
NVME_OPS = ("pin_memory", "async_io")
_BUILDERS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}


def needed_ops(ds: DsConfig) -> tuple[str, ...]:
    """Names of the ops, in the order they are built. Without NVMe offload there are none."""
    return NVME_OPS if "nvme" in (ds.offload_optimizer_device, ds.offload_param_device) else ()


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
    with process_limit(args.timeout_s):
        for path in args.remove_lock:
            with contextlib.suppress(FileNotFoundError):  # another host that shares the cache was faster
                os.remove(path)
        return _build_and_say(args.ops) if args.ops else 0


def _build_and_say(ops: Sequence[str]) -> int:
    began = time.perf_counter()
    try:
        build(ops)
    except Exception as error:  # a compiler's, a linker's or DeepSpeed's own
        words = str(error).strip().splitlines() or [type(error).__name__]
        print(words[-1], file=sys.stderr)
        return 1
    print(f"{', '.join(ops)} built in {time.perf_counter() - began:.0f} s")
    return 0


def build(names: Sequence[str]) -> None:
    """Compile and load each op. Raises what DeepSpeed's builders raise."""
    quiet_libraries()
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in names:
        getattr(builders, _BUILDERS[name])().load(verbose=False)


if __name__ == "__main__":
    sys.exit(main())
