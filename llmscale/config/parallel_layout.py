"""ParallelLayout: which ranks share what. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """All ranks of a run, and the groups that they form; one GPU, or one CPU process, each.

    Neighbouring ranks divide the tokens of the same sequences, and so are one data-parallel rank together. ZeRO divides
    model states over all of them, as none holds other weights than the next.
    """

    world_size: int
    """All ranks."""
    sequence_parallel_size: int = 1
    """Ranks that divide a sequence."""

    def __post_init__(self) -> None:
        if self.sequence_parallel_size < 1 or self.world_size % self.sequence_parallel_size:
            raise ConfigError(
                f"{self.world_size} ranks cannot be divided into groups of {self.sequence_parallel_size} that share "
                "a sequence: the size of a group must divide the number of ranks."
            )

    @property
    def data_parallel_size(self) -> int:
        """Parts of a global batch: groups of ranks that train on samples of their own."""
        return self.world_size // self.sequence_parallel_size

    @property
    def shard_ranks(self) -> int:
        """Ranks that ZeRO divides parameters, gradients and optimizer states over, and reduces gradients over."""
        return self.world_size
