"""A start of a run, resolved from inputs that are read already; what it changes since its checkpoint. No torch.

Memory of a run: estimated before step 1, measured after step 2, explained if it runs out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import SHAPE_KEYS, VOCAB_MULTIPLE, shortest_interval
from llmscale.checkpoint.initial_weights import base_of_checkpoint
from llmscale.checkpoint.inventory import FoundCheckpoints
from llmscale.checkpoint.manifest import SPARE_BYTES, load_pieces
from llmscale.checkpoint.run_state import RunState, SavedRun
from llmscale.config.hardware import Cluster, measured_gpu
from llmscale.config.resolve import ResolvedRun, resolve_run, resolve_schedule
from llmscale.config.run_config import CHANGES_THAT_BREAK, KEYS, RunConfig
from llmscale.config.run_keys import IDENTITY, place_of
from llmscale.config.schedule import Schedule
from llmscale.config.user_paths import shown, url_of
from llmscale.engine.device_settings import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, allocator_settings
from llmscale.errors import CheckpointError, ConfigError, MachineError
from llmscale.keys import value_at
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.memory.estimate import CONTEXT_BYTES, MemoryEstimate, estimate_memory
from llmscale.planning.compilation import EAGER, Compilation
from llmscale.planning.disk_usage import checkpoints_at_once
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import MARGIN
from llmscale.training.identity import check_identity
from llmscale.training.inputs import Inputs, PreparedRun, read_inputs
from llmscale.training.sample_stream import SampleStream, build_stream, check_skips

if TYPE_CHECKING:
    from llmscale.engine.device_memory import MeasuredMemory

#: Relative change of the learning rate up to which it counts as continuous.
_SMOOTH = 0.05
#: Fraction of memory that a change must save at least for a run that the estimate expected to fit.
_MIN_SAVING = 0.1
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Start(Inputs):
    """Inputs of a run that fit together, with what follows from them: what it trains, and where it begins."""

    resolved: ResolvedRun
    """The resolved run, for GPUs until `on_cpu` is called."""
    stream: SampleStream
    warnings: tuple[str, ...] = ()
    """Allowed changes of the checkpoint's identity, each with its consequence."""
    compilation: Compilation = EAGER
    """How blocks are compiled; decided once the device is known."""
    listing: FoundCheckpoints | None = None
    """The run's checkpoints as rank 0 listed them after the claim; None before."""

    @property
    def first_step(self) -> int:
        """Optimizer steps done before this start."""
        return self.state.step if self.state else 0

    @property
    def is_finished(self) -> bool:
        """True if the checkpoint has no steps left."""
        return self.state is not None and not self.is_open and self.state.step >= self.resolved.total_steps

    @cached_property
    def identity(self) -> dict[str, object]:
        """Everything that a checkpoint and the run that resumes it must share, and its stream's record."""
        manifest = self.sets.manifest
        return {
            **{name: value_at(place, self) for name, place in IDENTITY.items()},
            # Compared only when another run begins from these weights; on resume the fingerprint covers it.
            "vocab_size": manifest.vocab_size,
            "tokenizer_sha256": manifest.tokenizer_sha256,
            **self.stream.identity,
        }

    def on_cpu(self, *, has_bf16: bool = True) -> Start:
        """Return the start for a CPU, with or without bf16 arithmetic."""
        return replace(self, resolved=self.resolved.on_cpu(has_bf16=has_bf16))

    def at(self, source: SavedRun | None, *, resumes: bool) -> Start:
        """Return the start of the same run from another checkpoint, or from step 0.

        Raises CheckpointError, ConfigError, DataError.
        """
        begun = _begin(replace(self, source=source, resumes=resumes), self.resolved)
        return replace(begun, compilation=self.compilation, listing=self.listing)

    def with_steps(self, steps: int) -> Start:
        """Return the start of a run whose steps --minutes sets. Raises ConfigError."""
        check_skips(self.config.skip_steps, steps)
        begun = _begin(self, _with_steps(self, self.resolved, steps))
        return replace(begun, compilation=self.compilation, listing=self.listing)


def prepare_start(run: RunConfig | PreparedRun, world_size: int) -> Start:
    """Read a run's inputs and resolve its start. Raises ConfigError, DataError or CheckpointError; writes nothing."""
    return resolve_start(read_inputs(run), world_size)


def resolve_start(inputs: Inputs, world_size: int) -> Start:
    """Resolve a run for a number of ranks, and its samples from its checkpoint on.

    Raises ConfigError, DataError, or CheckpointError if the run cannot resume the checkpoint.
    """
    return _begin(inputs, resolve_ranks(inputs, world_size))


