"""Rank script of test_own_engine.py: engines around a module of one's own, right ones and wrong ones, are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from llmscale import api
from llmscale.engine.deepspeed_engine import release_engine
from llmscale.engine.process_group import World
from llmscale.engine.zero_layout import inner_optimizer
from tests.own_module import build, train
from tests.rank_end import answer_cells


def plant(engine: Any, fault: str) -> None:
    """Let the engine's optimizer step wrongly."""
    inner = inner_optimizer(engine)
    step = inner.step

    def with_larger_gradients(*args: object, **kwargs: object) -> object:
        if dist.get_rank() == 1:
            for group in inner.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(1.01)
        return step(*args, **kwargs)

    def with_a_lower_rate(*args: object, **kwargs: object) -> object:
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] *= 0.99
        result = step(*args, **kwargs)
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
        return result

    def with_lost_moments(*args: object, **kwargs: object) -> object:
        result = step(*args, **kwargs)
        for state in inner.state.values():
            state["exp_avg"].zero_()
        return result

    faults = {"gradients": with_larger_gradients, "rate": with_a_lower_rate, "moments": with_lost_moments}
    inner.step = faults[fault]


@contextlib.contextmanager
def lost_reduction(fault: str | None) -> Iterator[None]:
    """Let rank 1's gradients count twice in every reduction of stages 1 and 2."""
    if fault != "reduction":
        yield
        return
    reduce = dist.all_reduce

    def doubled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        if dist.get_rank() == 1 and tensor.numel() > 100:
            tensor.mul_(2)
        return reduce(tensor, *args, **kwargs)

    with mock.patch("deepspeed.comm.all_reduce", doubled):
        yield


def check(engine: dict[str, Any], fault: str | None = None, *, as_deepspeed_does: bool = False) -> dict[str, object]:
    """Check two steps of an engine, and take a third."""
    made = build_by_deepspeed(engine) if as_deepspeed_does else build(**engine)
    if fault not in (None, "reduction"):
        plant(made, str(fault))
    steps = iter(range(9))

    def take_step() -> list[float]:
        step = next(steps)
        return train(made, step, step + 1)

    with lost_reduction(fault):
        checked = api.check_numerics(made, take_step)
    after = take_step()
    release_engine(made)
    wrong = checked.wrong
    return {
        "said": str(checked),
        "links": sorted({finding.link for finding in checked.findings}),
        "comparisons": len(checked.findings),
        "unwatched": checked.unwatched,
        "wrong": wrong and [wrong.step, wrong.link, wrong.name, wrong.rank],
        "after": after,
    }


def plain(engine: dict[str, Any]) -> dict[str, object]:
    """The third step of an engine that nobody watches."""
    made = build(**engine)
    after = train(made, 0, 3)[2:]
    release_engine(made)
    return {"after": after}


def build_by_deepspeed(engine: dict[str, Any]) -> Any:
    """Build an engine with the step that DeepSpeed takes meanwhile."""

    def initialize(**arguments: Any) -> Any:
        return deepspeed.initialize(**arguments, dist_init_required=False)

    with mock.patch.object(api, "initialize", initialize, create=True):
        return build(**engine)


def answer(cell: dict[str, Any], _: World) -> dict[str, object]:
    arguments = {key: value for key, value in cell.items() if key != "do"}
    return dict(globals()[cell["do"]](**arguments))


if __name__ == "__main__":
    answer_cells(answer)
