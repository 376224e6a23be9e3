"""--on-spike skip: go back to the checkpoint before a spike, within the same processes, and leave its batches out.

Everything that a start with `--resume CHECKPOINT --skip-steps A:B` would do happens, with the same code: the checkpoint
is verified, a new history begins, the stream of samples is built anew. Only the process group and the engine stay.
"""

from __future__ import annotations

import time
from dataclasses import replace

from llmscale.checkpoint.inventory import Checkpoint
from llmscale.engine.collectives import gather, on_main_rank
from llmscale.errors import CheckpointError
from llmscale.training.actions.save_checkpoints import SaveCheckpoints
from llmscale.training.build_session import choose_checkpoint, open_data
from llmscale.training.fill_engine import fill_from
from llmscale.training.heartbeat import Heartbeat
from llmscale.training.recent_steps import RecentSteps
from llmscale.training.resume import enter_history
from llmscale.training.run_data import build_stream
from llmscale.training.session import Session
from llmscale.training.step_actions import build_actions
from llmscale.training.watch_spikes import checkpoint_before, how_to_go_back, steps_to_skip

#: Times in one start. Whoever needs more has another problem than a batch.
_MOST_TIMES = 5


def go_back(session: Session, heartbeat: Heartbeat) -> bool:
    """Whether the session is at an earlier step now; if not, the main rank asks to stop, and says how to go on by hand.
    It counts as a start, for the supervisor too. Collective. Raises LlmscaleError as a start would."""
    heartbeat.beat("starting")
    with session.live.meter.pause("starting"):
        has_gone_back = _go_back(session)
    heartbeat.beat("starting")
    return has_gone_back


def _go_back(session: Session) -> bool:
    began, live = time.perf_counter(), session.live
    control, report = live.world.control, live.report
    spike = next(wanted for wanted in gather(control, live.spikes.go_back_from) if wanted is not None)
    live.spikes.go_back_from = None
    live.spikes.finish_saving()
    before = on_main_rank(control, lambda: checkpoint_before(live, spike[0]))
    problem = "there is no checkpoint before it" if before is None else None
    if live.spikes.times_gone_back >= _MOST_TIMES:
        problem = f"the run has gone back {_MOST_TIMES} times already"
    if before is None or problem is not None:
        return _stop(session, before, spike, str(problem))
    left = steps_to_skip(live, spike)
    skips = [*live.run.config.skip_steps, left]
    run = replace(live.run, config=live.run.config.model_copy(update={"skip_steps": skips}))
    report(f"going back from step {session.step} to {before.path.name}; the batches of steps {left} are left out")
    wanted = run.config.model_copy(update={"resume": str(before.path), "init_from": None})
    try:
        point = choose_checkpoint(replace(run, config=wanted, weights=None), live.world, report)
    except CheckpointError as error:
        return _stop(session, before, spike, str(error))
    assert point is not None
    live.feed.close()
    stream = build_stream(run, point.state)
    feed, validation = open_data(run, live.world, stream, point.state)
    fill_from(live.engine, point, live.world, live.configured_scaler)
    live.engine.skipped_steps = 0
    history = enter_history(run.config.run, point, control, report)
    if live.log:
        live.log.log_event("go_back", step=session.step, to_step=point.state.step, spike=spike[0], skip_steps=left)
        live.log.go_back(point.state.step)
    live.spikes.times_gone_back += 1
    again = replace(
        live,
        run=run,
        stream=stream,
        feed=feed,
        validation=validation,
        state=point.state,
        history=history,
        startup_s={"going back": time.perf_counter() - began},
        recent=RecentSteps(live.world),
    )
    actions = build_actions(again, session.stop)
    session.continue_with(again, actions, SaveCheckpoints(again, actions))
    return True


def _stop(session: Session, before: Checkpoint | None, spike: tuple[int, int], problem: str) -> bool:
    if session.live.world.is_main:
        session.stop.received.append(f"--on-spike skip, which cannot go back from step {spike[0]}: {problem}")
        session.live.report(how_to_go_back(session.live, before, spike))
    return False
