"""Check a run before it starts: its configuration on every host, data, run folder, memory and disk. No torch."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.cluster.doctor.facts import (
    CheckRow,
    DataFacts,
    FileFacts,
    FolderFacts,
    HostFacts,
    RunFacts,
    differ,
    format_by_host,
    format_hosts,
    green,
    red,
    split_error,
    yellow,
)
from llmscale.cluster.hostfile import Host
from llmscale.cluster.remote import HostRunner
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import DsConfig, load_ds_config, parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.hardware import find_gpu
from llmscale.config.resolve import (
    SetFacts,
    resolve_batch,
    resolve_optimizer,
    resolve_run,
    resolve_schedule,
    resolve_shape,
)
from llmscale.config.run_config import RunConfig, parse_run_config
from llmscale.data.mixture import TrainingSets, open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.memory.activations.recorded import NotRecorded
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.planning.disk_usage import checkpoints_at_once
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import MARGIN, Job, Machines, fit_at
from llmscale.training.inputs import read_inputs, with_prepared_text
from llmscale.training.start import resolve_start


def check_ds_config(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Check the ds_config against the closed schema, and that every host has the same file."""
    files = {host: found.ds for host, found in facts.items() if found.ds}
    if not files:
        return
    wrong = list(_check_file("ds_config", files))
    yield from wrong
    first = next(iter(files.values()))
    for warning in first.warnings if not wrong else ():
        yield yellow("ds_config", f"{first.path}: {warning}", "--fixed FILE writes the file without such keys.")
    if not wrong and not first.warnings:
        yield green("ds_config", f"{first.path}: every key is known and has an effect")


def check_run_config(facts: Mapping[str, HostFacts], reported: Collection[str] = ()) -> Iterator[CheckRow]:
    """Check run file and flags, and everything else that train.py checks before it starts.

    Errors in `reported`, which other rows show, are left out: train.py stops at its first error.
    """
    runs = {host: found.run for host, found in facts.items() if found.run}
    if not runs:
        return
    wrong = list(_check_file("run config", {host: run.config for host, run in runs.items()}))
    yield from wrong
    if wrong:
        return
    other = {
        host: run.problem for host, run in runs.items() if run.problem and not _is_reported(facts[host], run, reported)
    }
    for text in sorted(set(other.values())):
        hosts = [host for host, problem in other.items() if problem == text]
        found, fix = split_error(text)
        yield red("run config", f"train.py would refuse on {format_hosts(hosts)}: {found}", fix)
    if not other:
        path = next(iter(runs.values())).config.path
        yield green("run config", f"{path or 'the flags'}: every key is known")


def _is_reported(host: HostFacts, run: RunFacts, reported: Collection[str]) -> bool:
    # train.py names all problems of a ds_config in one line.
    if host.ds and host.ds.problems and run.problem and run.problem.startswith(f"{host.ds.path}: "):
        return True
    return run.problem in {*reported, run.data.problem if run.data else None}


def _check_file(name: str, files: Mapping[str, FileFacts]) -> Iterator[CheckRow]:
    """Yield red rows for a file that is wrong on a host, or differs between hosts."""
    problems = {host: file.problems for host, file in files.items() if file.problems}
    for text in dict.fromkeys(problem for texts in problems.values() for problem in texts):
        hosts = [host for host, texts in problems.items() if text in texts]
        found, fix = split_error(text)
        if len(hosts) < len(files):
            where = format_hosts(hosts)
            found, fix = f"on {where}: {found}", f"Copy the file of another host to {where}. {fix}"
        yield red(name, found, fix)
    hashes = {host: (file.sha256 or "missing")[:12] for host, file in files.items()}
    if not problems and differ(hashes):
        path = next(iter(files.values())).path
        yield red(
            name,
            f"{path} is not the same file on all hosts: {format_by_host(hashes)}",
            "Copy one of them to all hosts: every rank reads the file of its host.",
        )


