"""Runs in a bucket: trained on one machine, continued on others, through faults of the store."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.checkpoint.remote_run import fetch_run, read_index
from llmscale.checkpoint.tensor_files import fetch_checkpoint
from llmscale.cli import main as cli
from llmscale.config.user_paths import copy_of
from tests.azure_store import AzureStore
from tests.conftest import TRAIN, Ranks, assert_same_losses, read_losses, words
from tests.distributed.test_full_disk import read_until
from tests.google_store import GoogleStore
from tests.object_store import BUCKET, ObjectStore
from tests.relay import Relay, relay_to

RANK = Path(__file__).with_name("store_rank.py")
SLOW_DOWN = (503, b"<Error><Code>SlowDown</Code></Error>")
EXPIRED = (400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>")
URL = "s3://bucket/runs/x"
#: 12 steps in fp32, saving every fourth, with the same losses at every layout.
FLAGS = words("--precision fp32 --steps 12 --save-every 4 --keep-last 2 --lr 3e-3")


class Machines:
    """Machines that train the run URL. Each has its own disk."""

    def __init__(self, start: Callable[..., Ranks], command: Callable[..., list[str]], disks: Path) -> None:
        self._start, self._command, self.disks = start, command, disks

    def start(self, name: str, world_size: int, *flags: str, url: str = URL, layout: list[int] | None = None) -> Ranks:
        os.environ["LLMSCALE_RUNS"] = str(self.disks / name)
        words = self._command(*FLAGS, "--run", url, *flags)
        assert words[0] == str(TRAIN)
        return self._start([str(RANK), *words[1:]], world_size, layout)

    def train(self, name: str, world_size: int, *flags: str, expect: int = 0, url: str = URL) -> str:
        """Train to the end; return rank 0's output."""
        job = self.start(name, world_size, *flags, url=url)
        output = job.wait()[0]
        assert job.exit_codes == [expect] * world_size, output
        return output

    def kill_after(self, name: str, world_size: int, text: str, *flags: str) -> str:
        """Train until rank 0 prints `text`, and kill all ranks."""
        job = self.start(name, world_size, *flags)
        seen = read_until(job, text)
        job.kill()
        return seen

    def copy(self, name: str) -> Path:
        return self.disks / name / "train" / "s3" / "bucket" / "runs" / "x"

    def look(self, name: str = "viewer", url: str = URL) -> Path:
        """Return the run as other commands see it, with all checkpoints verified."""
        os.environ["LLMSCALE_RUNS"] = str(self.disks / name)
        view = fetch_run(copy_of(url, "view"))
        for checkpoint in find_checkpoints(view).current:
            assert fetch_checkpoint(checkpoint.path) is None
        return view


@pytest.fixture
def machines(
    ranks: Callable[..., Ranks], train_command: Callable[..., list[str]], object_store: ObjectStore, tmp_path: Path
) -> Machines:
    os.environ["LLMSCALE_BEAT_S"] = "0.3"
    return Machines(ranks, train_command, tmp_path / "disks")


@pytest.fixture
def straight(train_straight: Callable[..., dict[int, float]]) -> dict[int, float]:
    return train_straight(*FLAGS)


def steps_in(view: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(view).current]


def test_a_run_goes_on_on_other_machines(
    machines: Machines, object_store: ObjectStore, straight: dict[int, float]
) -> None:
    machines.kill_after("a", 2, "step-00000004\n", "--ds", "zero2")
    machines.kill_after("b", 1, "published", "--ds", "zero3")
    machines.train("c", 2, "--ds", "zero1")
    view = machines.look()
    assert_same_losses(read_losses(view), straight)
    assert steps_in(view) == [12, 8]
    index = read_index(view)
    assert index is not None and index.epoch == 3 and index.holder is None
    folders = {name.split("/")[1] for name in object_store.files("runs/x/") if name.startswith("checkpoints/")}
    assert folders == set(index.checkpoints.values()), "what is not named is removed"
    assert len((view / "starts.jsonl").read_text().splitlines()) == 3


def assert_published_is_whole(machines: Machines, number: int) -> None:
    """Check every checkpoint that latest.json names, on a new disk."""
    if read_index(copy_of(URL, "view")) is not None:
        machines.look(f"look-{number}")


def test_death_at_an_upload_loses_nothing(
    machines: Machines, object_store: ObjectStore, straight: dict[int, float]
) -> None:
    """The trainer dies before or after a request reached the store, and another machine takes over."""
    moments = (
        ("e00001-step-00000004/__0_0.distcp", True),
        ("latest.json", False),
    )
    for number, (name, is_before) in enumerate(moments):
        die_at(machines, object_store, number, lambda path, name=name: path.endswith(name), is_before)
    machines.train("last", 1, "--ds", "zero1")
    view = machines.look()
    assert_same_losses(read_losses(view), straight)
    assert steps_in(view) == [12, 8]


