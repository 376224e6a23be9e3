"""Run as a script, this file is one of three ranks that vote, fail and act together."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from llmscale.engine.collectives import gather, on_all_ranks, on_main_rank, vote
from llmscale.errors import CheckpointError, ConfigError, DataError
from tests.conftest import REPOSITORY


def outcome(action: Callable[[], object]) -> object:
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail_on(rank: int, *failing: int, text: str, kind: type[Exception] = DataError) -> str:
    if rank in failing:
        raise kind(text)
    return f"fine on {rank}"


def one_rank() -> dict[str, object]:
    """What this rank sees of each question."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    seen = {
        "nobody": asdict(vote(group, stop=False)),
        "stop": asdict(vote(group, stop=rank == 2)),
        "save": asdict(vote(group, stop=False, save=rank == 0)),
        "ids": vote(group, stop=False, ids_checksum=2**63 - 1 - rank).ids_sum,
        "targets": vote(group, targets=rank + 1).targets,
        "failure": outcome(lambda: vote(group, stop=False, failure=DataError("shard 3 is gone") if rank else None)),
        "two failures": outcome(
            lambda: vote(group, stop=True, failure=DataError(f"disk {rank}") if rank < 2 else None)
        ),
        "together": outcome(lambda: on_all_ranks(group, lambda: f"fine on {rank}")),
        "one fails": outcome(lambda: on_all_ranks(group, lambda: fail_on(rank, 1, text="no such file"))),
        "type": outcome(lambda: on_all_ranks(group, fail_on, rank, 1, text="cut short", kind=CheckpointError)),
        "unforeseen": outcome(lambda: on_all_ranks(group, lambda: fail_on(rank, 1, text="no key", kind=KeyError))),
        "unforeseen vote": outcome(lambda: vote(group, failure=OSError("gone") if rank == 2 else None)),
        "unforeseen and foreseen": outcome(
            lambda: on_all_ranks(group, lambda: fail_on(rank, 0, 1, text="x", kind=KeyError if rank else DataError))
        ),
        "main": outcome(lambda: on_main_rank(group, lambda: fail_on(rank, 1, 2, text="ran where it must not"))),
        "main fails": outcome(lambda: on_main_rank(group, lambda: fail_on(rank, 0, text="busy", kind=ConfigError))),
        "main unforeseen": outcome(lambda: on_main_rank(group, lambda: fail_on(rank, 0, text="x", kind=TypeError))),
        "gather": gather(group, f"of {rank}"),
        "still in step": asdict(vote(group, stop=False)),
    }
    dist.destroy_process_group()
    return seen


def test_no_rank_ever_comes_to_another_conclusion(ranks: Callable) -> None:
    job = ranks([__file__], 3)
    outputs = job.wait()
    assert job.exit_codes == [0, 0, 0], outputs
    seen = [json.loads(output) for output in outputs]
    assert [rank.pop("together") for rank in seen] == [f"fine on {rank}" for rank in range(3)]
    # The traceback stays where it happened; the others hear of it in one line, and wait for nobody.
    message = "MachineError: unexpected KeyError: 'no key' (rank 1)"
    assert [rank.pop("unforeseen") for rank in seen] == [message, "KeyError: 'no key'", message]
    message = "MachineError: unexpected OSError: gone (rank 2)"
    assert [rank.pop("unforeseen vote") for rank in seen] == [message, message, "OSError: gone"]
    message = "DataError: x (rank 0); unexpected KeyError: 'x' (rank 1)"
    assert [rank.pop("unforeseen and foreseen") for rank in seen] == [message, "KeyError: 'x'", message]
    message = "MachineError: unexpected TypeError: x"
    assert [rank.pop("main unforeseen") for rank in seen] == ["TypeError: x", message, message]
    assert seen[0] == seen[1] == seen[2]
    calm = {"stop": False, "save": False, "rollback": False, "log": False, "ids_sum": 0, "targets": 0}
    assert seen[0] == {
        "nobody": calm,
        "stop": {**calm, "stop": True},
        "save": {**calm, "save": True},
        "targets": 6,
        "ids": sum((2**63 - 1 - rank) % 2**62 for rank in range(3)) % 2**62,
        "failure": "DataError: shard 3 is gone (rank 1, 2)",
        "two failures": "DataError: disk 0 (rank 0); disk 1 (rank 1)",
        "one fails": "DataError: no such file (rank 1)",
        "type": "CheckpointError: cut short (rank 1)",
        "main": "fine on 0",
        "main fails": "ConfigError: busy",
        "gather": ["of 0", "of 1", "of 2"],
        "still in step": calm,
    }


def test_no_other_module_speaks_to_the_ranks_by_hand() -> None:
    """Outside of llmscale/engine collectives carry measurements over the device's group; those of doctor and of the
    check of numbers are their subject."""
    package = REPOSITORY / "llmscale"
    by_hand = []
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("engine", "numerics") or path.parent.name == "doctor":
            continue
        text = path.read_text()
        if not re.search("gather_object|_object_list|barrier|all_reduce", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_object = node.func.attr.endswith(("gather_object", "_object_list")) or node.func.attr == "barrier"
                if is_object or (node.func.attr == "all_reduce" and any(word.arg == "group" for word in node.keywords)):
                    by_hand.append(f"{path}:{node.lineno}")
    assert not by_hand, "use engine/collectives.py"


if __name__ == "__main__":
    print(json.dumps(one_rank()), flush=True)
    # As train.py ends: on the interpreter's way out gloo's threads may still be at work, and abort.
    os._exit(0)
