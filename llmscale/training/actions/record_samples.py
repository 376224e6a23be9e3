"""--record-samples: write down which samples each step was made of."""

from __future__ import annotations

from llmscale.data.sample_log import FOLDER, SampleRecorder, begin_session
from llmscale.engine.collectives import on_main_rank, together
from llmscale.errors import ConfigError
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.untrusted.terminal import print_visible


class RecordSamples(StepAction):
    """This rank's part of the record. A start without the flag only notes in an earlier record that it began."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._records = live.run.config.record_samples
        self._recorder: SampleRecorder | None = None

    def begin(self, step: int) -> None:
        self.close()
        number = on_main_rank(self._live.world.control, lambda: self._begin_session(step))
        if self._records:
            self._recorder = self._open(number, step)

    def _begin_session(self, step: int) -> int:
        """Return one session number for all ranks."""
        folder, history = self._live.run.config.run, self._live.history.as_dict()
        if not self._records and not (folder / FOLDER).is_dir():
            return 0
        try:
            return begin_session(folder, step, history, records=self._records)
        except ConfigError as error:
            if self._records:
                raise
            print_visible(f"WARNING: {error}")
            return 0

    def _open(self, number: int, first_step: int) -> SampleRecorder:
        folder, world = self._live.run.config.run, self._live.world
        place = {"session": number, "rank": world.rank, "world_size": world.world_size, "start_step": first_step}
        return together(world.control, lambda: SampleRecorder(folder, **place, check=self._live.claim.check))

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
