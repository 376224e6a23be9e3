"""Rows of `llmscale estimate` for any module: ZeRO stages and offloads, each simulated, and the one to take.

A module of many equal blocks is simulated with few of them, twice: what a further block takes is the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config, read_ds_config
from llmscale.config.deepspeed.schema import AUTO, CheckpointingMode, Precision
from llmscale.config.hardware import Cluster, usable_precision
from llmscale.dry_run.module import OwnModule, simulate_module
from llmscale.dry_run.simulate import MOST_MICRO_STEPS, DryRun
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.estimate import MemoryEstimate
from llmscale.planning.recommend import Recommendation, recommend
from llmscale.planning.search import DEFAULT_NVME_PATH, Fit, Strategy, legal_strategies, strategy_of

#: Groups of blocks in the smaller of two simulations. At stage 3 a third block is the first one that is like any other:
#: parameters of the next one are gathered ahead.
_FEWEST_GROUPS = 1
_FEWEST_AT_STAGE_3 = 3


@dataclass(frozen=True)
class Blocks:
    """The blocks of a module, of which a simulation may leave some out."""

    count: int
    first: int
    """Blocks at the beginning that are unlike those that follow."""
    period: int
    """Blocks of a group; the groups after the first blocks are alike."""
    cut: Callable[[int], OwnModule]
    """Returns the module with another number of blocks."""

    def sizes(self, stage: int) -> tuple[int, int] | None:
        """Return the numbers of blocks to simulate in place of all; None where that saves no work."""
        groups = _FEWEST_AT_STAGE_3 if stage == 3 else _FEWEST_GROUPS
        fewer = self.first + groups * self.period
        more = fewer + self.period
        return (fewer, more) if fewer + more < self.count else None


@dataclass(frozen=True)
class ModuleFit(Fit):
    """A module's step under one ds_config, and its memory on a cluster."""

    row_strategy: Strategy
    precision: Precision
    batch_size: int
    micro_steps: int
    estimate: MemoryEstimate
    cluster: Cluster
    num_parameters: int
    is_complete: bool
    """True if all blocks were simulated."""

    @property
    def strategy(self) -> Strategy:
        return self.row_strategy

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size

    @property
    def micro_batch_tokens(self) -> int:
        """Return a number that is equal for all rows of a module."""
        return self.batch_size


@dataclass(frozen=True)
class ModuleRow:
    """A row of a module: what JSON and the table show."""

    DERIVED: ClassVar = (
        "strategy",
        "fit.precision",
        "fit.micro_batch_size",
        "fit.micro_steps",
        "fit.estimate",
        "fit.fits",
        "fit.has_margin",
        "fit.spare_bytes",
        "fit.host_bytes_per_node",
        "fit.verdict",
        "fit.is_complete",
    )

    fit: ModuleFit = field(repr=False)
    ds_config: str | None = None
    """Name of the user's ds_config."""

    @property
    def strategy(self) -> Strategy:
        return self.fit.strategy

    @property
    def batch(self) -> str:
        return f"{self.fit.micro_batch_size} x {self.fit.micro_steps}"


@dataclass(frozen=True)
class ModuleRows:
    """All rows of a module, and the one to take."""

    rows: tuple[ModuleRow, ...]
    recommendation: Recommendation | None

    @property
    def recommended(self) -> ModuleRow | None:
        return self.rows[self.recommendation.index] if self.recommendation else None

    def values(self) -> dict[str, object]:
        """Return what JSON has."""
        chosen = self.recommendation
        recommended = None if chosen is None else {"row": chosen.index, "why": chosen.why}
        return {"rows": self.rows, "recommended": recommended}


@dataclass(frozen=True)
class ModuleQuestion:
    """A module and the step that is asked about."""

    module: OwnModule
    cluster: Cluster
    micro_steps: int
    blocks: Blocks | None = None
    """None for a module of which all is simulated."""
    recomputing: OwnModule | None = None
    """The module with activation checkpointing; None where it has none that can be switched on."""
    recomputing_blocks: Blocks | None = None


def find_module_rows(
    question: ModuleQuestion, files: Sequence[tuple[str | None, DsConfig]], mode: CheckpointingMode | None = None
) -> ModuleRows:
    """Simulate a module under each of these ds_configs with their names, and choose one. Raises ConfigError.

    Without a mode of checkpointing, rows that recompute are simulated only where no other row leaves the margin.
    """
    if mode is not None:
        return _choose([_row(question, name, ds, mode) for name, ds in files])
    rows = [_row(question, name, ds, "none") for name, ds in files]
    if question.recomputing is not None and not any(row.fit.has_margin for row in rows):
        rows += [_row(question, name, ds, "full") for name, ds in files]
    return _choose(rows)


