"""`llmscale replay RUN --step N`: one step of a run once more, sample by sample and parameter by parameter.

The nearest earlier checkpoint is resumed by one process, whatever ranks the run had, in a temporary run folder. Where
none is left, the run begins once more: from its seed, or its initial weights. The training session takes the steps in
between.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli.data import as_plain_sample, describe_sample
from llmscale.config.command_line import FlagParser, Need, flag, local_path, path_or_url, run_place, whole_number
from llmscale.errors import CheckpointError, ConfigError
from llmscale.terminal.human_numbers import count_nouns
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor

    from llmscale.checkpoint.inventory import FoundCheckpoints
    from llmscale.checkpoint.manifest import Checkpoint
    from llmscale.checkpoint.run_state import RunState
    from llmscale.config.run_config import RunConfig
    from llmscale.data.loader import MicroBatch
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.report.history import RunHistory
    from llmscale.training.sample_stream import StepSample
    from llmscale.training.session import Session
    from llmscale.training.start import Start

#: Parameters that are printed.
_PARAMETERS = 10
#: Steps that are taken again from step 0, as many as lie between two checkpoints by default.
_MOST_FROM_START = 500
#: Facts of a start on which the bits of a loss depend.
_FACTS = ("world_size", "zero_stage", "precision", "micro_batch_size", "device")


@dataclass(frozen=True)
class Replayed:
    """One step, taken again."""

    loss: float
    """Mean over the batch, in nats per token."""
    grad_norm: float | None
    """Global norm before clipping; None if DeepSpeed computed none."""
    was_skipped: bool
    """True if fp16 gradients overflowed, and the optimizer took no step."""
    losses: dict[int, float]
    """Nats per token of each sample, by its id in all datasets together."""
    gradient_norms: dict[str, float]
    """Norm before clipping of each parameter's gradient, the largest first; empty for a skipped step."""
    replayed_by: dict[str, object]
    """_FACTS of this process."""