def die_at(
    machines: Machines, store: ObjectStore, number: int, where: Callable[[str], bool], is_before: bool, *flags: str
) -> bool:
    """Train on a new machine and kill it at the first write that `where` names; return whether there was one."""
    died = []

    def watch(method: str, path: str) -> bool:
        if method == "PUT" and not died and where(path):
            died.append(path)
            job.kill()
            return is_before
        return bool(died) and is_before and method == "PUT"

    job = machines.start(f"dies-{number}", 1, "--ds", "zero1", *flags)
    store.fails = watch
    output = job.wait()[0]
    store.fails = lambda method, path: False
    assert died or job.exit_codes == [0], output
    assert_published_is_whole(machines, number)
    return bool(died)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("is_before", [True, False])
def test_death_at_every_upload_loses_nothing(
    machines: Machines,
    object_store: ObjectStore,
    train_straight: Callable[..., dict[int, float]],
    is_before: bool,
) -> None:
    """Every write of a start with two checkpoints is tried but signs of life: `latest.json` counts as the first write
    and behind a manifest, and an object once, however often it is written in a row. Each start is a new run beside what
    the one before left; every fourth is continued to the end."""
    flags = ("--steps", "8", "--keep-last", "1", "--ds", "zero1")
    number, has_died = 0, True
    while has_died:
        number += 1
        object_store.client.delete_object(Bucket=BUCKET, Key="runs/x/latest.json")
        written: list[str] = []

        def is_nth(path: str, number: int = number, written: list[str] = written) -> bool:
            name = path.rpartition("/")[2]
            is_beat = name == "latest.json" and written and written[-1] != "manifest.json"
            if not is_beat and name not in written[-1:]:
                written.append(name)
                return len(written) == number
            return False

        has_died = die_at(machines, object_store, number, is_nth, is_before, *flags)
        if has_died and number % 4 == 0:
            machines.train(f"after-{number}", 1, *flags)
        if not has_died or number % 4 == 0:
            view = machines.look(f"end-{number}")
            assert_same_losses(read_losses(view), train_straight(*FLAGS, *flags))
            assert steps_in(view) == [8]
    assert number > 10


