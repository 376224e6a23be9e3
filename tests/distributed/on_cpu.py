"""Rank script: run an example that uses accelerate's DeepSpeed on a CPU, for which accelerate has no backend.

usage: on_cpu.py EXAMPLE KILL_AFTER [ARGUMENT...]

The process is killed after KILL_AFTER backward passes; 0: never.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

from llmscale.engine.process_group import join_world
from tests.rank_end import end_rank


def main(example: str, kill_after: int, arguments: list[str]) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    join_world()
    import deepspeed
    from accelerate import state

    deepspeed.init_distributed = functools.partial(deepspeed.init_distributed, dist_init_required=False)
    state.PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", state.DistributedType.MULTI_GPU)
    engine = deepspeed.DeepSpeedEngine
    engine.backward = count(engine.backward, kill_after)
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")
    end_rank()


def count(backward: Callable[..., Any], kill_after: int) -> Callable[..., Any]:
    """Return `backward` that kills the process after some calls."""
    calls = [0]

    @functools.wraps(backward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        calls[0] += 1
        if calls[0] == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return counted


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
