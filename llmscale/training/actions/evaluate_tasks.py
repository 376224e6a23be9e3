"""Tasks every --eval-every steps: their items shared out over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.engine.collectives import gather, on_all_ranks
from llmscale.evaluate.scoring import RowScore, in_order, score_batch
from llmscale.evaluate.scoring_requests import Row, batches_by_length
from llmscale.evaluate.tasks import EncodedTask, TaskFile, encode_task
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun


class EvaluateTasks(StepAction):
    """Every --eval-every steps and after the last one.

    Every rank gets every row's score, and works out the same results from them: what they are does not depend on who
    computed which. A forward pass has at most as many tokens as one of training, and the logits of as many at a time
    as the loss has, so that it takes no more memory than a validation.
    """

    def __init__(self, live: LiveRun, files: Sequence[TaskFile]) -> None:
        self._live = live
        self._tasks = on_all_ranks(live.world.control, lambda: self._encode(files))

    def due(self, step: int) -> bool:
        run = self._live.run
        return step % run.config.eval_every == 0 or step == run.resolved.total_steps

    def act(self, done: DoneStep) -> None:
        live = self._live
        with live.meter.pause("evaluating"):
            results = [task.values(self._score(task.rows)) for task in self._tasks]
        if live.log:
            for task, values in zip(self._tasks, results, strict=True):
                live.log.log_evaluation(done.step, task.file.name, values, len(task.file.items))

    def _encode(self, files: Sequence[TaskFile]) -> list[EncodedTask]:
        location, seq_len = self._live.run.sets.first, self._live.run.resolved.shape.seq_len
        tokenizer = load_set_tokenizer(location.folder, location.manifest)
        return [encode_task(file, tokenizer, seq_len) for file in files]

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Batches go round the ranks. Each takes part equally often, with a batch that does not count where it has none
        left: ZeRO-3 gathers weights in every forward pass. Collective."""
        live = self._live
        plan, world = live.run.resolved.plan, live.world
        most_tokens = plan.micro_batch_size * plan.seq_len
        batches = batches_by_length(rows, most_tokens, most_tokens)
        mine: list[tuple[int, RowScore]] = []
        live.engine.eval()
        with torch.no_grad():
            for start in range(0, len(batches), world.world_size):
                number = start + world.rank
                batch = batches[number if number < len(batches) else 0]
                scores = score_batch(self._forward, [rows[index] for index in batch], world.device)
                if number < len(batches):
                    mine += zip(batch, scores, strict=True)
        live.engine.train()
        return in_order(pair for of_rank in gather(world.control, mine) for pair in of_rank)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores: Tensor = self._live.engine(tokens, targets, each_token=True)
        return scores
