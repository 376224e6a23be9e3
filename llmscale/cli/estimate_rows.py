"""The question of `llmscale estimate` from its flags, its rows as records, and their table. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.cli.answers import CATEGORIES, table
from llmscale.cli.flags import DEFAULT_INTERCONNECT, ESTIMATED_GPUS, LIST, PLANNED_GPUS, given_keys, resolve_model
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config, read_ds_config
from llmscale.config.hardware import GPU, Cluster, get_interconnect, usable_precision
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import ResolvedStep, SetFacts, resolve_batch, resolve_run
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.run_flags import model_keys
from llmscale.memory.breakdown import GIB, format_size
from llmscale.memory.estimate import RESERVED_PER_ALLOCATED
from llmscale.planning.recommend import (
    RankedConfig,
    Ranking,
    choose_between,
    distinct_rows,
    rank_trials,
)
from llmscale.planning.search import (
    CHECKPOINTING,
    MARGIN,
    PROCESS_BYTES,
    Strategy,
    Trial,
    strategy_ds_config,
    try_strategies,
)
from llmscale.terminal.table import output_width

#: Preset for --max-model, whose sizes are replaced.
_ANY_MODEL = "gpt3-125m"
#: Context and batch of `--max-model` without a model: GPT-3's context, and 2^20 tokens.
_MAX_MODEL_SEQ_LEN = 2048
_MAX_MODEL_BATCH = 512
EXIT_NOTHING_FITS = 1
#: Width of a table of rows in a file or a pipe; with --wide no column is left out.
_TABLE_WIDTH = 100
_ANY_WIDTH = 1_000_000
STRATEGY_HEADS = {
    "strategy.stage_words": "ZeRO",
    "strategy.offload": "offload",
    "strategy.activation_checkpointing": "checkpt",
}
_ROW_HEADS = {"gpu": "GPU", "usd_per_gpu_hour": "$/h", "ds_config": "ds_config", **STRATEGY_HEADS, "batch": "batch"}
#: Columns that `total` consists of.
_PART_HEADS = {f"fit.estimate.peak.{name}": head for name, head in CATEGORIES.items()} | {
    "fit.estimate.reserve_bytes": "reserve",
    "fit.estimate.context_bytes": "context",
}
_TOTAL_HEADS = {"fit.estimate.total_bytes": "total", "fit.verdict": "  fits"}
_RATE_HEADS = {
    "fit.host_bytes_per_node": "host",
    "fit.nvme_bytes_per_node": "NVMe",
    "tokens_per_second": "tok/s",
    "mfu": "MFU",
    "usd_per_billion_tokens": "$ per 1B",
}


@dataclass(frozen=True)
class EstimateRequest:
    """The user's question."""

    keys: Mapping[str, object]
    """Keys of a run that the user set."""
    cluster: Cluster
    trials: list[Trial]
    """Runs of the user's ds_configs, else of every strategy that DeepSpeed can train."""
    names: list[str] | None
    """Names of the user's ds_configs; None without."""
    is_restricted: bool
    """True if the user fixed a setting that could be another."""
    nvme_path: str
    assumes_gpus: bool
    """True if the user did not say how many GPUs a node has."""

    @property
    def step(self) -> ResolvedStep:
        """Run with the first of the ds_configs or strategies, for all that they share."""
        return self.trials[0].step

    @property
    def model_keys(self) -> dict[str, object]:
        """Keys of the run that describe the model."""
        return {key: self.keys[key] for key in model_keys() if key in self.keys}

    @property
    def machines_in_words(self) -> str:
        gpu = self.cluster.gpu
        return self.cluster.in_words(f"{gpu.name} ({gpu.memory_gib:g} GiB)")

    def assumption_lines(self) -> Iterator[str]:
        """Yield the number of GPUs, if it is assumed."""
        if self.assumes_gpus:
            yield f"  {ESTIMATED_GPUS} GPU is assumed, where `plan` assumes {PLANNED_GPUS}: --num-gpus says how many"