def resolve_ranks(inputs: Inputs, world_size: int) -> ResolvedRun:
    """Divide a run over ranks. Raises ConfigError, in particular for a number of ranks that cannot share the batch."""
    batch = inputs.config.overfit_batch
    if batch is not None and batch < world_size:
        raise ConfigError(f"--overfit-batch {batch} has fewer samples than there are ranks: give {world_size} or more.")
    return resolve_run(inputs.config, inputs.ds, inputs.facts, world_size)


def _begin(inputs: Inputs, resolved: ResolvedRun) -> Start:
    """Return the start at the inputs' checkpoint, none of whose values depends on the number of ranks."""
    config = inputs.config
    source = inputs.source
    state = inputs.state
    if inputs.steps_of_minutes is not None:
        resolved = _with_steps(inputs, resolved, inputs.steps_of_minutes)
    if source is not None:
        _check_model(inputs, resolved, source)
    if source is not None and state is not None and state.step != source.step:
        raise CheckpointError(f"{source.path} says step {source.step} in one file and {state.step} in another.")
    stream = build_stream(config, inputs.sets, resolved, state)
    values = {entry.name: getattr(inputs, entry.name) for entry in fields(Inputs)}
    start = Start(**values, resolved=resolved, stream=stream)
    if not inputs.is_open:
        check_skips(config.skip_steps, resolved.total_steps)
    if state is None:
        return start
    return replace(start, warnings=tuple(check_identity(state.identity, start.identity, config.allow_changed)))


def _with_steps(inputs: Inputs, resolved: ResolvedRun, steps: int) -> ResolvedRun:
    config = inputs.config.model_copy(update={"steps": steps})
    return replace(resolved, schedule=resolve_schedule(config, resolved.plan, inputs.facts.num_train_samples))


def _check_model(inputs: Inputs, resolved: ResolvedRun, source: SavedRun) -> None:
    """Raise CheckpointError if the checkpoint's tensors belong to another model or optimizer."""
    config = inputs.config
    shape = resolved.shape
    folder = source.path
    state = source.state
    fixed = [key for key, behaviour in SHAPE_KEYS.items() if behaviour.resume == "weights"]
    if not inputs.resumes:
        # Adapters begin beside these weights.
        base_of_checkpoint(source)
        fixed = [key for key in fixed if not key.startswith("lora_")]
    saved = {key: state.hyperparameters[key] for key in fixed if key in state.hyperparameters}
    now = {key: getattr(shape, key) for key in saved}
    match [saved.get(key) for key in ("n_layer", "dense_layers", "expert_interval")]:
        case [int(layers), int(dense), int(interval)] if dense + interval <= layers:
            saved["dense_layers"], saved["expert_interval"] = shortest_interval(layers, dense, interval)
    vocab_size = state.config.get("vocab_size") or state.identity.get("vocab_size")
    if type(vocab_size) is int and -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE != shape.padded_vocab_size:
        saved["vocab_size"] = vocab_size
        now["vocab_size"] = shape.vocab_size
    if inputs.resumes and state.optimizer_scalars and "optimizer" in state.hyperparameters:
        saved["optimizer"] = state.hyperparameters["optimizer"]
        now["optimizer"] = config.optimizer
    differ = [f"{key} was {saved[key]} and is {now[key]}" for key in saved if saved[key] != now[key]]
    if inputs.resumes and (change := _describe_frozen(state, config, resolved)):
        raise CheckpointError(
            f"{folder} does not fit this run: {change}. Frozen parameters have no optimizer states. Give what it was, "
            f"or begin a new run with these weights: --init-from {folder} and another --run folder."
        )
    if differ:
        raise CheckpointError(
            f"{folder} does not fit this run: {', '.join(differ)}. Give what it was, or name another "
            f"{'--run folder' if inputs.resumes else 'checkpoint'}."
        )


def _describe_frozen(state: RunState, config: RunConfig, resolved: ResolvedRun) -> str | None:
    """Return how the frozen parameters differ from the checkpoint's, or None."""
    if resolved.shape.lora_rank:
        return None
    tensors = resolved.tensors
    saved = state.hyperparameters.get("freeze")
    if isinstance(saved, list):
        patterns = [str(pattern) for pattern in saved]
    else:
        patterns = []
    before = {tensor.name for tensor in replace(tensors, frozen=tuple(patterns)).frozen_tensors}
    after = {tensor.name for tensor in tensors.frozen_tensors}
    if before == after:
        return None
    changes = {"thawed": before - after, "frozen": after - before}
    listed = (
        f"{min(names)}{' and others' if len(names) > 1 else ''} {verb}" for verb, names in changes.items() if names
    )
    return f"--freeze was {patterns} and is {config.freeze} ({', '.join(listed)})"


