"""TensorBoard event files in the run folder, only when asked for.

Written by tensorboardX, which needs numpy and protobuf (wandb brings the latter along anyway): torch's own writer needs
the whole of tensorboard, with a web server and gRPC, on the machine that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError
from llmscale.training.trackers.tracker import Tracker, one_line

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

FOLDER = "tensorboard"
#: Seconds until what was logged is in the file.
_FLUSH_S = 10


class TensorboardFiles(Tracker):
    """One file per start; TensorBoard shows all of a folder as one curve."""

    name = "TensorBoard"

    def __init__(self, open_writer: Callable[[int], SummaryWriter], first_step: int) -> None:
        """`open_writer` begins a file after so many steps."""
        self._open, self._writer = open_writer, open_writer(first_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def finish(self) -> None:
        self._writer.close()


def start_tensorboard(run_folder: Path, *, first_step: int) -> TensorboardFiles:
    """Begin a file that continues the curves after `first_step` steps: whatever TensorBoard has of later ones, of a
    start that was killed or that the run went back from, it drops. Raises ConfigError."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(f"--tensorboard needs tensorboardX: `{install_command('tensorboard')}`.") from None

    def begin(step: int) -> SummaryWriter:
        # In the name, because two files of one second would be one.
        suffix = f".step-{step}"
        folder = str(run_folder / FOLDER)
        return SummaryWriter(folder, purge_step=step + 1, flush_secs=_FLUSH_S, filename_suffix=suffix)

    try:
        return TensorboardFiles(begin, first_step)
    except OSError as error:
        raise ConfigError(f"--tensorboard: {run_folder / FOLDER} cannot be started: {one_line(error)}.") from None