def read_cluster(args: argparse.Namespace, gpu: GPU) -> Cluster:
    """Return the machines that the flags describe. Raises ConfigError."""
    network = get_interconnect(DEFAULT_INTERCONNECT if args.interconnect == LIST else args.interconnect)
    if args.host_memory_gib is None:
        host_bytes = None
    else:
        host_bytes = int(args.host_memory_gib * GIB)
    return Cluster(gpu, args.num_gpus or ESTIMATED_GPUS, network, args.num_nodes, host_bytes)


def read_request(args: argparse.Namespace, gpu: GPU) -> EstimateRequest:
    """Check all flags and read the files. Raises ConfigError."""
    cluster = read_cluster(args, gpu)
    keys = given_keys(args, "estimate")
    if args.freeze is not None:
        keys["freeze"] = [pattern for text in args.freeze for pattern in text.split(",")]
    config = build_run_config({"model": _ANY_MODEL, **keys})
    keys = {key: getattr(config, key) for key in keys}
    precision = usable_precision(config.precision, gpu)
    mode = config.activation_checkpointing
    config, shape = resolve_model(config, config.seq_len if args.model else config.seq_len or _MAX_MODEL_SEQ_LEN)
    facts = SetFacts(shape.vocab_size, shape.seq_len, num_train_samples=1, eot_token=0)
    least = None if args.model else _MAX_MODEL_BATCH
    files = [_read_ds_file(path, config, gpu) for path in args.ds or ()]
    if files:
        trials = [_trial(config, ds, facts, cluster, least) for ds in files]
    else:
        plainest = Strategy(0 if config.optimizer == "adafactor" else 3, "none", "none", "none")
        ds = parse_ds_config(strategy_ds_config(plainest, precision), "this model")
        # hpZ gathers faster among the GPUs of a node than among several nodes.
        if cluster.num_nodes > 1 and not (args.max_model or args.max_seq_len):
            hpz_ranks = cluster.gpus_per_node
        else:
            hpz_ranks = 1
        trial = _trial(config, ds, facts, cluster, least)
        trials = try_strategies(trial, (mode,) if mode else CHECKPOINTING, hpz_ranks, args.nvme_path)
    return EstimateRequest(
        keys,
        cluster,
        trials,
        _names(files),
        bool(files or mode or config.micro_batch_size),
        args.nvme_path,
        args.num_gpus is None,
    )


def _read_ds_file(path: Path, config: RunConfig, gpu: GPU) -> DsConfig:
    """Return a ds_config that this GPU can train; the precision that a flag gives goes before. Raises ConfigError."""
    ds = read_ds_config(path).with_flags(config.precision, config.gradient_clipping)
    get_optimizer(config.optimizer).check_stage(ds.zero_stage)
    usable_precision(ds.precision, gpu, f"{path}: ")
    return ds


def _trial(config: RunConfig, ds: DsConfig, facts: SetFacts, cluster: Cluster, least: int | None) -> Trial:
    """Return the run with a ds_config. A batch that nobody gave is rounded up, as in `plan`, so that it has no fillers.

    `least`: sequences of such a batch; None for the preset's.
    """
    plan = resolve_batch(config, facts.seq_len, cluster.world_size, ds)
    groups = plan.ranks.data_parallel_size
    _, micro = ds.batch(config.global_batch_size, config.micro_batch_size, plan.global_batch_size, groups)
    is_given = config.global_batch_size or isinstance(
        ds.keys.train_batch_size or ds.keys.gradient_accumulation_steps, int
    )
    if not is_given:
        unit = math.lcm(groups, micro or 1)
        batch = -(-(least or plan.global_batch_size) // unit) * unit
        config = config.model_copy(update={"global_batch_size": batch})
    return Trial(resolve_run(config, ds, facts, cluster.world_size), is_fixed=micro is not None)


def _names(files: list[DsConfig]) -> list[str] | None:
    """Return the files' names, with folders where names are equal; None without files."""
    paths = [ds.source for ds in files]
    names = [Path(path).name for path in paths]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)] or None


_ROW_HEADS |= {"fit.plan.filler_share": "fillers"}


