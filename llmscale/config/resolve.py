"""Resolve a run once: flags, ds_config, dataset and number of ranks become one frozen object. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

from llmscale.architecture.layers import BESIDE_ADAPTERS, ParameterTensors
from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config.batch_plan import BatchPlan, BatchRamp, LengthRamp, ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import DsConfig, resolve_ds_config, without_pinned_memory
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision, ResolvedDsConfig
from llmscale.config.hf_model import default_preset, rate_preset
from llmscale.config.loss_settings import BALANCE_LOSS, DEFAULT_LOSS, ROUTER_BIAS_SPEED, LossSettings
from llmscale.config.optimizers import ADAMW, OptimizerSpec, get_optimizer, parse_rule
from llmscale.config.presets import get_preset, nominal_parameters
from llmscale.config.run_config import EXCLUSIVE_KEYS, KEYS, RunConfig, build_run_config
from llmscale.config.run_keys import needs
from llmscale.config.schedule import DEFAULT_FLOORS, Schedule
from llmscale.errors import ConfigError

#: Keys of a run for the file's optimizer that its blocks set.
_OF_OPTIMIZER = ("lr", "beta1", "beta2", "eps", "weight_decay", "warmup_min_lr")
#: Vocabularies for a text of one's own, and the most that one may add to the size in a model's name.
LEAST_VOCAB = 512
MOST_VOCAB = 32768
_MOST_OF_NAME = 1.16
#: Default batches are multiples of the first of these that is at most an eighth of them, or of the last: common numbers
#: of ranks divide them.
_BATCH_MULTIPLES = (64, 8)


@dataclass(frozen=True)
class SetFacts:
    """Properties of a dataset that a run depends on."""

    vocab_size: int
    """Number of ids that the dataset's tokenizer can produce."""
    seq_len: int
    """Tokens per sample, targets not counted."""
    num_train_samples: int
    """Number of samples in the training split."""
    eot_token: int
    """Token that ends every document."""


@dataclass(frozen=True)
class ResolvedStep:
    """Everything that determines the memory and the time of one optimizer step."""

    shape: GPTShape
    plan: BatchPlan
    ds: DsConfig
    """The ds_config file with the overriding flags applied."""
    ds_config: Mapping[str, object]
    """JSON values for `deepspeed.initialize`; no key is "auto"."""
    checkpointing: CheckpointingMode
    optimizer: OptimizerSpec
    loss: LossSettings

    @cached_property
    def engine_config(self) -> ResolvedDsConfig:
        """`ds_config` as a typed object."""
        return ResolvedDsConfig.model_validate(dict(self.ds_config))

    @cached_property
    def tensors(self) -> ParameterTensors:
        """Parameters of the model, one by one, and which of them are frozen."""
        return _shared(replace(self.shape.tensors, frozen=self.optimizer.frozen))

    @cached_property
    def rank_tensors(self) -> ParameterTensors:
        """Parameters of one rank, which may hold a part of the experts."""
        parts = self.plan.ranks.expert_parallel_size
        if parts == 1:
            return self.tensors
        return _shared(replace(self.tensors, architecture=self.shape.architecture.with_divided_experts(parts)))

    @cached_property
    def stored_optimizer(self) -> OptimizerSpec:
        """`optimizer` with master weights and states in the type that the ds_config gives them."""
        if self.ds.keys.has_bf16_states:
            return self.optimizer.in_bf16()
        return self.optimizer

    @property
    def precision(self) -> Precision:
        return self.ds.precision

    @property
    def zero_stage(self) -> int:
        return self.ds.zero_stage

    def with_plan(self, plan: BatchPlan) -> ResolvedStep:
        """Return the step with another division of its batch. Raises ConfigError."""
        if (plan.gradient_accumulation_steps > 1) != (self.plan.gradient_accumulation_steps > 1):
            return self.changed(plan=plan)
        batch = {
            "train_micro_batch_size_per_gpu": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "train_batch_size": plan.train_batch_size,
        }
        return replace(self, plan=plan, ds_config={**self.ds_config, **batch})

    def with_length(self, seq_len: int) -> ResolvedStep:
        """Return the step with sequences of another length."""
        shape = replace(self.shape, seq_len=seq_len)
        plan = replace(self.plan, seq_len=seq_len)
        # A table of positions changes the size of the model, and with it the ds_config.
        is_as_large = shape.num_parameters == self.shape.num_parameters
        if is_as_large:
            return replace(self, shape=shape, plan=plan)
        return self.changed(shape=shape, plan=plan)

    def changed(self, **fields: Any) -> ResolvedStep:
        """Return the step with other fields, and the open keys of its ds_config filled again. Raises ConfigError."""
        step = replace(self, **fields)
        return replace(step, ds_config=resolve_ds_config(step.ds, step.shape, step.plan))


