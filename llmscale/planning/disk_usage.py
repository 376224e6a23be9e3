"""Disk space of a run: checkpoints, prepared data, the finished model. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from llmscale.architecture.shape import GPTShape
from llmscale.config.optimizers import get_optimizer
from llmscale.config.run_config import RunConfig

#: Bytes of a 16-bit weight.
_EXPORT_BYTES = 2
#: Offset of a sample in MDS.
_SAMPLE_OVERHEAD_BYTES = 4
#: Default of --save-every.
SAVE_EVERY: int = RunConfig.model_fields["save_every"].default
#: Index, manifest and state of a checkpoint.
SMALL_FILES = 3


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of a run on the shared disk."""

    DERIVED: ClassVar = ("checkpoints_bytes", "hourly_bytes", "total_bytes")

    checkpoint_bytes: int
    """Bytes of a checkpoint at any stage: master weights and states, once over all ranks. Names and headers add about
    1 KB per tensor."""
    kept_checkpoints: int
    """Checkpoints of --keep-last, the best one, and one per multiple of --keep-every."""
    data_bytes: int
    """Bytes of the uncompressed dataset, with every token seen once."""
    weights_bytes: int
    """Bytes of the finished model in 16 bits."""
    hourly: int = 0
    """Checkpoints of --keep-hours, which are kept permanently."""
    is_hourly_weights: bool = False
    """True if their 16-bit weights alone are kept."""

    def store_requests(self, world_size: int) -> int:
        """Return the requests of a save to a store: a write and a check per file, a conditional write, and the listing
        and removal of the checkpoint that expires."""
        num_files = world_size + SMALL_FILES
        return 2 * num_files + 1 + 1 + num_files

    @property
    def checkpoints_bytes(self) -> int:
        """Return the most bytes of checkpoints at once: an old one is deleted only after a newer one is complete."""
        return self.checkpoint_bytes * (self.kept_checkpoints + 1)

    @property
    def hourly_bytes(self) -> int:
        return self.hourly * (self.weights_bytes if self.is_hourly_weights else self.checkpoint_bytes)

    @property
    def total_bytes(self) -> int:
        return self.checkpoints_bytes + self.hourly_bytes + self.data_bytes + self.weights_bytes


def estimate_disk(shape: GPTShape, steps: int, tokens: float, config: RunConfig) -> DiskSpace:
    """Estimate the disk of a run of `steps` steps, with the optimizer and the checkpoints to keep of `config`."""
    token_bytes = 2 if shape.vocab_size <= 1 << 16 else 4
    sample_bytes = (shape.seq_len + 1) * token_bytes + _SAMPLE_OVERHEAD_BYTES
    for_good = steps // config.keep_every if config.keep_every else 0
    return DiskSpace(
        checkpoint_bytes=get_optimizer(config.optimizer).checkpoint_bytes(shape.architecture),
        kept_checkpoints=config.keep_last + 1 + for_good,
        data_bytes=round(tokens / shape.seq_len * sample_bytes),
        weights_bytes=_EXPORT_BYTES * shape.num_parameters,
    )


def checkpoints_at_once(config: RunConfig, total_steps: int) -> int:
    """Return the most checkpoints in the run folder at once: the kept ones, the best one and a new one."""
    by_clock = config.minutes_between_saves and "save_every_minutes" in config.model_fields_set
    last_only = not config.save_every and not by_clock
    saves = 1 if last_only else total_steps
    if config.save_every and not by_clock:
        # How many saves the default of 10 minutes adds is not known here: one has to fit.
        saves = min(total_steps, math.ceil(total_steps / config.save_every) + bool(config.minutes_between_saves))
    most = min(saves, config.keep_last + 1 + bool(config.val_every))
    if config.keep_every and config.save_every:
        # Saved steps that keep_every divides are kept permanently; some of the newest may be among them.
        most = min(saves, most + total_steps // math.lcm(config.keep_every, config.save_every))
    return most
