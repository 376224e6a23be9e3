"""Checks of a run on the host that they run on: its configuration, data, run folder, memory and disk. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmscale.cluster.doctor.machine import host_memory_bytes
from llmscale.cluster.doctor.report import CheckRow, ProbeRequest, green, red, shared, split_error, worst, yellow
from llmscale.cluster.launch.ranks import list_gpus
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import load_ds_config, parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.hardware import Cluster, measured_gpu
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.data.mixture import open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import MARGIN, evaluate
from llmscale.training.inputs import read_inputs, with_prepared_text
from llmscale.training.start import Start, check_space, resolve_start

_COPY_FILE = "Copy one of them to all hosts: every rank reads the file of its host."
_COPY_DATA = "Copy one of them to all hosts (rsync -a --delete), or share its disk."


def check_ds_config(path: Path) -> Iterator[CheckRow]:
    """Check a ds_config against the closed schema: all problems, where train.py would stop at the first."""
    path = DS_CONFIGS.find(path)
    try:
        config = load_ds_config(path)
    except LlmscaleError as error:
        yield red("ds_config", *split_error(str(error)))
        return
    yield _shared_file("ds_config", path)
    problems = find_problems(read_foreign(config))
    for problem in problems:
        yield red("ds_config", *split_error(f"{path}: {problem.text}"))
    if problems:
        return
    ds = parse_ds_config(config, str(path))
    for warning in ds.warnings:
        yield yellow("ds_config", f"{path}: {warning}", "--fixed FILE writes the file without such keys.")
    if not ds.warnings:
        yield green("ds_config", f"{path}: every key is known and has an effect")


def _shared_file(name: str, path: Path) -> CheckRow:
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return shared(name, "file", f"{path} {content}", _COPY_FILE)


def check_run(config: RunConfig, request: ProbeRequest) -> Iterator[CheckRow]:
    """Check everything that train.py checks before it starts, and whether the run fits GPUs, host and disk."""
    if config.config is not None:
        yield _shared_file("run config", config.config)
    yield _check_folder(config.run)
    files = [*check_ds_config(config.ds), *_check_data(config)]
    yield from files
    if worst(files) == "fail":
        return
    try:
        start = resolve_start(read_inputs(config), request.world_size)
    except LlmscaleError as error:
        yield red("run config", *split_error(str(error)))
        return
    yield green("run config", start.resolved.plan.describe())
    try:
        check_space(start)
        yield green("disk", "space for the run's checkpoints")
    except ConfigError as error:
        yield red("disk", *split_error(str(error)))
    yield from _check_memory(start, request)


def _check_data(config: RunConfig) -> Iterator[CheckRow]:
    """Check the datasets, with one stat for every shard of a local one."""
    try:
        sets = open_training_sets(config.data, config.data_cache)
        for location in sets.locations:
            for split in location.manifest.splits if location.remote is None else ():
                check_files(location.folder, split, location.manifest)
    except LlmscaleError as error:
        yield red("data", *split_error(str(error)))
        return
    # Datasets and proportions of a mixture must be the same.
    stages = sets.recipe.stages if sets.recipe else ()
    content = hashlib.sha256(f"{sets.fingerprint} {stages}".encode()).hexdigest()[:12]
    size = f"{sets.num_train_samples:,} samples of {sets.manifest.seq_len} tokens"
    yield shared("data", "all", f"{size}, {content}", _COPY_DATA)


def _check_folder(run: Path) -> CheckRow:
    """Check the run folder, or its nearest parent that exists."""
    folder = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return green("run folder", f"{run} is writable")
    fix = "Name another folder with --run, or give the user permission (chown)."
    return red("run folder", f"{run}: {folder.absolute()} is not writable", fix)


def _check_memory(start: Start, request: ProbeRequest) -> Iterator[CheckRow]:
    """Compare the estimate with this host's smallest GPU, and offloaded states with its memory. No row without GPUs."""
    gpus, _ = list_gpus(request.timeout_s)
    if not gpus:
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    nodes, rest = divmod(request.world_size, request.slots)
    # Hosts of different sizes: offloaded states are then not compared with the host's memory.
    nodes, per_node, host_bytes = (request.world_size, 1, None) if rest else (nodes, request.slots, host_memory_bytes())
    gpu = measured_gpu(smallest.name, smallest.memory_bytes, None)
    fit = evaluate(start.resolved, Cluster(gpu, per_node, num_nodes=nodes, host_bytes=host_bytes))
    change = None if fit.fits else find_smallest_change(fit.step, fit.cluster)
    size = f"{format_size(fit.estimate.total_bytes)} of {format_size(smallest.memory_bytes)} on {smallest.name}"
    if fit.has_margin:
        yield green("memory", size)
        return
    if fit.fits:
        less = "Watch the first steps, or take a smaller --micro-batch-size."
        yield yellow("memory", f"{size}, less than the margin of {MARGIN:.0%}", less)
        return
    if fit.host_spare_bytes is not None and fit.host_spare_bytes < 0:
        size += (
            f"; {format_size(fit.host_bytes_per_node)} of host memory, {format_size(-fit.host_spare_bytes)} too much"
        )
    fix = change.describe() if change else "No strategy fits. Use more or larger GPUs, or a smaller model."
    yield red("memory", f"{size}: {describe_breakdown(fit.estimate.peak)}", fix)


def read_run(flags: Sequence[str]) -> RunConfig:
    """Return the run of train.py's flags; --text is not prepared. Raises ConfigError or DataError."""
    return with_prepared_text(parse_run_config(list(flags)), may_prepare=False).config
