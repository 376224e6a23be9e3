"""Evaluate one model for `llmscale eval`: validation losses, task scores, published results of the same size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from llmscale.data.order.sample_order import RankLayout
from llmscale.data.validation import (
    ValidationSplit,
    bits_per_byte,
    mean_bits_per_byte,
    open_validation,
    validation_batches,
)
from llmscale.errors import DataError
from llmscale.evaluate.model_source import ModelSource, is_hf_folder
from llmscale.evaluate.tasks import PublishedResult, TaskFile, TaskResult, comparable_results, encode_task
from llmscale.model.gpt import GPT

if TYPE_CHECKING:
    from llmscale.evaluate.lm_eval_tasks import LmEvalTasks

#: Largest file of weights of a temporary export.
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ValidationLoss:
    """Validation loss on one dataset."""

    name: str
    loss: float
    """Nats per token."""
    bytes_per_token: float | None
    """UTF-8 bytes per target; None for conversations."""
    num_samples: int

    @property
    def values(self) -> dict[str, float]:
        """Loss, and bits per byte where bytes are known."""
        known = {"loss": self.loss}
        if self.bytes_per_token is not None:
            known["bits_per_byte"] = bits_per_byte(self.loss, self.bytes_per_token)
        return known


def open_validation_sets(source: ModelSource, max_samples: int) -> tuple[ValidationSplit, ...]:
    """Open a model's splits as training does; none without datasets or samples. Raises ConfigError, and DataError when
    no dataset has one."""
    sets = source.sets
    if sets is None or not max_samples:
        return ()
    splits = open_validation(sets, max_samples, document_mask=source.shape.has_document_mask)
    if not splits:
        raise DataError(
            f"{sets.name} has no validation split. Name a set that has one with --data, or leave the loss out with "
            "--val-samples 0."
        )
    return splits


def validation_loss(
    model: GPT, of: ValidationSplit, *, batch_size: int, progress: Callable[[int], object]
) -> ValidationLoss:
    """Compute the mean loss over the sequences that training uses too. Raises DataError.

    `progress` gets the sequences done since the last call.
    """
    device = next(model.parameters()).device
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode(), _ending_documents(model, of.document_end):
        for batch in validation_batches(of.shards, RankLayout(0, (1,)), batch_size, of.num_samples):
            totals += batch.sums(model, device)
            progress(batch.weight)
    total, targets, count = totals.tolist()
    return ValidationLoss(of.name, total / targets, of.bytes_per_token, int(count))


@contextmanager
def _ending_documents(model: GPT, document_end: int | None) -> Iterator[None]:
    """Let attention begin again after a token, or nowhere, as the dataset was trained on."""
    own = model.shape
    model.shape = replace(own, document_end=document_end)
    try:
        yield
    finally:
        model.shape = own


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation."""

    source: ModelSource
    losses: Sequence[ValidationLoss]
    """Loss on each dataset; empty without datasets."""
    tasks: Sequence[TaskResult]
    published: Sequence[PublishedResult] | None = None
    """HellaSwag results of models of that size; None unless all items were scored in the same way."""
    notes: Sequence[str] = ()
    """Limit of the losses."""

    def as_dict(self) -> dict[str, object]:
        """Return JSON values."""
        shape = self.source.shape
        values: dict[str, object] = {
            "model": str(self.source.folder),
            "step": self.source.step,
            "num_parameters": shape.num_parameters,
            **({"active_parameters": shape.active_parameters} if shape.num_experts else {}),
            "tasks": {task.task: {"values": _finite(task.values), "num_items": task.num_items} for task in self.tasks},
        }
        if self.losses:
            by_set = {one.name: _finite(one.values) for one in self.losses}
            values["validation"] = {
                **_finite(total_loss(self.losses)),
                "num_samples": sum(loss.num_samples for loss in self.losses),
                **({"by_set": by_set} if len(by_set) > 1 else {}),
            }
        if self.published is not None:
            values["published_hellaswag"] = [
                {"model": other.model, "values": dict(other.values), "source": other.source} for other in self.published
            ]
        return values


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def total_loss(losses: Sequence[ValidationLoss]) -> dict[str, float]:
    """Average the loss over the sequences of all datasets, and bits per byte where all bytes are known."""
    count = sum(loss.num_samples for loss in losses)
    totals = {"loss": sum(loss.loss * loss.num_samples for loss in losses) / count}
    in_bits = mean_bits_per_byte(
        [(loss.loss, loss.num_samples) for loss in losses], [loss.bytes_per_token for loss in losses]
    )
    return totals if in_bits is None else totals | {"bits_per_byte": in_bits}


