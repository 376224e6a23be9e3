"""train.py that counts what it does itself in a step, as one line of JSON per step: calls of its own Python functions,
without the model's, and collectives that it starts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch.distributed as dist

import llmscale
from llmscale.train import main
from llmscale.training.stop_request import Heartbeat

PACKAGE = str(Path(llmscale.__file__).parent) + "/"
MODEL = (PACKAGE + "model/", PACKAGE + "architecture/")
counts: Counter[str] = Counter()


def is_own(frame: FrameType | None) -> bool:
    """Comprehensions and generators are left out, which are frames in some versions of Python and not in others."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name[0] != "<"


def profile(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and is_own(frame) and not frame.f_code.co_filename.startswith(MODEL):
        counts["calls"] += 1


def count_collectives() -> None:
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"):
        collective: Callable[..., object] = getattr(dist, name)

        def counted(*args: object, collective: Callable[..., object] = collective, **kwargs: object) -> object:
            counts["collectives"] += is_own(sys._getframe(1))
            return collective(*args, **kwargs)

        setattr(dist, name, counted)


def report_steps() -> None:
    """The heartbeat is the last thing that a step does."""
    beat = Heartbeat.beat

    def beat_and_report(heartbeat: Heartbeat, phase: str, step: int | None = None) -> None:
        beat(heartbeat, phase, step)
        sys.setprofile(None)
        if phase == "training":
            print(json.dumps({"step": step, **counts}), flush=True)
        counts.clear()
        sys.setprofile(profile)

    Heartbeat.beat = beat_and_report  # type: ignore[method-assign]


if __name__ == "__main__":
    count_collectives()
    report_steps()
    sys.exit(main(sys.argv[1:]))
