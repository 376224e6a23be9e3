"""Provide what every benchmark needs: the machine of a result, checked flags, prepared text, and ranks that take turns.

A script's standard output is its committed summary: the command, the table, and the machine with its load. `--json`
writes the raw measurements, which stay out of git. No torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import secrets
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, cast

from llmscale.config import command_line
from llmscale.config.hardware import get_gpu
from llmscale.config.presets import get_preset
from llmscale.config.user_paths import check_output_file
from llmscale.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 2**30
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "mosaicml-streaming", "numpy")


def words(text: str) -> tuple[str, ...]:
    """Return the words of a command, or of a part of one."""
    return tuple(text.split())


# The machine, and result files.


def describe_machine() -> dict[str, object]:
    """Return processor, cores, GPUs, package versions and the load average. Print the command that is running."""
    module = getattr(sys.modules["__main__"].__spec__, "name", Path(sys.argv[0]).stem)
    print(f"$ python -m {module} {shlex.join(sys.argv[1:])}".rstrip(), flush=True)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "load_average": _load_average(),
    }


def describe_circumstances(
    machine: Mapping[str, object], args: argparse.Namespace, settings: Iterable[str]
) -> dict[str, object]:
    """Return the machine with its load before and now, and the flags named in `settings`."""
    return {
        "machine": {**machine, "load_average_after": _load_average()},
        "settings": {name: getattr(args, name) for name in settings},
    }


def machine_line(machine: Mapping[str, object]) -> str:
    """Return the last line of a summary: processor, GPUs, versions, and the load before and after."""
    packages = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "deepspeed") if machine.get(name))
    before, after = cast("list[float]", machine["load_average"])[0], _load_average()[0]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, GPUs {machine['gpus'] or 'none'}; {packages}; "
        f"load average {before} before, {after} after"
    )


def median_and_range(values: Iterable[float]) -> dict[str, float]:
    """Return the median of repeated measurements with the smallest and the largest one."""
    numbers = list(values)
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def show_range(spread: Mapping[str, float], form: str = ".2f") -> str:
    """Return "median (smallest-largest)"."""
    return f"{spread['median']:{form}} ({spread['min']:{form}}-{spread['max']:{form}})"


def save_result(path: Path | None, result: Mapping[str, object]) -> None:
    """Write `result` as JSON if --json named a file."""
    if path:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)


def gpu_names() -> list[str]:
    """Return the driver's name of each GPU of this machine."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[:-1]


def status_bytes(field: str) -> int:
    """Return a size from /proc/self/status in bytes: VmRSS is resident memory now, VmHWM its maximum."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_bytes() -> int:
    """Return the largest resident memory of this process and of its children that have ended."""
    # ru_maxrss of this process would begin with that of the process that started it.
    return max(status_bytes("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def _load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# `type=` of flags: a wrong value is refused before anything is prepared or measured.

PICTURES = (".png", ".svg", ".pdf")
whole_number = command_line.whole_number(1, 10**9)
whole_or_zero = command_line.whole_number(0, 10**9)
positive = command_line.number(0, 1e6, above=True)
fraction = command_line.number(0, 1, above=True)


def preset_name(text: str) -> str:
    """Return the name of a preset."""
    return _known(get_preset, text)


def gpu_name(text: str) -> str:
    """Return the name of a GPU of the table."""
    return _known(get_gpu, text)


def output_file(text: str) -> Path:
    """Return the path of a file that can be written or overwritten."""
    file = command_line.local_path(text)
    try:
        check_output_file("the file", file, overwrite=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file


def picture_file(text: str) -> Path:
    """Return the path of a picture whose suffix names a known format."""
    file = output_file(text)
    if file.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"the suffix says the format, and must be {', '.join(PICTURES)}, not '{text}'")
    return file


def _known(get: Callable[[str], object], name: str) -> str:
    try:
        get(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


# Text, runs and processes.


def python_path(*first: Path) -> str:
    """Return PYTHONPATH with the folders `first` before those that it has, without this repository elsewhere."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, first), *(folder for folder in given if folder not in ("", str(REPOSITORY)))])


