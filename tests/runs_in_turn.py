"""Several runs of train.py in the same ranks, one after the other: starting a rank takes longer than a tiny run.

For tests of what runs compute. The process group stays, and so does whatever DeepSpeed keeps in a process, so what is
about a start itself starts its own ranks. Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from tests.conftest import TRAIN, run_ranks

#: Between the outputs of two runs.
_END = "-- end of the run --\n"


def train_in_turn(commands: Sequence[Sequence[str]], world_size: int, traces_only: bool = False) -> list[str]:
    """Run commands of `build_train_command`, each of which must succeed; rank 0's output of each.

    With `traces_only`, blocks of `--compile on` become graphs but not kernels, which take minutes to generate.
    """
    flags = [command[1:] for command in commands if command[0] == str(TRAIN)]
    assert len(flags) == len(commands)
    return run_ranks([__file__, json.dumps(flags), json.dumps(traces_only)], world_size).split(_END)[:-1]


def main(commands: Sequence[Sequence[str]], traces_only: bool) -> None:
    from llmscale import train
    from llmscale.engine.compilation import BlockCompiler
    from llmscale.engine.process_group import join_world
    from llmscale.training import open_session, session
    from tests.rank_end import end_rank

    world = join_world()
    open_session.join_world = lambda: world
    session.leave_world = lambda: None
    if traces_only:
        open_session.BlockCompiler = lambda _, mode: BlockCompiler("aot_eager", mode)
    # The port at which they met is theirs.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for command in commands:
        status = train.main(command)
        if status:
            os._exit(status)
        print(_END, end="", flush=True)
    end_rank()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