@lru_cache(maxsize=16)
def _shared(tensors: ParameterTensors) -> ParameterTensors:
    """Return the first of equal objects: the rows of a table then make the lists of a model's parameters once."""
    return tensors


@dataclass(frozen=True)
class ResolvedRun(ResolvedStep):
    """Everything that follows from a run's configuration, ds_config, dataset and number of ranks."""

    schedule: Schedule

    @property
    def total_steps(self) -> int:
        return self.schedule.steps

    @property
    def total_tokens(self) -> int:
        return self.plan.samples_after(self.total_steps) * self.plan.seq_len

    def as_dict(self) -> dict[str, object]:
        """Return JSON values for the run folder, which has the ds_config in a separate file."""
        return {
            "shape": asdict(self.shape),
            "plan": self.plan.as_dict(),
            "schedule": asdict(self.schedule),
            "total_steps": self.total_steps,
        }

    def on_cpu(self, *, has_bf16: bool = True) -> ResolvedRun:
        """Return the run for a CPU: no pinned memory, and fp32 in place of a default of bf16 without its arithmetic."""
        if has_bf16 or not self.ds.keys.leaves_precision_open:
            ds = self.ds
        else:
            ds = self.ds.with_precision("fp32")
        return replace(self, ds=ds, ds_config=without_pinned_memory(resolve_ds_config(ds, self.shape, self.plan)))


def with_ds_keys(config: RunConfig, ds: DsConfig) -> RunConfig:
    """Return the configuration with the keys that its ds_config sets and the user does not. Raises ConfigError."""
    given = config.model_fields_set
    of_file = dict(ds.run_keys)
    if "schedule" not in given or config.schedule == of_file.get("schedule"):
        of_file |= ds.scheduler_defaults
    taken = {key: value for key, value in of_file.items() if key not in given}
    for key, twin in EXCLUSIVE_KEYS:
        if twin in given:
            taken.pop(key, None)
    if "optimizer" in given and config.optimizer != ds.run_keys.get("optimizer"):
        # Its numbers are for another optimizer.
        taken = {key: value for key, value in taken.items() if key not in _OF_OPTIMIZER}
    if not taken:
        return config
    merged = {**config.model_dump(exclude_unset=True), **taken}
    changed = build_run_config(merged, f"{ds.source}: ", given)
    unmet = {need.keys for need in needs() if need.keys in taken and need.is_met and not need.is_met(changed)}
    return build_run_config({key: value for key, value in merged.items() if key not in unmet}, f"{ds.source}: ", given)


def resolve_step(
    ds: DsConfig,
    shape: GPTShape,
    plan: BatchPlan,
    checkpointing: CheckpointingMode,
    optimizer: OptimizerSpec = ADAMW,
    loss: LossSettings = DEFAULT_LOSS,
) -> ResolvedStep:
    """Fill the open keys of the ds_config. Raises ConfigError when it contradicts the plan."""
    return ResolvedStep(shape, plan, ds, resolve_ds_config(ds, shape, plan), checkpointing, optimizer, loss)


