"""What an engine begins with: the states of a checkpoint, another run's weights, or published ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmscale.checkpoint.load import load_engine
from llmscale.checkpoint.weights_source import CheckpointWeights, PublishedWeights, WeightsSource
from llmscale.config.hf_model import PREFIX
from llmscale.engine.process_group import World
from llmscale.engine.train_step import get_scaler_state, set_scaler_state
from llmscale.training.resume import ResumePoint, find_named_checkpoint
from llmscale.training.run_inputs import PreparedRun

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def fill_engine(
    run: PreparedRun,
    engine: DeepSpeedEngine,
    point: ResumePoint | None,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    """From the checkpoint, or with the weights that a run begins with. Collective. Raises LlmscaleError."""
    if point is None:
        source = _first_weights(run, world, report, progress)
        if source is not None:
            source.load_into(engine, world.control)
            report(f"weights from {source.name}; everything else starts at step 0")
        return
    fill_from(engine, point, world, get_scaler_state(engine))
    report(f"continuing from {point.folder}: step {point.state.step}, {point.state.tokens_seen:,} tokens seen")
    if point.state.precision != run.resolved.precision:
        report(
            f"precision changes from {point.state.precision} to {run.resolved.precision}: fp32 master weights and "
            "optimizer states are taken over exactly; a loss scaler, where there is one, starts from its configuration"
        )


def fill_from(
    engine: DeepSpeedEngine, point: ResumePoint, world: World, configured_scaler: dict[str, float] | None
) -> None:
    """Weights, optimizer states and loss scaler of a checkpoint; of one that was saved without fp16, the scaler as it
    was configured. Collective. Raises CheckpointError."""
    load_engine(engine, point.folder, point.state, world.control)
    set_scaler_state(engine, point.state.loss_scaler or configured_scaler)


def _first_weights(
    run: PreparedRun, world: World, report: Callable[[str], None], progress: Callable[[], object]
) -> WeightsSource | None:
    """Where a run that begins has its weights from; None for none. Collective."""
    if run.weights is not None:
        for note in run.weights.notes:
            report(note)
        assert run.weights.pieces is not None
        model = run.weights.model
        return PublishedWeights(f"{PREFIX}{model.hub_name or model.name}", run.weights.pieces, progress)
    if run.config.init_from is None:
        return None
    return CheckpointWeights(find_named_checkpoint(run.config.init_from, "--init-from", world.control, report))
