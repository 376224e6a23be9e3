"""Train a GPT under DeepSpeed ZeRO: parse, check, build, resume, loop.

What every rank runs, under `llmscale train`, deepspeed, torchrun, `llmscale launch` or alone; --help lists its flags.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # The launcher runs this file as a script, which puts its folder first on sys.path, where `llmscale/data` and its
    # neighbours could shadow libraries. The folder above is what makes `import llmscale` work, installed or not.
    # With PYTHONSAFEPATH its folder is not there.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [str(Path(__file__).resolve().parent.parent)]

from llmscale.training.stop_request import StopRequest

if __name__ == "__main__":
    # Before the rest is imported: a rank that a signal kills leaves the others waiting.
    stop_request = StopRequest()
    stop_request.install()

from llmscale.config.arguments import parse_run_config
from llmscale.config.launcher_variables import LauncherVariables, check_meeting_point, read_launcher_variables
from llmscale.engine.device_settings import set_allocator_default
from llmscale.errors import LlmscaleError, MachineError
from llmscale.files.patient_output import make_output_patient
from llmscale.last_words import output_arrives, prepare_streams, say_error, say_unexpected
from llmscale.terminal.announcer import Announcer
from llmscale.training.changes import check_start
from llmscale.training.heartbeat import Heartbeat
from llmscale.training.memory_report import OutOfMemory, explained_out_of_memory
from llmscale.training.run_inputs import PreparedRun, prepare_run, quiet_s
from llmscale.untrusted.interpreter import protect_children
from llmscale.untrusted.terminal import print_visible


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Run; 0 when the run is finished or was asked to stop and has saved, 1 when this machine failed it (memory, a
    killed data worker, a taken port) or nobody foresaw what did, 2 for the user's mistakes. `stop` is installed;
    without one, signals act as before."""
    began = time.perf_counter()
    prepare_streams()
    protect_children()
    stop, heartbeat = stop or StopRequest(), Heartbeat(None, 0)
    here: LauncherVariables | None = None
    run_folder: Path | None = None
    try:
        here = read_launcher_variables(os.environ)
        heartbeat = Heartbeat.from_environment()
        heartbeat.install()
        stop.before_early_end.append(heartbeat.end_early)
        if not heartbeat.is_supervised:
            stop.watch_launchers()
        config = parse_run_config(sys.argv[1:] if argv is None else argv)
        run_folder = config.run
        # Not before: --help that cannot be written is an error.
        make_output_patient()
        with Announcer(is_silent=here.rank != 0, is_plain=config.plain) as announcer:
            stop.before_early_end.append(announcer.clear)
            announcer.begin("checking the configuration and the data", after_s=quiet_s(config))
            run = prepare_run(config, world_size=here.world_size)
            if finished := check_start(run):
                announcer.end()
                status = 0
                if here.rank == 0:
                    print_visible("\n".join(finished))
            else:
                check_meeting_point(here, os.environ)
                status = train(run, stop, heartbeat, began, announcer)
    except OutOfMemory as error:
        # It may have happened on this rank alone, so each speaks for itself.
        say_error(str(error))
        status = 1
    except MachineError as error:
        if here is None or here.local_rank == 0 or not error.is_on_every_rank:
            say_error(str(error))
        status = 1
    except LlmscaleError as error:
        # Ranks of one host share their files and flags, so one of them speaks for all.
        if here is None or here.local_rank == 0:
            say_error(str(error))
        status = 2
    except SystemExit as end:
        # --help; what it says may not arrive.
        heartbeat.end(1)
        if end.code or output_arrives():
            raise
        status = 1
    except BaseException as error:
        if stop.ends_early:
            stop.end_now()
        say_unexpected(error, run_folder)
        status = 1
    heartbeat.end(status)
    return status


def train(run: PreparedRun, stop: StopRequest, heartbeat: Heartbeat, began: float, announcer: Announcer) -> int:
    """Everything after the checks. `began` is when the process started, on perf_counter's clock."""
    set_allocator_default(os.environ)
    announcer.begin("importing torch and DeepSpeed")
    from llmscale.training.build_session import open_session
    from llmscale.training.go_back import go_back

    with explained_out_of_memory(run), open_session(run, stop, heartbeat, began, announcer) as session:
        is_starting = True
        while session.step < run.resolved.total_steps or (session.agree_at_the_end() and go_back(session, heartbeat)):
            step = session.step
            micro_batches = session.fetch(step)
            decision = session.agree(step)
            if decision.rollback and not decision.stop and go_back(session, heartbeat):
                continue
            if decision.stop:
                announcer.end()
                session.log_last()
            if decision.save:
                session.save()
            if decision.stop:
                stop.leave_start_up()
                heartbeat.beat("stopped", step)
                break
            done = session.train(step, micro_batches)
            if is_starting:
                announcer.end()
                stop.leave_start_up()
                is_starting = False
            session.after(done)
            heartbeat.beat("training", session.step)
            del done, micro_batches  # not kept while the next are fetched
        # Of a run that had nothing left to do, the start ends here.
        announcer.end()
        session.finish()
    return 0


if __name__ == "__main__":
    exit_code = main(stop=stop_request)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: after an error gloo's threads still wait for their peers, and the interpreter's way out would now
    # and then abort with SIGABRT instead of the exit code. Everything that must be on disk is there by now.
    os._exit(exit_code)
