"""What train.py adds to its engine's step stays small: its calls and collectives are counted, not timed.

At 60 calls the own share of a step of a model of 1M parameters is about 1 % on a CPU
(scripts/bench/speed/engine_overhead.py). Run as a script, this file is train.py that counts what it does itself in a
step, as one line of JSON per step: calls of its own Python functions, without the model's, and collectives that it
starts.
"""

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
from llmscale.training.watchdog import Heartbeat
from tests.conftest import build_train_command, run_ranks

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


#: Two micro-steps, read in this process, of which each asks whether a shard's file is still the one that was checked;
#: about 20 calls find out the size of the step's batch, which may grow, and the weight of losses beside fillers; 5 ask
#: rank 0's clock for a line and whether targets are masked. A little more than it takes: whoever needs more says here
#: what for.
MOST_CALLS = 100
#: A step that is logged asks the device for the loss and the gradient norm and the GPU for its power, counts tokens,
#: writes a line and a record, and judges each of the ten steps since the last one for a spike.
MOST_CALLS_LOGGED = 280
STEPS, LOG_EVERY = 25, 10


def test_a_step_takes_few_calls_and_one_collective(tiny_set: Path, tmp_path: Path) -> None:
    flags = ("--steps", str(STEPS), "--log-every", str(LOG_EVERY), "--check-every", "0", "--save-every", "0")
    sizes = ("--micro-batch-size", "2", "--global-batch-size", "4", "--num-workers", "0", "--val-every", "0")
    command = build_train_command(tiny_set, tmp_path / "run", *flags, *sizes)
    output = run_ranks([__file__, *command[1:]], 1)
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    # The first three steps of a start are a longer story (its pace), and the last one is logged and saved.
    logged = [step for step in steps[3:-1] if step["step"] % LOG_EVERY == 0]
    others = [step for step in steps[3:-1] if step["step"] % LOG_EVERY]
    assert (len(logged), len(others)) == (2, STEPS - 6)
    assert {step["collectives"] for step in others} == {1}, "the agreement on stopping and saving"
    assert {step["collectives"] for step in logged} == {3}, "the loss, and whether steps were lost"
    assert max(step["calls"] for step in others) <= MOST_CALLS, others
    assert max(step["calls"] for step in logged) <= MOST_CALLS_LOGGED, logged
    usual = sorted(step["calls"] for step in others)[len(others) // 2]
    assert usual > MOST_CALLS / 2, "nothing was counted, or the bound can come down"


if __name__ == "__main__":
    count_collectives()
    report_steps()
    sys.exit(main(sys.argv[1:]))
