"""The four training loops of engine_overhead.py, each as one rank runs it.

They share model, initial weights, samples and their order, optimizer groups, clipping, learning-rate schedule and the
interval at which the loss is read. train.py's own code resolves all of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmscale.architecture.layers import ParameterTensors
from llmscale.config.run_arguments import parse_run_config
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.training.start import Start, prepare_start
from scripts.bench.harness import Orders, read_losses

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

    from llmscale.config.batch_plan import BatchPlan
    from llmscale.engine.process_group import World


class Pace:
    """A loop's clock, called at the end of each step. Waits after each turn until the next turn is ordered.

    A turn lasts from its order to the end of its last step, with the device synchronised at both ends. It contains
    everything that the loop does per step: data, logging, agreement between ranks.
    """

    def __init__(self, orders: Orders, warmup_steps: int, block_steps: int) -> None:
        self._orders, self._warmup, self._block = orders, warmup_steps, block_steps
        self._steps, self._began_s, self._began_cpu_s = 0, time.perf_counter(), time.process_time()
        self._engine_cpu_s = 0.0

    def watch_engine(self) -> None:
        """Begin to count the processor seconds inside DeepSpeed's engine separately."""
        from deepspeed import DeepSpeedEngine

        for name in ("forward", "backward", "step"):
            setattr(DeepSpeedEngine, name, self._watched(getattr(DeepSpeedEngine, name)))

    def _watched(self, method: Callable[..., object]) -> Callable[..., object]:
        def watched(*args: object, **kwargs: object) -> object:
            began_cpu_s = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._engine_cpu_s += time.process_time() - began_cpu_s

        return watched

    def step_done(self) -> str | None:
        """Return the order that begins the next turn; None within a turn."""
        self._steps += 1
        done = self._steps - self._warmup
        if done < 0 or done % self._block:
            return None
        _synchronize()
        seconds, cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._began_cpu_s
        answer = {"seconds": seconds, "cpu_s": cpu_s, "engine_cpu_s": self._engine_cpu_s}
        self._orders.answer({**answer, "peak_memory_bytes": _peak_memory_bytes()})
        order = self._orders.wait()
        self._engine_cpu_s = 0.0
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        return order


@dataclass(frozen=True)
class Contest:
    """One rank of one contestant."""

    run: Start
    arguments: list[str]
    """Command line of train.py."""
    windows: Path
    """File with all samples in the order of train.py's feed: uint16 [samples, seq_len + 1]."""
    pace: Pace


def prepare(arguments: list[str], world_size: int) -> Start:
    return prepare_start(parse_run_config(arguments), world_size)


def save_windows(run: Start, path: Path) -> None:
    """Write all samples of the run in order, for the other loops to read from one memory map, the cheapest feed."""
    from llmscale.data.shards.token_shards import TokenShards

    samples = np.arange(run.resolved.total_steps * run.resolved.plan.global_batch_size, dtype=np.int64)
    ids = run.stream.order.sample_ids(samples)
    np.save(path, TokenShards(run.sets.first, "train").read(ids))


def run_train_py(contest: Contest) -> float:
    """Run train.py from its command line. Return the last loss."""
    from llmscale import train
    from llmscale.training.live_run import StepResult
    from llmscale.training.session import Session

    run_actions = Session.run_actions

    def run_and_pace(session: Session, done: StepResult) -> None:
        run_actions(session, done)
        contest.pace.step_done()

    Session.run_actions = run_and_pace  # type: ignore[method-assign]
    contest.pace.watch_engine()
    if train.main(contest.arguments):
        raise SystemExit("train.py failed")
    losses = read_losses(contest.run.config.run)
    return losses[max(losses)]


def run_engine(contest: Contest) -> float:
    """Run train.py's engine alone: forward, backward, step, learning rate, and a loss now and then."""
    from llmscale.engine.deepspeed_engine import build_engine, gradient_norm, set_learning_rate
    from llmscale.engine.process_group import is_gpu, join_world, leave_world

    config, plan, world = contest.run.config, contest.run.resolved.plan, join_world()
    resolved = contest.run.resolved if is_gpu() else contest.run.resolved.on_cpu()
    engine = build_engine(config, resolved)
    windows = np.load(contest.windows, mmap_mode="r")
    for step in range(resolved.total_steps):
        tokens = _rank_tokens(windows, step, plan, world)
        set_learning_rate(engine, resolved.optimizer, resolved.schedule.learning_rate(step))
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        if _is_logged(contest, step):
            mean = _mean_over_ranks(loss, world)
            print(f"step {step + 1} loss {mean:.4f} norm {gradient_norm(engine):.3f}")
        contest.pace.step_done()
    leave_world()
    return mean


