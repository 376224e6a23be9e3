"""Attempts of a launch: their record, the decision to try again, and the arguments of a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llmscale.cluster.launch import attempt as attempt_run
from llmscale.cluster.launch import supervisor
from llmscale.cluster.launch.supervisor import (
    Attempt,
    decide,
    read_attempts,
)
from llmscale.config.run_arguments import parse_run_config
from llmscale.errors import CheckpointError, ConfigError
from llmscale.files.record_log import RecordLog
from llmscale.training.run_folder import ATTEMPTS_NAME
from llmscale.training.start import prepare_start
from tests.cluster.launch.stand_in import StandIn, host_command
from tests.conftest import TINY_MODEL
from tests.training.test_start import save

FIRST = Attempt(1, "2026-01-01T00:00:00+00:00", {"a": 2}, 2, "10.0.0.1:1234", {"b": "no route"}, "logs")


def write(run: Path, *attempts: Attempt) -> None:
    log = RecordLog(run / ATTEMPTS_NAME, pytest.fail)
    for attempt in attempts:
        log.append(json.dumps(asdict(attempt)).encode() + b"\n")
    log.close()


def test_an_attempt_is_what_was_written_of_it_last(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    done = replace(FIRST, seconds=3.5, first_step=1, last_step=9, end="failed", reason="rank 0 vanished")
    write(tmp_path, FIRST, done, replace(FIRST, number=2))
    assert read_attempts(tmp_path) == [done, replace(FIRST, number=2)]


def test_a_damaged_record_does_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / ATTEMPTS_NAME
    write(tmp_path, FIRST)
    with path.open("a") as file:
        file.write('null\n{"number": "7"}\n')
        file.write(json.dumps({**asdict(replace(FIRST, number=2)), "of_a_later_version": 1}) + "\n")
        file.write('{"number": 2, "beg')
    write(tmp_path, replace(FIRST, number=3))
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 2, 3]


def attempts(*last_steps: int | None, end: str = "failed") -> list[Attempt]:
    ended = replace(FIRST, end=end, reason="rank 0 said no")
    return [replace(ended, number=number, last_step=step) for number, step in enumerate(last_steps, start=1)]


@pytest.mark.parametrize(
    ("last_steps", "wait_s"), [([10], 1), ([10, 20], 1), ([10, 20, 20], 2), ([None] * 5, 16), ([7] * 8, 60)]
)
def test_attempts_that_end_alike_wait_longer_and_longer(last_steps: list[int | None], wait_s: float) -> None:
    assert decide(attempts(*last_steps), 20, 99) == wait_s


@pytest.mark.parametrize(("step", "words"), [(7, "after step 7"), (None, "before its first step")])
def test_the_same_step_again_and_again_is_the_runs_own_fault(step: int | None, words: str) -> None:
    assert isinstance(decide(attempts(4, step, step), 20, 3), float)
    given_up = decide(attempts(4, step, step, step), 20, 3)
    assert given_up == f"3 attempts in a row ended {words} (failed: rank 0 said no)"


def test_what_bounds_restarts() -> None:
    mixed = attempts(7, 7) + attempts(7, end="host lost")
    assert isinstance(decide(mixed, 20, 3), float), "another kind of end is another fault"
    assert decide(attempts(1, 2), 2, 3) == 1.0
    assert decide(attempts(1, 2, 3), 2, 3) == "2 restarts were not enough (--max-restarts)"


# ---------------------------------------------------------------- whole launches, on hosts that are processes here


@pytest.fixture
def stand_in(tmp_path: Path, tiny_set: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(supervisor, "_REGATHER_S", 0.05)
    return StandIn(tmp_path, tiny_set)


HOSTILE = "a b  'c' \"d\" $(touch executed) `touch executed` ; * ~ $HOME \\ %h !! é\t"


def test_ranks_are_numbered_over_all_hosts_and_get_every_argument_unchanged(stand_in: StandIn) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")
    code = f"print(json.dumps([[os.environ[name] for name in {names}], sys.argv[-1]])); train(1, 3)"
    assert stand_in.launch(code, {"a": 2, "b": 1}, ("--sample-every", "9", "--sample-prompt", HOSTILE)) == 0
    (attempt,) = stand_in.attempts
    assert (attempt.hosts, attempt.world_size) == ({"a": 2, "b": 1}, 3)
    assert (attempt.end, attempt.first_step, attempt.last_step) == ("finished", 1, 3)
    logs = {path.name: json.loads(path.read_text()) for path in Path(attempt.logs).iterdir()}
    address = attempt.master.rpartition(":")[0]
    assert logs == {
        "rank-00000.log": [["0", "0", "2", "3", "0", "2", address], HOSTILE],
        "rank-00001.log": [["1", "1", "2", "3", "0", "2", address], HOSTILE],
        "rank-00002.log": [["2", "0", "1", "3", "1", "2", address], HOSTILE],
    }
    assert f"b rank 2: {(Path(attempt.logs) / 'rank-00002.log').read_text()}".rstrip() in stand_in.lines


def test_a_killed_rank_is_to_blame_and_all_begin_again(stand_in: StandIn) -> None:
    code = """
