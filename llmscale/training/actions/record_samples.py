"""--record-samples: write down which samples each step was made of."""

from __future__ import annotations

from llmscale.data.sample_log import SampleRecorder, next_session
from llmscale.engine.collectives import on_main_rank, together
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun


class RecordSamples(StepAction):
    """This rank's part of the record."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._recorder: SampleRecorder | None = None

    def begin(self, step: int) -> None:
        self.close()
        self._recorder = self._open(step)

    def _open(self, first_step: int) -> SampleRecorder:
        """One session number for all ranks, chosen by the main rank."""
        folder, world = self._live.run.config.run, self._live.world
        number = on_main_rank(world.control, lambda: next_session(folder))
        place = {"session": number, "rank": world.rank, "world_size": world.world_size, "start_step": first_step}
        return together(world.control, lambda: SampleRecorder(folder, **place, check=self._live.claim.check))

    def due(self, step: int) -> bool:
        return True

    def act(self, done: DoneStep) -> None:
        assert self._recorder is not None
        for batch in done.micro_batches:
            self._recorder.add(batch.sample_ids.numpy())
        self._recorder.end_step(done.step - 1)

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()
