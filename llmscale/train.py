"""Train a GPT under DeepSpeed ZeRO: parse, check, build, resume, loop.

Every rank runs this file, started by `llmscale train`, deepspeed, torchrun, `llmscale launch` or directly; --help lists
its flags.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # A launcher runs this file as a script, which puts its folder first on sys.path, where `llmscale/data` and its
    # neighbours could shadow libraries. The folder above is needed for `import llmscale`, installed or not.
    # PYTHONSAFEPATH leaves the script's folder out.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [str(Path(__file__).resolve().parent.parent)]

from llmscale.training.stop_request import LAUNCHER_VARIABLE, StopRequest

if __name__ == "__main__":
    # Before the other imports: a rank killed by a signal leaves the others waiting.
    stop_request = StopRequest()
    stop_request.install()

from llmscale.config.bundled_files import explain_missing
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.engine.device_settings import set_allocator_default
from llmscale.engine.launcher_variables import LauncherVariables, check_meeting_point, read_launcher_variables
from llmscale.engine.network import check_interfaces
from llmscale.error_handling import flush_stdout, make_output_resilient, prepare_streams, print_error, report_crash
from llmscale.errors import LlmscaleError, MachineError, UnreachableError
from llmscale.terminal.status_line import StatusLine
from llmscale.training.inputs import announce_after_s, with_prepared_text
from llmscale.training.start import Start, check_space, explained_out_of_memory, lines_at_end, prepare_start
from llmscale.training.stop_request import explain_lost_peer
from llmscale.training.watchdog import Heartbeat, watch
from llmscale.untrusted.interpreter import protect_children
from llmscale.untrusted.terminal import print_visible


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Run training, and return the exit status.

    0: the run is finished, or was asked to stop and has saved. 1: this machine failed it (memory, a killed data worker,
    an occupied port), a store failed it for the moment, or something unexpected did. 2: a mistake of the user. 75: it
    has saved, because another node leaves, and torchrun is to start it again. 76: it hung. `stop` is installed already;
    without one, signals act as before.
    """
    began = time.perf_counter()
    prepare_streams()
    protect_children()
    stop = stop or StopRequest()
    heartbeat = Heartbeat(None, 0)
    here: LauncherVariables | None = None
    config: RunConfig | None = None
    failure: str | None = None
    try:
        here = read_launcher_variables(os.environ)
        heartbeat = Heartbeat.from_environment()
        heartbeat.install()
        stop.before_early_end.append(heartbeat.end_early)
        if not heartbeat.is_supervised:
            stop.watch_launchers()
        config = parse_run_config(sys.argv[1:] if argv is None else argv)
        stop.before_early_end.append(partial(_notify, config, here, heartbeat, 0))
        # After parsing: --help that cannot be written is an error.
        make_output_resilient()
        status = _check_and_train(config, here, stop, heartbeat, began)
    except SystemExit as end:
        # --help; its output may fail.
        heartbeat.end(1)
        if end.code or flush_stdout():
            raise
        status = 1
    except BaseException as error:
        failure = str(error) or type(error).__name__
        heartbeat.fail(failure)
        status = _report_failure(error, here, config.run if config else None, stop)
    if config and here:
        _notify(config, here, heartbeat, status, failure)
    heartbeat.end(status)
    return status


def _notify(
    config: RunConfig, here: LauncherVariables, heartbeat: Heartbeat, status: int, failure: str | None = None
) -> None:
    """Run --notify on rank 0, unless what started this rank does: `llmscale train` or `llmscale launch`."""
    if config.notify and here.rank == 0 and not heartbeat.is_supervised and LAUNCHER_VARIABLE not in os.environ:
        from llmscale.report.run_list import notify_of_end

        notify_of_end(config, status, failure)


def _check_and_train(
    config: RunConfig, here: LauncherVariables, stop: StopRequest, heartbeat: Heartbeat, began: float
) -> int:
    """Check the run, and train unless it is finished already. Collective."""
    run = with_prepared_text(config)
    config = run.config
    watch(heartbeat, config, here.rank, partial(_notify, config, here, heartbeat))
    with StatusLine(is_silent=here.rank != 0, is_plain=config.plain) as announcer:
        stop.before_early_end.append(announcer.clear)
        announcer.begin("checking the configuration and the data", after_s=announce_after_s(config))
        start = prepare_start(run, here.world_size)
        if finished := lines_at_end(start):
            announcer.end()
            if here.rank == 0:
                print_visible("\n".join(finished))
            return 0
        check_space(start)
        check_meeting_point(here, os.environ)
        check_interfaces(os.environ)
        return train(start, stop, heartbeat, began, announcer)


def _report_failure(
    error: BaseException, here: LauncherVariables | None, run_folder: Path | None, stop: StopRequest
) -> int:
    """Print the error on the ranks that report it, and return the exit status."""
    # Ranks of one host share files and flags, so one of them reports; a store may have failed any of them alone.
    reports = here is None or here.local_rank == 0
    if not stop.ends_early and not isinstance(error, LlmscaleError):
        error = explain_lost_peer(error) or error
    error = explain_missing(error, "train") or error
    if isinstance(error, LlmscaleError):
        if reports or (isinstance(error, (MachineError, UnreachableError)) and not error.is_on_every_rank):
            print_error(str(error))
        return 1 if error.is_transient else 2
    if stop.ends_early:
        stop.end_now()
    report_crash(error, run_folder)
    return 1


def train(start: Start, stop: StopRequest, heartbeat: Heartbeat, began: float, announcer: StatusLine) -> int:
    """Train a run that passed the checks. `began` is the start of the process on perf_counter's clock."""
    set_allocator_default(os.environ)
    announcer.begin("importing torch and DeepSpeed")
    from llmscale.training.open_session import open_session
    from llmscale.training.session import roll_back

    with explained_out_of_memory(start), open_session(start, stop, heartbeat, began, announcer) as session:
        is_starting = True
        while session.step < session.run.resolved.total_steps or (
            session.rolls_back_at_end() and roll_back(session, heartbeat)
        ):
            step = session.step
            micro_batches = session.fetch(step)
            decision = session.decide(step)
            if decision.rollback and not decision.stop and roll_back(session, heartbeat):
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
            result = session.train(step, micro_batches)
            if is_starting:
                # At once: from here on there is something to save.
                stop.leave_start_up()
                announcer.end()
                is_starting = False
            session.run_actions(result)
            heartbeat.beat("training", session.step)
            del result, micro_batches  # frees them before the next fetch
        # A run without steps left ends its start here.
        announcer.end()
        return session.finish()


if __name__ == "__main__":
    exit_code = main(stop=stop_request)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: after an error gloo's threads still wait for their peers, and the interpreter's shutdown would
    # sometimes abort with SIGABRT instead of the exit code. Everything that must be on disk is there.
    os._exit(exit_code)
