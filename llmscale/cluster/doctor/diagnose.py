"""Ask all hosts at once to check themselves, and make one table of their reports. No torch in this process.

`python -m llmscale.cluster.doctor.diagnose` is the probe, which checks its host and prints a report.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import ValidationError

from llmscale.cluster.doctor.machine import (
    check_cores,
    check_gpus,
    check_imports,
    check_network,
    check_shared_memory,
    check_software,
    first_address,
    host_memory_bytes,
)
from llmscale.cluster.doctor.on_ranks import measure_all_reduce
from llmscale.cluster.doctor.report import (
    REPORT,
    SEVERITY,
    CheckRow,
    HostReport,
    ProbeRequest,
    green,
    merge_reports,
    red,
    shared,
    split_error,
    worst,
    yellow,
)
from llmscale.cluster.hosts import (
    SSH_FAILED,
    TIMED_OUT,
    Finished,
    ask_hosts,
    is_this_machine,
    print_answer,
    read_request,
)
from llmscale.cluster.launch.ranks import Gpu, list_gpus
from llmscale.config.bundled_files import DS_CONFIGS
from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import load_ds_config, parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.hardware import Cluster, measured_gpu
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.data.mixture import open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.engine.network import find_port, is_free
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import MARGIN, evaluate
from llmscale.training.inputs import read_inputs, with_prepared_text
from llmscale.training.start import Start, check_space, resolve_start

#: Time limit of a login. A slower one would delay every start as much.
_LOGIN_TIMEOUT_S = 20.0
#: Rows that prevent the all-reduce when they are red: ranks could not meet, and trying would only time out.
_BEFORE_ALL_REDUCE = frozenset({"address", "imports", "versions", "gpus"})
_COPY_FILE = "Copy one of them to all hosts: every rank reads the file of its host."
_COPY_DATA = "Copy one of them to all hosts (rsync -a --delete), or share its disk."


def diagnose(
    request: ProbeRequest, *, network_test: bool = True, promised_bytes_per_s: float | None = None
) -> list[CheckRow]:
    """Run all checks on all hosts. Return the rows from green to red, otherwise in the order of the checks.

    `promised_bytes_per_s`: expected bandwidth per host and direction; None to measure only.
    """
    rows: list[CheckRow] = []
    reports = _probe(request, rows)
    rows += merge_reports(reports)
    if reports and network_test:
        obstacles = sorted({row.name for row in rows if row.status == "fail"} & _BEFORE_ALL_REDUCE)
        if obstacles:
            rows.append(yellow("all-reduce", "not measured", f"First repair: {', '.join(obstacles)}."))
        else:
            rows += measure_all_reduce(request.hosts, reports, promised_bytes_per_s)
    return sorted(rows, key=lambda row: SEVERITY.index(row.status))


def _probe(request: ProbeRequest, rows: list[CheckRow]) -> dict[str, HostReport]:
    """Return the report of every host whose probe ran; add rows for the others."""
    requests = {host: asdict(replace(request, host=host)) for host in request.hosts}
    answers = ask_hosts("llmscale.cluster.doctor.diagnose", requests, request.timeout_s + _LOGIN_TIMEOUT_S)
    reports: dict[str, HostReport] = {}
    for host, answer in answers.items():
        try:
            if answer.answer and not answer.returncode:
                reports[host] = REPORT.validate_json(answer.answer)
            else:
                rows.append(_explain_silence(host, answer, answer.describe()))
        except ValidationError:
            rows.append(_explain_silence(host, answer, "its llmscale is another one"))
    if reports and not (len(answers) == 1 and is_this_machine(*answers)):
        rows.append(green("reach", f"{len(reports)} of {len(answers)} hosts answer through ssh"))
    return reports


def _explain_silence(host: str, answer: Finished, problem: str) -> CheckRow:
    """Return the row of a host without a report."""
    fix = (
        f"Put the same llmscale and the same Python environment at the same path on every host ({sys.executable}): "
        "rsync -a, or a shared file system."
    )
    if answer.returncode == SSH_FAILED:
        fix = f"`ssh {host} true` must work without a question: start the host, correct its name, copy your key."
    elif answer.returncode == TIMED_OUT:
        fix = f"Log in to {host} and look for a stuck disk or driver (ps -eo stat,cmd | grep '^D'); a reboot helps."
    return red("reach", f"{host}: {problem}", fix)


# ---------------------------------------------------------------- the probe on each host


def examine(request: ProbeRequest) -> HostReport:
    """Run all checks, each announced on stderr: the last line tells what a stuck disk or driver has stopped."""
    _announce("looking at the installed software")
    rows = [*check_software()]
    _announce("asking the GPU driver")
    gpus, problem = list_gpus(request.timeout_s)
    rows += [*check_gpus(gpus, problem, request.slots), check_cores(request.slots)]
    _announce("importing what train.py imports")
    rows += check_imports(gpus, request.timeout_s)
    _announce("looking up names and addresses")
    rows += [*check_network(request), check_shared_memory()]
    _announce("reading the run's configuration, data and folder")
    config = None
    try:
        if request.train_flags:
            config = with_prepared_text(parse_run_config(request.train_flags), may_prepare=False).config
    except LlmscaleError as error:
        rows.append(red("run config", *split_error(str(error))))
    if config is not None:
        rows += check_run(config, request, gpus)
    elif request.ds is not None:
        rows += check_ds_config(Path(request.ds))
    return HostReport(
        rows=tuple(rows),
        num_gpus=len(gpus),
        address=first_address(),
        spare_port=request.port if is_free(request.port) else find_port(),
        folder=os.path.abspath(config.run) if config else None,
    )


def _announce(check: str) -> None:
    print(check, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- a run, on the host that it runs on


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


def check_run(config: RunConfig, request: ProbeRequest, gpus: Sequence[Gpu]) -> Iterator[CheckRow]:
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
    if gpus:
        yield from _check_memory(start, request, gpus)


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


def _check_memory(start: Start, request: ProbeRequest, gpus: Sequence[Gpu]) -> Iterator[CheckRow]:
    """Compare the estimate with this host's smallest GPU, and offloaded states with its memory."""
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    nodes, rest = divmod(request.world_size, request.slots)
    # Hosts of different sizes: offloaded states are then not compared with the host's memory.
    nodes, per_node, host_bytes = (request.world_size, 1, None) if rest else (nodes, request.slots, host_memory_bytes())
    gpu = measured_gpu(smallest.name, smallest.memory_bytes, None)
    fit = evaluate(start.resolved, Cluster(gpu, per_node, num_nodes=nodes, host_bytes=host_bytes))
    if fit.fits:
        change = None
    else:
        change = find_smallest_change(fit.step, fit.cluster)
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
    if change:
        fix = change.describe()
    else:
        fix = "No strategy fits. Use more or larger GPUs, or a smaller model."
    yield red("memory", f"{size}: {describe_breakdown(fit.estimate.peak)}", fix)


def main() -> None:
    """Print the report of this host."""
    request = ProbeRequest(**read_request())
    limit = threading.Timer(request.timeout_s, os._exit, (TIMED_OUT,))
    limit.daemon = True
    limit.start()
    print_answer(REPORT.dump_json(examine(request)).decode())


if __name__ == "__main__":
    main()
