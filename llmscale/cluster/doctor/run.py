"""Checks of a run on the host that they run on: its configuration, data, run folder, memory and disk. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmscale.cluster.doctor.machine import check_nvme_tools, host_memory_bytes, list_gpus
from llmscale.cluster.doctor.report import CheckRow, ProbeRequest, SharedValue, green, red, split_error, yellow
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import load_ds_config, parse_ds_config, read_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.hardware import Cluster, measured_gpu
from llmscale.config.run_config import RunConfig, parse_run_config
from llmscale.data.mixture import TrainingSets, open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import MARGIN, evaluate
from llmscale.training.inputs import read_inputs, with_prepared_text
from llmscale.training.start import Start, check_space, resolve_start

_COPY_FILE = "Copy one of them to all hosts: every rank reads the file of its host."
_COPY_DATA = "Copy one of them to all hosts (rsync -a --delete), or share its disk."


def check_ds_config(path: Path) -> Iterator[CheckRow | SharedValue]:
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
    if "nvme" in (ds.offload_optimizer_device, ds.offload_param_device):
        yield check_nvme_tools()


def _shared_file(name: str, path: Path) -> SharedValue:
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return SharedValue(name, f"{path} {content}", _COPY_FILE, "file")


def check_run(config: RunConfig, request: ProbeRequest) -> Iterator[CheckRow | SharedValue]:
    """Check everything that train.py checks before it starts, and whether the run fits GPUs, host and disk."""
    if config.config is not None:
        yield _shared_file("run config", config.config)
    start, sets, refusal = None, None, ""
    try:
        inputs = read_inputs(config)
        sets = inputs.sets
        start = resolve_start(inputs, request.world_size)
    except LlmscaleError as error:
        refusal = str(error)
    data = list(_check_data(config, sets))
    yield from data
    if (
        refusal
        and _is_valid(config.ds)
        and split_error(refusal) not in [(row.found, row.fix) for row in data if isinstance(row, CheckRow)]
    ):
        yield red("run config", *split_error(refusal))
    yield _check_folder(config.run)
    if start is None:
        return
    yield green("run config", start.resolved.plan.describe())
    try:
        check_space(start)
        yield green("disk", "space for the run's checkpoints")
    except ConfigError as error:
        yield red("disk", *split_error(str(error)))
    yield from _check_memory(start, request)


def _is_valid(ds_config: Path) -> bool:
    """Return whether the rows of `check_ds_config` are not red."""
    try:
        read_ds_config(ds_config)
    except LlmscaleError:
        return False
    return True


def _check_data(config: RunConfig, sets: TrainingSets | None) -> Iterator[CheckRow | SharedValue]:
    """Check the datasets, with one stat for every shard of a local one."""
    try:
        sets = sets or open_training_sets(config.data, config.data_cache)
        for location in sets.locations:
            for split in location.manifest.splits if location.remote is None else ():
                check_files(location.folder, split, location.manifest)
    except LlmscaleError as error:
        yield red("data", *split_error(str(error)))
        return
    # Datasets and proportions of a mixture must be the same.
    stages = sets.recipe.stages if sets.recipe else ()
    content = hashlib.sha256(f"{sets.fingerprint} {stages}".encode()).hexdigest()[:12]
    yield SharedValue(
        "data", f"{sets.num_train_samples:,} samples of {sets.manifest.seq_len} tokens, {content}", _COPY_DATA
    )


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
    found = f"{format_size(fit.estimate.total_bytes)} of {format_size(smallest.memory_bytes)} on {smallest.name}"
    if fit.has_margin:
        yield green("memory", found)
        return
    if fit.fits:
        less = "Watch the first steps, or take a smaller --micro-batch-size."
        yield yellow("memory", f"{found}, less than the margin of {MARGIN:.0%}", less)
        return
    if fit.host_spare_bytes is not None and fit.host_spare_bytes < 0:
        found += (
            f"; {format_size(fit.host_bytes_per_node)} of host memory, {format_size(-fit.host_spare_bytes)} too much"
        )
    fix = change.describe() if change else "No strategy fits. Use more or larger GPUs, or a smaller model."
    yield red("memory", f"{found}: {describe_breakdown(fit.estimate.peak)}", fix)


def read_run(flags: Sequence[str]) -> RunConfig:
    """Return the run of train.py's flags; --text is not prepared. Raises ConfigError or DataError."""
    return with_prepared_text(parse_run_config(list(flags)), may_prepare=False)