def check_space(start: Start) -> None:
    """Raise ConfigError if the first checkpoints of a new run do not fit on its disk."""
    config = start.config
    resolved = start.resolved
    if start.has_checkpoints or config.overfit_batch is not None:
        return
    place = next(folder for folder in (config.run, *config.run.absolute().parents) if folder.exists())
    # Those of --keep-every can be moved away during a long run.
    count = checkpoints_at_once(config.model_copy(update={"keep_every": 0}), resolved.total_steps)
    one = resolved.stored_optimizer.checkpoint_bytes(resolved.shape.architecture)
    needed = count * one + SPARE_BYTES
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"--run {config.run} cannot be written to: No space left on device for {count} checkpoint"
            f"{f's (--keep-last {config.keep_last}, the best and the next one)' if count > 1 else ''} of "
            f"{format_size(one)}: {place} has {format_size(free)} free, and {format_size(needed)} are needed with "
            "some to spare. Free some space, lower --keep-last, or name another --run."
        )


def lines_at_end(start: Start) -> list[str]:
    """Return lines on how to continue a run that is finished, and none for one that trains.

    Reads the whole checkpoint of a finished run: a start skips a damaged one, and takes the previous one.
    """
    source = start.source
    state = start.state
    run = start.config.run
    if source is None or state is None or not start.is_finished:
        return []
    end = f"finished at step {state.step} of {start.resolved.total_steps}; run folder: {shown(run)}"
    pieces = load_pieces(source.path)
    # All of it is on this disk, or in the run's store: the ranks need not meet.
    if pieces:
        is_settled = pieces.remote is not None
    else:
        is_settled = url_of(run) is None
    if is_settled and source.find_damage() is None:
        return [*finished_lines(state, start), end]
    return []


def hyperparameters(run: Start) -> dict[str, object]:
    """Return everything that decides how steps are made and may change on resume, as plain values without defaults.

    The run's identity (run_config.CHANGES_THAT_BREAK) may not change.
    """
    resolved = run.resolved
    ds_config = run.resolved.engine_config
    logged = [key for key, behaviour in KEYS.items() if behaviour.resume in ("logged", "weights")]
    return {
        "zero_stage": resolved.zero_stage,
        "world_size": resolved.plan.ranks.world_size,
        **{key: value_at(place_of(key), run) for key in logged},
        "grad_accum_dtype": ds_config.grad_accum_dtype,
        "communication_data_type": ds_config.communication_data_type,
    }


def change_lines(state: RunState, run: Start, now: Mapping[str, object]) -> Iterator[str]:
    """Yield the hyperparameters that differ from the checkpoint's, and a jump of the learning rate."""
    saved = state.hyperparameters
    changed = [f"{key} {_show(saved[key])} -> {_show(value)}" for key, value in now.items()
               if key in saved and saved[key] != value]  # fmt: skip
    changed += _accepted_changes(state.identity, run.identity)
    if changed:
        yield f"changed since the checkpoint: {'; '.join(changed)}"
    if state.step >= run.resolved.total_steps:
        return
    schedule = _schedule_of(state)
    before = schedule.learning_rate(state.step)
    after = run.resolved.schedule.learning_rate(state.step)
    if abs(after - before) > _SMOOTH * max(before, after):
        yield (
            f"the learning rate goes from {schedule.learning_rate(max(0, state.step - 1)):.2e} to {after:.2e} at "
            f"step {state.step + 1:,}, where the checkpoint's schedule had {before:.2e}"
        )


