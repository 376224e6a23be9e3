"""Disk space of a run: checkpoints, prepared data, the finished model. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.optimizers import ADAMW, OptimizerSpec
from llmscale.config.run_config import RunConfig

#: Of a weight in 16 bits.
_EXPORT_BYTES = 2
#: MDS keeps an offset of four bytes per sample.
_SAMPLE_OVERHEAD_BYTES = 4
#: Space beyond the tensors that a save asks for: index, manifest, state, and the file system's own overhead.
SPARE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class DiskSpace:
    """Bytes on the disk that all nodes share."""

    checkpoint_bytes: int
    """One checkpoint, at any stage: master weights and states once over all ranks. Names and headers add about 1 KB
    per tensor."""
    kept_checkpoints: int
    """--keep-last, and one for ever per multiple of --keep-every."""
    data_bytes: int
    """The prepared set, uncompressed, when every token is trained on once."""
    weights_bytes: int
    """The finished model in 16 bits."""

    @property
    def checkpoints_bytes(self) -> int:
        """At the fullest: an old checkpoint goes only when a newer one is whole."""
        return self.checkpoint_bytes * (self.kept_checkpoints + 1)

    @property
    def total_bytes(self) -> int:
        return self.checkpoints_bytes + self.data_bytes + self.weights_bytes


def estimate_disk(
    shape: GPTShape,
    steps: int,
    tokens: float,
    *,
    optimizer: OptimizerSpec = ADAMW,
    keep_last: int = 2,
    keep_every: int = 0,
) -> DiskSpace:
    """Of a run of `steps` optimizer steps on `tokens` tokens; keep_last and keep_every as in train.py."""
    token_bytes = 2 if shape.vocab_size <= 1 << 16 else 4
    sample_bytes = (shape.seq_len + 1) * token_bytes + _SAMPLE_OVERHEAD_BYTES
    forever = steps // keep_every if keep_every else 0
    return DiskSpace(
        checkpoint_bytes=optimizer.state_bytes(shape.architecture),
        kept_checkpoints=keep_last + forever,
        data_bytes=round(tokens / shape.seq_len * sample_bytes),
        weights_bytes=_EXPORT_BYTES * shape.num_parameters,
    )


def checkpoints_at_once(config: RunConfig, total_steps: int) -> int:
    """Return the most checkpoints that the run folder holds at once: the kept ones, and the new one before the oldest
    goes."""
    last_only = not config.save_every and config.save_every_minutes is None
    saves = 1 if last_only else total_steps
    if config.save_every and config.save_every_minutes is None:
        saves = math.ceil(total_steps / config.save_every)
    most = min(saves, config.keep_last + 1)
    if config.keep_every and config.save_every:
        # Those kept for ever are the saved steps that keep_every divides; some of the newest may be among them.
        most = min(saves, most + total_steps // math.lcm(config.keep_every, config.save_every))
    return most
