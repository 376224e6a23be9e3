"""Check a run in its precision and in fp32; repeat what is wrong with other settings until one makes the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.engine.process_group import World, is_gpu
from llmscale.errors import ConfigError
from llmscale.numerics.block import Case
from llmscale.numerics.check import CaseResult, check_case
from llmscale.numerics.report import LAST, Report, Try

_Change = Callable[[Case], Case]


def _with_keys(**keys: object) -> _Change:
    return lambda case: replace(case, config=case.config.model_copy(update=keys))


def undivided(case: Case) -> Case:
    """Return the case with complete sequences and experts on every rank."""
    if case.config.sequence_parallel_size == case.config.expert_parallel_size == 1:
        return case
    size = {"global_batch_size": None, "global_batch_tokens": None}
    return _with_keys(sequence_parallel_size=1, expert_parallel_size=1, **size)(case)


def _with_zero(**keys: object) -> _Change:
    """Return a change of keys of zero_optimization."""

    def change(case: Case) -> Case:
        zero = case.ds.keys.zero
        if zero.stage == 0 or all(getattr(zero, key) == value for key, value in keys.items()):
            return case
        return replace(case, ds=_with_ds(case.ds, zero_optimization=zero.model_copy(update=keys)))

    return change


def _with_ds(ds: DsConfig, **keys: Any) -> DsConfig:
    return replace(ds, keys=ds.keys.model_copy(update=keys))


def _without_overlap(case: Case) -> Case:
    zero = case.ds.keys.zero
    overlaps = zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm
    return _with_zero(overlap_comm=False)(case) if overlaps else case


def _in_fp32(case: Case) -> Case:
    if case.ds.keys.communication_data_type == "fp32" or case.chosen_precision == "fp32":
        return case
    return replace(case, ds=_with_ds(case.ds, communication_data_type="fp32"))


def _with_fp32_states(case: Case) -> Case:
    bf16 = case.ds.keys.bf16
    if bf16 is None or not case.ds.keys.has_bf16_states:
        return case
    off = {"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
    return replace(case, ds=_with_ds(case.ds, bf16=bf16.model_copy(update=off)))


def _another_stage(case: Case) -> Case:
    """Return the case at stage 2, or at 0 or 3 if it is at 1 or 2; with nothing else of its section."""
    stage = case.ds.zero_stage
    in_16bit = case.chosen_precision == "fp16" or case.ds.keys.has_bf16_states
    needs_shards = case.config.expert_parallel_size > 1 or in_16bit
    other = 2 if stage in (0, 3) else 3 if needs_shards else 0
    zero = type(case.ds.keys.zero).model_validate({"stage": other})
    return replace(case, ds=_with_ds(case.ds, zero_optimization=zero))


def _without_compiler(case: Case) -> Case:
    return case if case.config.compile == "auto" and not is_gpu() else _with_keys(compile="off")(case)


def _without_checkpointing(case: Case) -> Case:
    if (case.config.activation_checkpointing or case.ds.checkpointing) == "none":
        return case
    return _with_keys(activation_checkpointing="none")(case)


def _with_math_attention(case: Case) -> Case:
    return replace(_with_keys(attention_kernel="sdpa")(case), math_attention=True)


_CHANGES: dict[str, _Change] = {
    "overlap_comm off": _without_overlap,
    "gradient accumulation 1": lambda case: replace(case, micro_steps=1),
    "offload off": _with_zero(offload_optimizer=None, offload_param=None),
    "reduce_scatter off": _with_zero(reduce_scatter=False),
    "communication in fp32": _in_fp32,
    "bf16_optimizer_states off": _with_fp32_states,
    "--compile off": _without_compiler,
    "--activation-checkpointing none": _without_checkpointing,
    "attention by torch's math kernel": _with_math_attention,
    "--loss-kernel torch, one chunk": lambda case: replace(_with_keys(loss_kernel="torch")(case), one_chunk=True),
    "sequences and experts undivided": undivided,
    "another ZeRO stage": _another_stage,
    "--optimizer adamw": _with_keys(optimizer="adamw"),
    "--precision fp32": lambda case: case if case.chosen_precision == "fp32" else replace(case, precision="fp32"),
}
#: The likeliest and cheapest first.
_OF_ENGINE = (
    "overlap_comm off",
    "gradient accumulation 1",
    "offload off",
    "reduce_scatter off",
    "communication in fp32",
    "bf16_optimizer_states off",
    "sequences and experts undivided",
    *LAST,
)
_OF_MODEL = (
    "gradient accumulation 1",
    "--compile off",
    "--activation-checkpointing none",
    "attention by torch's math kernel",
    "--loss-kernel torch, one chunk",
    "sequences and experts undivided",
    *LAST,
)
_OF_UPDATE = ("bf16_optimizer_states off", "offload off", "--optimizer adamw", *LAST)
_BY_LINK = {"loss": _OF_MODEL, "gradient": _OF_MODEL, "update": _OF_UPDATE}


def settings_for(link: str, ranks: int) -> tuple[str, ...]:
    """Return the names of the settings to try for a link, in order; without the last where one rank goes first."""
    settings = _BY_LINK.get(link, _OF_ENGINE)
    needs_one_rank = ranks > 1 and settings is not _OF_MODEL
    return tuple(setting for setting in settings if not (needs_one_rank and setting in LAST))


def changed_cases(case: Case, settings: tuple[str, ...]) -> Iterator[tuple[str, Case]]:
    """Yield each setting with its case, without those that change nothing."""
    for setting in settings:
        changed = _CHANGES[setting](case)
        if changed != case:
            yield setting, changed


def check_run(case: Case, world: World, tries: tuple[str, ...] | None) -> Report:
    """Check a run in its own precision and in fp32, and try other settings for the first wrong one. Collective."""
    results = [(case, check_case(case, world))]
    if results[0][1].precision != "fp32":
        # Another size of vocabulary, without padding.
        in_fp32 = replace(case, precision="fp32", vocab_size=1024)
        results.insert(0, (in_fp32, check_case(in_fp32, world)))
    passes = tuple(result.summary for _, result in results)
    wrong = next((pair for pair in results if pair[1].summary.first_wrong), None)
    return Report(passes) if wrong is None else Report(passes, _try_settings(*wrong, world, tries))


def _try_settings(case: Case, result: CaseResult, world: World, tries: tuple[str, ...] | None) -> tuple[Try, ...]:
    """Repeat a wrong case with other settings until one is right, up to its first wrong step. Collective."""
    first = result.summary.first_wrong
    assert first is not None
    settings = settings_for(first.link, world.world_size) if tries is None else tries
    done: list[Try] = []
    for setting, changed in changed_cases(replace(case, steps=first.step), settings):
        try:
            again = check_case(changed, world)
        except ConfigError:
            continue  # the run cannot have it
        done.append(Try(setting, "wrong" if again.summary.first_wrong else "right"))
        if done[-1].verdict == "right":
            break
    return tuple(done)
