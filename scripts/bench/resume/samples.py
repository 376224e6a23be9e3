"""The samples of a run's steps, for comparisons of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.run_state import load_run_state
from llmscale.config.run_config import build_run_config
from llmscale.data.mixture import open_recorded_sets
from llmscale.training.sample_stream import stream_of_checkpoint


def read_samples(run: Path) -> dict[int, NDArray[np.int64]]:
    """Return the sorted ids of each step's batch, from 0, by the newest checkpoint; `--check-every 1` compares them."""
    state = load_run_state(find_checkpoint(run))
    config = build_run_config(dict(state.config))
    stream = stream_of_checkpoint(config, open_recorded_sets(config.data, None, None, state.identity), state)
    ends = [stream.samples_after(step) for step in range(state.step + 1)]
    return {step: np.sort(stream.order.sample_ids(np.arange(*ends[step : step + 2]))) for step in range(state.step)}