def losses_on(
    model: GPT, sets: Sequence[ValidationSplit], batch_size: int, progress: Callable[[int], object]
) -> dict[str, float]:
    """Return the average over all datasets, or an empty dict without datasets. Raises DataError."""
    losses = [validation_loss(model, one, batch_size=batch_size, progress=progress) for one in sets]
    if losses:
        return total_loss(losses)
    return {}


def evaluate(
    source: ModelSource,
    files: Sequence[TaskFile],
    harness: LmEvalTasks | None,
    progress: Callable[[str, int | None, int], object],
    *,
    limit: int | None,
    val_samples: int,
    batch_size: int,
    chat: bool = False,
) -> Evaluation:
    """Prepare everything that is asked for, then load the model and evaluate it.

    `limit` items of each task; `val_samples` sequences for the loss, 0 for none. `chat` puts lm-eval's tasks as
    conversations, in the template of the model's data or of its tokenizer. `progress` gets the name of the activity,
    its number of sequences if known, and the sequences done since the last call. Raises ConfigError, CheckpointError or
    DataError, for items and datasets before the model is loaded.
    """
    from llmscale.evaluate.scoring import score_rows

    tokenizer = source.tokenizer
    seq_len = source.shape.seq_len
    tasks = [encode_task(replace(file, items=file.items[:limit]), tokenizer, seq_len) for file in files]
    sets = open_validation_sets(source, val_samples)
    of_lm_eval = []
    if harness is not None:
        progress("lm-eval", None, 0)
        of_lm_eval = _run_lm_eval(source, harness, limit, batch_size, chat=chat)
    losses = []
    results = []
    if sets or tasks:
        model = source.load_model()
        for one in sets:
            on_batch = partial(progress, "validation", one.num_samples)
            losses.append(validation_loss(model, one, batch_size=batch_size, progress=on_batch))
        for task in tasks:
            name = task.file.name
            on_batch = partial(progress, name, len(task.rows))
            scores = score_rows(model, task.rows, batch_size=batch_size, progress=on_batch)
            results.append(TaskResult(name, task.values(scores), len(task.file.items)))
    results += of_lm_eval
    is_comparable = limit is None and any(file.format == "hellaswag" for file in files)
    if is_comparable:
        published = comparable_results(source.shape.active_parameters)
    else:
        published = None
    locations = source.sets.locations if source.sets is not None and losses else ()
    notes = [f"{at.folder}: {at.manifest.note_on_bytes}" for at in locations if at.manifest.note_on_bytes]
    return Evaluation(source, losses, results, published, notes)


def _run_lm_eval(
    source: ModelSource, harness: LmEvalTasks, limit: int | None, batch_size: int, *, chat: bool
) -> list[TaskResult]:
    """Run lm-eval's tasks, as conversations if `chat`. Raises ConfigError, CheckpointError, DataError."""
    from llmscale.evaluate.conversation import open_template
    from llmscale.evaluate.lm_eval_tasks import open_lm

    if chat:
        template = open_template(source.tokenizer, source.chat_template)[1]
    else:
        template = None
    with transformers_folder(source) as folder:
        lm = open_lm(folder, source.shape.seq_len, batch_size, template)
        return harness.run(lm, limit, chat=chat)


@contextmanager
def transformers_folder(source: ModelSource) -> Iterator[Path]:
    """Yield the model's folder of transformers, or a temporary export in fp32 with its adapters merged."""
    from llmscale.evaluate.export import describe_export, write_model
    from llmscale.evaluate.weights import Merged

    if is_hf_folder(source.folder):
        yield source.folder
        return
    model = describe_export(source.shape, source.published, "fp32", _SHARD_BYTES)
    weights = source.open_weights()
    if source.shape.lora_rank:
        weights = Merged(weights, source.shape)
    with TemporaryDirectory(prefix="llmscale-eval-") as parent:
        folder = Path(parent) / "model"
        write_model(weights, model, source.tokenizer, folder, card="", overwrite=False)
        yield folder
