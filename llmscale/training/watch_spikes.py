"""Loss spikes: say where, keep the checkpoint before, and do what --on-spike asks for."""

from __future__ import annotations

import shlex

from llmscale.checkpoint.inventory import Checkpoint, find_checkpoints, pin_checkpoint
from llmscale.checkpoint.manifest import is_whole
from llmscale.errors import CheckpointError
from llmscale.training.live_run import LiveRun
from llmscale.training.spikes import Spike, SpikeDetector
from llmscale.training.stop_request import StopRequest

#: A spike shows in the loss of weights that the step before it made: of the batches to leave out that step's is the
#: first, and the checkpoint must be older.
STEPS_BEFORE = 1


class WatchSpikes:
    """Where a step was logged, the main rank looks at every step since the last one. What it wants of all ranks they
    agree on before the next step, in the message that they exchange anyway."""

    def __init__(self, live: LiveRun, stop: StopRequest) -> None:
        self._live, self._stop = live, stop
        self._detector = SpikeDetector()

    def look(self, step: int) -> None:
        """`step` was logged; on the main rank."""
        for recent in self._live.recent.window.steps:
            spike = self._detector.add(recent.step, recent.loss, recent.grad_norm)
            if spike is not None:
                self._tell(spike)
        wanted = self._live.spikes.go_back_from
        if wanted is not None:
            self._live.spikes.go_back_from = (wanted[0], self._detector.last_step or wanted[1])

    def _tell(self, spike: Spike) -> None:
        live, config = self._live, self._live.run.config
        live.spikes.finish_saving()
        before = checkpoint_before(live, spike.step)
        kept = "there is no checkpoint before it" if before is None else self._keep(before, spike.step)
        which = f"llmscale data which {shlex.quote(str(config.run))} --step {spike.step}"
        norm = "" if spike.grad_norm is None else f", gradient norm {spike.grad_norm:.3g}{_sigmas(spike.grad_norm_z)}"
        live.report(
            f"WARNING: step {spike.step}: the loss leaps to {spike.loss:.4f}{_sigmas(spike.loss_z)}{norm}; {kept}. Its "
            f"samples, once a checkpoint is behind it: {which}"
        )
        assert live.log is not None
        live.log.log_event(
            "loss_spike",
            step=spike.step,
            loss=spike.loss,
            loss_z=spike.loss_z,
            grad_norm=spike.grad_norm,
            grad_norm_z=spike.grad_norm_z,
            samples=[which],
            checkpoint=str(before.path) if before else None,
            on_spike=config.on_spike,
        )
        if config.on_spike == "skip":
            live.spikes.go_back_from = live.spikes.go_back_from or (spike.step, spike.step)
        elif config.on_spike == "stop":
            self._stop.received.append(f"--on-spike stop: the loss spike at step {spike.step}")
            live.report(how_to_go_back(live, before, (spike.step, spike.step)))

    def _keep(self, before: Checkpoint, step: int) -> str:
        try:
            pin_checkpoint(before.path, f"before the loss spike at step {step}")
        except (OSError, CheckpointError) as error:
            return f"the checkpoint before it, {before.path.name}, is not kept for long: {error}"
        return f"the checkpoint before it, {before.path.name}, is kept"


def checkpoint_before(live: LiveRun, step: int) -> Checkpoint | None:
    """The newest whole one of this history that has seen nothing of what led to the spike at `step`."""
    try:
        saved = find_checkpoints(live.run.config.run, live.history).current
    except CheckpointError:
        return None
    fit = (one for one in saved if one.step < step - STEPS_BEFORE and is_whole(one.path, one.manifest))
    return next(fit, None)


def steps_to_skip(live: LiveRun, spike: tuple[int, int]) -> str:
    """A:B of --skip-steps for a spike's first and newest step. A range of the same name was applied and means other
    samples by now, so this one gets a name of its own by leaving out a step more."""
    first, behind = max(1, spike[0] - STEPS_BEFORE), spike[1] + 1
    known = {skip.steps for skip in live.stream.skips}
    while f"{first}:{behind}" in known:
        behind += 1
    return f"{first}:{behind}"


def how_to_go_back(live: LiveRun, before: Checkpoint | None, spike: tuple[int, int]) -> str:
    """The flags that leave the spike's batches out, in one line."""
    skip = f"--skip-steps {steps_to_skip(live, spike)}"
    if before is None:
        return f"to go on without its batches, begin anew with the same command, another --run and {skip}"
    return f"to go on without its batches, add to the same command: --resume {shlex.quote(str(before.path))} {skip}"


def _sigmas(z: float | None) -> str:
    return "" if z is None else f" ({z:+.1f} sigma)"
