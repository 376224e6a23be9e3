"""Check the run that is to start: its configuration on every host, data, run folder, memory and disk. No torch."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmscale.checkpoint.history import find_checkpoints
from llmscale.cluster.doctor.host_facts import DataFacts, FileFacts, FolderFacts, HostFacts, RunFacts
from llmscale.cluster.doctor.rows import CheckRow, differ, green, grouped, listed, red, split_error, yellow
from llmscale.cluster.hostfile import Host
from llmscale.config.arguments import parse_run_config
from llmscale.config.deepspeed.resolve import DsConfig, load_ds_config, parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.hardware import find_gpu
from llmscale.config.optimizers import get_optimizer
from llmscale.config.resolve import SetFacts, resolve_batch, resolve_run, resolve_schedule, resolve_shape
from llmscale.config.run_config import RunConfig
from llmscale.config.shipped import DS_CONFIGS
from llmscale.data.mix.training_sets import TrainingSets, open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.memory.activations.recorded import NotRecorded
from llmscale.memory.format_bytes import describe_breakdown, format_size
from llmscale.planning.disk_usage import checkpoints_at_once
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import Job, Machines, fit_at
from llmscale.training.run_inputs import prepare_run


@dataclass(frozen=True)
class SharedFolder:
    """What came of writing a file on the first host and looking for it on the others."""

    folder: str
    writer: str
    problem: str | None
    """Why the first host could not write it."""
    seen: Mapping[str, bool]
    """By host."""


def check_ds_config(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """The ds_config against the closed schema, and the same file on every host."""
    files = {host: found.ds for host, found in facts.items() if found.ds}
    if not files:
        return
    wrong = list(_check_file("ds_config", files))
    yield from wrong
    first = next(iter(files.values()))
    for warning in first.warnings if not wrong else ():
        yield yellow("ds_config", f"{first.path}: {warning}", "Delete the key, or change what makes it idle.")
    if not wrong and not first.warnings:
        yield green("ds_config", f"{first.path}: every key is known and has an effect")


def check_run_config(facts: Mapping[str, HostFacts], said: Collection[str] = ()) -> Iterator[CheckRow]:
    """Run file and flags, and everything else that train.py checks before it starts. Errors that other rows `said`
    already are left out: train.py stops at its first."""
    runs = {host: found.run for host, found in facts.items() if found.run}
    if not runs:
        return
    wrong = list(_check_file("run config", {host: run.config for host, run in runs.items()}))
    yield from wrong
    if wrong:
        return
    other = {host: run.problem for host, run in runs.items() if run.problem and not _is_said(facts[host], run, said)}
    for text in sorted(set(other.values())):
        hosts = [host for host, problem in other.items() if problem == text]
        found, fix = split_error(text)
        yield red("run config", f"train.py would refuse on {listed(hosts)}: {found}", fix)
    if not other:
        path = next(iter(runs.values())).config.path
        yield green("run config", f"{path or 'the flags'}: every key is known")


def _is_said(host: HostFacts, run: RunFacts, said: Collection[str]) -> bool:
    # Of several problems with the ds_config train.py names the first, and how many more there are.
    if host.ds and host.ds.problems and run.problem and run.problem.startswith(host.ds.problems[0]):
        return True
    return run.problem in {*said, run.data.problem if run.data else None}


def _check_file(name: str, files: Mapping[str, FileFacts]) -> Iterator[CheckRow]:
    """Red rows for a file that is wrong anywhere, or not the same everywhere."""
    problems = {host: file.problems for host, file in files.items() if file.problems}
    for text in dict.fromkeys(problem for found in problems.values() for problem in found):
        hosts = [host for host, found in problems.items() if text in found]
        what, fix = split_error(text)
        if len(hosts) < len(files):
            what, fix = f"on {listed(hosts)}: {what}", f"Copy the file of another host to {listed(hosts)}. {fix}"
        yield red(name, what, fix)
    hashes = {host: (file.sha256 or "missing")[:12] for host, file in files.items()}
    if not problems and differ(hashes):
        path = next(iter(files.values())).path
        yield red(
            name,
            f"{path} is not the same file everywhere: {grouped(hashes)}",
            "Copy one of them to all hosts: every rank reads its own host's.",
        )


def check_data(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Readable on every host, and the same set."""
    data = {host: found.run.data for host, found in facts.items() if found.run and found.run.data}
    if not data:
        return
    problems = {host: found.problem for host, found in data.items() if found.problem}
    for text in sorted({problem for problem in problems.values() if problem}):
        hosts = [host for host, problem in problems.items() if problem == text]
        found, fix = split_error(text)
        if len(problems) < len(data):
            fix = "Copy the set to the same path there (rsync -a), or share its disk."
        yield red("data", f"on {listed(hosts)}: {found}", fix)
    if problems:
        return
    fingerprints = {host: found.fingerprint[:12] for host, found in data.items()}
    one: DataFacts = next(iter(data.values()))
    if differ(fingerprints):
        yield red(
            "data",
            f"{one.name} is not the same set everywhere: {grouped(fingerprints)}",
            "Copy one of them to all hosts (rsync -a --delete), or share its disk.",
        )
    else:
        yield green(
            "data", f"{one.name}: {one.num_train_samples:,} samples of {one.seq_len} tokens, {one.fingerprint[:12]}"
        )