def check_data(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Check that the dataset is readable on every host, and the same."""
    data = {host: found.run.data for host, found in facts.items() if found.run and found.run.data}
    if not data:
        return
    problems = {host: found.problem for host, found in data.items() if found.problem}
    for text in sorted({problem for problem in problems.values() if problem}):
        hosts = [host for host, problem in problems.items() if problem == text]
        found, fix = split_error(text)
        if len(problems) < len(data):
            fix = "Copy the dataset to the same path there (rsync -a), or share its disk."
        yield red("data", f"on {format_hosts(hosts)}: {found}", fix)
    if problems:
        return
    fingerprints = {host: found.fingerprint[:12] for host, found in data.items()}
    one: DataFacts = next(iter(data.values()))
    if differ(fingerprints):
        yield red(
            "data",
            f"{one.name} is not the same dataset on all hosts: {format_by_host(fingerprints)}",
            "Copy one of them to all hosts (rsync -a --delete), or share its disk.",
        )
    else:
        yield green(
            "data", f"{one.name}: {one.num_train_samples:,} samples of {one.seq_len} tokens, {one.fingerprint[:12]}"
        )


@dataclass(frozen=True)
class SharedFolder:
    """Result of writing a file on one host and looking for it on the others."""

    folder: str
    writer: str
    problem: str | None
    """Reason why the first host could not write it."""
    seen: Mapping[str, bool]
    """Result by host: True if the host sees the file."""


#: Seconds for a network file system to show a new file to another host, and for a host to answer.
_LOOK_TIMEOUT_S = 30.0
_WRITE = 'touch -- "$1"'
#: Opening the folder asks a network file system's server again.
_LOOK = 'for try in 1 2 3 4 5 6 7 8 9 10; do [ -e "$1" ] && exit 0; ls "$2" >/dev/null 2>&1; sleep 0.5; done; exit 1'
_REMOVE = 'rm -f -- "$1"'


def try_shared_folder(runner: HostRunner, facts: Mapping[str, HostFacts]) -> SharedFolder | None:
    """Write a file to the run folder, or to its nearest parent that exists, and look for it on the other hosts.

    None if fewer than two hosts have facts of a run folder.
    """
    folders = _folders_of(facts)
    if len(folders) < 2:
        return None
    writer, *others = folders
    folder = folders[writer].exists_at
    path = f"{folder.rstrip('/')}/.llmscale-doctor-{secrets.token_hex(8)}"
    try:
        written = runner.shell([writer], _WRITE, [path], _LOOK_TIMEOUT_S)[writer]
        if written.returncode:
            return SharedFolder(folder, writer, written.describe(), {})
        looked = runner.shell(others, _LOOK, [path, folder], _LOOK_TIMEOUT_S)
        return SharedFolder(folder, writer, None, {host: answer.returncode == 0 for host, answer in looked.items()})
    finally:
        runner.shell([writer], _REMOVE, [path], _LOOK_TIMEOUT_S)


def check_run_folder(facts: Mapping[str, HostFacts], shared: SharedFolder | None) -> Iterator[CheckRow]:
    """Check that the run folder is writable, and on one shared file system if there are several hosts."""
    folders = _folders_of(facts)
    if not folders:
        return
    fix = "Name another folder with --run, or give the user permission (chown)."
    refusing = [host for host, folder in folders.items() if not folder.writable]
    if refusing:
        some = folders[refusing[0]]
        yield red("run folder", f"{some.run}: {some.exists_at} is not writable on {format_hosts(refusing)}", fix)
    if shared is None:
        if not refusing:
            yield green("run folder", f"{next(iter(folders.values())).run} is writable")
        return
    if shared.problem:
        found = f"{shared.folder} on {shared.writer} is not writable: {shared.problem}"
        yield red("run folder", found, fix)
        return
    blind = [host for host, seen in shared.seen.items() if not seen]
    if blind:
        yield yellow(
            "run folder",
            f"{shared.folder} is not one shared file system: a file written on {shared.writer} is not there on "
            f"{format_hosts(blind)}. Each host keeps its own ranks' part of every checkpoint",
            "To survive the loss of a host, put --run on NFS, Lustre or the like, or in a store (--run s3://...).",
        )
    elif not refusing:
        yield green("run folder", f"{shared.folder} is one shared file system")


def _folders_of(facts: Mapping[str, HostFacts]) -> dict[str, FolderFacts]:
    return {host: found.run.folder for host, found in facts.items() if found.run and found.run.folder}


def gather_ds(path: str) -> FileFacts:
    """Return all problems and warnings of a ds_config."""
    path = str(DS_CONFIGS.find(Path(path)))
    try:
        config = load_ds_config(Path(path))
    except LlmscaleError as error:
        return FileFacts(path, (str(error),), _hash(path))
    problems = tuple(f"{path}: {problem.text}" for problem in find_problems(read_foreign(config)))
    return FileFacts(path, problems, _hash(path), () if problems else parse_ds_config(config, path).warnings)


def gather_run(flags: Sequence[str], world_size: int) -> RunFacts:
    """Return what train.py would find with these flags: configuration, dataset, run folder, and its error if any."""
    try:
        config = with_prepared_text(parse_run_config(flags), may_prepare=False)
    except LlmscaleError as error:
        return RunFacts(FileFacts(" ".join(flags), (str(error),), None), None, None, None)
    file = str(config.config) if config.config else ""
    inputs, problem = None, None
    try:
        inputs = read_inputs(config)
        resolve_start(inputs, world_size)
    except LlmscaleError as error:
        problem = str(error)
    return RunFacts(
        config=FileFacts(file, (), _hash(file) if file else None),
        data=_describe_data(config, inputs.sets if inputs else None),
        folder=describe_folder(config.run),
        problem=problem,
    )


def _describe_data(config: RunConfig, sets: TrainingSets | None) -> DataFacts:
    """Stat every shard of a local dataset. Without `sets`, read the manifest; a remote one's and its index enter its
    cache."""
    try:
        sets = sets or open_training_sets(config.data, config.data_cache)
        for location in sets.locations:
            for split in location.manifest.splits if location.remote is None else ():
                check_files(location.folder, split, location.manifest)
    except LlmscaleError as error:
        return DataFacts(config.data, str(error))
    manifest = sets.manifest
    return DataFacts(
        name=config.data,
        problem=None,
        fingerprint=sets.fingerprint if sets.recipe is None else _hash_mixture(sets),
        vocab_size=manifest.vocab_size,
        seq_len=manifest.seq_len,
        num_train_samples=sets.num_train_samples,
        eot_token=manifest.eot_token,
    )


def _hash_mixture(sets: TrainingSets) -> str:
    """Return a hash over the datasets and their proportions: both must be the same on all hosts."""
    return hashlib.sha256(f"{sets.fingerprint} {sets.recipe.stages if sets.recipe else ()}".encode()).hexdigest()


def describe_folder(run: Path) -> FolderFacts:
    """Return facts of the run folder, which need not exist yet."""
    exists_at = next(folder for folder in (run, *run.absolute().parents) if os.path.exists(folder))
    try:
        checkpoints = find_checkpoints(run).current
    except LlmscaleError:
        # The row of train.py's checks reports it.
        checkpoints = []
    return FolderFacts(
        run=str(run),
        exists_at=os.path.abspath(exists_at),
        writable=os.path.isdir(exists_at) and os.access(exists_at, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(exists_at).free,
        checkpoints_bytes=sum(checkpoint.manifest.num_bytes for checkpoint in checkpoints),
        num_checkpoints=len(checkpoints),
    )


def _hash(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _check_memory(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig, known: SetFacts
) -> Iterator[CheckRow]:
    """Compare the estimate with the smallest GPU, and offloaded states with the smallest host. No row without GPUs."""
    gpus = [gpu for found in facts.values() if found.gpus for gpu in found.gpus.gpus]
    if not gpus:
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    host_bytes = min((found.system.memory_bytes for found in facts.values() if found.system), default=None)
    world_size = sum(host.slots for host in hosts)
    known_gpu = find_gpu(smallest.name)
    capability = known_gpu.capability if known_gpu else None
    machines = Machines(len(hosts), hosts[0].slots, smallest.memory_bytes, host_bytes, capability)
    if machines.world_size != world_size:
        # Hosts of different sizes: offloaded states are then not compared with a host's memory.
        machines = Machines(world_size, 1, smallest.memory_bytes, capability=capability)
    try:
        run = resolve_run(config, ds, known, world_size)
        plan = run.plan
        machine_job = (run.shape, plan.global_batch_size, machines, plan.micro_batch_size)
        sizes = plan.ranks.sequence_parallel_size, plan.ranks.expert_parallel_size
        job = Job(*machine_job, run.optimizer, run.loss.chunk_tokens, *sizes)
        fit = fit_at(run.ds, job, run.checkpointing, plan.micro_batch_size)
        change = None if fit.fits else find_smallest_change(run.ds, job, run.checkpointing, plan.micro_batch_size)
    except NotRecorded as error:
        yield yellow("memory", "not estimated", str(error))
        return
    except ConfigError as error:
        yield red("memory", *split_error(str(error)))
        return
    found = f"{format_size(fit.estimate.total_bytes)} of {format_size(smallest.memory_bytes)} on {smallest.name}"
    if fit.has_margin:
        yield green("memory", found)
        return
    if fit.fits:
        less = "Watch the first steps, or take a smaller --micro-batch-size."
        yield yellow("memory", f"{found}, less than the margin of {MARGIN:.0%}", less)
        return
    host_spare = fit.host_spare_bytes
    if host_spare is not None and host_spare < 0:
        found += f"; {format_size(fit.host_bytes_per_node)} of host memory, {format_size(-host_spare)} too much"
    yield red(
        "memory",
        f"{found}: {describe_breakdown(fit.estimate.peak)}",
        change.describe() if change else "No strategy fits. Use more or larger GPUs, or a smaller model.",
    )


#: Spare space of a save (llmscale.planning.disk_usage.SPARE_BYTES), and the run's logs and samples.
SPARE_BYTES = 128 * 2**20


def check_plan(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig | None
) -> Iterator[CheckRow]:
    """Yield the rows about batch, disk and memory, as far as dataset and ds_config are known."""
    data = [found.run.data for found in facts.values() if found.run and found.run.data and not found.run.data.problem]
    if not data:
        return
    known = SetFacts(data[0].vocab_size, data[0].seq_len, data[0].num_train_samples, data[0].eot_token)
    try:
        shape = resolve_shape(config, known)
        plan = resolve_batch(config, shape.seq_len, sum(host.slots for host in hosts), ds)
        total_steps = resolve_schedule(config, plan, known.num_train_samples).steps
        checkpoint_bytes = resolve_optimizer(config, shape).checkpoint_bytes(shape.architecture)
    except ConfigError as error:
        yield red("batch", *split_error(str(error)))
        return
    yield green("batch", plan.describe())
    yield from _check_disk(facts, hosts[0].name, config, checkpoint_bytes, total_steps)
    if ds is not None:
        yield from _check_memory(hosts, facts, config, ds, known)


def _check_disk(
    facts: Mapping[str, HostFacts], first_host: str, config: RunConfig, checkpoint_bytes: int, total_steps: int
) -> Iterator[CheckRow]:
    """Compare the free space at the run folder with the checkpoints that it will hold at the same time."""
    folders = _folders_of(facts)
    if first_host not in folders:
        return
    folder = folders[first_host]
    count = checkpoints_at_once(config, total_steps)
    needed_bytes = checkpoint_bytes * count + SPARE_BYTES
    free_bytes = folder.free_bytes + folder.checkpoints_bytes
    found = (
        f"{format_size(free_bytes)} free for {count} checkpoint{'s' if count > 1 else ''} of "
        f"{format_size(checkpoint_bytes)} each ({format_size(needed_bytes)} with logs) at {folder.exists_at}"
    )
    if free_bytes < needed_bytes:
        yield red(
            "disk",
            found,
            "Free some space, put --run on a larger disk, or keep fewer checkpoints: --keep-last, --keep-every.",
        )
    else:
        yield green("disk", found)
