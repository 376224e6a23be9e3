"""Shared fixtures: real ranks on gloo, and a small prepared dataset."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import warm_start

if TYPE_CHECKING:
    from tests.azure_store import AzureStore
    from tests.google_store import GoogleStore
    from tests.object_store import ObjectStore

REPOSITORY = Path(__file__).resolve().parent.parent
TRAIN = REPOSITORY / "llmscale" / "train.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` leave out files without such tests: a bare GPU machine lacks the libraries of the others."""
    is_test = config.option.markexpr == "gpu" and collection_path.suffix == ".py" and collection_path != Path(__file__)
    return True if is_test and "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


# Nothing here is compiled. DeepSpeed decorates its Muon with torch.compile all the same, and importing what that needs
# takes more than a quarter of a rank's start.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Every rank of a distributed test is a process of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("llmscale", deadline=None)
hypothesis.settings.load_profile("llmscale")

# Under nohup or in a shell's background these are ignored, which every process started here would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep a million objects of imported modules out of every later garbage collection."""
    gc.collect()
    gc.freeze()


#: By then whatever does not hang has ended, on the slowest machine: no promise about speed. Without our own checks,
#: ranks that wait for each other do so for half an hour.
HANG_S = 300


@dataclass
class Ranks:
    """Processes of one job, started as a launcher would start them."""

    processes: list[subprocess.Popen[str]]

    def wait(self, timeout_s: float = HANG_S) -> list[str]:
        """The ranks' output, once all have ended. A rank that ends badly or too late takes the others down with it."""
        outputs = []
        try:
            for process in self.processes:
                outputs.append(process.communicate(timeout=timeout_s)[0])
        finally:
            self.kill()
        return outputs

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def send(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Signal some ranks, or all."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            if self.processes[rank].poll() is None:
                self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """End what still runs, data workers included: each rank leads a process group of its own."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """Return a port that nothing listens on, and that the kernel gives to no connection meanwhile (from 32,768 on)."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def last_wins(words: Sequence[str]) -> list[str]:
    """Keep the last one of repeated flags, which train.py refuses. For tests that extend a command."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    names = [group[0].partition("=")[0] if group else "" for group in groups]
    remaining = [
        g
        for i, g in enumerate(groups)
        if names[i] not in names[i + 1 :] or names[i] in ("--allow-changed", "--skip-steps")
    ]
    return [word for group in remaining for word in group]


_jobs = itertools.count()


def start_ranks(
    command: Sequence[str], world_size: int, ranks_per_node: Sequence[int] | None = None, *, is_cold: bool = False
) -> Ranks:
    """Start `command` once per rank, with the environment that DeepSpeed's launcher sets. `is_cold` for what a start of
    Python itself is tested with: a rank is forked from a process that has imported everything otherwise."""
    command = last_wins(command) if command[:1] == [str(TRAIN)] else list(command)
    layout = list(ranks_per_node or [world_size])
    port = free_port()
    processes = []
    job = next(_jobs)
    for node, size in enumerate(layout):
        for local_rank in range(size):
            rank = sum(layout[:node]) + local_rank
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONUNBUFFERED": "1",
            }
            start = subprocess.Popen if is_cold else partial(warm_start.Process, turn=job + rank)
            processes.append(
                start(
                    [sys.executable, *command],
                    env=environment,
                    cwd=REPOSITORY,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
    return Ranks(processes)


def run_ranks(
    command: Sequence[str], world_size: int, *, expect: int = 0, timeout_s: float = HANG_S, **options: Any
) -> str:
    """Run a job, all of whose ranks must end with the status `expect`; return rank 0's output."""
    job = start_ranks(command, world_size, **options)
    outputs = job.wait(timeout_s)
    assert job.exit_codes == [expect] * world_size, outputs
    return outputs[0]


def run_cells(
    script: Path, cells: Sequence[object], world_size: int, *arguments: str, timeout_s: float = HANG_S
) -> list[dict[str, Any]]:
    """Run ranks of a script that calls `answer_cells`; return the answers."""
    output = run_ranks([str(script), json.dumps(list(cells)), *arguments], world_size, timeout_s=timeout_s)
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    assert len(answers) == len(cells), output
    return answers


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Run each test with output to a pipe of any width, and undo what it set in this process's environment.

    A command that runs within this process sets variables for its children. Left there, they would protect the children
    of later tests, too, or make each of their ranks a real start (see `warm_start`). xdist sets COLUMNS.
    """
    before = dict(os.environ)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


#: Signals by which a process ends unless it handles them.
HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def signals_are_left_alone() -> Iterator[None]:
    """A command that is called within this process leaves no handler, no blocked signal and no alarm behind: one would
    end the process that runs the tests a quarter of an hour later, in the middle of another test."""
    before = signals_of_this_process()
    yield
    seconds_left = signal.alarm(0)
    after = signals_of_this_process()
    for number, handler in before[0].items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before[1])
    assert (after, seconds_left) == (before, 0)


def signals_of_this_process() -> tuple[dict[signal.Signals, object], set[signal.Signals]]:
    """Handlers, and what is blocked."""
    return {number: signal.getsignal(number) for number in HANDLED}, signal.pthread_sigmask(signal.SIG_BLOCK, ())


def shared_memory_segments() -> set[str]:
    """Names in /dev/shm, without the semaphores that Python's multiprocessing makes and unlinks at once: tests that run
    beside this one make them too."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


@pytest.fixture(scope="session", autouse=True)
def warm_servers_end() -> Iterator[None]:
    """The processes that others are forked from end with the tests."""
    yield
    warm_start.end_servers()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(command, world_size)` starts a job; whatever still runs when the test ends is killed."""
    started: list[Ranks] = []

    def start(*arguments: Any, **options: Any) -> Ranks:
        started.append(start_ranks(*arguments, **options))
        return started[-1]

    yield start
    for job in started:
        job.kill()


def words(text: str) -> tuple[str, ...]:
    """Return the words of a command, or of a part of one."""
    return tuple(text.split())


def prepare_bytes(text: Path, out: Path, seq_len: int = 32) -> None:
    """Make a dataset of bytes in samples of `seq_len`, a tenth of it for validation."""
    settings = words(f"--tokenizer bytes --seq-len {seq_len} --val-fraction 0.1 --workers 1")
    command = [*words("-m llmscale.cli.main data prepare"), "--input", str(text), "--out", str(out), *settings]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    warm_start.run([sys.executable, *command], check=True, cwd=REPOSITORY, env=environment, capture_output=True)


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of bytes in samples of 32, whose documents have 1 to 40."""
    folder = tmp_path_factory.mktemp("short")
    draw = random.Random(0)
    texts = ["".join(draw.choice("abcde ") for _ in range(draw.randint(1, 40))) for _ in range(600)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text + "."}) for text in texts))
    prepare_bytes(folder / "text.jsonl", folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of English-like text: bytes, seq_len 32, about 2,400 training samples."""
    folder = tmp_path_factory.mktemp("tiny")
    sentence = "the quick brown fox jumps over a lazy dog while many small models learn to read"
    words = sentence.split()
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choice(words) for _ in range(80))}) for _ in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare_bytes(folder / "text.jsonl", folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of other letters than tiny_set has: bytes, seq_len 32."""
    folder = tmp_path_factory.mktemp("digits")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{number} " * 60}) for number in range(120)))
    prepare_bytes(folder / "text.jsonl", folder / "set")
    return folder / "set"


#: A model that trains in milliseconds.
TINY_MODEL = words("--model tiny-1m --n-layer 2 --n-head 2 --n-embd 32")


def build_train_command(data: Path, run: Path, *flags: str, model: Sequence[str] = TINY_MODEL) -> list[str]:
    """train.py with a tiny model and quiet extras off; `flags` win. Weights or a run may name the `model`."""
    settings = words("--log-every 1 --val-every 0 --num-workers 0 --global-batch-size 8 --verbose")
    return last_wins([str(TRAIN), "--data", str(data), *model, "--run", str(run), *settings, *flags])


@pytest.fixture
def train_command(tiny_set: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`train_command(*flags)`: train.py on the tiny set into the run folder tmp_path/run."""
    return partial(build_train_command, tiny_set, tmp_path / "run")


def refusal_of(command: Sequence[str], world_size: int = 1) -> str:
    """Return why a command of `build_train_command` is refused, before ranks would join."""
    from llmscale.config.run_arguments import parse_run_config
    from llmscale.errors import LlmscaleError
    from llmscale.training.start import prepare_start

    with pytest.raises(LlmscaleError) as error:
        prepare_start(parse_run_config(command[1:]), world_size)
    return str(error.value)


def read_records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of these kinds in a run's metrics.jsonl, in their order."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] in kinds]


def read_losses(run: Path, kind: str = "train") -> dict[int, float]:
    """Loss by step; of a step that was logged twice, the later one."""
    return {record["step"]: record["loss"] for record in read_records(run, kind)}


def flip_a_bit(path: Path) -> None:
    """Alter a file near its end."""
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def forget_after(run: Path, step: int) -> None:
    """Leave the run as a crash soon after the save of `step` would have left it."""
    from llmscale.checkpoint.inventory import list_checkpoints
    from llmscale.checkpoint.manifest import step_of

    for folder in list_checkpoints(run):
        if step_of(folder) > step:
            shutil.rmtree(folder)


def read_events(run: Path, name: str) -> list[dict[str, Any]]:
    """Records of one kind of event."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("event") == name]


@pytest.fixture(scope="session")
def train_straight(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, float]]:
    """`train_straight(*flags)`: losses of one rank at stage 1 in a local folder; trained once."""

    @functools.cache
    def train(*flags: str) -> dict[int, float]:
        run = tmp_path_factory.mktemp("straight") / "run"
        run_ranks(build_train_command(tiny_set, run, *flags, "--ds", "zero1"), 1)
        return read_losses(run)

    return train


def assert_same_losses(losses: dict[int, float], expected: dict[int, float]) -> None:
    """Both have the same steps, and losses within 1e-5, relative."""
    assert losses.keys() == expected.keys()
    assert max(abs(losses[step] - expected[step]) / expected[step] for step in expected) <= 1e-5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(num_bytes)` is an empty folder on a file system of its own; skips where nobody may mount one."""
    mounted: list[Path] = []

    def mount(num_bytes: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def running_store() -> Iterator[ObjectStore]:
    """An S3 server for the session."""
    from tests.object_store import serve_objects

    with serve_objects() as store:
        yield store


@pytest.fixture
def object_store(running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The S3 server with an empty bucket and nothing that fails; retries do not pause."""
    from llmscale.data.storage import faults
    from tests.object_store import BUCKET

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in running_store.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(faults, "RETRY_PAUSES_S", (0.0, 0.0))
    running_store.requests.clear()
    yield running_store
    running_store.fails = running_store.spoil = lambda method, path: False
    running_store.lists_nothing = False
    for name in running_store.files():
        running_store.client.delete_object(Bucket=BUCKET, Key=name)


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleStore]:
    pytest.importorskip("gcp_storage_emulator")
    from tests.google_store import serve_google

    with serve_google(tmp_path_factory.mktemp("google")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureStore]:
    from tests.azure_store import find_azurite, serve_azure

    if find_azurite() is None:
        pytest.skip("needs azurite: npm install -g azurite")
    with serve_azure(tmp_path_factory.mktemp("azure")) as server:
        yield server