def check_run_folder(facts: Mapping[str, HostFacts], shared: SharedFolder | None) -> Iterator[CheckRow]:
    """Writable, and one shared file system when there are several hosts."""
    folders = folders_of(facts)
    if not folders:
        return
    refusing = [host for host, folder in folders.items() if not folder.writable]
    if refusing:
        some = folders[refusing[0]]
        yield red(
            "run folder",
            f"{some.run}: {some.exists_at} may not be written to on {listed(refusing)}",
            "Name another folder with --run, or give the user permission (chown).",
        )
    if shared is None:
        if not refusing:
            yield green("run folder", f"{next(iter(folders.values())).run} can be written to")
        return
    if shared.problem:
        yield red(
            "run folder",
            f"{shared.folder} on {shared.writer} cannot be written to: {shared.problem}",
            "Name another folder with --run, or give the user permission (chown).",
        )
        return
    blind = [host for host, seen in shared.seen.items() if not seen]
    if blind:
        yield red(
            "run folder",
            f"a file written to {shared.folder} on {shared.writer} is not there on {listed(blind)}: not one shared "
            "file system, so no checkpoint could be saved",
            "Put --run on NFS, Lustre or the like, mounted at the same path on every host.",
        )
    elif not refusing:
        yield green("run folder", f"{shared.folder} is one shared file system")


def folders_of(facts: Mapping[str, HostFacts]) -> dict[str, FolderFacts]:
    return {host: found.run.folder for host, found in facts.items() if found.run and found.run.folder}


def gather_ds(path: str) -> FileFacts:
    """Whether a ds_config is there and legal, and all that is wrong with it."""
    path = str(DS_CONFIGS.find(Path(path)))
    try:
        config = load_ds_config(Path(path))
    except LlmscaleError as error:
        return FileFacts(path, (str(error),), _hash(path))
    problems = tuple(f"{path}: {problem}" for problem in find_problems(config))
    return FileFacts(path, problems, _hash(path), () if problems else parse_ds_config(config, path).warnings)


def gather_run(flags: Sequence[str], world_size: int) -> RunFacts:
    """What train.py would find with these flags."""
    try:
        config = parse_run_config(flags)
    except LlmscaleError as error:
        return RunFacts(FileFacts(" ".join(flags), (str(error),), None), None, None, None)
    file = str(config.config) if config.config else ""
    return RunFacts(
        config=FileFacts(file, (), _hash(file) if file else None),
        data=_describe_data(config),
        folder=describe_folder(config.run),
        problem=_try(config, world_size),
    )


def _try(config: RunConfig, world_size: int) -> str | None:
    try:
        prepare_run(config, world_size)
    except LlmscaleError as error:
        return str(error)
    return None


def _describe_data(config: RunConfig) -> DataFacts:
    """The manifest, and one stat per shard of a local set. Of a remote set manifest and index come into its cache."""
    try:
        sets = open_training_sets(config.data, config.data_cache)
        for location in sets.locations:
            for split in location.manifest.splits if location.remote is None else ():
                check_files(location.folder, split, location.manifest)
    except LlmscaleError as error:
        return DataFacts(config.data, str(error))
    manifest = sets.manifest
    return DataFacts(
        name=config.data,
        problem=None,
        fingerprint=sets.fingerprint if sets.recipe is None else _hash_mix(sets),
        vocab_size=manifest.vocab_size,
        seq_len=manifest.seq_len,
        num_train_samples=sets.num_train_samples,
        eot_token=manifest.eot_token,
    )


