"""One small trained run for all commands that look at runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import warm_start

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def trained_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 2 and 3, by one rank. Do not change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    warm_start.run(
        [
            sys.executable,
            "llmscale/train.py",
            f"--data={tiny_set}",
            f"--run={run}",
            "--model=tiny-1m",
            "--n-layer=1",
            "--n-head=2",
            "--n-embd=32",
            "--global-batch-size=4",
            "--steps=3",
            "--save-every=2",
            "--val-every=0",
            "--num-workers=0",
        ],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    return run


#: Runs each command of stdin in a process that it forks, after importing every command without torch.
TORCH_FREE = """
import importlib, json, os, sys
from llmscale.cli import main as cli
for name in cli.COMMANDS:
    importlib.import_module(f"llmscale.cli.{name}")
heavy = {"torch", "deepspeed", "transformers", "streaming", "matplotlib"} & set(sys.modules)
assert not heavy, f"{heavy} were imported"
for line in sys.stdin:
    words, folder, environment = json.loads(line)
    pid = os.fork()
    if not pid:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/blocked/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path.insert(0, f"{folder}/blocked")
        sys.argv = ["llmscale", *words]
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def torch_free_server() -> Iterator[subprocess.Popen[str]]:
    command, pipes = [sys.executable, "-c", TORCH_FREE], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, text=True, env=environment, cwd=REPOSITORY, **pipes) as server:  # type: ignore[call-overload]
        yield server
        server.stdin.close()


@pytest.fixture
def llmscale(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`llmscale(*words)` runs the command; with `torch_free=True` where importing torch ends the process.

    `input` is what it reads from stdin, without `torch_free`.
    """

    def run(*words: str, torch_free: bool = False, input: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        if torch_free:
            (tmp_path / "blocked" / "torch").mkdir(parents=True, exist_ok=True)
            (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
            server = request.getfixturevalue("torch_free_server")
            server.stdin.write(json.dumps([words, str(tmp_path), environment]) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            outputs = ((tmp_path / "blocked" / name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(words, status, *outputs)
        return warm_start.run(
            [sys.executable, "-m", "llmscale.cli.main", *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            input=input,
        )

    return run
