"""Validation micro-batches: the same samples, each once, at every world size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmscale.data.mixture import TrainingSets
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.token_shards import TokenShards, WindowReader
from llmscale.errors import ConfigError


@dataclass(frozen=True)
class ValidationSplit:
    """The part of a set that its loss is taken on."""

    name: str
    """The set's name in a mix; empty for a single set."""
    shards: WindowReader
    num_samples: int
    """Sequences per validation."""
    bytes_per_token: float
    """UTF-8 bytes per token, over the whole split."""


def open_validation(sets: TrainingSets, max_samples: int) -> tuple[ValidationSplit, ...]:
    """Open the validation splits that exist. Each set of a mix has as large a part of `max_samples` as it has of the
    run's samples, but at least one. Raises DataError."""
    parts = sets.recipe.parts if sets.recipe else (Fraction(1),)
    found = []
    for name, location, part in zip(sets.names, sets.locations, parts, strict=True):
        split = location.manifest.splits.get("val")
        if split is not None and split.num_samples:
            num_samples = min(max(1, round(part * max_samples)), split.num_samples)
            shown = name if sets.recipe else ""
            found.append(ValidationSplit(shown, TokenShards(location, "val"), num_samples, split.bytes_per_token))
    return tuple(found)


def describe_samples(splits: Sequence[ValidationSplit]) -> str:
    """Return how many sequences of each set a validation takes, in words."""
    total = sum(split.num_samples for split in splits)
    by_set = ", ".join(f"{split.num_samples:,} of {split.name}" for split in splits if split.name)
    return f"{total:,} sequences{f' ({by_set})' if by_set else ''}"


class ValidationBatch(NamedTuple):
    """One forward pass of one rank. The split's loss is sum(loss x weight) / sum(weight), all ranks."""

    tokens: Tensor
    """Windows, int64 [b, seq_len + 1] with 1 <= b <= micro_batch_size."""
    sample_ids: Tensor
    """Ids of the windows that count, int64 [weight]."""
    weight: int
    """Windows that count: b, or 0 for a filler that keeps ranks in step (ZeRO-3 gathers together)."""


def validation_sample_ids(num_samples: int, max_samples: int | None) -> NDArray[np.int64]:
    """The samples evaluated: all, or `max_samples` spread evenly over the split. int64, ascending."""
    count = num_samples if max_samples is None else min(max_samples, num_samples)
    if count < 1:
        raise ConfigError(
            f"Validation needs at least one sample: the split holds {num_samples}, asked for {max_samples}."
        )
    return np.arange(count, dtype=np.int64) * num_samples // count


def validation_batches(
    shards: WindowReader, layout: RankLayout, micro_batch_size: int, max_samples: int | None = None
) -> Iterator[ValidationBatch]:
    """This rank's micro-batches, equally many on every rank; a filler of weight 0 stands in at the end.

    Micro-batches go round the ranks. Raises ConfigError for an empty choice, DataError while reading.
    """
    ids = validation_sample_ids(len(shards), max_samples)
    per_round = micro_batch_size * layout.data_parallel_size
    for start in range(0, len(ids), per_round):
        begin = start + layout.data_parallel_rank * micro_batch_size
        mine = ids[begin : begin + micro_batch_size]
        windows = shards.read(mine if len(mine) else ids[:1])
        yield ValidationBatch(torch.from_numpy(windows.astype(np.int64)), torch.from_numpy(mine.copy()), len(mine))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """From nats per token: a measure that models with other tokenizers share."""
    return loss / math.log(2) / bytes_per_token


def mean_bits_per_byte(losses: Sequence[tuple[float, int]], bytes_per_token: Sequence[float]) -> float:
    """Over several sets, by their (nats per token, sequences of one length): all nats over all bytes."""
    nats = math.fsum(loss * count for loss, count in losses)
    return (
        nats / math.log(2) / math.fsum(count * size for (_, count), size in zip(losses, bytes_per_token, strict=True))
    )