def resolve_run(config: RunConfig, ds: DsConfig, facts: SetFacts, world_size: int) -> ResolvedRun:
    """Fill every default that depends on another key, the ds_config, the data or the world size. Raises ConfigError."""
    shape = resolve_shape(config, facts)
    plan = resolve_batch(config, shape.seq_len, world_size, ds)
    plan.ranks.heads_of_rank(shape.n_head, shape.n_kv_head)
    plan.ranks.experts_of_rank(shape.num_experts)
    schedule = resolve_schedule(config, plan, facts.num_train_samples)
    chosen = ds.with_flags(config.precision, config.gradient_clipping)
    mode = config.activation_checkpointing or ds.checkpointing
    optimizer = resolve_optimizer(config, shape)
    if optimizer.frozen and ds.keys.offload_param_device == "nvme":
        flag = "--lora-rank" if shape.lora_rank else "--freeze"
        raise ConfigError(
            f"{flag} does not work with {ds.source}'s parameters on NVMe. Use offload_param to cpu or to none."
        )
    if chosen.keys.has_bf16_states and config.optimizer == "muon":
        raise ConfigError(
            f"--optimizer muon does not work with {ds.source}'s bf16_optimizer_states: it rounds a weight after its "
            "decay and again after its step, and bf16 would lose the decay. Use --optimizer adamw, or delete "
            "bf16_master_weights_and_grads and bf16_optimizer_states."
        )
    if config.keep_zeros and any(group.is_orthogonalised for group in optimizer.groups):
        raise ConfigError(
            f"--keep-zeros does not work with --optimizer {config.optimizer}: its update moves every element of "
            "a matrix. Use --optimizer adamw."
        )
    if shape.mlp_tile_tokens and config.compile == "on":
        raise ConfigError(
            f"--mlp-tile-tokens {shape.mlp_tile_tokens} does not work with --compile on: the backward pass of a tile "
            "runs it again, which a graph of the block cannot. Give --compile off, or no tiles."
        )
    loss = resolve_loss(config, shape)
    return ResolvedRun(shape, plan, chosen, resolve_ds_config(chosen, shape, plan), mode, optimizer, loss, schedule)


def resolve_loss(config: RunConfig, shape: GPTShape) -> LossSettings:
    """Return the settings of the loss. Raises ConfigError for those without effect on the model."""
    for key, behaviour in KEYS.items():
        needed = behaviour.needs_of_model
        if needed and getattr(config, key) and not getattr(shape, needed):
            flag = f"--{needed.replace('_', '-')}{'' if isinstance(getattr(shape, needed), bool) else ' N'}"
            raise ConfigError(f"{key} = {getattr(config, key)} has no effect without {flag}. Give both or neither.")
    balance = config.balance_loss
    speed = config.router_bias_speed
    if balance is None:
        balance = default_balance_loss(shape)
    if speed is None:
        speed = ROUTER_BIAS_SPEED if shape.router_bias else 0.0
    return LossSettings(
        config.loss_chunk_tokens, config.z_loss, config.loss_kernel, balance, config.router_z_loss, speed
    )


def default_balance_loss(shape: GPTShape) -> float:
    """Return the weight of the balance loss of a run that does not give one."""
    return BALANCE_LOSS if shape.num_experts and not shape.router_bias else 0.0


def resolve_optimizer(config: RunConfig, shape: GPTShape) -> OptimizerSpec:
    """Return the optimizer with the run's own learning-rate factors and patterns. Raises ConfigError."""
    spec = get_optimizer(config.optimizer)
    if config.muon_lr_factor is not None:
        spec = spec.with_matrix_factor(config.muon_lr_factor)
    frozen = config.freeze
    if shape.lora_rank:
        if frozen:
            raise ConfigError(
                "--freeze has no effect beside --lora-rank, which trains adapters alone. Drop one of them."
            )
        names = [tensor.name for tensor in shape.tensors.all]
        frozen = [pattern for pattern in BESIDE_ADAPTERS if any(fnmatchcase(name, pattern) for name in names)]
    if not config.param_group and not frozen:
        return spec
    return spec.with_rules([parse_rule(text) for text in config.param_group], frozen, shape.tensors.all)


