"""Run as a script, this file is one of three ranks that vote, fail and act together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from llmscale.engine.collectives import agree, on_main_rank, together
from llmscale.errors import DataError, LlmscaleError


def outcome(action: Callable[[], object]) -> object:
    try:
        return action()
    except LlmscaleError as error:
        return f"{type(error).__name__}: {error}"


def fail_on(rank: int, *failing: int, text: str) -> str:
    if rank in failing:
        raise DataError(text)
    return f"fine on {rank}"


def one_rank() -> dict[str, object]:
    """What this rank sees of each question."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    seen = {
        "nobody": asdict(agree(group, stop=False)),
        "stop": asdict(agree(group, stop=rank == 2)),
        "save": asdict(agree(group, stop=False, save=rank == 0)),
        "ids": agree(group, stop=False, ids_checksum=2**63 - 1 - rank).ids_sum,
        "failure": outcome(lambda: agree(group, stop=False, failure="shard 3 is gone" if rank else None)),
        "two failures": outcome(lambda: agree(group, stop=True, failure=f"disk {rank}" if rank < 2 else None)),
        "together": outcome(lambda: together(group, lambda: f"fine on {rank}")),
        "one fails": outcome(lambda: together(group, lambda: fail_on(rank, 1, text="no such file"))),
        "main": outcome(lambda: on_main_rank(group, lambda: fail_on(rank, 1, 2, text="ran where it must not"))),
        "main fails": outcome(lambda: on_main_rank(group, lambda: fail_on(rank, 0, text="disk full"))),
        "still in step": asdict(agree(group, stop=False)),
    }
    dist.destroy_process_group()
    return seen


def test_no_rank_ever_comes_to_another_conclusion(ranks: Callable) -> None:
    job = ranks([__file__], 3)
    outputs = job.wait()
    assert job.exit_codes == [0, 0, 0], outputs
    seen = [json.loads(output) for output in outputs]
    assert [rank.pop("together") for rank in seen] == [f"fine on {rank}" for rank in range(3)]
    assert seen[0] == seen[1] == seen[2]
    calm = {"stop": False, "save": False, "ids_sum": 0}
    assert seen[0] == {
        "nobody": calm,
        "stop": {**calm, "stop": True},
        "save": {**calm, "save": True},
        "ids": sum((2**63 - 1 - rank) % 2**62 for rank in range(3)) % 2**62,
        "failure": "DataError: shard 3 is gone (rank 1, 2)",
        "two failures": "DataError: disk 0 (rank 0); disk 1 (rank 1)",
        "one fails": "DataError: no such file (rank 1)",
        "main": None,
        "main fails": "DataError: disk full (rank 0)",
        "still in step": calm,
    }


if __name__ == "__main__":
    print(json.dumps(one_rank()), flush=True)
    # As train.py ends: on the interpreter's way out gloo's threads may still be at work, and abort.
    os._exit(0)