def _hash_mix(sets: TrainingSets) -> str:
    """Of the sets and their proportions, which must be the same everywhere, too."""
    return hashlib.sha256(f"{sets.fingerprint} {sets.recipe.stages if sets.recipe else ()}".encode()).hexdigest()


def describe_folder(run: Path) -> FolderFacts:
    """The run folder, which need not exist yet."""
    exists_at = next(folder for folder in (run, *run.absolute().parents) if os.path.exists(folder))
    try:
        checkpoints = find_checkpoints(run).current
    except LlmscaleError:
        # train.py's own checks say so.
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


def check_memory(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig, known: SetFacts
) -> Iterator[CheckRow]:
    """The estimate against the smallest GPU, and what is offloaded against the smallest host. No row without GPUs."""
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
        # Hosts of different sizes: what is offloaded is then not compared with a host's memory.
        machines = Machines(world_size, 1, smallest.memory_bytes, capability=capability)
    try:
        run = resolve_run(config, ds, known, world_size)
        plan = run.plan
        machine_job = (run.shape, plan.global_batch_size, machines, plan.micro_batch_size)
        job = Job(*machine_job, run.optimizer, run.loss.chunk_tokens)
        fit = fit_at(run.ds, job, run.checkpointing, plan.micro_batch_size)
        change = None if fit.fits else find_smallest_change(run.ds, job, run.checkpointing, plan.micro_batch_size)
    except NotRecorded as error:
        yield yellow("memory", "not estimated", str(error))
        return
    except ConfigError as error:
        yield red("memory", *split_error(str(error)))
        return
    found = f"{format_size(fit.estimate.total_bytes)} of {format_size(smallest.memory_bytes)} on {smallest.name}"
    if fit.fits:
        yield green("memory", found)
        return
    host_spare = fit.host_spare_bytes
    if host_spare is not None and host_spare < 0:
        found += f"; {format_size(fit.host_bytes_per_node)} of host memory, {format_size(-host_spare)} too much"
    yield red(
        "memory",
        f"{found}: {describe_breakdown(fit.estimate.peak)}",
        change.describe() if change else "No strategy fits: more GPUs, larger ones, or a smaller model.",
    )


#: What else a save asks for (llmscale.planning.disk_usage.SPARE_BYTES), and the run's logs and samples.
SPARE_BYTES = 128 * 2**20


def check_plan(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], config: RunConfig, ds: DsConfig | None
) -> Iterator[CheckRow]:
    """All rows, as far as what they rest on is known: the data set's facts, a legal ds_config."""
    data = [found.run.data for found in facts.values() if found.run and found.run.data and not found.run.data.problem]
    if not data:
        return
    known = SetFacts(data[0].vocab_size, data[0].seq_len, data[0].num_train_samples, data[0].eot_token)
    try:
        shape = resolve_shape(config, known)
        plan = resolve_batch(config, shape.seq_len, sum(host.slots for host in hosts))
        total_steps = resolve_schedule(config, plan, known.num_train_samples).total_steps
    except ConfigError as error:
        yield red("batch", *split_error(str(error)))
        return
    yield green("batch", plan.describe())
    checkpoint_bytes = get_optimizer(config.optimizer).state_bytes(shape.architecture)
    yield from check_disk(facts, hosts[0].name, config, checkpoint_bytes, total_steps)
    if ds is not None:
        yield from check_memory(hosts, facts, config, ds, known)


def check_disk(
    facts: Mapping[str, HostFacts], first_host: str, config: RunConfig, checkpoint_bytes: int, total_steps: int
) -> Iterator[CheckRow]:
    """Free space where the run folder is, against all checkpoints that will lie there at once."""
    folders = folders_of(facts)
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
            "Free some space, name a folder on a larger disk with --run, or keep fewer: --keep-last, --keep-every.",
        )
    else:
        yield green("disk", found)
