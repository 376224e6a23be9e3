"""Describe the defaults that a run has chosen, for its start-up summary. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config.batch_plan import DEFAULT_MICRO_BATCH_TOKENS, BatchPlan
from llmscale.config.deepspeed.resolve import BATCH_KEYS, DsConfig
from llmscale.config.hf_model import default_preset, rate_preset
from llmscale.config.optimizers import get_optimizer
from llmscale.config.presets import PRESETS, nominal_parameters
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.config.schedule import OF_DEEPSPEED, Schedule
from llmscale.errors import ConfigError
from llmscale.terminal.human_numbers import format_quantity

#: Largest relative difference between a model's size and the size in its preset's name.
_SAME_SIZE = 0.05
#: Numbers that name a model's size to people.
SIZES = ("n_layer", "n_head", "n_embd")


def describe_preset(name: str, shape: GPTShape, vocabulary_of: str = "the dataset's") -> str | None:
    """Return `gpt2-124m with ...: 88.1M parameters, not 124M`, or None if the size agrees with the name."""
    nominal = nominal_parameters(name)
    if abs(shape.num_parameters / nominal - 1) <= _SAME_SIZE:
        return None
    preset = PRESETS[name]
    parts = [f"{key} {value}" for key, value in shape_changes(name, shape).items()]
    if (shape.vocab_size, shape.seq_len) != (preset.vocab_size, preset.seq_len) or not parts:
        parts.append(f"{vocabulary_of} vocabulary of {shape.vocab_size:,} and a context of {shape.seq_len:,}")
    return (
        f"{name} with {', '.join(parts)}: {format_quantity(shape.num_parameters)} parameters, not "
        f"{format_quantity(nominal)}"
    )


def describe_parameters(shape: GPTShape) -> str:
    """Return `124,439,808 parameters`, and with experts how many of them a token uses."""
    if shape.num_experts:
        active = f", of which a token uses {shape.active_parameters:,}"
    else:
        active = ""
    return f"{shape.num_parameters:,} parameters{active}"


def shape_changes(name: str, shape: GPTShape) -> dict[str, object]:
    """Return the keys of a shape that differ from its preset's and do not follow from the sizes that differ.

    Vocabulary, context and settings of training are left out.
    """
    preset = PRESETS[name].shape(shape.vocab_size, shape.seq_len)
    sizes = {key: getattr(shape, key) for key in SIZES}
    changed = {key: value for key, value in sizes.items() if value != getattr(preset, key)}
    try:
        resized = preset.changed(changed)
    except ConfigError:  # sizes that need an explicit head_dim
        resized = preset
    others = [key for key, behaviour in SHAPE_KEYS.items() if key not in sizes and behaviour.of_model != "training"]
    return changed | {key: getattr(shape, key) for key in others if getattr(shape, key) != getattr(resized, key)}


def describe_gradients(plan: BatchPlan, ds_config: Mapping[str, object]) -> str:
    """Return the types in which gradients are summed and reduced, from a resolved ds_config."""
    types = cast("Mapping[str, str]", ds_config["data_types"])
    words = []
    if plan.gradient_accumulation_steps > 1:
        words.append(f"summed over {plan.gradient_accumulation_steps} micro-steps in {types['grad_accum_dtype']}")
    if plan.ranks.world_size > 1:
        words.append(f"reduced over {plan.ranks.world_size} ranks in {ds_config['communication_data_type']}")
    return ", ".join(words) or "one micro-step on one rank, nothing is summed"


def describe_batch(config: RunConfig, ds: DsConfig) -> Iterator[str]:
    """Yield the sources of batch sizes that the user gave neither as flags nor in the ds_config."""
    written = {name for name in BATCH_KEYS if isinstance(getattr(ds.keys, name), int)}
    if config.micro_batch_size is not None:
        written.add("train_micro_batch_size_per_gpu")
    is_given = config.global_batch_size is not None or config.global_batch_tokens is not None
    if not (is_given or "train_batch_size" in written or written >= {*BATCH_KEYS[1:]}):
        near = "a multiple near " if written else ""
        yield f"the global batch is {near}{_named(config, default_preset(config))}"
    if config.micro_batch_size is None and not written - {"train_batch_size"}:
        yield f"the micro-batch the largest within {DEFAULT_MICRO_BATCH_TOKENS:,} tokens that needs the fewest fillers"


def describe_optimizer(config: RunConfig, schedule: Schedule, gradient_clipping: float) -> str:
    """Describe optimizer and schedule, with all defaults."""
    if config.lr is not None:
        preset = ""
    else:
        preset = f" ({_rate_source(config)})"
    if config.optimizer != "adafactor":
        adam = f", betas {config.beta1:g} and {config.beta2:g}"
    else:
        adam = ""
    if config.param_group:
        rules = f"; {', '.join(config.param_group)}"
    else:
        rules = ""
    rules += f"; frozen: {', '.join(config.freeze)}" if config.freeze else ""
    if config.muon_lr_factor:
        factor = f" ({config.muon_lr_factor:g} times that for matrices)"
    else:
        factor = ""
    divisor = get_optimizer(config.optimizer).default_rate_factor
    decay = f"{config.weight_decay / divisor:g}{f' ({config.weight_decay:g} / {divisor:g})' if divisor != 1 else ''}"
    return (
        f"{config.optimizer}, learning rate {schedule.lr:.2e}{preset}{factor}, {describe_schedule(schedule)}, "
        f"weight decay {decay}{adam}, "
        f"{f'clipping at {gradient_clipping:g}' if gradient_clipping else 'no clipping'}, "
        f"dropout {config.dropout:g}{rules}"
    )


def warn_of_learning_rate(config: RunConfig, schedule: Schedule) -> str | None:
    """Return a warning for a run that starts from trained weights with the learning rate for new ones, or None."""
    if config.init_from is None or config.lr is not None:
        return None
    return (
        f"the weights are trained, and the peak learning rate of {schedule.lr:.2e} is {_rate_source(config)}, for "
        f"training from scratch. Continue with less, such as --lr {schedule.lr / 10:.1e}, or keep it with --lr "
        f"{schedule.lr:.1e}"
    )


def warn_of_router(shape: GPTShape) -> str | None:
    """Return a warning for routers whose weights do not depend on them, or None."""
    if not (shape.num_experts > 1 == shape.experts_per_token and shape.normalize_router):
        return None
    return (
        "experts_per_token is 1 and normalize_router is on: the one weight is always 1, and gives routers no gradient. "
        "Give --no-normalize-router, as Switch Transformer does"
    )


def describe_schedule(schedule: Schedule) -> str:
    """Return `117 warm-up steps, cosine to 6.00e-05`."""
    shape: str = schedule.schedule
    of = ""
    warmup = f"{schedule.warmup_steps:,} warm-up steps"
    if shape in OF_DEEPSPEED:
        of = f" ({shape})"
        shape = OF_DEEPSPEED[shape]
        warmup += f" ({schedule.warmup_type}, from {schedule.warmup_min_lr:.2g})"
    floor = f" to {schedule.lr * schedule.min_lr_frac:.2e}" if shape != "constant" else ""
    over = {"constant": "", "wsd": f" in the last {schedule.decay_steps:,} steps"}.get(
        shape, f" by step {schedule.decay_steps:,}"
    )
    return f"{warmup}, {shape}{of}{floor}{over}"


def describe_steps(config: RunConfig, resolved: ResolvedRun, num_samples: int) -> str | None:
    """Return the samples that the default of --steps leaves out or repeats, the key in its place, or None."""
    if config.steps is not None:
        return None
    if config.minutes is not None:
        return f"of --minutes {config.minutes:g}"
    if config.tokens is not None:
        more = resolved.total_tokens - config.tokens
        return f"--tokens {config.tokens:,} rounded up to whole steps" if more else None
    left = num_samples - resolved.plan.samples_after(resolved.total_steps)
    if left == 0:
        return "one pass over the data"
    if left > 0:
        return f"one pass over the data, of which the last {left:,} samples fill no batch and are not seen"
    return f"the {num_samples:,} samples are less than one batch: {-left:,} are seen again"


def _rate_source(config: RunConfig) -> str:
    """Return the preset and the optimizer's reason of the default learning rate."""
    name = rate_preset(config)
    is_its_own = PRESETS[name].run.get("optimizer") == config.optimizer
    return f"{_named(config, name)} {'' if is_its_own else get_optimizer(config.optimizer).rate_note}".rstrip()


def _named(config: RunConfig, preset: str) -> str:
    """Return the preset that supplies a default value."""
    return f"{preset}'s{'' if preset == config.model else ', the preset nearest in size'}"
