"""Rows about the run that is to start: its configuration on every host, data, run folder, disk. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from llmscale.cluster.doctor.host_facts import DataFacts, FileFacts, FolderFacts, HostFacts, RunFacts
from llmscale.cluster.doctor.rows import CheckRow, differ, green, grouped, listed, red, split_error, yellow


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
