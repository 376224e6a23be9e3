"""Compute a model's loss on the validation splits of datasets, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmscale.data.mixture import TrainingSets
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.validation import ValidationSplit, bits_per_byte, open_validation, validation_batches
from llmscale.errors import DataError
from llmscale.model.gpt import GPT


@dataclass(frozen=True)
class ValidationLoss:
    """Validation loss on one dataset."""

    name: str
    loss: float
    """Nats per token."""
    bytes_per_token: float
    num_samples: int

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.loss, self.bytes_per_token)


def open_validation_sets(sets: TrainingSets, max_samples: int) -> tuple[ValidationSplit, ...]:
    """Open the splits as training does. Raises DataError when no dataset has one."""
    found = open_validation(sets, max_samples)
    if not found:
        raise DataError(
            f"{sets.name} has no validation split. Name a set that has one with --data, or leave the loss out with "
            "--val-samples 0."
        )
    return found


def validation_loss(
    model: GPT, of: ValidationSplit, *, batch_size: int, progress: Callable[[int], object]
) -> ValidationLoss:
    """Compute the mean loss over the sequences that training uses too. Raises DataError.

    `progress` gets the sequences done since the last call.
    """
    device, total, count = next(model.parameters()).device, 0.0, 0
    with torch.inference_mode():
        for batch in validation_batches(of.shards, RankLayout(0, (1,)), batch_size, of.num_samples):
            tokens = batch.tokens.to(device)
            total += float(model(tokens[:, :-1], tokens[:, 1:])) * batch.weight
            count += batch.weight
            progress(batch.weight)
    return ValidationLoss(of.name, total / count, of.bytes_per_token, count)
