"""Run as a script, this file is one rank that joins the world and says where it stands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import psutil
import pytest

from llmscale.engine.process_group import join_world, leave_world, set_default_environment
from llmscale.errors import ConfigError

LAUNCHER_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher has said anything; what the test says is taken back."""
    for key in LAUNCHER_KEYS:
        # Set first, so that monkeypatch also removes what the function under test adds.
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(environment: pytest.MonkeyPatch) -> None:
    set_default_environment()
    assert {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536


@pytest.mark.parametrize(("name", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")])
def test_one_of_several_processes_does_not_train_alone(
    environment: pytest.MonkeyPatch, name: str, launcher: str
) -> None:
    environment.setenv(name, "1")
    set_default_environment()
    environment.delenv("RANK")
    environment.setenv(name, "4")
    with pytest.raises(ConfigError, match=rf"{name} is 4, but RANK is not set: {launcher} alone"):
        set_default_environment()


@pytest.mark.parametrize(
    ("message", "copied"), [("LOCAL_SIZE", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
)
def test_each_launcher_s_word_for_the_ranks_of_a_node_is_understood(
    environment: pytest.MonkeyPatch, message: str, copied: str
) -> None:
    for key, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), (message, "4")):
        environment.setenv(key, value)
    set_default_environment()
    assert (os.environ[copied], os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("4", "5", "8")


def test_ranks_know_where_they_stand_on_uneven_nodes_and_say_nothing_else(ranks: Callable) -> None:
    job = ranks([__file__], 3, [1, 2])
    outputs = job.wait()
    assert job.exit_codes == [0, 0, 0], outputs
    worlds = [json.loads(output) for output in outputs]
    assert [world["rank"] for world in worlds] == [0, 1, 2]
    assert [world["local_rank"] for world in worlds] == [0, 0, 1]
    assert [world["is_main"] for world in worlds] == [True, False, False]
    assert all(world["ranks_per_node"] == [1, 2] and world["world_size"] == 3 for world in worlds)


def test_ranks_on_one_machine_listen_on_loopback_alone(ranks: Callable) -> None:
    """A stranger who reaches the rendezvous could read its keys and write one."""
    job = ranks([__file__], 2, [2])
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    addresses = [json.loads(output)["listens_at"] for output in outputs]
    assert addresses[0] and {*addresses[0], *addresses[1]} == {"127.0.0.1"}


if __name__ == "__main__":
    here = join_world()
    connections = psutil.Process().net_connections(kind="inet")
    print(
        json.dumps(
            {
                "rank": here.rank,
                "world_size": here.world_size,
                "local_rank": here.local_rank,
                "ranks_per_node": here.ranks_per_node,
                "is_main": here.is_main,
                "listens_at": [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN],
            }
        )
    )
    leave_world()