if attempt == 1:
    train(1, 5)
    time.sleep(0.3 + rank)
    os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else fail("Connection closed by peer")
train(5, 9)
"""
    assert stand_in.launch(code) == 0
    first, second = stand_in.attempts
    assert (first.end, first.reason) == ("failed", "rank 1 on b was killed by SIGKILL")
    assert (first.last_step, second.first_step, second.last_step) == (5, 5, 9)


def test_an_error_at_the_same_step_gives_up_with_the_last_lines_of_the_rank_that_had_it(stand_in: StandIn) -> None:
    code = """
train(1, 7)
if rank == 1:
    fail("the poisoned step")
time.sleep(0.1)
fail("[enforce fail] Connection closed by peer")
"""
    assert stand_in.launch(code, same_step_limit=2) == 1
    assert [(attempt.end, attempt.last_step) for attempt in stand_in.attempts] == [("failed", 7)] * 2
    assert stand_in.attempts[0].reason == "rank 1 on b ended with status 1"
    assert "  b | error: the poisoned step" in stand_in.lines
    assert any("giving up: 2 attempts in a row ended after step 7" in line for line in stand_in.lines)


def test_a_mistake_of_the_user_is_not_tried_again(stand_in: StandIn) -> None:
    assert stand_in.launch("fail('no such thing', 2) if rank else time.sleep(100)") == 2
    assert stand_in.ends == ["user error"]
    assert stand_in.attempts[0].reason == "rank 1 on b refused"


def test_a_run_that_cannot_continue_is_refused_before_ranks_start(stand_in: StandIn) -> None:
    words = ["--data", str(stand_in.data), *TINY_MODEL, "--run", str(stand_in.run_folder), "--global-batch-size", "12"]
    save(prepare_start(parse_run_config(words), 2), 1)
    with pytest.raises(CheckpointError, match="seed was 1337 and is 7"):
        stand_in.launch("train(1, 2)", flags=("--seed", "7"))
    assert stand_in.attempts == []


def test_a_stopped_rank_without_a_peer_is_found_by_the_launcher(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_run, "_WATCHDOGS_S", 2.0)
    code = "train(1, 4)\nif attempt == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    flags = ("--hang-timeout-s", "1", "--start-timeout-s", "0")
    assert stand_in.launch(code, {"a": 1}, flags) == 0
    assert stand_in.ends == ["hung", "finished"]
    assert stand_in.attempts[0].reason == "no progress after step 4: rank 0 on a is stopped (state T)"


LOSE_B = """
train(1, 5 * attempt)
if os.environ["CROSS_RANK"] == "1" and attempt in {attempts}:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60 if world_size == 2 and attempt in {attempts} else 0)
"""


def test_a_lost_host_is_used_again_from_the_next_restart_on(stand_in: StandIn) -> None:
    assert stand_in.launch(LOSE_B.format(attempts=[1])) == 0
    lost, both = stand_in.attempts
    assert (lost.end, lost.reason) == ("host lost", "b: its connection closed (exit status -9)")
    assert (both.end, both.hosts, both.left_out) == ("finished", {"a": 1, "b": 1}, {})


def test_a_host_that_is_lost_twice_in_a_row_is_left_out_once(stand_in: StandIn) -> None:
    code = LOSE_B.format(attempts=[1, 2]) + "if attempt == 3: fail('another failure')"
    assert stand_in.launch(code) == 0
    assert stand_in.ends == ["host lost", "host lost", "failed", "finished"]
    assert [sorted(attempt.hosts) for attempt in stand_in.attempts] == [["a", "b"], ["a", "b"], ["a"], ["a", "b"]]
    assert "two attempts in a row" in stand_in.attempts[2].left_out["b"]


@pytest.mark.parametrize("why", ["--min-hosts", pytest.param("--sequence-parallel-size", marks=pytest.mark.slow)])
def test_hosts_that_do_not_answer_are_waited_for_on_a_restart(stand_in: StandIn, why: str) -> None:
    asked: list[str] = []

    def command(host: str) -> list[str]:
        asked.append(host)
        is_there = host == "a" or len(asked) <= 2 or len(asked) > 6
        return host_command(host) if is_there else ["sh", "-c", "echo ssh: no route to host >&2; exit 255"]

    code = "if attempt == 1: fail('once') if rank else time.sleep(60)"
    flags = (why, "2") if why == "--sequence-parallel-size" else ()
    assert stand_in.launch(code, flags=flags, command=command, min_hosts=1 if flags else 2) == 0
    assert stand_in.ends == ["failed", "finished"]
    assert "WARNING: b is left out: ssh: no route to host" in stand_in.lines
    assert "waiting for 2 of 2 hosts" in stand_in.lines


def test_a_first_attempt_waits_for_min_hosts_and_not_for_any(stand_in: StandIn) -> None:
    asked: list[str] = []

    def command(host: str) -> list[str]:
        asked.append(host)
        return host_command(host) if host == "a" or len(asked) > 4 else ["false"]

    assert stand_in.launch("train(1, 1)", command=command, min_hosts=2) == 0
    assert (stand_in.ends, asked) == (["finished"], ["a", "b"] * 3)

    stand_in.run_folder = stand_in.folder / "another"
    assert stand_in.launch("", command=lambda _: ["/nowhere/ssh"]) == 1
    assert stand_in.ends == ["no hosts"]


def test_a_signal_reaches_every_rank_and_ends_with_0(stand_in: StandIn) -> None:
    code = """
