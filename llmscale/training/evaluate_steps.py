"""Evaluation during training: validation loss, tasks, and sampled text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.checkpoint.manifest import Validation
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.validation import (
    ValidationBatch,
    ValidationSplit,
    describe_samples,
    mean_bits_per_byte,
    validation_batches,
)
from llmscale.engine.collectives import gather, on_all_ranks, on_main_rank
from llmscale.evaluate.generate import SamplingSettings, encode_prompt, generate_text
from llmscale.evaluate.scoring import Row, RowScore, batches_by_length, in_order, score_batch
from llmscale.evaluate.tasks import EncodedTask, TaskFile, encode_task
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_SAMPLING = SamplingSettings(max_new_tokens=48, temperature=0.8, top_k=50, top_p=None)


class Validate(StepAction):
    """Measures the validation loss every --val-every steps and after the last one."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io, self._splits = run, engine, io, run.validation
        self._newest: tuple[int, Validation] | None = None

    def due(self, step: int) -> bool:
        return step % self._run.config.val_every == 0 or step == self._run.resolved.total_steps

    def run(self, result: StepResult) -> None:
        world = self._run.world
        with self._engine.meter.pause("evaluating"):
            # Everything is read first: a rank that cannot read must not leave the others in a forward pass.
            batches = on_all_ranks(world.control, lambda: [self._read(split) for split in self._splits])
            size = self._run.resolved.plan.ranks.sequence_parallel_size
            losses = [validation_loss(self._engine.deepspeed, of_split, world.device, size) for of_split in batches]
        total = sum(num_samples for _, num_samples in losses)
        mean = sum(loss * num_samples for loss, num_samples in losses) / total
        samples = f"{total} of {self._run.start.sets.fingerprint}"
        self._newest = (result.step, Validation(mean, samples)) if math.isfinite(mean) else None
        if self._io.log:
            names = [split.name for split in self._splits]
            by_set = {name: loss for name, (loss, _) in zip(names, losses, strict=True) if name}
            in_bits = mean_bits_per_byte(losses, [split.bytes_per_token for split in self._splits])
            self._io.log.log_validation(result.step, mean, total, by_set, in_bits, describe_samples(self._splits))

    def after(self, step: int) -> Validation | None:
        """Return the validation after a step, if it was measured there and is finite."""
        return self._newest[1] if self._newest and self._newest[0] == step else None

    def _read(self, split: ValidationSplit) -> list[ValidationBatch]:
        layout, micro_batch_size = self._engine.feed.plan.layout, self._run.resolved.plan.micro_batch_size
        return list(validation_batches(split.shards, layout, micro_batch_size, split.num_samples))


def validation_loss(
    engine: DeepSpeedEngine, batches: Iterable[ValidationBatch], device: torch.device, ranks_of_sequence: int = 1
) -> tuple[float, int]:
    """Return the mean loss in nats per token over all ranks' batches, and the number of sequences. Collective.

    Every rank must bring equally many batches: ZeRO-3 gathers weights in every forward pass.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            tokens = batch.tokens.to(device)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            totals += torch.tensor([float(loss) * batch.weight, batch.weight], dtype=torch.float64)
    engine.train()
    totals = totals.to(device)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[1]) // ranks_of_sequence


class EvaluateTasks(StepAction):
    """Evaluates tasks every --eval-every steps and after the last one, their items distributed over all ranks.

    Every rank gets all scores and computes the same results. A forward pass has at most the tokens of one of training,
    and the logits of as many at a time as the loss: it takes no more memory than a validation.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        self._tasks = on_all_ranks(run.world.control, lambda: self._encode(run.start.tasks))

    def due(self, step: int) -> bool:
        return step % self._run.config.eval_every == 0 or step == self._run.resolved.total_steps

    def run(self, result: StepResult) -> None:
        with self._engine.meter.pause("evaluating"):
            results = [task.values(self._score(task.rows)) for task in self._tasks]
        if self._io.log:
            for task, values in zip(self._tasks, results, strict=True):
                self._io.log.log_evaluation(result.step, task.file.name, values, len(task.file.items))

    def _encode(self, files: Sequence[TaskFile]) -> list[EncodedTask]:
        location, seq_len = self._run.start.sets.first, self._run.resolved.shape.seq_len
        tokenizer = load_set_tokenizer(location.folder, location.manifest)
        return [encode_task(file, tokenizer, seq_len) for file in files]

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Score rows in batches that the ranks take in turn. Collective.

        A rank without a batch left scores one that does not count: ZeRO-3 gathers weights in every forward pass.
        """
        plan, world = self._run.resolved.plan, self._run.world
        group, num_groups = plan.ranks.group_of(world.rank), plan.ranks.data_parallel_size
        max_tokens = plan.micro_batch_size * plan.seq_len
        batches = batches_by_length(rows, max_tokens, max_tokens)
        mine: list[tuple[int, RowScore]] = []
        self._engine.deepspeed.eval()
        with torch.no_grad():
            for start in range(0, len(batches), num_groups):
                number = start + group
                batch = batches[number if number < len(batches) else 0]
                scores = score_batch(self._forward, [rows[index] for index in batch], world.device)
                if number < len(batches) and plan.ranks.is_first(world.rank):
                    mine += zip(batch, scores, strict=True)
        self._engine.deepspeed.train()
        return in_order(pair for of_rank in gather(world.control, mine) for pair in of_rank)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores: Tensor = self._engine.deepspeed(tokens, targets, each_token=True)
        split = self._engine.deepspeed.module.split
        return scores if split is None else split.gather_scores(scores, targets.shape[1])


class SampleText(StepAction):
    """Samples text every --sample-every steps, and whenever the model is evaluated; rank 0 prints.

    Every rank generates, because ZeRO-3 gathers weights in every forward pass. All use rank 0's choice of each token:
    ranks that rounded differently would end at different tokens, and one would wait for weights indefinitely.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        location = run.start.sets.first
        self._tokenizer = on_all_ranks(
            run.world.control, lambda: load_set_tokenizer(location.folder, location.manifest)
        )

    def due(self, step: int) -> bool:
        config, total_steps = self._run.config, self._run.resolved.total_steps
        if config.eval_every and step == total_steps:
            return True
        return any(every and step % every == 0 for every in (config.sample_every, config.eval_every))

    def run(self, result: StepResult) -> None:
        run, prompts = self._run, self._run.start.prompts
        # The model would not see more than its context.
        tokens_of = [encode_prompt(self._tokenizer, prompt)[-run.resolved.shape.seq_len :] for prompt in prompts]
        texts = [""] * len(prompts)
        with self._engine.meter.pause("evaluating"):
            chunks = generate_text(
                self._engine.deepspeed.module,
                self._tokenizer,
                tokens_of,
                _SAMPLING,
                seeds=[run.config.seed] * len(prompts),
                agree=lambda tokens: on_main_rank(run.world.control, lambda: tokens),
            )
            for chunk in chunks:
                texts[chunk.number] += chunk.text
        if self._io.log:
            for prompt, text in zip(prompts, texts, strict=True):
                self._io.log.log_sample(result.step, prompt, prompt + text)