def row_heads(*, wide: bool) -> dict[str, str]:
    peak = {"fit.estimate.peak_moment": "peak in"} if wide else {}
    return _ROW_HEADS | (_PART_HEADS if wide else {}) | _TOTAL_HEADS | peak | _RATE_HEADS


def question_values(request: EstimateRequest) -> dict[str, object]:
    """Return model, machines and assumptions."""
    cluster = request.cluster
    step = request.step
    return {
        "shape": step.shape,
        "global_batch_size": step.plan.global_batch_size,
        "optimizer": step.optimizer.name,
        "gpu": cluster.gpu,
        "interconnect": cluster.interconnect.name,
        "machines": {
            "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu_bytes": cluster.gpu_bytes,
            "host_bytes": cluster.host_bytes,
            "world_size": cluster.world_size,
        },
        "assumed": {
            "reserved_per_allocated": RESERVED_PER_ALLOCATED,
            "margin": MARGIN,
            "host_bytes_per_process": PROCESS_BYTES,
        },
    }


@dataclass(frozen=True)
class RowsAnswer:
    """Every row of a question, and the one to take."""

    request: EstimateRequest
    ranking: Ranking

    def choices(self, *, is_complete: bool) -> list[RankedConfig]:
        """Return the rows to choose between, or all; the user's ds_configs are all of them."""
        rows = self.ranking.configs
        if self.request.names:
            return [*rows]
        if is_complete:
            chosen = distinct_rows(self.ranking)
        else:
            chosen = choose_between(self.ranking)
        return [rows[index] for index in chosen]

    def values(self) -> dict[str, object]:
        """Return what JSON has."""
        chosen = self.ranking.recommendation
        recommended = None if chosen is None else {"row": chosen.index, "why": chosen.why}
        return question_values(self.request) | {"rows": self.ranking.configs, "recommended": recommended}


def find_rows(request: EstimateRequest, gpu: str | None = None, usd_per_gpu_hour: float | None = None) -> RowsAnswer:
    """Fit and rank every run of a question. `gpu`: its name, where several are compared."""
    ranking = rank_trials(request.trials, request.cluster)
    names: Sequence[str | None] = request.names or [None] * len(ranking.configs)
    rows = [
        replace(row, ds_config=name, gpu=gpu, usd_per_gpu_hour=usd_per_gpu_hour)
        for row, name in zip(ranking.configs, names, strict=True)
    ]
    return RowsAnswer(request, replace(ranking, configs=tuple(rows)))


def row_lines(answer: RowsAnswer, *, is_complete: bool, wide: bool) -> Iterator[str]:
    """Yield the rows in GiB; `*` marks the recommended one."""
    choices = answer.choices(is_complete=is_complete)
    recommended = answer.ranking.recommended
    group = "strategy.zero_stage" if is_complete and not answer.request.names else ""
    if wide:
        width = _ANY_WIDTH
    else:
        width = output_width() or _TABLE_WIDTH
    yield from table(row_heads(wide=wide), choices, is_marked=lambda row: row is recommended, group=group, width=width)
    yield ""
    left_out = len(answer.choices(is_complete=True)) - len(choices)
    more = [f"--all: {left_out} more rows"] if left_out else []
    yield (
        "GiB per GPU at the peak, host and NVMe per node; batch: micro-batch x accumulation. "
        f"{'; '.join([*more, '--wide: all parts', '--why: what is assumed', '--explain: activations'])}."
    )


def margin_line() -> str:
    """Return a note on the memory that a row must leave."""
    return (
        f"Micro-batches leave {MARGIN:.0%} of a GPU and of a node free, because no GPU has calibrated these estimates; "
        "tight: less is free."
    )


def host_words(cluster: Cluster) -> str:
    """Return how the host memory of offloaded states is checked."""
    if not cluster.host_bytes:
        return "not checked: --host-memory-gib"
    processes = f"{cluster.gpus_per_node} x {format_size(PROCESS_BYTES)} for processes (assumed)"
    return f"with a save's copy and {processes} checked against {format_size(cluster.host_bytes)} (--host-memory-gib)"
