"""Whatever is not foreseen is one line, with the traceback in a file; output that cannot be written is no success."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.error_handling import describe_death, print_error, report_crash, run_cli
from llmscale.errors import ConfigError, MachineError
from tests.conftest import REPOSITORY, free_port


def failing(error: BaseException) -> int:
    raise error


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LLMSCALE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


class Panic(BaseException):
    """As pyo3 raises for a panic in Rust."""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("seed = x\nis wrong."), 2, "error: seed = x\\nis wrong.\n"),
        (ConfigError("esc \x1b[2J."), 2, "error: esc \\x1b[2J.\n"),
        (MachineError("the port is taken."), 1, "error: the port is taken.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_what_is_foreseen(error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda: failing(error)) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error",
    # A full disk names no file, and a full /dev/shm is not the output.
    [
        OSError(28, "No space left on device"),
        ValueError("bad\nvalue"),
        MemoryError(),
        RecursionError("too deep"),
        Panic("capacity overflow"),
        KeyError(1),
    ],
)
def test_what_is_not_foreseen_leaves_its_traceback_in_a_private_file(
    error: BaseException, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_cli(lambda: failing(error)) == 1
    message = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert message.startswith(f"error: unexpected {type(error).__name__}")
    assert message.endswith(f" The traceback is in {file}; please report it.\n")
    assert message.count("\n") == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "in failing" in file.read_text()


def test_the_run_folder_s_logs_take_it_where_they_are_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    report_crash(ValueError("x"), tmp_path / "run")
    report_crash(ValueError("y"), tmp_path / "no-run")
    assert [path.name for path in (tmp_path / "run" / "logs").iterdir()] != []
    assert not (tmp_path / "no-run").exists()
    assert capsys.readouterr().err.count("\n") == 2


def test_without_a_place_for_the_file_the_traceback_is_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    run_cli(lambda: failing(ValueError("x")))
    message = capsys.readouterr().err
    assert message.startswith("Traceback")
    assert message.splitlines()[-1].startswith(
        "error: unexpected ValueError: x. The traceback above could not be written"
    )


def test_of_ranks_that_fail_alike_one_speaks_and_says_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, text in (("1", "same"), ("2", "same"), ("3", "another")):
        monkeypatch.setenv("RANK", rank)
        report_crash(ValueError(text))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: rank 1: unexpected ValueError: same.")
    assert second.startswith("error: rank 3: unexpected ValueError: another.")


def test_the_same_error_of_the_next_start_is_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same parent, as torchrun starts ranks again."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            report_crash(ValueError("same"))
    monkeypatch.setenv("MASTER_PORT", "29999")
    report_crash(ValueError("same"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": unexpected")[0] for line in lines] == ["error: rank 1"] * 3 + ["error: rank 0"]


def test_long_words_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"steps = {'9' * 5000}: too large.")
    message = capsys.readouterr().err
    assert len(message) < 200
    assert "(5,001 characters)" in message


def run_shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`$L` is the llmscale command, `$T` train.py."""
    programs = {"L": f"{sys.executable} -m llmscale.cli.main", "T": f"{sys.executable} llmscale/train.py"}
    return subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **programs, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


FULL = "error: the output cannot be written: No space left on device.\n"
CLOSED = "error: the output cannot be written: Bad file descriptor.\n"


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("$L estimate --gpu list > /dev/full", 1, FULL),
        ("$T --help > /dev/full", 1, FULL),
        ("$L estimate --gpu list >&-", 1, CLOSED),
        ("$L estimate --gpu list 2>&- <&- | wc -l | grep -q '[0-9][0-9]'", 0, ""),
        ("$L estimate --gpu nosuch 2>&-", 2, ""),
        ("set -o pipefail; $L estimate --gpu list | head -1 > /dev/null", 0, ""),
    ],
)
def test_output_that_cannot_be_written(script: str, status: int, message: str) -> None:
    if "/dev/full" in script and not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    done = run_shell(script)
    assert (done.returncode, done.stderr) == (status, message)


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_characters_that_the_terminal_lacks_are_written_out(environment: dict[str, str]) -> None:
    done = run_shell("$L estimate --model 'é' --gpu t4", **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model '") and done.stderr.count("\n") == 1


def test_a_taken_port_and_a_name_without_address_end_before_torch(tiny_set: Path, tmp_path: Path) -> None:
    run = f"$T --data {tiny_set} --run {tmp_path / 'run'}"
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = run_shell(run, **launched, MASTER_PORT=str(port))
    # 1: `llmscale launch` tries again, with another port.
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"error: MASTER_PORT {port} is taken on this host")
    launched["MASTER_ADDR"] = "no-such-host.invalid"
    done = run_shell(run, **launched, MASTER_PORT=str(free_port()))
    assert done.returncode in (1, 2)
    assert "error: MASTER_ADDR no-such-host.invalid " in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


PRINT = """
import sys
from llmscale.error_handling import make_output_resilient
make_output_resilient()
print("first", flush=True)
{middle}
print("last", flush=True)
print("error", file=sys.stderr)
"""


def run_print(stdout: object, middle: str = "", **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PRINT.format(middle=middle)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=300,
        **options,
    )  # type: ignore[call-overload]


def test_a_full_disk_behind_stdout_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        done = run_print(full, 'print("again", flush=True)')
    warning = b"WARNING: the output cannot be written: No space left on device. The run continues.\n"
    assert (done.returncode, done.stderr) == (0, warning + b"error\n")


def test_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    done = run_print(write)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr.endswith(b"Broken pipe. The run continues.\nerror\n")


def test_all_is_as_before_on_a_healthy_stream() -> None:
    done = run_print(subprocess.PIPE, 'print("ä€", end="", flush=False)', env={"PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout.decode()) == (0, "first\nä€last\n")


def test_a_closed_stdout_is_none() -> None:
    done = run_print(None, close_fds=True, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0


def test_a_closed_stdout_is_no_lost_output_of_what_is_patient() -> None:
    """What `llmscale train >&-` ends with."""
    code = "import sys; from llmscale.error_handling import make_output_resilient, run_cli; "
    code += "sys.exit(run_cli(lambda: make_output_resilient() or print('x') or 0))"
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("counters", "before", "words"),
    [
        ("nr_free_pages 7\noom_kill 3\n", 2, "most likely by the kernel for lack of host memory"),
        ("nr_free_pages 7\noom_kill 3\n", 3, "from another process"),
        ("oom_kill 0\n", None, "from another process"),
        ("oom_kill 3\n", None, "most likely by the kernel"),
        ("nr_free_pages 7\n", 0, "most likely by the kernel"),
    ],
)
def test_the_kernel_is_named_only_if_it_has_killed(
    counters: str, before: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text(counters)
    monkeypatch.setattr("llmscale.error_handling._COUNTERS", tmp_path / "vmstat")
    assert words in describe_death(signal.SIGKILL, before)
    assert describe_death(signal.SIGTERM, before) == "was killed by SIGTERM"
    assert describe_death(99, before) == "was killed by signal 99"
