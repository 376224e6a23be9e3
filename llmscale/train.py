"""Train a GPT under DeepSpeed ZeRO: parse, check, build, resume, loop.

deepspeed llmscale/train.py --ds ds_configs/zero2.json [--num_gpus is the launcher's; --help lists ours]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # The launcher runs this file as a script, which puts its folder first on sys.path, where `llmscale/data` and its
    # neighbours could shadow libraries. The folder above is what makes `import llmscale` work, installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from llmscale.config.parse import parse_run_config
from llmscale.errors import LlmscaleError
from llmscale.training.memory_report import OutOfMemory, explained_out_of_memory
from llmscale.training.prepared_run import PreparedRun, prepare_run
from llmscale.training.stop_request import StopRequest
from llmscale.training.watch import Watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when the run is finished or was asked to stop and has saved, 1 when a rank ran out of memory, 2 for the
    user's mistakes."""
    began = time.perf_counter()
    stop, watch = StopRequest(), Watch.from_environment()
    stop.install()
    watch.install()
    try:
        config = parse_run_config(sys.argv[1:] if argv is None else argv)
        run = prepare_run(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        status = train(run, stop, watch, began)
    except OutOfMemory as error:
        # It may have happened on this rank alone, so each speaks for itself.
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    except LlmscaleError as error:
        # Ranks of one host share their files and flags, so one of them speaks for all.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    except BaseException:
        # Said before the traceback: a rank without a last word was killed.
        watch.end(1)
        raise
    watch.end(status)
    return status


def train(run: PreparedRun, stop: StopRequest, watch: Watch, began: float) -> int:
    """Everything after the checks. `began` is when the process started, on perf_counter's clock."""
    from llmscale.training.open_session import open_session

    with explained_out_of_memory(run), open_session(run, stop, began) as session:
        for step in range(session.first_step, run.resolved.total_steps):
            micro_batches = session.fetch(step)
            verdict = session.agree(step)
            if verdict.save:
                session.save()
            if verdict.stop:
                watch.beat("stopped", step)
                break
            session.train(step, micro_batches)
            session.after()
            watch.beat("training", session.step)
        session.finish()
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error gloo's threads still wait for their peers, and the interpreter's way out would now
    # and then abort with SIGABRT instead of the exit code. Everything that must be on disk is there by now.
    os._exit(exit_code)
