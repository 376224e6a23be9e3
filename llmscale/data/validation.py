"""Validation micro-batches: the same samples, once each, at every world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmscale.data.mixture import TrainingSets
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.token_shards import TokenShards, WindowReader, are_targets, ids_of
from llmscale.errors import ConfigError


@dataclass(frozen=True)
class ValidationSplit:
    """The part of a dataset on which the validation loss is computed."""

    name: str
    """Name of the dataset in a mixture; empty for a single dataset."""
    shards: WindowReader
    num_samples: int
    """Sequences per validation."""
    bytes_per_token: float | None
    """UTF-8 bytes per target of the split; None for conversations."""
    document_end: int | None
    """Token after which attention begins again, as in training; None without a mask."""


def open_validation(sets: TrainingSets, max_samples: int, *, document_mask: bool) -> tuple[ValidationSplit, ...]:
    """Open the existing validation splits. `max_samples` is divided over a mixture's datasets as the run's samples are,
    at least one each. `document_mask` is the run's own. Raises ConfigError, DataError."""
    if sets.recipe:
        parts = sets.recipe.parts
    else:
        parts = (Fraction(1),)
    if sets.masks_documents(document_mask):
        document_end = sets.manifest.eot_token
    else:
        document_end = None
    splits = []
    for name, location, part in zip(sets.names, sets.locations, parts, strict=True):
        split = location.manifest.splits.get("val")
        if split is not None and split.num_samples:
            num_samples = min(max(1, round(part * max_samples)), split.num_samples)
            label = name if sets.recipe else ""
            ratio = location.manifest.bytes_per_target("val")
            splits.append(ValidationSplit(label, TokenShards(location, "val"), num_samples, ratio, document_end))
    return tuple(splits)


def describe_samples(splits: Sequence[ValidationSplit]) -> str:
    """Return a text on how many sequences of each dataset a validation takes."""
    total = sum(split.num_samples for split in splits)
    by_set = ", ".join(f"{split.num_samples:,} of {split.name}" for split in splits if split.name)
    return f"{total:,} sequences{f' ({by_set})' if by_set else ''}"


class ValidationBatch(NamedTuple):
    """One forward pass of one rank.

    The split's loss is sum(loss x weight) / sum(targets) over all ranks.
    """

    tokens: Tensor
    """Windows, int64 [b, seq_len + 1] with 1 <= b <= micro_batch_size."""
    sample_ids: Tensor
    """Ids of the windows that count, int64 [weight]."""
    weight: int
    """Windows that count: b, or 0 for a filler that keeps ranks in step, because ZeRO-3 gathers on all ranks."""
    is_target: Tensor | None = None
    """True for tokens that are targets, bool like `tokens`; None if all are."""

    def sums(self, model: Callable[..., Tensor], device: torch.device) -> Tensor:
        """Run the model; return loss x weight, the targets that count in windows, and the weight: [3] in fp64."""
        tokens = self.tokens.to(device)
        if self.is_target is None:
            is_target = {}
        else:
            is_target = {"is_target": self.is_target[:, 1:].to(device)}
        loss = float(model(tokens[:, :-1], tokens[:, 1:], **is_target))
        targets: float = self.weight
        if self.is_target is not None and self.weight:
            targets = int(self.is_target[:, 1:].sum()) / (self.tokens.shape[1] - 1)
        return torch.tensor([loss * self.weight, targets, self.weight], dtype=torch.float64)


def validation_sample_ids(num_samples: int, max_samples: int | None) -> NDArray[np.int64]:
    """Return the samples to evaluate: all, or `max_samples` spread evenly over the split. int64, ascending."""
    if max_samples is None:
        count = num_samples
    else:
        count = min(max_samples, num_samples)
    if count < 1:
        raise ConfigError(
            f"Validation needs at least one sample: the split holds {num_samples}, asked for {max_samples}."
        )
    return np.arange(count, dtype=np.int64) * num_samples // count


def validation_batches(
    shards: WindowReader, layout: RankLayout, micro_batch_size: int, max_samples: int | None = None
) -> Iterator[ValidationBatch]:
    """Yield this rank's micro-batches, equally many on every rank, with fillers of weight 0 at the end.

    Micro-batches are dealt round-robin. Raises ConfigError for an empty choice, DataError while reading.
    """
    ids = validation_sample_ids(len(shards), max_samples)
    per_round = micro_batch_size * layout.data_parallel_size
    for start in range(0, len(ids), per_round):
        begin = start + layout.data_parallel_rank * micro_batch_size
        mine = ids[begin : begin + micro_batch_size]
        chosen = mine if len(mine) else ids[:1]
        is_target = None
        if shards.has_mask:
            windows = shards.read_marked(chosen)
        else:
            windows = shards.read(chosen)
        if shards.has_mask:
            windows, is_target = ids_of(windows), torch.from_numpy(are_targets(windows))
        tokens = torch.from_numpy(windows.astype(np.int64))
        yield ValidationBatch(tokens, torch.from_numpy(mine.copy()), len(mine), is_target)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert nats per token to bits per byte, which is comparable across tokenizers."""
    return loss / math.log(2) / bytes_per_token


def mean_bits_per_byte(losses: Sequence[tuple[float, int]], bytes_per_token: Sequence[float | None]) -> float | None:
    """Return the bits per byte over several datasets from their (nats per token, number of sequences): all nats over
    all bytes; None where a dataset's bytes are not known."""
    sizes = [size for size in bytes_per_token if size is not None]
    if len(sizes) < len(losses):
        return None
    nats = math.fsum(loss * count for loss, count in losses)
    return nats / math.log(2) / math.fsum(count * size for (_, count), size in zip(losses, sizes, strict=True))