def run_plain(contest: Contest) -> float:
    """Run a hand-written loop: no DeepSpeed, no agreement, no metrics file; DDP for several ranks."""
    import torch

    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.model.gpt import GPT

    resolved, config, plan = contest.run.resolved, contest.run.config, contest.run.resolved.plan
    world = join_world()
    model: torch.nn.Module = GPT(resolved.shape, seed=config.seed).to(world.device)
    optimizer = _build_optimizer(contest.run, model)
    if world.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    windows = np.load(contest.windows, mmap_mode="r")
    autocast = contest.run.resolved.precision == "autocast"
    for step in range(resolved.total_steps):
        tokens = _rank_tokens(windows, step, plan, world)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = resolved.schedule.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if _is_logged(contest, step):
            mean = _mean_over_ranks(loss, world)
            print(f"step {step + 1} loss {mean:.4f} norm {norm.item():.3f}")
        contest.pace.step_done()
    leave_world()
    return mean


def run_trainer(contest: Contest) -> float:
    """Run Hugging Face Trainer with train.py's resolved ds_config.

    Under autocast the two differ: the `torch_autocast` section makes DeepSpeed cast by module and choose the type of
    the exchange, while train.py keeps that section from DeepSpeed and enters autocast in the model.
    """
    from llmscale.engine.process_group import is_gpu, join_world, leave_world
    from llmscale.model.gpt import GPT

    transformers = import_transformers()
    resolved, config = contest.run.resolved, contest.run.config
    world = join_world()
    model = _model_for_trainer(GPT(resolved.shape, seed=config.seed))
    arguments = transformers.TrainingArguments(
        output_dir=str(config.run),
        deepspeed=dict((resolved if is_gpu() else resolved.on_cpu()).ds_config),
        per_device_train_batch_size=resolved.plan.micro_batch_size,
        max_steps=resolved.total_steps,
        max_grad_norm=1.0,
        logging_steps=config.log_every,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=is_gpu(),
        use_cpu=not is_gpu(),
    )
    trainer = _contest_trainer(transformers, contest)
    trainer(model=model, args=arguments, train_dataset=_windows_for_trainer(contest.windows)).train()
    mean = _mean_over_ranks(model.last_loss, world)
    leave_world()
    return mean


CONTESTANT_LOOPS: dict[str, Callable[[Contest], float]] = {
    "plain": run_plain,
    "engine": run_engine,
    "trainer": run_trainer,
    "train.py": run_train_py,
}


def _is_logged(contest: Contest, step: int) -> bool:
    return (step + 1) % contest.run.config.log_every == 0 or step in (0, contest.run.resolved.total_steps - 1)


def _mean_over_ranks(loss: torch.Tensor, world: World) -> float:
    """Return the mean loss of all ranks. Collective."""
    import torch.distributed as dist

    mean = loss.detach() / world.world_size
    dist.all_reduce(mean)
    return mean.item()


def _rank_tokens(windows: NDArray[np.uint16], step: int, plan: BatchPlan, world: World) -> torch.Tensor:
    """Return a rank's micro-batch of a step on its device: int64 [micro_batch_size, seq_len + 1]."""
    import torch

    begin = step * plan.global_batch_size + world.rank * plan.micro_batch_size
    rows = windows[begin : begin + plan.micro_batch_size].astype(np.int64)
    return torch.from_numpy(rows).to(world.device, non_blocking=True)


def _build_optimizer(run: Start, model: torch.nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    from llmscale.engine.optimizers import build_optimizer

    config, kinds = run.config, ParameterTensors(run.resolved.shape.architecture).kinds
    betas = (config.beta1, config.beta2)
    return build_optimizer(
        model, kinds, run.resolved.optimizer, lr=lr, weight_decay=config.weight_decay, betas=betas, eps=config.eps
    )


def _model_for_trainer(gpt: torch.nn.Module) -> torch.nn.Module:
    """Return `gpt` as Trainer calls a model: by keyword, with the loss in a dict."""
    import torch

    class TrainerModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.last_loss = gpt, torch.zeros(())

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.gpt(input_ids, labels)
            self.last_loss = loss.detach()
            return {"loss": loss}

    return TrainerModel()


def _windows_for_trainer(path: Path) -> Dataset[dict[str, torch.Tensor]]:
    import torch

    class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            self._windows = np.load(path, mmap_mode="r")

        def __len__(self) -> int:
            return len(self._windows)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.from_numpy(self._windows[index].astype(np.int64))
            return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    return Windows()


def _contest_trainer(transformers, contest: Contest) -> type:
    """Return a Trainer class with our optimizer and schedule, sequential samples, and `contest.pace` at its steps."""
    # Under DeepSpeed Trainer ignores an optimizer passed to it, so the methods that build one are replaced.
    import torch

    schedule = contest.run.resolved.schedule

    class EndOfStep(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            contest.pace.step_done()

    class ContestTrainer(transformers.Trainer):
        def __init__(self, **arguments: object) -> None:
            super().__init__(**arguments)
            self.add_callback(EndOfStep)

        def create_optimizer(self, *_: object) -> torch.optim.Optimizer:
            self.optimizer = _build_optimizer(contest.run, self.model.gpt, lr=1.0)
            return self.optimizer

        def create_scheduler(
            self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
        ) -> torch.optim.lr_scheduler.LambdaLR:
            # transformers 5 gives none.
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.learning_rate)
            return self.lr_scheduler

        def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return ContestTrainer


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory_bytes() -> int:
    from llmscale.engine.device_memory import peak_memory_bytes

    return peak_memory_bytes()
