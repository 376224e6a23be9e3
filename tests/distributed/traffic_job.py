"""train.py that counts its collectives and what they carry: bytes of whole tensors in the step after the first two, as
one line of JSON per rank. The bytes of small tensors, such as norms and agreements, are left out."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from llmscale.data.loader import MicroBatch
from llmscale.train import main
from llmscale.training.live_run import StepResult
from llmscale.training.session import Session

SMALLEST = 64
#: Function of torch.distributed -> which argument is the whole tensor.
WHOLE = {
    "all_reduce": (0, "tensor"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter_tensor": (1, "input"),
    "all_to_all_single": (1, "input"),
}
carried: Counter[str] = Counter()
calls: Counter[str] = Counter()


def count(name: str, place: int, keyword: str) -> None:
    collective: Callable[..., object] = getattr(dist, name)

    def counted(*args: object, **kwargs: object) -> object:
        complete = args[place] if len(args) > place else kwargs[keyword]
        assert isinstance(complete, Tensor)
        calls[name] += 1
        if complete.numel() > SMALLEST:
            carried[name] += complete.nbytes
        return collective(*args, **kwargs)

    setattr(dist, name, counted)


def count_steps() -> None:
    train = Session.train

    def counted(session: Session, step: int, batches: list[MicroBatch]) -> StepResult:
        carried.clear()
        calls.clear()
        done = train(session, step, batches)
        if step == 2:
            print(json.dumps({"carried": carried, "calls": calls}), flush=True)
        return done

    Session.train = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    for name, (place, keyword) in WHOLE.items():
        count(name, place, keyword)
    count_steps()
    sys.exit(main(sys.argv[1:]))
