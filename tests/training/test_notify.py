from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.cluster.launch.ranks import process_state
from llmscale.cluster.launch.supervisor import Attempt, Supervisor
from llmscale.config.run_config import RunConfig
from llmscale.training import run_folder as notify_module
from llmscale.training.run_folder import notify
from tests.conftest import HANG_S, Ranks
from tests.distributed.test_full_disk import read_until


def told(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_facts_are_read_by_no_shell_and_have_no_nan(tmp_path: Path) -> None:
    facts = {"error": f"$(touch {tmp_path}/no) `touch {tmp_path}/no`\n'; touch {tmp_path}/no #", "loss": math.inf}
    notify(f"test -n $HOME && cat > {tmp_path}/told", tmp_path / "$(touch no)", "failed", facts)
    (record,) = told(tmp_path / "told")
    assert (record["event"], record["error"], record["loss"]) == (
        "failed",
        "$(touch no) `touch no`\n'; touch no #",
        None,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_a_command_that_fails_or_hangs_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notify("echo '\033[31mno such host' >&2; exit 6", tmp_path, "finished", {})
    assert capsys.readouterr().err == "WARNING: --notify ended with status 6: \\x1b[31mno such host\n"
    monkeypatch.setattr(notify_module, "HOOK_S", 0.3)
    notify("sleep 600 & echo $! > pid; sleep 600".replace("pid", f"{tmp_path}/pid"), tmp_path, "finished", {})
    assert capsys.readouterr().err == "WARNING: --notify took longer than 0 s and was killed\n"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + HANG_S
    while process_state(child) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_state(child) in ("", "Z"), "what it left in the background ends with it"


def test_rank_0_tells_of_a_stop_an_end_and_a_failure_once(
    ranks: Callable[..., Ranks], train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "told"
    command = train_command("--notify", f"cat >> {path}", "--precision", "fp32", "--steps", "100000")
    job = ranks(command, 2)
    read_until(job, "step      3/")
    job.send(signal.SIGTERM)
    job.wait()
    assert job.exit_codes == [0, 0]
    (stopped,) = told(path)
    assert (stopped["event"], stopped["total_steps"], stopped["run"]) == ("stopped", 100000, "run")
    assert isinstance(stopped["step"], int) and stopped["step"] >= 3 and isinstance(stopped["loss"], float)
    job = ranks([*command[:-1], str(stopped["step"] + 1)], 1)
    output = job.wait()[0]
    assert (job.exit_codes, told(path)[1]["event"]) == ([0], "finished"), output
    job = ranks([*command, "--seed", "3"], 2)
    job.wait()
    assert job.exit_codes == [2, 2]
    failed = told(path)[2]
    assert (failed["event"], failed["exit_status"], len(told(path))) == ("failed", 2, 3)
    assert "seed" in str(failed["error"])


def test_the_supervisor_tells_of_each_attempt(tmp_path: Path) -> None:
    config = RunConfig(run=tmp_path, notify=f"cat >> {tmp_path}/told")
    supervisor = SimpleNamespace(_config=config)
    attempt = Attempt(3, "now", {}, 2, "", {}, "", end="failed", reason="rank 1 on b ended with status 1")
    Supervisor._notify(supervisor, attempt, None)  # type: ignore[arg-type]
    Supervisor._notify(supervisor, replace(attempt, number=4, end="stopped", reason="SIGTERM"), 0)  # type: ignore[arg-type]
    first, second = told(tmp_path / "told")
    assert (first["event"], first["attempt"], first["restarts"]) == ("failed", 3, True)
    assert first["error"] == "rank 1 on b ended with status 1"
    assert (second["event"], second["attempt"], second["restarts"]) == ("stopped", 4, False)