def resolve_shape(config: RunConfig, facts: SetFacts) -> GPTShape:
    """Return the preset's shape, overridden by flags, with vocabulary, context length and end of document from the
    dataset. Raises ConfigError."""
    preset = get_preset(default_preset(config))
    if config.seq_len is not None and config.seq_len != facts.seq_len:
        raise ConfigError(
            f"seq_len {config.seq_len} does not match the dataset in {config.data}, whose samples have "
            f"{facts.seq_len} tokens. Drop --seq-len, or prepare the data with --seq-len {config.seq_len}."
        )
    vocab_size = config.vocab_size or facts.vocab_size
    if vocab_size < facts.vocab_size:
        raise ConfigError(
            f"vocab_size {vocab_size} is smaller than the dataset's: {config.data} has token ids up to "
            f"{facts.vocab_size - 1}. Give --vocab-size {facts.vocab_size} or more, or data "
            "made with the model's tokenizer."
        )
    given = {key: value for key in SHAPE_KEYS if (value := getattr(config, key)) is not None}
    document_end = facts.eot_token if config.document_mask else None
    shape = preset.shape(vocab_size, facts.seq_len)
    changed = shape.changed({**given, "document_end": document_end})
    for key in ("rope_theta", "rope_scaling"):
        if changed.positions == "learned" and getattr(changed, key) != getattr(shape, key):
            raise ConfigError(
                f"{key} = {given[key]!r} has no effect on learned positions. Give --positions rotary, or drop it."
            )
    return changed


def fitting_vocabulary(config: RunConfig, seq_len: int) -> int:
    """Return the largest power of two as vocabulary with which the preset has about the size in its name.

    A changed shape gives the name another size, in proportion. Raises ConfigError.
    """

    def parameters(vocab_size: int) -> int:
        return resolve_shape(config, SetFacts(vocab_size, seq_len, num_train_samples=1, eot_token=0)).num_parameters

    unchanged = get_preset(config.model).shape(LEAST_VOCAB, seq_len).num_parameters
    most = _MOST_OF_NAME * nominal_parameters(config.model) * parameters(LEAST_VOCAB) / unchanged
    vocab_size = MOST_VOCAB
    limit = config.vocab_size or MOST_VOCAB
    while vocab_size > LEAST_VOCAB and (vocab_size > limit or parameters(vocab_size) > most):
        vocab_size //= 2
    return vocab_size


