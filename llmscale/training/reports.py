"""Reports while a run trains: start-up, memory, --overfit-batch, validation, tasks, sampled text, --profile."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

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
from llmscale.engine.deepspeed_engine import gradient_norm
from llmscale.engine.device_memory import measured_memory
from llmscale.engine.train_step import Phase
from llmscale.error_handling import say
from llmscale.evaluate.generate import SamplingSettings, encode_prompt, generate_text
from llmscale.evaluate.scoring import Row, RowScore, batches_by_length, in_order, score_batch
from llmscale.evaluate.tasks import EncodedTask, TaskFile, encode_task
from llmscale.files.atomic_write import write_durably
from llmscale.model.gpt import Block
from llmscale.numerics.links import LINKS, Finding, MeanGradients, first_wrong
from llmscale.numerics.plain import check_is_plain
from llmscale.numerics.probe import Probe, choose_strides
from llmscale.numerics.report import as_row, describe_wrong, worst_rows
from llmscale.numerics.run_update import RunJudge, watch_run
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.inputs import parse_profiled
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.rank_agreement import describe_ranks
from llmscale.training.start import measured_line

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


#: Steps of this start that --check-numerics compares, if fp16 skips none.
_COMPARED_STEPS = 2
#: Steps of this start after which memory is measured: DeepSpeed allocates more after the first.
_MEASURED_STEP = 2
#: Copies of an element: weight as used, and before and after the step with gradient and two states each.
_COPIES = 8
#: Elements of matrices that Muon's step is checked for: fp64 orthogonalises a few million in seconds.
_MATRIX_ELEMENTS = 2**22
#: Share of H at or below which a batch counts as learned, and the loss that suffices for repetitive text.
_LEARNED_SHARE = 0.5
_LEARNED_LOSS = 0.1
#: Relative fall below which a loss counts as unchanged.
_UNCHANGED = 0.02
_SAMPLING = SamplingSettings(max_new_tokens=48, temperature=0.8, top_k=50, top_p=None)
_FOLDER = "profile"
#: Operations in the table, those with most time of their own first.
_NUM_ROWS = 50
#: Widest name in the table, in characters; the names of kernels are much longer.
_NAME_WIDTH = 80


class ReportStartup(StepAction):
    """Prints the time of each phase of the start after its first step."""

    def begin(self, step: int) -> None:
        self._began = time.perf_counter()

    def due(self, step: int) -> bool:
        return step == self._run.first_step + 1

    def run(self, result: StepResult) -> None:
        seconds = {**self._run.startup_s, "first step": time.perf_counter() - self._began}
        phases = " + ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        self._io.detail(f"start-up: {phases} = {sum(seconds.values()):.1f} s")


class CheckNumerics(StepAction):
    """Compares the first steps of this start with plain arithmetic, and prints one line.

    At full size: the links that need no second model (numerics/links.py).
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        """Raises ConfigError for a part of the run without plain arithmetic."""
        super().__init__(run, engine, io)
        check_is_plain(run.config.optimizer, run.resolved.shape, run.resolved.loss)
        self._probe: Probe | None = None
        self._findings: list[Finding] = []
        self._left = _COMPARED_STEPS

    def begin(self, step: int) -> None:
        run = self._run
        if step >= run.resolved.total_steps:
            return
        elements = {tensor.name: tensor.elements for tensor in run.resolved.tensors.trainable}
        copies = run.micro_steps(step) + _COPIES
        strides = choose_strides(elements, copies)
        num_copied = sum(-(-count // strides[name]) for name, count in elements.items())
        self._share = num_copied / sum(elements.values())
        complete = _first_matrices(elements, strides)
        self._watched = watch_run(run.config, run.resolved, run.world.control, strides, complete)
        graphs = None if self._engine.compiler is None else Block
        self._probe = Probe(self._engine.deepspeed, strides, graphs=graphs)
        self._judge = RunJudge(self._watched, self._probe, steps_counted=0 if run.state is None else None)
        self._io.report(
            f"--check-numerics copies {self._share:.0%} of the weights and their gradients: "
            f"{4 * num_copied * copies / 2**30:.2f} GiB a rank"
        )

    def due(self, step: int) -> bool:
        return self._probe is not None

    def run(self, result: StepResult) -> None:
        probe = self._probe
        assert probe is not None
        if result.was_skipped:
            probe.reset()
            return
        with self._engine.meter.pause("profiling"):
            step = result.step - 1
            engine = self._engine.deepspeed
            means = MeanGradients(self._watched, probe)
            lr = self._run.resolved.schedule.learning_rate(step)
            self._findings += self._judge.judge(step, lr, gradient_norm(engine), means.of)
            probe.reset()
        self._left -= 1
        if not self._left or result.step == self._run.resolved.total_steps:
            self.close()
            line = self._describe()
            self._io.report(line)
            self._io.log_event("numerics", step=result.step, result=line)

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _describe(self) -> str:
        """Return one line about the judged steps."""
        wrong = first_wrong(self._findings)
        if wrong is not None:
            return f"WARNING: the numbers of step {wrong.step + 1} are wrong: {describe_wrong(as_row(wrong))}"
        steps = [finding.step + 1 for finding in self._findings]
        compared = "" if self._share == 1 else f", on {self._share:.0%} of the weights"
        shares = ", ".join(f"{row.link} {row.share or 0:.2f}" for row in worst_rows(self._findings, LINKS))
        return (
            f"numbers: steps {min(steps)} to {max(steps)} are right on {self._watched.size} ranks{compared}; shares of "
            f"what rounding explains: {shares}"
        )


def _first_matrices(elements: Mapping[str, int], strides: Mapping[str, int]) -> frozenset[str]:
    """Return the first parameters that are copied completely, as many as are checked in seconds."""
    names = []
    total = 0
    for name, count in elements.items():
        if strides[name] == 1 and total + count <= _MATRIX_ELEMENTS:
            names.append(name)
            total += count
    return frozenset(names)


class ReportCompilation(StepAction):
    """Prints graphs and seconds of the compiler after the first step, or the ranks on which it failed."""

    def due(self, step: int) -> bool:
        return step == self._run.first_step + 1

    def run(self, result: StepResult) -> None:
        report = self._io.report
        compiler = self._engine.compiler
        rank = self._run.world.rank
        assert compiler is not None
        failures = gather(self._run.world.control, compiler.failure)
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            report(
                f"WARNING: the compiler failed on {describe_ranks(failed)}, whose blocks run eagerly: "
                f"{failures[failed[0]]}. --compile off does not try."
            )
        elif not compiler.graphs:
            report("WARNING: torch compiled nothing, as where TORCHDYNAMO_DISABLE is set; blocks run eagerly.")
        if compiler.graphs:
            self._io.detail(f"blocks: {count_nouns(compiler.graphs, 'graph')} compiled in {compiler.compile_s:.1f} s")
        # Ranks do not meet at a later failure, so each reports its own.
        compiler.on_failure = lambda failure: say(
            f"WARNING: the compiler failed on rank {rank}, whose blocks run eagerly from now on: {failure}."
        )


class ReportMemory(StepAction):
    """Prints and records the measured peak of GPU memory beside the estimate; nothing on a CPU."""

    def due(self, step: int) -> bool:
        return step == self._run.first_step + _MEASURED_STEP

    def run(self, result: StepResult) -> None:
        measured = measured_memory()
        estimate = self._run.estimate
        if measured is None:
            return
        self._io.detail(measured_line(estimate, measured))
        estimated = estimate.allocated_bytes
        self._io.log_event("memory", step=result.step, estimated_bytes=estimated, **asdict(measured))


class JudgeOverfit(StepAction):
    """Compares the last step's loss with the first step's, and reports the verdict."""

    def due(self, step: int) -> bool:
        return step in (1, self._run.resolved.total_steps)

    def run(self, result: StepResult) -> None:
        """Read the loss of all ranks, and judge the last one. Collective. Synchronises with the device."""
        run = self._run
        control = self._run.world.control
        loss = float(np.mean(gather(control, float(result.loss))))
        if result.step == 1:
            size = run.resolved.shape.padded_vocab_size
            batches = [batch.target_ids().numpy() for batch in result.micro_batches if not batch.is_filler]
            counts = np.bincount(np.concatenate([np.empty(0, np.int64), *batches]), minlength=size)
            self._first_loss = loss
            self._entropy = entropy(np.sum(gather(control, counts), axis=0))
        if result.step == run.resolved.total_steps:
            has_learned, why = judge_overfit(self._first_loss, loss, self._entropy)
            samples = run.resolved.plan.global_batch_size
            steps = count_nouns(result.step, "step")
            verdict = f"{'learned' if has_learned else 'did not learn'}: the loss of the same {samples:,} samples {why}"
            self._io.report(f"{verdict} ({steps}, --lr {run.resolved.schedule.lr:g})")
            self._io.log_event("overfit", step=result.step, has_learned=has_learned, reason=why)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of a distribution given by counts, [n]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def judge_overfit(first: float, last: float, context_free: float) -> tuple[bool, str]:
    """Return whether a batch was learned, and what its loss did. Losses are in nats per token; `context_free` is H."""
    moved = f"from {first:.4f} to {last:.4f}"
    if not last <= first * (1 + _UNCHANGED):
        return False, f"rose {moved}. Lower --lr, or raise --warmup-steps"
    if last > first * (1 - _UNCHANGED):
        return False, f"stayed ({moved}). Likely causes: --lr is far too low, or no gradient reaches the weights"
    fell = f"fell {moved}, and a model that ignores the context stays above {context_free:.4f}"
    if last <= max(_LEARNED_SHARE * context_free, _LEARNED_LOSS):
        return True, fell
    if last < context_free:
        return False, f"{fell}. It learns, but has not memorised the batch: give more --steps, or another --lr"
    return False, (
        f"{fell}. Give more --steps or a higher --lr; if that does not help, attention or positions pass nothing on, "
        "or the targets do not follow from the context"
    )


class Validate(StepAction):
    """Measures the validation loss every --val-every steps and after the last one."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        super().__init__(run, engine, io)
        self._newest: tuple[int, Validation] | None = None

    def due(self, step: int) -> bool:
        return step % self._run.config.val_every == 0 or step == self._run.resolved.total_steps

    def run(self, result: StepResult) -> None:
        world = self._run.world
        with self._engine.meter.pause("evaluating"):
            # Everything is read first: a rank that cannot read must not leave the others in a forward pass.
            batches = on_all_ranks(world.control, lambda: [self._read(split) for split in self._run.validation])
            size = self._run.resolved.plan.ranks.sequence_parallel_size
            losses = [validation_loss(self._engine.deepspeed, of_split, world.device, size) for of_split in batches]
        total = sum(num_samples for _, num_samples in losses)
        mean = sum(loss * num_samples for loss, num_samples in losses) / total
        samples = f"{total} of {self._run.start.sets.fingerprint}"
        if math.isfinite(mean):
            self._newest = (result.step, Validation(mean, samples))
        else:
            self._newest = None
        if self._io.log:
            splits = self._run.validation
            by_set = {split.name: loss for split, (loss, _) in zip(splits, losses, strict=True) if split.name}
            in_bits = mean_bits_per_byte(losses, [split.bytes_per_token for split in splits])
            self._io.log.log_validation(result.step, mean, total, by_set, in_bits, samples=describe_samples(splits))

    def after(self, step: int) -> Validation | None:
        """Return the validation after a step, if it was measured there and is finite."""
        return self._newest[1] if self._newest and self._newest[0] == step else None

    def _read(self, split: ValidationSplit) -> list[ValidationBatch]:
        layout = self._engine.feed.plan.layout
        micro_batch_size = self._run.resolved.plan.micro_batch_size
        return list(validation_batches(split.shards, layout, micro_batch_size, split.num_samples))


def validation_loss(
    engine: DeepSpeedEngine, batches: Iterable[ValidationBatch], device: torch.device, ranks_of_sequence: int = 1
) -> tuple[float, int]:
    """Return the mean loss in nats per token over all ranks' batches, and the number of sequences. Collective.

    Every rank must bring equally many batches: ZeRO-3 gathers weights in every forward pass.
    """
    totals = torch.zeros(3, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            totals += batch.sums(engine, device)
    engine.train()
    totals = totals.to(device)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[2]) // ranks_of_sequence


class EvaluateTasks(StepAction):
    """Evaluates tasks every --eval-every steps and after the last one, their items distributed over all ranks.

    Every rank gets all scores and computes the same results. A forward pass has at most the tokens of one of training,
    and the logits of as many at a time as the loss: it takes no more memory than a validation.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        super().__init__(run, engine, io)
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
        location = self._run.start.sets.first
        seq_len = self._run.resolved.shape.seq_len
        tokenizer = load_set_tokenizer(location.folder, location.manifest)
        return [encode_task(file, tokenizer, seq_len) for file in files]

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Score rows in batches that the ranks take in turn. Collective.

        A rank without a batch left scores one that does not count: ZeRO-3 gathers weights in every forward pass.
        """
        plan = self._run.resolved.plan
        world = self._run.world
        group = plan.ranks.group_of(world.rank)
        num_groups = plan.ranks.data_parallel_size
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
        if split is None:
            return scores
        return split.gather_scores(scores, targets.shape[1])


class SampleText(StepAction):
    """Samples text every --sample-every steps, and whenever the model is evaluated; rank 0 prints.

    Every rank generates, because ZeRO-3 gathers weights in every forward pass. All use rank 0's choice of each token:
    ranks that rounded differently would end at different tokens, and one would wait for weights indefinitely.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        super().__init__(run, engine, io)
        location = run.start.sets.first
        self._tokenizer = on_all_ranks(
            run.world.control, lambda: load_set_tokenizer(location.folder, location.manifest)
        )

    def due(self, step: int) -> bool:
        config = self._run.config
        total_steps = self._run.resolved.total_steps
        if config.eval_every and step == total_steps:
            return True
        return any(every and step % every == 0 for every in (config.sample_every, config.eval_every))

    def run(self, result: StepResult) -> None:
        run = self._run
        prompts = self._run.start.prompts
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


class ProfileSteps(StepAction):
    """Profiles from the end of step A-1 to the end of step B-1, including logging, saving and validation.

    On rank 0 alone: its waits for the others are part of its collectives.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO, *, is_rollback: bool) -> None:
        """`is_rollback`: an earlier action of this start has profiled, or has reported that nothing is."""
        super().__init__(run, engine, io)
        self._steps = str(run.config.profile)
        self._is_rollback = is_rollback
        first, behind = parse_profiled(self._steps)
        self._before = first - 1
        self._last = min(behind - 1, run.resolved.total_steps)
        self._profiler: profile | None = None
        self._whole = record_function("profiled steps")
        self._phase: record_function | None = None

    def begin(self, step: int) -> None:
        if step > self._before or self._last <= self._before:
            if self._is_rollback:
                return
            self._io.report(f"WARNING: --profile {self._steps}: this start goes from step {step + 1} to "
                            f"{self._run.resolved.total_steps}, so nothing is profiled")  # fmt: skip
        elif step == self._before:
            self._start()

    def due(self, step: int) -> bool:
        # No collectives: the other ranks have nothing to do.
        return self._run.world.is_main and step in (self._before, self._last)

    def run(self, result: StepResult) -> None:
        if result.step == self._before:
            self._start()
        elif self._profiler is not None:
            self._finish()

    def close(self) -> None:
        if self._profiler is not None:
            self._engine.meter.phases.listener = None
            self._io.report(f"WARNING: --profile {self._steps}: the run left these steps before the last, so "
                            "nothing is written")  # fmt: skip
            self._profiler.stop()

    def _start(self) -> None:
        if not self._run.world.is_main:
            return
        with self._engine.meter.pause("profiling"):
            if self._run.world.device.type == "cuda":
                on_gpu = [ProfilerActivity.CUDA]
            else:
                on_gpu = []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
            _synchronise()
        self._whole.__enter__()
        self._engine.meter.phases.listener = self._enter_phase

    def _enter_phase(self, phase: Phase) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = record_function(f"phase: {phase}")
        self._phase.__enter__()

    def _finish(self) -> None:
        profiler = self._profiler
        meter = self._engine.meter
        assert profiler is not None
        _synchronise()
        meter.phases.listener = None
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._whole.__exit__(None, None, None)
        with meter.pause("profiling"):
            profiler.stop()
            self._profiler = None
            # An error here would end rank 0 alone and leave the others waiting.
            try:
                self._write(profiler)
            except (OSError, RuntimeError) as error:
                self._io.report(f"WARNING: --profile {self._steps}: nothing is written: {error}. Training continues")

    def _write(self, profiler: profile) -> None:
        io = self._io
        folder = self._run.config.run / _FOLDER
        name = f"steps-{self._before + 1}-to-{self._last}"
        trace = folder / f"{name}.trace.json"
        table = folder / f"{name}.table.txt"
        folder.mkdir(exist_ok=True)
        partial = trace.with_name(f".{trace.name}.partial")
        partial.unlink(missing_ok=True)  # a link here would redirect the write
        profiler.export_chrome_trace(str(partial))
        partial.replace(trace)
        if self._run.world.device.type == "cuda":
            column = "self_device_time_total"
        else:
            column = "self_cpu_time_total"
        rows = profiler.key_averages()
        write_durably(table, rows.table(sort_by=column, row_limit=_NUM_ROWS, max_name_column_width=_NAME_WIDTH))
        io.report(
            f"profile of steps {self._before + 1} to {self._last} on rank 0, which the profiler itself slows down: "
            f"{trace} (open it in chrome://tracing or ui.perfetto.dev), {table.name} beside it"
        )
        num_steps = self._last - self._before
        io.log_event("profile", step=self._last, num_steps=num_steps, trace=str(trace), table=str(table))


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