def stop(number, frame):
    heartbeat.beat("stopped", 3)
    end(0)
signal.signal(signal.SIGTERM, stop)
train(1, 3)
print("ready", flush=True)
time.sleep(100)
"""

    def show(line: str) -> None:
        stand_in.lines.append(line)
        if sum(line.endswith("ready") for line in stand_in.lines) == 2 and not stand_in.stop_signals:
            stand_in.stop_signals.append("SIGTERM")

    assert stand_in.launch(code, show=show) == 0
    assert (stand_in.ends, stand_in.attempts[0].last_step) == (["stopped"], 3)
    assert any(line.startswith("asked to stop; the ranks have saved, at step 3") for line in stand_in.lines)


def test_a_run_that_is_in_use_is_waited_for_and_then_refused(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.run_folder.mkdir()
    code = """
import sys, time
from pathlib import Path
from llmscale.files.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
"""
    for seconds, limit_s in ((1, 120.0), (1000, 0.1)):
        command = [sys.executable, "-c", code, str(stand_in.run_folder), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None and owner.stdout.readline() == "locked\n"
            if seconds == 1:
                assert stand_in.launch("train(1, 2)", lost_after_s=limit_s) == 0
            else:
                with pytest.raises(ConfigError, match="is in use by process"):
                    stand_in.launch("train(1, 2)", lost_after_s=limit_s)
            owner.kill()
    assert stand_in.ends == ["finished"]
    assert sum("waiting for ranks of an earlier start" in line for line in stand_in.lines) >= 1


def test_only_hosts_that_the_run_can_be_divided_over_are_used(stand_in: StandIn) -> None:
    slots = {"a": 1, "b": 1, "c": 1}
    assert stand_in.launch("train(1, 1)", slots, ("--sequence-parallel-size", "2")) == 0
    assert sorted(stand_in.attempts[0].hosts) == ["a", "b"]
    for groups, min_hosts in (("2", 3), ("4", 1)):
        with pytest.raises(ConfigError, match="--sequence-parallel-size: 1, 3"):
            stand_in.launch("train(1, 1)", slots, ("--sequence-parallel-size", groups), min_hosts=min_hosts)
    with pytest.raises(ConfigError, match="--min-hosts 4 is more than the number of hosts, 3"):
        stand_in.launch("train(1, 1)", slots, min_hosts=4)
