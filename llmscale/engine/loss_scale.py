"""The fp16 loss scale of an engine, and the state of what changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmscale.errors import TrainingError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: State of the loss scalers of stages 1-3 and of stage 0. Everything else in them is configuration.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale(engine: DeepSpeedEngine) -> float | None:
    """Return the current fp16 loss scale; None in every other precision."""
    if engine.fp16_enabled():
        return float(engine.optimizer.loss_scale)
    return None


def get_scaler_state(engine: DeepSpeedEngine) -> dict[str, float] | None:
    """Return the fp16 loss scaler's state as plain numbers; None without fp16."""
    if not engine.fp16_enabled():
        return None
    scaler = _scaler(engine)
    return {name: getattr(scaler, name) for name in _SCALER_STATE if getattr(scaler, name, None) is not None}


def set_scaler_state(engine: DeepSpeedEngine, state: dict[str, float] | None) -> None:
    """Give a newly configured scaler the state of a saved one.

    Does nothing when either side has no dynamic loss scaling: the configured scaler then starts from its first scale.
    """
    if state is None or not engine.fp16_enabled() or not engine.dynamic_loss_scale():
        return
    scaler = _scaler(engine)
    for name, value in state.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


@contextmanager
def explain_smallest_scale(step: int) -> Iterator[None]:
    """Turn DeepSpeed's error about the smallest loss scale into a TrainingError for step `step` (0-based).

    DeepSpeed raises a bare Exception, known by its text, on every rank.
    """
    try:
        yield
    except Exception as error:
        if not str(error).startswith("Current loss scale already at minimum"):
            raise
        raise TrainingError(
            f"step {step + 1}: fp16 gradients overflow even at the smallest loss scale, so the model has diverged "
            "or needs a wider range than fp16's. Continue from the last checkpoint with a lower --lr or a longer "
            "warm-up, lower fp16.min_loss_scale in the ds_config if it is above 1, or use bf16 (--precision bf16), "
            "which has no scale."
        ) from None


def _scaler(engine: DeepSpeedEngine) -> object:
    # Stages 1-3 keep a LossScaler object, stage 0 a LossScaleConfig.
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