def add_parser(subparsers: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `replay`."""
    parser = subparsers.add_parser("replay")
    parser.add_argument("run", type=run_place, metavar="RUN", help="run folder")
    flag(parser, "--step N", "the step, as printed in the log", whole_number(1, limits.MAX_STEPS), required=True)
    text = "leave samples out of all replayed steps: ids as `data which` prints them, of a mixture SET:ID"
    flag(parser, "--without SAMPLES", text, None, [], nargs="+", action="extend")
    flag(parser, "--precision", "another precision than the run's", choices=("fp32", "bf16", "fp16", "autocast"))
    flag(parser, "--ds FILE|NAME", "another ds_config than the run's", local_path)
    flag(parser, "--data FOLDER|URL", "the run's dataset, where it is now", path_or_url)
    flag(parser, "--samples K", "samples to print, those of the largest losses", whole_number(0, limits.MAX_BATCH), 16)
    flag(parser, "--json", "print one JSON object, with all samples and parameters")
    parser.needs = [Need("samples", "with --json", lambda args: not args.json)]
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.inventory import find_checkpoint, find_checkpoints
    from llmscale.checkpoint.run_state import load_run_state
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
    from llmscale.engine.launcher_variables import check_is_only_copy
    from llmscale.report.history import RunHistory, load_history
    from llmscale.training.sample_stream import read_step_samples, stream_of_checkpoint
    from llmscale.training.start import prepare_start

    began = time.perf_counter()
    check_is_only_copy(os.environ, "llmscale replay")
    listing = find_checkpoints(args.run)
    if not listing.current:
        raise CheckpointError(f"{find_checkpoint(args.run)} is one checkpoint. Name its run folder.")
    history = RunHistory()
    with suppress(ConfigError):  # a run whose records are lost
        history = load_history(args.run)
    checkpoint = _choose_checkpoint(args.run, args.step, listing, history)
    with tempfile.TemporaryDirectory(prefix="llmscale-replay-") as folder:
        start = prepare_start(_config(args, listing, checkpoint, Path(folder)), 1)
        if checkpoint is None:
            # In the order that the run began with, without what it skipped.
            saved = load_run_state(_describing(args.step, listing).path)
            start = replace(start, stream=stream_of_checkpoint(start.config, start.sets, saved))
        without = _parse_samples(args.without, start, args.step)
        samples = read_step_samples(start.config, start.sets, start.stream, args.step)
        fetch_tokenizer(start.sets.first)
        tokenizer = load_set_tokenizer(start.sets.first.folder, start.sets.manifest)
        replayed = _replay(start, args.step, without, began)
    losses = [(replayed.losses[sample_id], sample) for sample_id, sample in samples if sample_id in replayed.losses]
    losses.sort(key=lambda pair: -pair[0])
    logged_loss = history.train.get(args.step)
    starts = [record for after, record in history.of_kind("event", "start") if after < args.step]
    if starts:
        trained_by = {name: starts[-1].get(name) for name in _FACTS}
    else:
        trained_by = {}
    if args.json:
        values = {"step": args.step, "checkpoint": checkpoint and str(checkpoint), "logged_loss": logged_loss}
        values |= asdict(replayed) | {"trained_by": trained_by}
        values["losses"] = [{"loss": loss, **as_plain_sample(sample, tokenizer)} for loss, sample in losses]
        print(json.dumps(values, indent=1))
        return 0
    again = args.step - 1 - start.first_step
    if replayed.grad_norm is None:
        norm = ""
    else:
        norm = f", gradient norm {replayed.grad_norm:.4g}"
    print(f"step {args.step:,} of {start.resolved.total_steps:,}: loss {replayed.loss:.6f}{norm}")
    if checkpoint:
        begin = checkpoint.name
    else:
        begin = f"step 0 ({_origin(start.config.init_from)})"
    print(f"from {begin}, {count_nouns(again, 'step')} in between taken again; {_who(replayed.replayed_by)}")
    if checkpoint is None and (later := _start_between(args.step, _describing(args.step, listing).step, history)):
        print(f"with the flags of the start after step {later:,}: those of the start that took the step are gone")
    if replayed.was_skipped:
        print("fp16 gradients overflowed: the optimizer took no step, and gradients have no norm")
    is_changed = bool(without or args.precision or args.ds)
    for line in _comparison_lines(replayed, logged_loss, trained_by, is_changed=is_changed):
        print_visible(line)
    _print_tables(losses, replayed.gradient_norms, tokenizer, args.samples)
    return 0


def _choose_checkpoint(run: Path, step: int, listing: FoundCheckpoints, history: RunHistory) -> Path | None:
    """Return the newest checkpoint before a step, or None to begin at step 0. Raises ConfigError, CheckpointError."""
    last = max(listing.current[0].step, *history.steps.steps[-1:])
    if step > last:
        raise ConfigError(f"--step {step}: {run} has taken steps 1 to {last:,}. Name one of them.")
    whole = [one for one in listing.current if one.is_whole()]
    before = next((one for one in whole if one.step < step), None)
    if before is not None:
        return before.path
    starts = [at for at, _ in history.of_kind("event", "start")]
    has_beginning = starts[0] == 0 if starts else listing.origin is None
    if has_beginning and step <= _MOST_FROM_START:
        return None
    if has_beginning:
        spans = [f"1 to {min(_MOST_FROM_START, last):,}"]
    else:
        spans = []
    spans += [f"{whole[-1].step + 1:,} to {last:,}"] if whole and whole[-1].step < last else []
    if spans:
        can = f"Steps {' and '.join(spans)} can be replayed"
    else:
        can = "No step can be replayed"
    limit = f", the first {_MOST_FROM_START} from its beginning" if has_beginning else ""
    raise CheckpointError(
        f"--step {step}: {run} has no checkpoint before it any more. {can}{limit}. train.py's --keep-every N keeps "
        "checkpoints."
    )


def _origin(init_from: str | None) -> str:
    if init_from is None:
        return "its weights from the seed"
    return f"its weights from {init_from}"


def _config(args: argparse.Namespace, listing: FoundCheckpoints, checkpoint: Path | None, folder: Path) -> RunConfig:
    """Return the configuration with which the run took the step, for one process that only trains.

    Raises ConfigError, CheckpointError, DataError.
    """
    from llmscale.checkpoint.run_state import load_run_state
    from llmscale.config.run_config import build_run_config
    from llmscale.config.run_keys import keys_with
    from llmscale.evaluate.model_source import open_trained_sets
    from llmscale.training.run_folder import CONFIG_NAME
    from llmscale.untrusted.documents import Rules, load_json

    # The first checkpoint after the step has the flags of the start that took it.
    after = [one.path for one in listing.current if one.step >= args.step]
    described_by = checkpoint or _describing(args.step, listing).path
    state = load_run_state(described_by)
    where = str(after[-1] if after else args.run / CONFIG_NAME)
    recorded: object
    if after:
        later = load_run_state(after[-1])
        recorded = later.config
        steps = later.hyperparameters.get("steps")
    else:
        described = load_json(Path(where), Rules(ConfigError))
        recorded = described.get("config")
        resolved = described.get("resolved")
        if isinstance(resolved, dict):
            steps = resolved.get("total_steps")
        else:
            steps = None
    if not isinstance(recorded, dict):
        raise ConfigError(f"{where} holds no configuration.")
    # No step depends on the others, which are at their defaults.
    needless = {*keys_with(resume="free")} - ({"lora_from"} if checkpoint is None else set())
    values = {key: value for key, value in recorded.items() if key not in needless}
    if values.get("minutes") is not None:
        # That start has set the number of steps.
        values |= {"minutes": None, "steps": steps}
    config = build_run_config(values, f"{where}: ")
    changed: dict[str, object] = {
        "run": folder,
        "resume": str(checkpoint),
        "init_from": None,
        "lora_from": None,
        "num_workers": 0,
        "val_every": 0,
        "plain": True,
        "on_spike": "warn",
        "sequence_parallel_size": 1,
        "expert_parallel_size": 1,
        "micro_batch_size": config.micro_batch_size or state.hyperparameters.get("micro_batch_size"),
        "precision": args.precision or config.precision,
        "ds": args.ds or config.ds,
        "data": args.data or config.data,
    }
    if checkpoint is None:
        changed |= _beginning(args.run, config, state)
    config = config.model_copy(update=changed)
    # Refuses other data, and addresses that only the checkpoint knows.
    open_trained_sets(described_by, state, config, "If it is elsewhere, name it with --data.", args.data)
    return config


def _describing(step: int, listing: FoundCheckpoints) -> Checkpoint:
    """Return the oldest checkpoint from a step on, which describes the run where no earlier one is left."""
    later = next((one for one in reversed(listing.current) if one.step >= step), None)
    if later is None:
        raise CheckpointError(f"--step {step}: no checkpoint before or after it is whole. Name a later step.")
    return later


def _start_between(step: int, described: int, history: RunHistory) -> int | None:
    """Return the step after which the run was started again, between a step and the checkpoint that describes it."""
    starts = [after for after, _ in history.of_kind("event", "start") if step <= after < described]
    return starts[-1] if starts else None


def _beginning(run: Path, config: RunConfig, state: RunState) -> dict[str, object]:
    """Return the keys with which the run began, for one process and whatever the defaults are now."""
    from llmscale.report.run_facts import given_flags, load_starts

    # A later start may leave --init-from out.
    init_from = config.init_from or given_flags(load_starts(run)[:1]).get("init_from")
    if config.batch_ramp_from:
        batch = {}
    else:
        batch = {"global_batch_size": state.identity.get("global_batch_size")}
    return {
        "resume": "none",
        "init_from": init_from,
        "lora_from": config.lora_from,
        "global_batch_tokens": None if batch else config.global_batch_tokens,
        **batch,
    }


def _parse_samples(words: Sequence[str], start: Start, step: int) -> frozenset[int]:
    """Return samples to leave out by their ids in all datasets together.

    Raises ConfigError unless replayed steps have each of them, and others.
    """
    import numpy as np

    sets = start.sets
    stream = start.stream
    sizes = [location.manifest.splits["train"].num_samples for location in sets.locations]
    begins = dict(zip(sets.names, [sum(sizes[:place]) for place in range(len(sizes))], strict=True))
    steps = range(start.first_step + 1, step + 1) if words else ()
    ends = {number: (stream.samples_after(number - 1), stream.samples_after(number)) for number in steps}
    batches = {number: set(stream.order.sample_ids(np.arange(*between)).tolist()) for number, between in ends.items()}
    ids: set[int] = set()
    for word in " ".join(words).replace(",", " ").split():
        name, _, number = word.rpartition(":")
        name = name or (sets.names[0] if len(sets.names) == 1 else "")
        if name in begins and number.isdecimal():
            sample_id = begins[name] + int(number)
        else:
            sample_id = -1
        if not any(sample_id in batch for batch in batches.values()):
            raise ConfigError(
                f"--without {word}: steps {start.first_step + 1} to {step} have no such sample. Name ids of `llmscale "
                f"data which`{'' if len(sets.names) == 1 else f', each with its dataset: {sets.names[0]}:7'}."
            )
        ids.add(sample_id)
    if empty := [number for number, batch in batches.items() if batch <= ids]:
        raise ConfigError(f"--without leaves no sample of step {empty[0]}. Leave fewer out.")
    return frozenset(ids)


def _replay(start: Start, step: int, without: frozenset[int], began: float) -> Replayed:
    """Take the steps up to `step` in this process, and return the last one. Raises LlmscaleError."""
    from llmscale.engine.device_settings import set_allocator_default
    from llmscale.terminal.colour import is_terminal
    from llmscale.terminal.status_line import StatusLine
    from llmscale.training.start import explained_out_of_memory
    from llmscale.training.stop_request import StopRequest
    from llmscale.training.watchdog import Heartbeat

    set_allocator_default(os.environ)
    with StatusLine(is_silent=not is_terminal(sys.stderr)) as announcer, explained_out_of_memory(start):
        announcer.begin("importing torch and DeepSpeed")
        from llmscale.engine.process_group import leave_world
        from llmscale.training.open_session import open_session

        try:
            # A session describes the run that it opens, which is not the user's.
            with (
                redirect_stdout(io.StringIO()),
                open_session(start, StopRequest(), Heartbeat(None, 0), began, announcer) as session,
            ):
                announcer.begin(f"replaying steps {start.first_step + 1} to {step}")
                while session.step < step - 1:
                    _take_step(session, without)
                return _take_watched_step(session, without)
        finally:
            # After an error, too: gloo's threads would abort the interpreter's end.
            leave_world()


def _take_step(session: Session, without: frozenset[int]) -> tuple[list[MicroBatch], Tensor, bool]:
    """Take the next step; return its micro-batches, its loss, and whether fp16 skipped it."""
    import torch

    step = session.step
    batches = session.fetch(step)
    weights = None
    session.decide(step)
    if without:
        for place, batch in enumerate(batches):
            stays = ~torch.isin(batch.sample_ids, torch.tensor(sorted(without)))
            # A micro-batch with no sample left is a filler.
            if stays.any():
                rows = stays
            else:
                rows = torch.ones_like(stays)
            is_target = None if batch.is_target is None else batch.is_target[rows]
            batches[place] = type(batch)(batch.tokens[rows], batch.sample_ids[stays], is_target)
        num_left = sum(len(batch.sample_ids) for batch in batches)
        weights = [len(batch.sample_ids) * len(batches) / num_left for batch in batches]
    result = session.train(step, batches, weights)
    return batches, result.loss, result.was_skipped


def _take_watched_step(session: Session, without: frozenset[int]) -> Replayed:
    """Take the next step, and note the losses of its samples and the norms of its gradients."""
    from collections import deque

    from llmscale.engine.deepspeed_engine import gradient_norm

    engine = session.engine.deepspeed
    resolved = session.run.resolved
    world = session.run.world
    of_sequences: deque[Tensor] = deque()
    engine.module.head.sequence_losses = of_sequences
    with _gradient_squares(engine) as squares:
        batches, loss, was_skipped = _take_step(session, without)
    losses: dict[int, float] = {}
    for batch, each in zip(batches, of_sequences, strict=True):
        if not batch.is_filler:
            # A sample may be cut into several sequences.
            means = each.double().view(len(batch.sample_ids), -1).mean(1).cpu() / batch.target_shares()
            losses |= zip(batch.sample_ids.tolist(), means.tolist(), strict=True)
    norm = gradient_norm(engine)
    total = sum(squares.values()) ** 0.5
    # The optimizer is given clipped gradients: all times one factor.
    factor = norm / total if norm is not None and total else 1.0
    norms = {name: factor * square**0.5 for name, square in sorted(squares.items(), key=lambda item: -item[1])}
    micro_batch_size = resolved.plan.micro_batch_size
    facts = (world.world_size, resolved.zero_stage, resolved.precision, micro_batch_size, world.device_name)
    return Replayed(float(loss), norm, was_skipped, losses, norms, dict(zip(_FACTS, facts, strict=True)))


@contextmanager
def _gradient_squares(engine: DeepSpeedEngine) -> Iterator[dict[str, float]]:
    """Yield a mapping that the next step fills: the squared norm of each gradient that the optimizer is given."""
    import torch

    from llmscale.engine.zero_layout import inner_optimizer, parameter_shards
    from llmscale.numerics.probe import shards_to_step

    inner = inner_optimizer(engine)
    shards = list(parameter_shards(engine))
    step: Callable[..., object] = inner.step
    squares: dict[str, float] = {}

    def watched(*args: object, **kwargs: object) -> object:
        for shard, gradient in shards_to_step(inner, shards):
            norm = float(torch.linalg.vector_norm(shard.view(gradient).local, dtype=torch.float64))
            squares[shard.name] = squares.get(shard.name, 0.0) + norm**2
        return step(*args, **kwargs)

    inner.step = watched  # type: ignore[assignment, method-assign]
    yield squares
    inner.step = step  # type: ignore[assignment, method-assign]


def _comparison_lines(
    replayed: Replayed, logged_loss: float | None, trained_by: Mapping[str, object], *, is_changed: bool
) -> Iterator[str]:
    """Yield how the loss compares with the logged one."""
    if logged_loss is None:
        yield "the run did not log this step's loss (--log-every)"
    elif is_changed:
        yield f"the run's loss was {logged_loss:.6f}: the change is {replayed.loss - logged_loss:+.6f}"
    elif replayed.loss == logged_loss:
        yield "equal to the logged loss, bit for bit"
    else:
        difference = abs(replayed.loss - logged_loss) / abs(logged_loss)
        yield f"the logged loss is {logged_loss:.6f}, a relative difference of {difference:.1e}"
        if trained_by == replayed.replayed_by:
            yield "WARNING: the same ranks, stage and precision gave other bits: code, libraries or machine changed"
        elif trained_by:
            yield f"the run was trained by {_who(trained_by)}: sums have another order"


def _who(facts: Mapping[str, object]) -> str:
    ranks, stage, precision, micro, device = (facts[name] for name in _FACTS)
    return f"{ranks} rank{'' if ranks == 1 else 's'}, ZeRO-{stage}, {precision}, micro-batches of {micro}, {device}"


def _print_tables(
    losses: Sequence[tuple[float, StepSample]], norms: Mapping[str, float], tokenizer: Tokenizer, most: int
) -> None:
    """Print the samples with the largest losses, and the parameters with the largest gradients."""
    print(f"\n{'loss':>8}  sample")
    for loss, sample in losses[:most]:
        print_visible(f"{loss:8.4f}  {describe_sample(sample, tokenizer)}")
    if len(losses) > most:
        print(f"and {len(losses) - most:,} more; --samples {len(losses)} prints them, --json the complete texts")
    if norms:
        print(f"\n{'gradient':>8}  parameter")
    for name, norm in list(norms.items())[:_PARAMETERS]:
        print(f"{norm:8.4g}  {name}")
    if len(norms) > _PARAMETERS:
        print(f"and {len(norms) - _PARAMETERS:,} smaller ones; --json has all")
