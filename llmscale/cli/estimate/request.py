"""From the arguments of `llmscale estimate` to a job, through the functions that resolve a training run. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from llmscale.config.arguments import build_run_config
from llmscale.config.deepspeed.schema import DsConfig, read_ds_config
from llmscale.config.deepspeed.sections import CheckpointingMode, Precision
from llmscale.config.hardware import GPU, custom_gpu, get_gpu
from llmscale.config.interconnect import Interconnect, get_interconnect
from llmscale.config.presets import get_preset
from llmscale.config.resolve import SetFacts, resolve_batch, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.planning.largest_micro_batch import Job, Machines

GIB = 2**30
#: Keys of a RunConfig that are flags here too.
RUN_KEYS = (
    *("model", "n_layer", "n_head", "n_embd", "activation", "dropout", "bias", "global_batch_size"),
    *("micro_batch_size", "precision", "activation_checkpointing"),
)
#: Context and batch of `--max-model` where no model is named: GPT-3's context, and 2^20 tokens.
_MAX_MODEL_SEQ_LEN, _MAX_MODEL_BATCH = 2048, 512


@dataclass(frozen=True)
class Request:
    """What was asked, resolved as train.py would."""

    config: RunConfig
    job: Job
    gpu: GPU
    interconnect: Interconnect
    precision: Precision
    """The flag's; else bf16, or fp16 on a card without it. A ds_config's own is only overridden by the flag."""

    @property
    def machines_in_words(self) -> str:
        return self.job.machines.in_words(f"{self.gpu.name} ({self.gpu.memory_gib:g} GiB)")


def read_request(args: argparse.Namespace) -> Request:
    """Raises ConfigError for whatever cannot be."""
    gpu = read_gpu(args)
    machines = read_machines(args, gpu)
    given = {key: getattr(args, key) for key in RUN_KEYS if getattr(args, key) is not None}
    if "model" not in given:
        given["model"] = "gpt3-125m"  # of --max-model and --hf: what a preset decides is set below or not used
    config = build_run_config(dict(given))
    seq_len = _read_seq_len(args)
    if args.model is None and config.global_batch_size is None:
        world_size = machines.world_size
        batch = -(-_MAX_MODEL_BATCH // world_size) * world_size
        config = config.model_copy(update={"global_batch_size": batch})
    # Of the data set only these matter; its size would decide the number of steps.
    facts = SetFacts(vocab_size=args.vocab_size, seq_len=seq_len, num_train_samples=1)
    shape = resolve_shape(config, facts)
    plan = resolve_batch(config, seq_len, machines.world_size)
    job = Job(shape, plan.global_batch_size, machines, config.micro_batch_size)
    return Request(config, job, gpu, get_interconnect(args.interconnect), _read_precision(config, gpu))


def read_gpu(args: argparse.Namespace) -> GPU:
    """The card: from the table, or described. Raises ConfigError."""
    described = [args.gpu_memory_gib, args.bf16_tflops]
    if args.gpu is not None:
        if any(value is not None for value in described):
            raise ConfigError(
                "--gpu names a card of the table, --gpu-memory-gib and --bf16-tflops one that is not in it."
            )
        return get_gpu(args.gpu)
    if None in described:
        raise ConfigError(
            "which GPU? Give --gpu NAME (--gpu list shows the table), or --gpu-memory-gib and --bf16-tflops for a card "
            "that is not in it."
        )
    return custom_gpu(args.gpu_memory_gib, args.bf16_tflops)


def read_ds_files(paths: list[Path], request: Request) -> list[tuple[DsConfig, CheckpointingMode]]:
    """Each ds_config with its checkpointing mode, overridden by the flags as train.py does. Raises ConfigError."""
    configs = []
    for path in paths:
        ds = read_ds_config(path)
        if request.config.precision is not None:
            ds = ds.with_precision(request.config.precision)
        _check_bf16(ds.precision, request.gpu, f"{path}: ")
        mode = request.config.activation_checkpointing or ds.checkpointing
        configs.append((ds, mode))
    return configs


def read_machines(args: argparse.Namespace, gpu: GPU) -> Machines:
    """Raises ConfigError for sizes that cannot be."""
    for flag, value in (("--num-gpus", args.num_gpus), ("--num-nodes", args.num_nodes)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, not {value}.")
    host_gib = args.host_memory_gib
    if host_gib is not None and host_gib <= 0:
        raise ConfigError(f"--host-memory-gib must be above 0, not {host_gib:g}.")
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    return Machines(args.num_nodes, args.num_gpus, int(gpu.memory_gib * GIB), host_bytes)


def read_hf_precision(args: argparse.Namespace, gpu: GPU) -> Precision:
    """As for our own model."""
    given = {} if args.precision is None else {"precision": args.precision}
    return _read_precision(build_run_config(dict(given)), gpu)


def _read_seq_len(args: argparse.Namespace) -> int:
    if args.seq_len is not None:
        if args.seq_len < 1:
            raise ConfigError(f"--seq-len must be at least 1, not {args.seq_len}.")
        return int(args.seq_len)
    return get_preset(args.model).seq_len if args.model is not None else _MAX_MODEL_SEQ_LEN


def _read_precision(config: RunConfig, gpu: GPU) -> Precision:
    if config.precision is None:
        return "bf16" if gpu.has_bf16 else "fp16"
    _check_bf16(config.precision, gpu, "")
    return config.precision


def _check_bf16(precision: Precision, gpu: GPU, where: str) -> None:
    if precision in ("bf16", "autocast") and not gpu.has_bf16:
        raise ConfigError(
            f"{where}a {gpu.name} has no bf16 arithmetic. Use fp16: --precision fp16, or a ds_config such as "
            "ds_configs/zero2_fp16.json."
        )