def resolve_batch(config: RunConfig, seq_len: int, world_size: int, ds: DsConfig | None) -> BatchPlan:
    """Divide the global batch of the flags, the ds_config or the preset over the ranks. Raises ConfigError.

    `ds` is None where several ds_configs are compared, and each is asked afterwards.
    """
    ranks = ParallelLayout(world_size, config.sequence_parallel_size, config.expert_parallel_size)
    total = _given_batch_size(config, seq_len)
    micro = config.micro_batch_size
    first = config.batch_ramp_from
    tokens = config.batch_ramp_tokens
    # A ramp begins with `first` sequences, and grows by as many at least once.
    least, of = (2 * first, first) if first is not None else (ranks.data_parallel_size, micro or 1)
    default = default_batch_size(default_preset(config), seq_len, least, of)
    if ds:
        total, micro = ds.batch(total, micro, default, ranks.data_parallel_size)
    shortest = config.seq_len_ramp_from
    until = config.seq_len_ramp_tokens
    return build_batch_plan(
        global_batch_size=total or default,
        ranks=ranks,
        seq_len=seq_len,
        micro_batch_size=micro,
        ramp=BatchRamp(first, -(-tokens // seq_len)) if first is not None and tokens is not None else None,
        lengths=LengthRamp(shortest, -(-until // seq_len)) if shortest is not None and until is not None else None,
    )


def default_batch_size(preset: str, seq_len: int, groups: int, of: int = 1) -> int:
    """Return about a preset's tokens per step in sequences: a number that common numbers of ranks divide.

    It is a multiple of `of`, and has at least one sequence for each of `groups` of ranks that train on different ones.
    """
    wanted = get_preset(preset).global_batch_tokens / seq_len
    units = [math.lcm(multiple, of) for multiple in _BATCH_MULTIPLES]
    unit = next((unit for unit in units if wanted >= 8 * unit), units[-1])
    if wanted < unit:
        unit = math.lcm(1 << max(0, round(math.log2(wanted))), of)
    size = unit * max(1, round(wanted / unit))
    if size >= groups:
        return size
    return math.lcm(of, groups)


def _given_batch_size(config: RunConfig, seq_len: int) -> int | None:
    """Return the sequences per step of --global-batch-size or --global-batch-tokens; None without them."""
    if config.global_batch_size is not None or config.global_batch_tokens is None:
        return config.global_batch_size
    if config.global_batch_tokens % seq_len:
        below = config.global_batch_tokens // seq_len * seq_len
        if below:
            nearest = f"{below} or {below + seq_len}"
        else:
            nearest = str(seq_len)
        raise ConfigError(
            f"global_batch_tokens {config.global_batch_tokens} is not a multiple of seq_len {seq_len}. "
            f"The nearest legal values are {nearest}."
        )
    return config.global_batch_tokens // seq_len


def _steps_of(tokens: int | None, plan: BatchPlan) -> int | None:
    if tokens is None:
        return None
    return plan.steps_for(-(-tokens // plan.seq_len))


def resolve_schedule(config: RunConfig, plan: BatchPlan, num_train_samples: int) -> Schedule:
    """Return the steps of the run, by default one pass over the dataset, and its learning-rate schedule.

    Until --minutes has set the steps, they are so many that the schedule is legal.
    """
    total_steps = config.steps or _steps_of(config.tokens, plan)
    if total_steps is None:
        total_steps = max(1, plan.steps_for(num_train_samples + 1) - 1)
        if config.minutes is not None:
            tokens = (config.warmup_tokens or 0) + (config.decay_tokens or 0)
            total_steps += (config.warmup_steps or 0) + (config.decay_steps or 0) + (_steps_of(tokens, plan) or 0)
    warmup_steps = config.warmup_steps if config.warmup_steps is not None else _steps_of(config.warmup_tokens, plan)
    if warmup_steps is None:
        warmup_steps = min(2000, total_steps // 100)
    # The final decay of wsd comes after a batch ramp.
    if config.schedule == "wsd":
        at_end = replace(plan, ramp=None)
    else:
        at_end = plan
    decay_steps = config.decay_steps or _steps_of(config.decay_tokens, at_end)
    if decay_steps is None:
        if config.schedule == "wsd":
            decay_steps = max(1, total_steps // 5)
        else:
            decay_steps = total_steps
    peak_lr = config.lr
    if peak_lr is None:
        factor = get_optimizer(config.optimizer).default_rate_factor
        peak_lr = get_preset(rate_preset(config)).learning_rate * factor
    warmup_min_lr = config.warmup_min_lr or peak_lr * (config.warmup_min_ratio or 0.0)
    min_lr_frac = config.min_lr_frac
    if min_lr_frac is None and config.schedule == "WarmupDecayLR":
        min_lr_frac = warmup_min_lr / peak_lr
    elif min_lr_frac is None:
        min_lr_frac = DEFAULT_FLOORS.get(config.schedule, 0.0)
    return Schedule(
        schedule=config.schedule,
        lr=peak_lr,
        warmup_steps=warmup_steps,
        steps=total_steps,
        decay_steps=decay_steps,
        min_lr_frac=min_lr_frac,
        warmup_type=config.warmup_type or "log",
        warmup_min_lr=warmup_min_lr,
    )
