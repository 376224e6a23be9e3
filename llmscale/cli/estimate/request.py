"""From the arguments of `llmscale estimate` to a search, by the functions that resolve a training run. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.cli.flags import DEFAULT_INTERCONNECT, LIST, given_model, resolve_model
from llmscale.config.arguments import build_run_config
from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import GPU, custom_gpu, get_gpu, usable_precision
from llmscale.config.interconnect import get_interconnect
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import resolve_batch
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.planning.search import CHECKPOINTING, Job, Machines, Search

GIB = 2**30
#: Of --max-model and --hf: what a preset decides is set below or not used.
_ANY_MODEL = "gpt3-125m"
#: Keys of a RunConfig that are flags here too, beside those of the model.
_RUN_KEYS = (
    *("global_batch_size", "micro_batch_size", "precision", "activation_checkpointing"),
    *("optimizer", "loss_chunk_tokens"),
)
#: Context and batch of `--max-model` where no model is named: GPT-3's context, and 2^20 tokens.
_MAX_MODEL_SEQ_LEN, _MAX_MODEL_BATCH = 2048, 512


@dataclass(frozen=True)
class EstimateRequest:
    """What was asked."""

    given: Mapping[str, object]
    """What the user said of the run, in the keys of train.py."""
    search: Search

    @property
    def model_keys(self) -> dict[str, object]:
        """Of them those that say what the model is."""
        return {key: value for key, value in self.given.items() if key not in _RUN_KEYS}

    @property
    def machines_in_words(self) -> str:
        gpu = self.search.gpu
        return self.search.job.machines.in_words(f"{gpu.name} ({gpu.memory_gib:g} GiB)")


def read_request(args: argparse.Namespace) -> EstimateRequest:
    """Raises ConfigError for whatever cannot be."""
    gpu = read_gpu(args)
    machines = read_machines(args, gpu)
    given = given_model(args) | {key: getattr(args, key) for key in _RUN_KEYS if getattr(args, key) is not None}
    config = build_run_config({"model": _ANY_MODEL, **given})
    mode = config.activation_checkpointing
    search = Search(
        _read_job(args, config, machines),
        gpu,
        get_interconnect(DEFAULT_INTERCONNECT if args.interconnect == LIST else args.interconnect),
        usable_precision(config.precision, gpu),
        (mode,) if mode else CHECKPOINTING,
        args.nvme_path,
        [_read_ds_file(path, config, gpu) for path in args.ds or ()],
    )
    return EstimateRequest({key: getattr(config, key) for key in given}, search)


def _read_job(args: argparse.Namespace, config: RunConfig, machines: Machines) -> Job:
    """Shape and global batch, as train.py would resolve them."""
    if args.model is None and config.global_batch_size is None:
        world_size = machines.world_size
        batch = -(-_MAX_MODEL_BATCH // world_size) * world_size
        config = config.model_copy(update={"global_batch_size": batch})
    config, shape = resolve_model(config, args.seq_len if args.model else args.seq_len or _MAX_MODEL_SEQ_LEN)
    plan = resolve_batch(config, shape.seq_len, machines.world_size)
    return Job(
        shape,
        plan.global_batch_size,
        machines,
        config.micro_batch_size,
        get_optimizer(config.optimizer),
        config.loss_chunk_tokens,
    )


def _read_ds_file(path: Path, config: RunConfig, gpu: GPU) -> tuple[DsConfig, CheckpointingMode]:
    """A ds_config with its checkpointing mode, overridden by the flags as train.py does. Raises ConfigError."""
    ds = read_ds_config(path).with_flags(config.precision, config.gradient_clipping)
    usable_precision(ds.precision, gpu, f"{path}: ")
    return ds, config.activation_checkpointing or ds.checkpointing


def read_gpu(args: argparse.Namespace) -> GPU:
    """The GPU: from the table, or described. Raises ConfigError."""
    described = [args.gpu_memory_gib, args.bf16_tflops]
    if args.gpu is not None:
        if any(value is not None for value in described):
            raise ConfigError(
                "--gpu names a GPU of the table, --gpu-memory-gib and --bf16-tflops one that is not in it."
            )
        return get_gpu(args.gpu)
    if None in described:
        raise ConfigError(
            "which GPU? Give --gpu NAME (--gpu list shows the table), or --gpu-memory-gib and --bf16-tflops for a GPU "
            "that is not in it."
        )
    return custom_gpu(args.gpu_memory_gib, args.bf16_tflops)


def read_machines(args: argparse.Namespace, gpu: GPU) -> Machines:
    """Return the machines that the flags describe."""
    host_gib = args.host_memory_gib
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    return Machines(args.num_nodes, args.num_gpus, int(gpu.memory_gib * GIB), host_bytes, gpu.capability)


def read_hf_precision(args: argparse.Namespace, gpu: GPU) -> Precision:
    """As for our own model."""
    given = {} if args.precision is None else {"precision": args.precision}
    return usable_precision(build_run_config(dict(given)).precision, gpu)
