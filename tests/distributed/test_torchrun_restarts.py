"""torchrun with restarts: a run continues after every one of them, also with fewer nodes. All tests are slow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import checkpoints_folder
from tests.conftest import HANG_S, REPOSITORY, free_port, read_losses, run_ranks, start_ranks, words
from tests.distributed.test_launchers import Job

pytestmark = pytest.mark.slow

FAULT_JOB = REPOSITORY / "tests" / "training" / "fault_job.py"
FLAGS = words("--precision fp32 --save-every 2 --keep-last 9 --steps 8 --lr 1e-3")
#: As in docs/cluster.md, with shorter waits.
ELASTIC = words("--nnodes 1:2 --max-restarts 9 --rdzv-backend c10d --local-addr 127.0.0.1")
WAITS = words("--rdzv-conf last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=4")


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    agents: list[Job] = []

    def start(*flags: str, **variables: str) -> Job:
        output = tmp_path / f"agent-{len(agents)}.txt"
        agents.append(Job(["torchrun", *flags], output, tmp_path / "run", variables=variables))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()


def starts_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launch", [("--master-port", "PORT"), ("--standalone",)])
@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
def test_a_flag_that_begins_somewhere_acts_once(
    torchrun: Callable, train_command: Callable, tmp_path: Path, flag: str, launch: tuple[str, ...]
) -> None:
    """Every start ends after three steps, and saves at every second: 2, then 4, 6 and 8 if restarts continue."""
    run_ranks(train_command(*FLAGS, "--run", str(tmp_path / "straight")), 1)
    begun, run = checkpoints_folder(tmp_path / "straight") / "step-00000002", tmp_path / "run"
    place = [str(free_port()) if word == "PORT" else word for word in launch]
    flags = train_command(*FLAGS, flag, str(begun), "--run", str(run))[1:]
    output = torchrun(
        *place, "--nproc-per-node", "2", "--max-restarts", "5", "--", str(FAULT_JOB), "crash:3", *flags
    ).wait()
    steps = [int(path.name[-8:]) for path in list_checkpoints(run)]
    assert steps == ([8, 6, 4] if flag == "--resume" else [8, 6, 4, 2])
    restarts = len(steps) - 1
    assert output.count(f"{flag} {begun} has acted at an earlier start of this launch, and is left out") == restarts
    assert output.count("unexpected RuntimeError: planted") == restarts, "each start says its error, once"
    if flag == "--resume":
        losses, expected = read_losses(run), read_losses(tmp_path / "straight")
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)


def test_a_node_that_is_lost_and_comes_back(torchrun: Callable, train_command: Callable, tmp_path: Path) -> None:
    """Three ranks on two nodes, two on what is left, then three again; the batch of 8 is not divided over three."""
    settings = (*FLAGS, "--steps", "4000", "--save-every", "20", "--check-every", "1")
    run, store = tmp_path / "run", f"127.0.0.1:{free_port()}"
    flags = train_command(*settings, "--run", str(run))
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    rendezvous = (*ELASTIC, "--rdzv-endpoint", store, "--rdzv-id", "job-1", *WAITS)

    def last_step() -> int:
        return max(read_losses(run), default=0) if (run / "metrics.jsonl").exists() else 0

    def wait_for_ranks(count: int) -> None:
        stays.until(lambda: (run / "starts.jsonl").exists() and starts_of(run)[-1]["world_size"] == count)
        begun = last_step()
        stays.until(lambda: last_step() > begun + 5)

    stays = torchrun(*rendezvous, "--nproc-per-node", "2", "--", *flags, **fresh)
    lost = torchrun(*rendezvous, "--nproc-per-node", "1", "--", *flags, **fresh)
    wait_for_ranks(3)
    stays.until(lambda: bool(list_checkpoints(run)))
    lost.kill()
    wait_for_ranks(2)
    torchrun(*rendezvous, "--nproc-per-node", "1", "--", *flags, **fresh)
    wait_for_ranks(3)
    assert [start["world_size"] for start in starts_of(run)] == [3, 2, 3]
    assert all(start["launches"] == ["torchrun --rdzv-id job-1"] for start in starts_of(run))
    last = last_step()
    stays.process.terminate()
    stays.process.wait(HANG_S)
    # The schedule depends on the steps of the run alone.
    straight = train_command(*settings, "--run", str(tmp_path / "straight"))
    job = start_ranks(straight, 1)
    stays.until(
        lambda: (
            (tmp_path / "straight" / "metrics.jsonl").exists()
            and max(read_losses(tmp_path / "straight"), default=0) >= last
        )
    )
    job.kill()
    losses, expected = read_losses(run), read_losses(tmp_path / "straight")
    assert {step: losses[step] for step in range(1, last + 1)} == pytest.approx(
        {step: expected[step] for step in range(1, last + 1)}, rel=1e-3
    )
