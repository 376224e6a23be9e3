"""--record-samples: write down which samples each step was made of."""

from __future__ import annotations

from llmscale.data.sample_log import SampleRecorder, begin_session
from llmscale.engine.collectives import on_all_ranks, on_main_rank
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun


class RecordSamples(StepAction):
    """This rank's part of the record. A start without the flag only notes in an earlier record that it began."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._records = live.run.config.record_samples
        self._recorder: SampleRecorder | None = None

    def begin(self, step: int) -> None:
        self.close()
        live, world = self._live, self._live.world
        folder, history = live.run.config.run, live.history.as_dict()
        # One session number for all ranks.
        number = on_main_rank(world.control, lambda: begin_session(folder, step, history, records=self._records))
        place = {"session": number, "rank": world.rank, "world_size": world.world_size, "start_step": step}
        if self._records:
            self._recorder = on_all_ranks(
                world.control, lambda: SampleRecorder(folder, **place, check=live.claim.check)
            )

    def due(self, step: int) -> bool:
        return self._records

    def act(self, done: DoneStep) -> None:
        assert self._recorder is not None
        for batch in done.micro_batches:
            self._recorder.add(batch.sample_ids.numpy())
        self._recorder.end_step(done.step - 1)

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()
