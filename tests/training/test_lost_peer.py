"""A rank whose peer has gone tells which one, and how it ended, whoever started the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llmscale.training import stop_request
from llmscale.training.stop_request import explain_lost_peer, find_ranks, names_lost_peer
from tests.conftest import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: As gloo, NCCL and the store of torch 2.13 say it.
GLOO_PLACE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
BROKEN = [
    f"{GLOO_PLACE}Read error [127.0.0.1]:403: Connection reset by peer. This is typically caused by a remote worker",
    f"{GLOO_PLACE}Connection closed by peer [10.0.0.7]:1931",
    f"{GLOO_PLACE}Write error [127.0.0.1]:403: Broken pipe",
    "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete",
    "[gloo] connection closed",
    "recvValue failed on SocketImpl(fd=3, addr=[localhost]:4, remote=[localhost]:29500): failed to recv, got 0 bytes",
    "sendBytes failed on SocketImpl(fd=3): Broken pipe",
    "NCCL communicator was aborted on rank 0.",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exited prematurely.",
    "Socket Timeout",
    "wait timeout after 600000ms, keys: /default_pg/0//cuda//timeout_dump",
]


class DistBackendError(RuntimeError):
    """As torch's, by its name."""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of a job whose rank 0 is this process."""
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stop_request, "_LOOK_S", 0.2)
    # The environment of this process in /proc is that of its start.
    monkeypatch.setattr(stop_request, "find_ranks", lambda: {os.getpid(): 0, **find_ranks()})
    monkeypatch.setattr(os, "getppid", os.getpid)
    process = subprocess.Popen(["sleep", "3600"], env={**os.environ, "RANK": "1"})
    yield process
    process.kill()
    process.wait()


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal, and wait until the process has ended without reaping it."""
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("text", BROKEN)
def test_every_broken_connection_names_the_rank_that_has_gone(peer: subprocess.Popen[bytes], text: str) -> None:
    end(peer, signal.SIGKILL)
    lost = explain_lost_peer(RuntimeError(text))
    assert lost is not None and lost.is_transient and lost.is_on_every_rank, "local rank 0 reports it"
    assert str(lost).startswith(f"rank 1 (process {peer.pid}) was killed by SIGKILL")
    assert names_lost_peer(str(lost)), "`llmscale launch` knows by it who is to blame"
    assert "pair.cc" not in str(lost) and "typically" not in str(lost)


def test_errors_of_torch_s_classes_count_whatever_they_say(peer: subprocess.Popen[bytes]) -> None:
    end(peer, signal.SIGTERM)
    lost = explain_lost_peer(DistBackendError("Watchdog caught collective operation timeout"))
    assert f"rank 1 (process {peer.pid}) was killed by SIGTERM, and" in str(lost)
    wrapped = ValueError("while saving")
    wrapped.__cause__ = RuntimeError(BROKEN[0])
    assert explain_lost_peer(wrapped) is not None


def test_a_rank_that_was_reaped_already_is_named_too(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.wait()
    assert str(explain_lost_peer(RuntimeError(BROKEN[0]))).startswith("rank 1 on this host ended, and its connections")


def test_a_rank_that_is_stopped_and_one_elsewhere(
    peer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
    timeout = RuntimeError(BROKEN[3])
    assert str(explain_lost_peer(timeout)).startswith(
        f"rank 1 (process {peer.pid}) is stopped: `kill -CONT {peer.pid}`"
    )
    peer.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, peer.pid, os.WCONTINUED | os.WNOWAIT)
    assert str(explain_lost_peer(timeout)).startswith("a rank does not answer, and all of them still run (")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(stop_request, "find_ranks", lambda: {os.getpid(): 0, peer.pid: 1})
    assert str(explain_lost_peer(RuntimeError(BROKEN[1]))).startswith("a rank on another host (10.0.0.7) ended or")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[2]' is invalid for input of size 3"),
        DistBackendError("NCCL error in: NCCLUtils.hpp:275, unhandled cuda error"),
        ConnectionResetError("Connection reset by peer"),
        KeyError("x"),
    ],
)
def test_other_errors_are_left_alone(peer: subprocess.Popen[bytes], error: Exception) -> None:
    assert explain_lost_peer(error) is None


def test_a_single_rank_has_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert explain_lost_peer(RuntimeError(BROKEN[0])) is None
