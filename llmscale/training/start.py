"""A start of a run, resolved from inputs that are read already: nothing here opens a file. No torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import cached_property

from llmscale.architecture.shape import SHAPE_KEYS, VOCAB_MULTIPLE, shortest_interval
from llmscale.checkpoint.initial_weights import PublishedWeights
from llmscale.checkpoint.inventory import FoundCheckpoints
from llmscale.checkpoint.run_state import RunState, SavedRun, check_identity
from llmscale.config.resolve import ResolvedRun, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.data.mixture import TrainingSets
from llmscale.errors import CheckpointError, ConfigError
from llmscale.evaluate.tasks import TaskFile
from llmscale.memory.breakdown import format_size
from llmscale.planning.compilation import EAGER, Compilation
from llmscale.planning.disk_usage import SPARE_BYTES, checkpoints_at_once
from llmscale.training.inputs import Inputs, read_inputs
from llmscale.training.sample_stream import SampleStream, build_stream, check_skips


@dataclass(frozen=True)
class Start:
    """A start of a run whose inputs fit together: what it trains, and where it begins."""

    inputs: Inputs
    resolved: ResolvedRun
    """The resolved run, for GPUs until `on_cpu` is called."""
    stream: SampleStream
    warnings: tuple[str, ...] = ()
    """Allowed changes of the checkpoint's identity, each with its consequence."""
    compilation: Compilation = EAGER
    """How blocks are compiled; decided once the device is known."""
    found: FoundCheckpoints | None = None
    """The run's checkpoints as rank 0 listed them after the claim; None before."""

    @property
    def config(self) -> RunConfig:
        return self.inputs.config

    @property
    def sets(self) -> TrainingSets:
        return self.inputs.sets

    @property
    def weights(self) -> PublishedWeights | None:
        """Published weights that the run begins with."""
        return self.inputs.weights

    @property
    def tasks(self) -> tuple[TaskFile, ...]:
        return self.inputs.tasks

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.inputs.prompts

    @property
    def source(self) -> SavedRun | None:
        """Checkpoint whose tensors the engine loads."""
        return self.inputs.source

    @property
    def state(self) -> RunState | None:
        """State of the checkpoint that the run resumes; None for a new run."""
        return self.source.state if self.source and self.inputs.resumes else None

    @property
    def first_step(self) -> int:
        """Optimizer steps done before this start."""
        return self.state.step if self.state else 0

    @property
    def is_finished(self) -> bool:
        """True if the checkpoint has no steps left."""
        return self.state is not None and self.state.step >= self.resolved.total_steps

    @cached_property
    def identity(self) -> dict[str, object]:
        """Everything that a checkpoint and the run that resumes it must share. See run_config.CHANGES_THAT_BREAK."""
        return _identity(self.inputs, self.resolved, self.stream)

    def on_cpu(self, *, has_bf16: bool = True) -> Start:
        """Return the start for a CPU, with or without bf16 arithmetic."""
        return replace(self, resolved=self.resolved.on_cpu(has_bf16=has_bf16))

    def at(self, source: SavedRun | None, *, resumes: bool) -> Start:
        """Return the start of the same run from another checkpoint, or from step 0.

        Raises CheckpointError, ConfigError, DataError.
        """
        again = _begin(replace(self.inputs, source=source, resumes=resumes), self.resolved)
        return replace(self, inputs=again.inputs, stream=again.stream, warnings=again.warnings)


def prepare_start(config: RunConfig, world_size: int) -> Start:
    """Read a run's inputs and resolve its start. Raises ConfigError, DataError or CheckpointError; writes nothing."""
    return resolve_start(read_inputs(config), world_size)


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
    config, source = inputs.config, inputs.source
    if source is not None:
        _check_model(inputs, resolved, source)
    state = source.state if source and inputs.resumes else None
    if source is not None and state is not None and state.step != source.step:
        raise CheckpointError(f"{source.path} says step {source.step} in one file and {state.step} in another.")
    stream = build_stream(config, inputs.sets, resolved, state)
    warnings: list[str] = []
    if state is not None:
        warnings = check_identity(state.identity, _identity(inputs, resolved, stream), config.allow_changed)
    check_skips(config.skip_steps, resolved.total_steps)
    return Start(inputs, resolved, stream, tuple(warnings))


def _identity(inputs: Inputs, resolved: ResolvedRun, stream: SampleStream) -> dict[str, object]:
    plan, manifest = resolved.plan, inputs.sets.manifest
    grows = f", from {plan.ramp.first} over {plan.ramp.samples} samples" if plan.ramp else ""
    return {
        "global_batch_size": f"{plan.global_batch_size}{grows}" if grows else plan.global_batch_size,
        "seq_len": plan.seq_len,
        "data": inputs.sets.fingerprint,
        # Compared only when another run begins from these weights; on resume the fingerprint covers it.
        "vocab_size": manifest.vocab_size,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "seed": inputs.config.seed,
        **stream.identity,
    }


def _check_model(inputs: Inputs, resolved: ResolvedRun, source: SavedRun) -> None:
    """Raise CheckpointError if the checkpoint's tensors belong to another model or optimizer."""
    config, shape, folder, state = inputs.config, resolved.shape, source.path, source.state
    fixed = [key for key, behaviour in SHAPE_KEYS.items() if behaviour.resume == "weights"]
    saved = {key: state.hyperparameters[key] for key in fixed if key in state.hyperparameters}
    now = {key: getattr(shape, key) for key in saved}
    match [saved.get(key) for key in ("n_layer", "dense_layers", "expert_interval")]:
        case [int(layers), int(dense), int(interval)] if dense + interval <= layers:
            saved["dense_layers"], saved["expert_interval"] = shortest_interval(layers, dense, interval)
    vocab_size = state.config.get("vocab_size") or state.identity.get("vocab_size")
    if type(vocab_size) is int and -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE != shape.padded_vocab_size:
        saved["vocab_size"], now["vocab_size"] = vocab_size, shape.vocab_size
    if inputs.resumes and state.optimizer_scalars and "optimizer" in state.hyperparameters:
        saved["optimizer"], now["optimizer"] = state.hyperparameters["optimizer"], config.optimizer
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
    tensors, saved = resolved.tensors, state.hyperparameters.get("freeze")
    patterns = [str(pattern) for pattern in saved] if isinstance(saved, list) else []
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
    config, resolved = start.config, start.resolved
    if start.inputs.has_checkpoints or config.overfit_batch is not None:
        return
    place = next(folder for folder in (config.run, *config.run.absolute().parents) if folder.exists())
    # Those of --keep-every can be moved away during a long run.
    count = checkpoints_at_once(config.model_copy(update={"keep_every": 0}), resolved.total_steps)
    one = resolved.optimizer.checkpoint_bytes(resolved.shape.architecture)
    needed, free = count * one + SPARE_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"--run {config.run} cannot be written to: No space left on device for {count} checkpoint"
            f"{f's (--keep-last {config.keep_last}, the best and the next one)' if count > 1 else ''} of "
            f"{format_size(one)}: {place} has {format_size(free)} free, and {format_size(needed)} are needed with "
            "some to spare. Free some space, lower --keep-last, or name another --run."
        )