def _accepted_changes(saved: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield the parts of a run's identity that --allow-changed has let differ; of hashes and tables only the name."""
    for key in CHANGES_THAT_BREAK:
        before = saved.get(key)
        after = now.get(key)
        if key in saved and before != after:
            are_plain = key != "data" and not any(isinstance(value, Mapping) for value in (before, after))
            yield f"{key} {before} -> {after}" if are_plain else key


def finished_lines(state: RunState, run: Start) -> Iterator[str]:
    """Yield how to continue a finished run; nothing if there are steps left."""
    total = run.resolved.total_steps
    config = run.config
    if state.step < total:
        return
    more = 2 * state.step
    wanted = config.model_copy(update={"steps": more, "tokens": None, "minutes": None})
    if config.tokens:
        longer_by = "more --tokens"
    else:
        longer_by = f"more --steps, such as --steps {more}"
    if config.minutes:
        longer_by = "another --minutes, which counts from there"
    longer = resolve_schedule(wanted, run.resolved.plan, run.sets.num_train_samples)
    last = _schedule_of(state).learning_rate(state.step - 1)
    following = longer.learning_rate(state.step)
    yield (f"nothing to do: the checkpoint is at step {state.step:,} of {total:,}. To continue, give {longer_by}")
    if abs(following - last) > _SMOOTH * last:
        yield (
            f"with {more:,} steps the {longer.schedule} schedule runs over all of them: the learning rate goes from "
            f"{last:.2e} to {following:.2e} at step {state.step + 1:,}. --schedule constant --lr {last:.2e} "
            "--warmup-steps 0 continues at the last one instead"
        )


def _schedule_of(state: RunState) -> Schedule:
    """Return the checkpoint's schedule; older ones lack the keys of DeepSpeed's schedules."""
    saved = state.hyperparameters
    return Schedule(**{entry.name: saved[entry.name] for entry in fields(Schedule) if entry.name in saved})  # type: ignore[arg-type]


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


class OutOfMemory(MachineError):
    """A rank ran out of memory."""


def estimate_line(estimate: MemoryEstimate, gpu_bytes: int | None) -> str:
    """Return the line printed before step 1. `gpu_bytes` is None on a CPU."""
    where = "per GPU" if gpu_bytes else "if each rank were a GPU"
    line = f"memory: estimated peak {format_size(estimate.allocated_bytes)} {where}, in {estimate.peak_moment} "
    line += f"({describe_breakdown(estimate.peak)})"
    if gpu_bytes is None:
        return f"{line}; nothing to compare it with on a CPU"
    total = f"{format_size(estimate.total_bytes)} of {format_size(gpu_bytes)}"
    return f"{line}; {total} with the allocator's reserve and the CUDA context"


def measured_line(estimate: MemoryEstimate, measured: MeasuredMemory) -> str:
    """Return the line printed after the first steps."""
    line = (
        f"memory: measured peak {format_size(measured.allocated_bytes)} allocated, "
        f"{format_size(measured.reserved_bytes)} reserved on the main rank"
    )
    error = estimate.allocated_bytes / measured.allocated_bytes - 1
    side = "above" if error >= 0 else "below"
    return f"{line}; the estimate of {format_size(estimate.allocated_bytes)} is {abs(error):.1%} {side}"


@contextmanager
def explained_out_of_memory(run: Start) -> Iterator[None]:
    """Turn an out-of-memory error into OutOfMemory with a breakdown and the smallest change that fits."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # torch is imported already when memory runs out.
        from llmscale.engine.device_memory import device_memory_bytes, gpu_capability

        words = explain_out_of_memory(run, str(error), device_memory_bytes(), gpu_capability())
        raise OutOfMemory(words) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise errors of torch's GPU and CPU allocators, of cuBLAS and of Python."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def explain_out_of_memory(
    run: Start, message: str, gpu_bytes: int | None, capability: ComputeCapability | None = None
) -> str:
    """Return three lines: the error, the estimated breakdown, and the smallest change that fits.

    A fourth line names the allocator's setting if the tensors alone would fit.
    """
    rank = os.environ.get("RANK", "0")
    what = " ".join(message.split()) or "MemoryError"
    lines = [f"rank {rank} ran out of memory: {what[:300]}"]
    estimate = estimate_memory(run.resolved, capability)
    lines.append(f"  {estimate_line(estimate, gpu_bytes)}")
    lines.append(f"  {_advice(run, estimate, gpu_bytes, capability)}")
    would_fit = gpu_bytes is not None and estimate.allocated_bytes + CONTEXT_BYTES <= gpu_bytes
    if would_fit and "expandable_segments" not in allocator_settings(os.environ):
        lines.append(
            f"  or first {ALLOCATOR_VARIABLES[0]}={EXPANDABLE_SEGMENTS}: all tensors together would fit, and the "
            "allocator loses less memory between them with it"
        )
    return "\n".join(lines)


def _advice(run: Start, estimate: MemoryEstimate, gpu_bytes: int | None, capability: ComputeCapability | None) -> str:
    resolved = run.resolved
    plan = run.resolved.plan
    # A change leaves MARGIN of the GPU; what the run needs now, less the least saving, has no margin on top.
    limit = round((estimate.total_bytes - _MIN_SAVING * estimate.reserved_bytes) / (1 - MARGIN))
    if gpu_bytes is not None:
        limit = min(limit, gpu_bytes)
    ranks_per_node = int(os.environ.get("LOCAL_SIZE", plan.ranks.world_size))
    num_nodes = max(1, plan.ranks.world_size // ranks_per_node)
    cluster = Cluster(measured_gpu("", limit, capability), ranks_per_node, num_nodes=num_nodes)
    change = find_smallest_change(resolved, cluster)
    if change is None:
        return (
            "no smaller micro-batch, recomputation, higher stage or offload to the host is enough: it takes more GPUs, "
            "a shorter seq_len or a smaller model"
        )
    saved = estimate.total_bytes - change.fit.estimate.total_bytes
    return f"the smallest change that fits: {' and '.join(change.words)} ({format_size(saved)} less)"