def python_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with this repository first among the imports, and `variables`."""
    return {**os.environ, "PYTHONPATH": python_path(REPOSITORY), **variables}


def run_llmscale(*arguments: str) -> None:
    """Run a command of the toolkit. Exits with its output if it fails."""
    command = [sys.executable, "-m", "llmscale", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=python_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"llmscale {' '.join(arguments)} ended with status {done.returncode}:\n{done.stdout}")


def prepare_text(folder: Path, seq_len: int) -> Path:
    """Prepare the Python standard library as bytes, which every machine has; return the dataset."""
    settings = words(f"--input python-stdlib --tokenizer bytes --seq-len {seq_len}")
    run_llmscale("data", "prepare", *settings, "--out", str(folder / "set"))
    return folder / "set"


def prepare_small_text(folder: Path, seq_len: int = 32) -> Path:
    """Prepare a small fixed part of the standard library without a validation split; return the dataset."""
    settings = words(f"--tokenizer bytes --seq-len {seq_len} --val-fraction 0 --workers 1")
    run_llmscale("data", "prepare", "--input", json.__path__[0], "--out", str(folder / "set"), *settings)
    return folder / "set"


def read_losses(run: Path, kind: str = "train") -> dict[int, float]:
    """Return losses of a run folder by step. Skips a line cut short by a kill; the last of a repeated step counts."""
    losses: dict[int, float] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError):
            record = json.loads(line)
            if record["kind"] == kind:
                losses[record["step"]] = record["loss"]
    return losses


def why_it_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a process's errors, or its status if it printed none."""
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"ended with status {done.returncode}"


def free_port() -> int:
    """Return a port that nothing listens on, and that the kernel gives to no connection meanwhile (from 32,768 on)."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world_size: int, port: int, threads: int = 1) -> dict[str, str]:
    """Return the environment of a rank that a launcher would start."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    place |= {"MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    variables = {key: str(value) for key, value in place.items()}
    return python_environment(MASTER_ADDR="127.0.0.1", TOKENIZERS_PARALLELISM="false", **variables)


class Job:
    """The ranks of one contestant, which wait for orders so that contestants can take turns on one machine.

    Every contestant keeps its processes for the whole run and sleeps on a pipe while another one is measured. A round
    asks each of them once, so other load on the machine falls on all of them alike.
    """

    def __init__(self, module: str, arguments: Sequence[str], world_size: int, *, threads: int, log: Path) -> None:
        """Start `python -m module` once per rank, with output to `log`."""
        port = free_port()
        self._log = log
        with log.open("w") as output:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env=rank_environment(rank, world_size, port, threads),
                    cwd=REPOSITORY,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                )
                for rank in range(world_size)
            ]

    def order(self, text: str) -> list[dict]:
        """Give every rank an order; return their answers by rank. Exits when a rank has ended."""
        for rank in self._ranks:
            try:
                cast("IO[str]", rank.stdin).write(text + "\n")
                cast("IO[str]", rank.stdin).flush()
            except BrokenPipeError:
                self._fail()
        return self.answers()

    def answers(self) -> list[dict]:
        """Return one answer from every rank."""
        lines = [cast("IO[str]", rank.stdout).readline() for rank in self._ranks]
        if not all(lines):
            self._fail()
        return [json.loads(line) for line in lines]

    def finish(self) -> None:
        """Wait until all ranks have ended without being told to."""
        for rank in self._ranks:
            cast("IO[str]", rank.stdin).close()
        if any([rank.wait() for rank in self._ranks]):
            self._fail()

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def _fail(self) -> None:
        codes = [rank.poll() for rank in self._ranks]
        self.kill()
        raise SystemExit(f"a rank ended too early (exit codes {codes}):\n{self._log.read_text()[-4000:]}")


def slowest(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of the slowest rank and the processor seconds of all ranks."""
    sums = {key: sum(answer[key] for answer in answers) for key in ("cpu_s", "engine_cpu_s")}
    return {"seconds": max(answer["seconds"] for answer in answers), **sums}


class Orders:
    """A rank's end of a Job. Standard output is for answers from here on; what libraries print goes to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> str | None:
        """Return the next order; None after the last one."""
        return sys.stdin.readline().strip() or None

    def answer(self, values: Mapping[str, object]) -> None:
        """Send one answer."""
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`, without files that disappear meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total
