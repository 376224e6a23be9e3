"""Every legal key of a ds_config: type, default, and when it has an effect; strict where pydantic would convert.

Each validator raises ValueError with the rule that a value breaks: 'must be true or false'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

AUTO = "auto"
#: Largest values that DeepSpeed's arithmetic, in fp32 and 64 bits, can represent.
_MAX_NUMBER = 10**18
_MAX_COUNT = 2**63 - 1


def show(value: object) -> str:
    """Return a value as JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _must(rule: str, is_legal: Callable[[Any], object], convert: Callable[[Any], object]) -> Callable[[object], object]:
    """Return a validator that converts legal values, and raises ValueError with the rule for others."""

    def check(value: object) -> object:
        if not is_legal(value):
            raise ValueError(f"must {rule}")
        return convert(value)

    return check


def _number(lowest: int, highest: int, *, is_whole: bool) -> Callable[[object], object]:
    """Return a validator of numbers. `5e8` is accepted as a whole number, because people write it."""
    kind, convert = ("a whole number", int) if is_whole else ("a number", float)

    def check(value: Any) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (is_whole and value % 1) or not lowest <= value <= highest:
            most = f" and at most {highest:,g}" if is_number and value > highest else ""
            raise ValueError(f"must be {kind} of at least {lowest}{most}")
        return convert(value)

    return check


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _or_auto(check: Callable[[object], object]) -> PlainValidator:
    return PlainValidator(lambda value: value if value == AUTO else check(value))


_flag = _must("be true or false", lambda value: isinstance(value, bool), bool)
_text = _must("be a non-empty string", _is_text, str)
_texts = _must("be a list of strings", lambda value: isinstance(value, list) and all(map(_is_text, value)), tuple)
_stage = _must("be 0, 1, 2 or 3", lambda value: type(value) is int and value in range(4), int)
_any_number = _number(0, _MAX_NUMBER, is_whole=False)
_count = _number(0, _MAX_COUNT, is_whole=True)
_positive = _number(1, _MAX_COUNT, is_whole=True)