def ask_for_module(
    module: OwnModule,
    cluster: Cluster,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    precision: Precision | None = None,
    global_batch_size: int | None = None,
) -> ModuleRows:
    """Return the rows of a module as it is built: of one ds_config, a file or its contents, or of all strategies.

    Raises ConfigError.
    """
    micro_steps = micro_steps_of(global_batch_size, module.batch_size, cluster.world_size)
    files: list[tuple[str | None, DsConfig]]
    if ds_config is None:
        files = [*strategies_to_simulate(usable_precision(precision, cluster.gpu))]
    else:
        if isinstance(ds_config, Mapping):
            ds = parse_ds_config(dict(ds_config), "ds_config")
        else:
            ds = read_ds_config(Path(ds_config))
        ds = ds.with_flags(precision, None)
        usable_precision(ds.precision, cluster.gpu, f"{ds.source}: ")
        files = [(Path(ds.source).name, ds)]
    return find_module_rows(ModuleQuestion(module, cluster, micro_steps), files, "none")


def _choose(rows: Sequence[ModuleRow]) -> ModuleRows:
    return ModuleRows(tuple(rows), recommend([row.fit for row in rows], [None] * len(rows)))


def strategies_to_simulate(precision: Precision) -> list[tuple[None, DsConfig]]:
    """Return the ds_config of every stage and offload that DeepSpeed can train; NVMe cannot be simulated."""
    legal = (ds for ds, _ in legal_strategies(precision, DEFAULT_NVME_PATH, ("none",)))
    return [(None, ds) for ds in legal if "nvme" not in strategy_of(ds, "none").offload]


def _row(question: ModuleQuestion, name: str | None, ds: DsConfig, mode: CheckpointingMode) -> ModuleRow:
    module = question.module
    blocks = question.blocks
    cluster = question.cluster
    if mode == "full":
        if question.recomputing is None:
            raise ConfigError(f"{module.name} has no activation checkpointing that can be switched on. Drop the flag.")
        module = question.recomputing
        blocks = question.recomputing_blocks
    config = engine_config(ds, question.micro_steps)

    def run(simulated: OwnModule) -> DryRun:
        return simulate_module(simulated, config, cluster.world_size, cluster.gpu.capability)

    if blocks:
        sizes = blocks.sizes(ds.zero_stage)
    else:
        sizes = None
    if blocks is None or sizes is None:
        done = run(module)
        estimate = _as_estimate(done)
        parameters = done.num_parameters
    else:
        fewer, more = (run(blocks.cut(size)) for size in sizes)
        times = (blocks.count - sizes[0]) / (sizes[1] - sizes[0])
        estimate = _with_blocks(_as_estimate(fewer), _as_estimate(more), times)
        parameters = fewer.num_parameters + round(times * (more.num_parameters - fewer.num_parameters))
    fit = ModuleFit(
        row_strategy=strategy_of(ds, mode),
        precision=ds.precision,
        batch_size=module.batch_size,
        micro_steps=question.micro_steps,
        estimate=estimate,
        cluster=cluster,
        num_parameters=parameters,
        is_complete=sizes is None,
    )
    return ModuleRow(fit, name)


def micro_steps_of(global_batch_size: int | None, micro_batch_size: int, ranks: int) -> int:
    """Return the micro-steps of a global batch; several if it is not known. Raises ConfigError."""
    if global_batch_size is None:
        return MOST_MICRO_STEPS
    unit = micro_batch_size * ranks
    if global_batch_size % unit:
        raise ConfigError(
            f"a global batch of {global_batch_size:,} is not a multiple of {unit:,}: {ranks:,} GPUs with micro-batches "
            f"of {micro_batch_size}. Legal: {unit:,}, {2 * unit:,} and so on."
        )
    return global_batch_size // unit


def engine_config(ds: DsConfig, micro_steps: int) -> dict[str, Any]:
    """Return the ds_config for DeepSpeed itself: what the file says, and DeepSpeed's defaults for "auto"."""
    written = ds.keys.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    config = _without_auto(written)
    sections = {"bf16": "bf16", "fp16": "fp16", "autocast": "torch_autocast"}
    if ds.precision in sections:
        name = sections[ds.precision]
        config[name] = {**config.get(name, {}), "enabled": True}
    return {**config, "gradient_accumulation_steps": micro_steps}


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }


def _as_estimate(run: DryRun) -> MemoryEstimate:
    moments = {"forward": run.forward, "backward": run.backward, "optimizer step": run.step}
    return MemoryEstimate(moments, run.host_bytes, nvme_bytes=0)


def _with_blocks(fewer: MemoryEstimate, more: MemoryEstimate, times: float) -> MemoryEstimate:
    """Return the estimate of `fewer` with `times` what `more` has beyond it."""
    moments = {name: _extended(moment, more.moments[name], times) for name, moment in fewer.moments.items()}
    host = fewer.host_bytes + round(times * (more.host_bytes - fewer.host_bytes))
    return MemoryEstimate(moments, host, nvme_bytes=0)


def _extended(fewer: Breakdown, more: Breakdown, times: float) -> Breakdown:
    larger = more.as_dict()
    return Breakdown(
        **{name: max(0, round(size + times * (larger[name] - size))) for name, size in fewer.as_dict().items()}
    )
