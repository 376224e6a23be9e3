from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys
from llmscale.files.resilient_stdout import make_output_resilient
make_output_resilient()
print("first", flush=True)
{middle}
print("last", flush=True)
print("error", file=sys.stderr)
"""


def run(stdout: object, middle: str = "", **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CODE.format(middle=middle)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=300,
        **options,
    )  # type: ignore[call-overload]


def test_a_full_disk_behind_stdout_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        done = run(full, 'print("again", flush=True)')
    warning = b"WARNING: the output cannot be written: No space left on device. The run continues.\n"
    assert (done.returncode, done.stderr) == (0, warning + b"error\n")


def test_nobody_reads() -> None:
    read, write = os.pipe()
    os.close(read)
    done = run(write)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr.endswith(b"Broken pipe. The run continues.\nerror\n")


def test_all_is_as_before_on_a_healthy_stream() -> None:
    done = run(subprocess.PIPE, 'print("ä€", end="", flush=False)', env={"PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout.decode()) == (0, "first\nä€last\n")


def test_a_closed_stdout_is_none() -> None:
    done = run(None, close_fds=True, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0


def test_a_closed_stdout_is_no_lost_output_of_what_is_patient() -> None:
    """What `llmscale train >&-` ends with."""
    code = "import sys; from llmscale.error_handling import run_cli; from llmscale.files.resilient_stdout import *; "
    code += "sys.exit(run_cli(lambda: make_output_resilient() or print('x') or 0))"
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