Auto = Literal["auto"]
Stage = Annotated[Literal[0, 1, 2, 3], PlainValidator(_stage)]
Flag = Annotated[bool, PlainValidator(_flag)]
Text = Annotated[str, PlainValidator(_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Number = Annotated[float, PlainValidator(_any_number)]
Count = Annotated[int, PlainValidator(_count)]
Positive = Annotated[int, PlainValidator(_positive)]
Power = Annotated[int, PlainValidator(_number(0, 64, is_whole=True))]
"""Exponent of two, for an fp16 loss scale."""
Depth = Annotated[int, PlainValidator(_number(-1, _MAX_COUNT, is_whole=True))]
"""Levels of nesting; -1: all."""
FlagOrAuto = Annotated[bool | Auto, _or_auto(_flag)]
NumberOrAuto = Annotated[float | Auto, _or_auto(_any_number)]
CountOrAuto = Annotated[int | Auto, _or_auto(_count)]
PositiveOrAuto = Annotated[int | Auto, _or_auto(_positive)]


Precision = Literal["fp32", "bf16", "fp16", "autocast"]
#: Activations that a block keeps for its backward pass: all, its matrix products, or (as in DeepSpeed) its input.
CheckpointingMode = Literal["none", "selective", "full"]
OffloadDevice = Literal["none", "cpu", "nvme"]
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class NoEffect:
    """Mark of a key that a file may have and DeepSpeed then does not use."""

    when: Callable[[DsFile, Any], object]
    """Condition on the file and on the section of the key."""
    why: str
    """End of the sentence `KEY has no effect`; {0} is the section."""


def _read_at(*stages: int) -> NoEffect:
    where = f"only at stage {', '.join(map(str, stages))}"
    return NoEffect(lambda file, zero: zero.stage not in stages, f" at stage {{0.stage}} (read {where})")


_SHARDED = _read_at(1, 2, 3)
_FLAT = _read_at(1, 2)
_STAGE_3 = _read_at(3)
_NVME = NoEffect(lambda file, offload: offload.device != "nvme", ' with device "{0.device}" (NVMe only)')
_AIO = NoEffect(
    lambda file, _: file.aio and "nvme" not in (file.offload_optimizer_device, file.offload_param_device),
    " without NVMe offload",
)
_DYNAMIC_SCALE = NoEffect(lambda file, fp16: fp16.loss_scale, " with a static loss_scale")


def _has_no_bf16_optimizer(file: DsFile, bf16: Bf16) -> bool:
    """Return whether DeepSpeed does not use its BF16_Optimizer: stage 1, bf16, fp32 accumulation, no offload."""
    accumulation = file.data_types.grad_accum_dtype if file.data_types else None
    is_used = file.zero.stage == 1 and file.precision == "bf16" and accumulation == "fp32"
    return bf16.immediate_grad_update and not is_used


_NOT_BF16 = NoEffect(
    lambda file, bf16: (bf16.bf16_master_weights_and_grads or bf16.bf16_optimizer_states) and file.precision != "bf16",
    " without bf16 precision",
)
_NOT_DEDICATED = NoEffect(_has_no_bf16_optimizer, " except at stage 1 with fp32 gradient accumulation")


class Section(BaseModel):
    """JSON object of a ds_config. Undeclared keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class OffloadOptimizer(Section):
    """Optimizer states and the optimizer step on the host; nvme: the states on disk (stage 3 only)."""

    device: OffloadDevice = "none"
    """cpu: host memory; nvme: the states on disk."""
    nvme_path: Annotated[Text | None, _NVME] = None
    """NVMe: folder on the disk."""
    buffer_count: Annotated[Count, _NVME] = 4
    """NVMe: buffers of the largest partition; parameter, gradient and Adam's two moments need 4."""
    pin_memory: Flag = True
    """Page-locked host memory, for faster copies."""
    pipeline_read: Annotated[Flag, _NVME] = False
    pipeline_write: Annotated[Flag, _NVME] = False
    fast_init: Annotated[Flag, _NVME] = False
    ratio: Number = 1.0
    """Share of the parameters whose states are on the host; below 1 only at stage 3."""


class OffloadParam(Section):
    """Low-precision parameters on the host or on disk; stage 3 only."""

    device: OffloadDevice = "none"
    """cpu: host memory; nvme: disk."""
    nvme_path: Annotated[Text | None, _NVME] = None
    """NVMe: folder on the disk."""
    buffer_count: Annotated[Count, _NVME] = 5
    buffer_size: Annotated[Count, _NVME] = 100_000_000
    """NVMe: elements per buffer."""
    max_in_cpu: Annotated[Count, _NVME] = 1_000_000_000
    """NVMe: elements kept in host memory."""
    pin_memory: Flag = True
    """Page-locked host memory, for faster copies."""


class ZeroOptimization(Section):
    """Sharding and its buffers, sizes in elements. `stage` is required: DeepSpeed's default of 0 shards nothing."""

    stage: Stage
    """Division among ranks: 1 of optimizer states, 2 of gradients too, 3 of parameters too; 0 of nothing."""
    contiguous_gradients: Annotated[Flag, _SHARDED] = True
    """Copy gradients into one buffer as they come, against fragmented memory."""
    reduce_scatter: Annotated[Flag, _SHARDED] = True
    """Each rank gets the sum of its own gradients alone, not of all."""
    reduce_bucket_size: Annotated[PositiveOrAuto, _SHARDED] = 500_000_000
    """Elements of gradients exchanged at a time; a smaller bucket takes less memory and more calls."""
    use_multi_rank_bucket_allreduce: Annotated[Flag, _FLAT] = True
    allgather_bucket_size: Annotated[Count, _FLAT] = 500_000_000
    """Elements of parameters gathered at a time after a step, at stages 1 and 2."""
    overlap_comm: Annotated[Flag | None, _SHARDED] = None
    """Exchange gradients during the backward pass; takes a second bucket. Default: DeepSpeed's, on at stage 3."""
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    sub_group_size: Annotated[Positive, _STAGE_3] = 1_000_000_000
    """Stage 3: elements of an optimizer step at a time."""
    stage3_prefetch_bucket_size: Annotated[CountOrAuto, _STAGE_3] = 50_000_000
    """Elements gathered ahead of their use."""
    stage3_param_persistence_threshold: Annotated[CountOrAuto, _STAGE_3] = 100_000
    """Parameters with fewer elements stay gathered."""
    stage3_model_persistence_threshold: Annotated[Count, _STAGE_3] = 2**63 - 1
    """Most elements that stay gathered in all."""
    stage3_max_live_parameters: Annotated[Count, _STAGE_3] = 1_000_000_000
    """Most elements gathered at a time."""
    stage3_max_reuse_distance: Annotated[Count, _STAGE_3] = 1_000_000_000
    """Largest distance, in elements, to its next use at which a parameter stays gathered."""
    stage3_gather_16bit_weights_on_model_save: Annotated[Flag, _STAGE_3] = False
    stage3_module_granularity_threshold: Annotated[Count, _STAGE_3] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[Flag, _STAGE_3] = False
    stage3_allgather_sequential: Annotated[Flag, _STAGE_3] = False
    ignore_unused_parameters: Annotated[Flag, _FLAT] = True
    round_robin_gradients: Annotated[Flag, _FLAT] = False
    """Stages 1 and 2 with offload: spread the copies of gradients over the ranks."""
    parameter_alignment: Annotated[Flag, _FLAT] = False
    zero_hpz_partition_size: Annotated[Positive, _STAGE_3] = 1
    """Ranks of a group that keeps a second copy of the parameters: ZeRO++'s hpZ (arXiv:2306.10209, section 3.2).

    After the first use in a step, parameters are gathered within the group. 1 switches it off.
    """
    memory_efficient_linear: Annotated[Flag, _STAGE_3] = True
    override_module_apply: Annotated[Flag, _STAGE_3] = True
    log_trace_cache_warnings: Annotated[Flag, _STAGE_3] = False
    enable_sanity_checks: Annotated[Flag, _STAGE_3] = False


class Fp16(Section):
    """fp16 weights, fp32 master; `loss_scale` 0 is dynamic: 2**initial_scale_power, halved on overflow."""

    enabled: FlagOrAuto
    auto_cast: Flag = False
    loss_scale: Number = 0.0
    """Constant loss scale; 0: dynamic."""
    initial_scale_power: Annotated[Power, _DYNAMIC_SCALE] = 16
    """Power of 2 of the first dynamic scale."""
    loss_scale_window: Annotated[Positive, _DYNAMIC_SCALE] = 1000
    """Steps without overflow before the scale is doubled."""
    hysteresis: Annotated[Positive, _DYNAMIC_SCALE] = 2
    """Overflows before the scale is halved."""
    consecutive_hysteresis: Annotated[Flag, _DYNAMIC_SCALE] = False
    min_loss_scale: Annotated[Positive, _DYNAMIC_SCALE] = 1
    """Least dynamic scale."""


class Bf16(Section):
    """bf16 weights, fp32 master, unless `bf16_optimizer_states` is set."""

    enabled: FlagOrAuto
    immediate_grad_update: Annotated[Flag, _NOT_DEDICATED] = False
    check_grad_overflow: Flag = True
    """Skip a step with NaN or infinite gradients."""
    bf16_master_weights_and_grads: Annotated[Flag, _NOT_BF16] = False
    """Master weights, and the gradients that the optimizer gets, in bf16; with `bf16_optimizer_states` only."""
    bf16_optimizer_states: Annotated[Flag, _NOT_BF16] = False
    """The optimizer's moments in bf16; stages 1 to 3 with states on the GPU."""


class TorchAutocast(Section):
    """fp32 weights, matrix products in bf16."""

    enabled: FlagOrAuto
    dtype: Literal["bfloat16", "bf16"] = "bfloat16"


class DataTypes(Section):
    grad_accum_dtype: Dtype | None = None
    """Type in which gradients of micro-batches are summed; llmscale's default is fp32."""
    param_dtype: Dtype | None = None


class ActivationCheckpointing(Section):
    """Activation checkpointing, switched on by the presence of this section."""

    cpu_checkpointing: Flag = False
    """Keep the saved activations in host memory."""
    synchronize_checkpoint_boundary: Flag = False
    profile: Flag = False


class Aio(Section):
    """Disk access of NVMe offload."""

    block_size: Positive = 1_048_576
    """Bytes of a request."""
    queue_depth: Positive = 8
    """Requests at a time."""
    intra_op_parallelism: Positive = 1
    """Threads of a transfer."""
    single_submit: Flag = False
    overlap_events: Flag = True
    use_gds: Flag = False


class CommsLogger(Section):
    enabled: Flag = False
    prof_all: Flag = True
    prof_ops: Texts = ()
    verbose: Flag = False
    debug: Flag = False


class FlopsProfiler(Section):
    enabled: Flag = False
    recompute_fwd_factor: Number = 0.0
    profile_step: Positive = 1
    module_depth: Depth = -1
    top_modules: Positive = 1
    detailed: Flag = True
    output_file: Text | None = None


class FileMonitor(Section):
    """`tensorboard` and `csv_monitor`."""

    enabled: Flag = False
    output_path: str = ""
    job_name: Text = "DeepSpeedJobName"


class ThroughputTimer(Section):
    enabled: Flag = True
    synchronized: Flag = True


class Timers(Section):
    throughput: ThroughputTimer | None = None


class DsFile(Section):
    """ds_config as written; an absent section is None."""

    train_batch_size: PositiveOrAuto | None = None
    train_micro_batch_size_per_gpu: PositiveOrAuto | None = None
    gradient_accumulation_steps: PositiveOrAuto | None = None
    gradient_clipping: NumberOrAuto | None = None
    zero_optimization: ZeroOptimization | None = None
    bf16: Bf16 | None = None
    fp16: Fp16 | None = None
    torch_autocast: TorchAutocast | None = None
    data_types: DataTypes | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    aio: Annotated[Aio | None, _AIO] = None
    communication_data_type: Dtype | None = None
    prescale_gradients: Flag = False
    gradient_predivide_factor: Number = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    zero_allow_untested_optimizer: Flag = True
    zero_force_ds_cpu_optimizer: Flag = False
    steps_per_print: Positive | None = None
    wall_clock_breakdown: Flag = False
    memory_breakdown: Flag = False
    dump_state: Flag = False
    disable_python_gc: Flag = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    comms_logger: CommsLogger | None = None
    flops_profiler: FlopsProfiler | None = None
    tensorboard: FileMonitor | None = None
    csv_monitor: FileMonitor | None = None
    timers: Timers | None = None

    @property
    def zero(self) -> ZeroOptimization:
        return self.zero_optimization or ZeroOptimization(stage=0)

    @property
    def precision(self) -> Precision:
        """Precision of the enabled section; else of the first "auto" in the order bf16, fp16, autocast; else fp32."""
        sections: tuple[tuple[Precision, Bf16 | Fp16 | TorchAutocast | None], ...] = (
            ("bf16", self.bf16),
            ("fp16", self.fp16),
            ("autocast", self.torch_autocast),
        )
        for wanted in (True, AUTO):
            for precision, section in sections:
                if section is not None and section.enabled == wanted:
                    return precision
        return "fp32"

    @property
    def leaves_precision_open(self) -> bool:
        """True if bf16 comes from "auto" alone, so that a device without bf16 may use another precision."""
        types = self.data_types
        names_bf16 = types is not None and "bf16" in (types.param_dtype, types.grad_accum_dtype)
        return self.precision == "bf16" and self.bf16 is not None and self.bf16.enabled == AUTO and not names_bf16

    @property
    def model_dtype(self) -> Dtype:
        """Type in which parameters are stored between steps."""
        return "fp32" if self.precision == "autocast" else self.precision

    @property
    def has_bf16_states(self) -> bool:
        """True if master weights, the optimizer's gradients and its moments are bf16."""
        return self.precision == "bf16" and self.bf16 is not None and self.bf16.bf16_optimizer_states

    @property
    def cpu_checkpointing(self) -> bool:
        """True if saved activations are kept in host memory."""
        return self.activation_checkpointing is not None and self.activation_checkpointing.cpu_checkpointing

    @property
    def offload_optimizer_device(self) -> OffloadDevice:
        section = self.zero.offload_optimizer
        return section.device if section else "none"

    @property
    def offload_param_device(self) -> OffloadDevice:
        section = self.zero.offload_param
        return section.device if section else "none"


def section_at(section: type[Section], name: str) -> type[Section] | None:
    """Return the type of an entry that is itself a section; None for any other entry."""
    field = section.model_fields.get(name)
    if field:
        options = get_args(field.annotation)
    else:
        options = ()
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)


def fills_auto(section: type[Section], name: str) -> bool:
    """Return whether a key's "auto" follows from the run. For any other key it is the default."""
    field = section.model_fields.get(name)
    return field is not None and Auto in _types_within(field.annotation)


def _types_within(annotation: object) -> Iterator[object]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types_within(inner)


def marks_of(section: type[Section], name: str) -> list[NoEffect]:
    """Return the marks of a key that is not always used."""
    return [part for part in section.model_fields[name].metadata if isinstance(part, NoEffect)]


class ResolvedZero(ZeroOptimization):
    """`zero_optimization` with a value for every key; an absent offload section has device "none"."""

    reduce_bucket_size: Positive = 500_000_000
    stage3_prefetch_bucket_size: Count = 50_000_000
    stage3_param_persistence_threshold: Count = 100_000
    overlap_comm: Flag = False
    offload_param: OffloadParam = Field(default_factory=OffloadParam)
    offload_optimizer: OffloadOptimizer = Field(default_factory=OffloadOptimizer)


class ResolvedDataTypes(DataTypes):
    grad_accum_dtype: Dtype


class ResolvedDsConfig(DsFile):
    """ds_config for `deepspeed.initialize`: no key is "auto", and no default is left to DeepSpeed."""

    train_batch_size: Positive
    train_micro_batch_size_per_gpu: Positive
    gradient_accumulation_steps: Positive
    gradient_clipping: Number
    zero_optimization: ResolvedZero
    data_types: ResolvedDataTypes
    communication_data_type: Dtype

    @property
    def zero(self) -> ResolvedZero:
        return self.zero_optimization

    @property
    def grad_accum_dtype(self) -> Dtype:
        """Type in which gradients are summed over micro-batches."""
        return self.data_types.grad_accum_dtype

    @property
    def check_grad_overflow(self) -> bool:
        return self.bf16 is None or self.bf16.check_grad_overflow

    @property
    def immediate_grad_update(self) -> bool:
        return self.bf16 is not None and self.bf16.immediate_grad_update
