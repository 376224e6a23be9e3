"""The question of `llmscale estimate`, from its flags. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.cli.flags import DEFAULT_INTERCONNECT, ESTIMATED_GPUS, LIST, PLANNED_GPUS, given_keys, resolve_model
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config, read_ds_config
from llmscale.config.hardware import GPU, Cluster, get_interconnect, usable_precision
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import SetFacts, resolve_batch, resolve_run
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.run_flags import model_keys
from llmscale.memory.breakdown import GIB
from llmscale.planning.search import (
    CHECKPOINTING,
    Strategy,
    Trial,
    strategy_ds_config,
    try_strategies,
)

#: Preset for --max-model, whose sizes are replaced.
_ANY_MODEL = "gpt3-125m"
#: Context and batch of `--max-model` without a model: GPT-3's context, and 2^20 tokens.
_MAX_MODEL_SEQ_LEN, _MAX_MODEL_BATCH = 2048, 512


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
    host_bytes = None if args.host_memory_gib is None else int(args.host_memory_gib * GIB)
    return Cluster(gpu, args.num_gpus or ESTIMATED_GPUS, network, args.num_nodes, host_bytes)


def read_request(args: argparse.Namespace, gpu: GPU) -> EstimateRequest:
    """Check all flags and read the files. Raises ConfigError."""
    cluster, keys = read_cluster(args, gpu), given_keys(args, "estimate")
    if args.freeze is not None:
        keys["freeze"] = [pattern for text in args.freeze for pattern in text.split(",")]
    config = build_run_config({"model": _ANY_MODEL, **keys})
    keys = {key: getattr(config, key) for key in keys}
    precision, mode = usable_precision(config.precision, gpu), config.activation_checkpointing
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
        hpz_ranks = cluster.gpus_per_node if cluster.num_nodes > 1 and not (args.max_model or args.max_seq_len) else 1
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
