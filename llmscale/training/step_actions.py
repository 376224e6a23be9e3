"""What happens at steps besides training: one list. Something new is a file in actions/ and a line here."""

from __future__ import annotations

from llmscale.training.actions.action import StepAction
from llmscale.training.actions.evaluate_tasks import EvaluateTasks
from llmscale.training.actions.log_steps import LogSteps
from llmscale.training.actions.nonfinite_guard import EndWhenLost
from llmscale.training.actions.profile_steps import ProfileSteps
from llmscale.training.actions.record_samples import RecordSamples
from llmscale.training.actions.report_compilation import ReportCompilation
from llmscale.training.actions.report_memory import ReportMemory
from llmscale.training.actions.report_startup import ReportStartup
from llmscale.training.actions.sample_text import SampleText
from llmscale.training.actions.validate import Validate
from llmscale.training.live_run import LiveRun
from llmscale.training.stop_request import StopRequest
from llmscale.training.watch_ranks import WatchRanks
from llmscale.training.watch_spikes import WatchSpikes


def build_actions(live: LiveRun, stop: StopRequest) -> list[StepAction]:
    """The actions of a run in the order in which they happen at one step; a checkpoint follows. `stop` takes what an
    action wants to end the run for. Collective."""
    config = live.run.config
    watchers = [WatchSpikes(live, stop).look] if live.world.is_main else []
    watchers += [WatchRanks(live).look] if live.world.world_size > 1 else []
    log = LogSteps(live, watchers)
    actions: list[StepAction] = [ProfileSteps(live, config.profile)] if config.profile else []
    actions += [RecordSamples(live), ReportStartup(live)]
    if live.compiler is not None:
        actions.append(ReportCompilation(live, live.compiler))
    actions += [ReportMemory(live), log, EndWhenLost(live, judges_at=log.due)]
    if live.validation:
        actions.append(Validate(live, live.validation))
    if live.run.tasks:
        actions.append(EvaluateTasks(live, live.run.tasks))
    if config.sample_every or config.eval_every:
        actions.append(SampleText(live))
    return actions