@pytest.fixture
def relay(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Requests to the store pass here."""
    with relay_to(urlsplit(object_store.url).port or 0) as relay:
        monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
        yield relay


@pytest.mark.slow
def test_a_store_that_throttles_fails_and_cuts_answers_costs_time_only(
    machines: Machines, relay: Relay, straight: dict[int, float]
) -> None:
    counts = itertools.count()
    harms = {3: "cut", 5: "lose"}

    def refuse(method: str, headers: Message) -> tuple[int, bytes] | None:
        return {1: SLOW_DOWN, 6: (500, b"")}.get(next(counts) % 23)

    relay.refuses = refuse
    relay.harm = lambda method, path: harms.get(next(counts) % 19, "")
    machines.train("a", 2, "--ds", "zero2")
    relay.refuses, relay.harm = (lambda method, headers: None), (lambda method, path: "")
    view = machines.look()
    assert_same_losses(read_losses(view), straight)
    assert steps_in(view)[0] == 12


@pytest.mark.slow
def test_expired_credentials_are_said_and_their_renewal_ends_the_wait(
    machines: Machines, relay: Relay, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "never-to-be-seen-4711"
    file = tmp_path / "credentials"

    def give(name: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key={secret}\n")

    give("FIRST")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    expired: list[str] = []
    relay.refuses = lambda method, headers: (
        EXPIRED if any(f"={name}/" in headers.get("Authorization", "") for name in expired) else None
    )
    job = machines.start("a", 2, "--ds", "zero2", "--steps", "100000", "--schedule", "constant")
    seen = read_until(job, "published")
    expired.append("FIRST")
    seen += read_until(job, "WARNING")
    for _ in range(2):
        seen += read_until(job, "saved ")
    give("SECOND")
    seen += read_until(job, "written again")
    job.send(signal.SIGTERM)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs[0]
    view = machines.look()
    newest = find_checkpoints(machines.copy("a")).current[0]
    assert steps_in(view)[0] == newest.step, "the last checkpoint is in the store"
    everything = [*object_store.files().values(), seen.encode(), *(output.encode() for output in outputs)]
    everything += [path.read_bytes() for path in (tmp_path / "disks").rglob("*") if path.is_file()]
    assert not any(secret.encode() in contents for contents in everything)


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, 507])
def test_a_bucket_that_refuses_at_the_end_is_said_and_the_same_command_publishes(
    machines: Machines, relay: Relay, straight: dict[int, float], status: int
) -> None:
    os.environ["STORE_END_S"] = "0.5"
    job = machines.start("a", 2, "--ds", "zero2")
    read_until(job, "step-00000004\n")
    relay.refuses = lambda method, headers: (status, b"") if method == "PUT" else None
    outputs = job.wait()
    assert job.exit_codes == [2, 2], outputs[0]
    (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
    assert URL in error and "the same command" in error
    relay.refuses = lambda method, headers: None
    assert 12 not in steps_in(machines.look("b"))
    output = machines.train("a", 2, "--ds", "zero2")
    view = machines.look("b")
    assert steps_in(view)[0] == 12, output
    assert_same_losses(read_losses(view), straight)


@pytest.mark.slow
def test_a_run_goes_back_and_is_pruned_in_the_store(
    machines: Machines, object_store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ds", "zero1", "--schedule", "constant", "--save-every", "2", "--keep-last", "9")
    machines.train("a", 1, *flags, "--steps", "8")
    back = f"{URL}/checkpoints/step-00000004"
    machines.train("b", 1, *flags, "--steps", "6", "--resume", back)
    view = machines.look()
    actual = find_checkpoints(view)
    assert ([saved.step for saved in actual.current], actual.history.number) == ([6, 4, 2], 2)
    assert sorted(saved.step for saved in actual.abandoned) == [6, 8]
    assert cli.main(["checkpoint", "list", URL]) == 0 and "step-00000008" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", URL]) == 0
    assert cli.main(["checkpoint", "prune", URL]) == 0
    index = read_index(view)
    assert index is not None and sorted(index.checkpoints) == [f"step-0000000{step}" for step in (2, 4, 6)]
    folders = {name.split("/")[0] for name in object_store.files("runs/x/checkpoints/")}
    assert folders == set(index.checkpoints.values())
    output = machines.train("c", 2, *flags, "--steps", "8")
    assert "step 6" in output
    assert steps_in(machines.look()) == [8, 6, 4, 2]


@pytest.mark.slow
def test_commands_and_other_runs_read_a_run_in_a_store(
    machines: Machines, object_store: ObjectStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machines.train("a", 1, "--ds", "zero1", "--steps", "4")
    os.environ["LLMSCALE_RUNS"] = str(tmp_path / "viewer")
    assert cli.main(["runs", "s3://bucket/runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["run"], listed["state"], listed["step"]) == (URL, "finished", 4)
    assert cli.main(["report", URL]) == 0
    assert cli.main(["checkpoint", "show", f"{URL}/checkpoints/step-00000004"]) == 0
    assert cli.main(["export", URL, "--to", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    output = machines.train("b", 2, "--ds", "zero3", "--init-from", URL, "--steps", "2", url="s3://bucket/runs/y")
    assert "weights from" in output
    before = object_store.files("runs/x/")
    assert cli.main(["checkpoint", "show", "s3://bucket/runs/none"]) == 2
    assert object_store.files("runs/x/") == before


@pytest.mark.slow
def test_nodes_with_separate_disks_publish_and_resume(machines: Machines, straight: dict[int, float]) -> None:
    job = machines.start("a-{node}", 2, "--ds", "zero2", layout=[1, 1])
    read_until(job, "step-00000004\n")
    job.kill()
    # Node 0 is new, node 1 is the same.
    shutil.rmtree(machines.disks / "a-0")
    job = machines.start("a-{node}", 4, "--ds", "zero3", layout=[2, 2])
    read_until(job, "step-00000008\n")
    job.kill()
    machines.train("b", 1, "--ds", "zero1")
    view = machines.look()
    assert_same_losses(read_losses(view), straight)
    assert steps_in(view) == [12, 8]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["google", "azure"])
def test_other_stores(
    kind: str,
    request: pytest.FixtureRequest,
    machines: Machines,
    straight: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: GoogleStore | AzureStore = request.getfixturevalue(kind)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{server.url}/runs/x"
    job = machines.start("a", 2, "--ds", "zero2", url=url)
    read_until(job, "step-00000004\n")
    job.kill()
    machines.train("b", 1, "--ds", "zero3", url=url)
    view = machines.look(url=url)
    assert_same_losses(read_losses(view), straight)
    assert steps_in(view) == [12, 8]
