"""The doctor on two real hosts: healthy ones are green, and every planted fault is red, alone, with its fix."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.playground.hosts import Playground, why_impossible
from tests.cluster.conftest import SHELL
from tests.cluster.doctor import planted_faults as plant
from tests.cluster.doctor.planted_faults import Stage
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

Answer = dict[str, list[dict[str, str]]]


@dataclass(frozen=True)
class Scene:
    """Two hosts and a run that could start on them."""

    stage: Stage
    data: Path
    """The prepared set."""
    runs: Path
    """Folder above the run folder, on the shared disk."""

    @property
    def flags(self) -> list[str]:
        return ["--data", str(self.data), "--run", str(self.runs / "r"), "--model", "tiny-1m", "--steps", "10"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, tiny_set: Path) -> Iterator[Scene]:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("doctor")
    for name in ("runs", "scratch"):
        (folder / name).mkdir()
    with Playground(2, folder / "playground", shared=[tmp_path_factory.getbasetemp()]) as playground:
        yield Scene(Stage(playground, folder / "scratch"), tiny_set, folder / "runs")


def run_doctor(scene: Scene, fault: Fault) -> subprocess.CompletedProcess[str]:
    hostfile = scene.stage.playground.write_hostfile(scene.stage.scratch / "hostfile", 1)
    test = [] if fault.network_test else ["--no-network-test"]
    return scene.stage.first.run(
        [
            *("python", "-m", "llmscale.cli.main", "doctor", "--json", "--hostfile", str(hostfile), *test),
            *("--timeout", str(fault.timeout_s), "--", *scene.flags),
        ],
        cwd=REPOSITORY,
        environment=SHELL,
        timeout_s=180,
    )


@dataclass(frozen=True)
class Fault:
    """What is wrong, and what the doctor must say."""

    plant: Callable[[Scene], AbstractContextManager[None]]
    row: str
    found: str
    fix: str
    status: str = "fail"
    network_test: bool = False
    timeout_s: int = 60


def on_stage(
    planter: Callable[[Stage], AbstractContextManager[None]],
) -> Callable[[Scene], AbstractContextManager[None]]:
    return lambda scene: planter(scene.stage)


def nothing(scene: Scene) -> AbstractContextManager[None]:
    return nullcontext()


SOURCE = REPOSITORY / "llmscale" / "train.py"

FAULTS = {
    "ssh server hangs": Fault(on_stage(plant.frozen_sshd), "reach", "node-1: ", "ssh node-1 true"),
    "key not accepted": Fault(on_stage(plant.key_not_accepted), "reach", "Permission denied", "copy your key"),
    "no Python there": Fault(on_stage(plant.no_python), "reach", "node-1: ", "same path on every host"),
    "other source": Fault(
        lambda scene: plant.other_source(scene.stage, SOURCE), "versions", "llmscale: sources", "rsync -a --delete"
    ),
    "other DeepSpeed": Fault(
        lambda scene: plant.other_version(scene.stage, "deepspeed"),
        "versions",
        "deepspeed: 0.19.8 on node-0; 0.1.0 on node-1",
        "pip install deepspeed==0.19.8",
    ),
    "import fails": Fault(on_stage(plant.broken_import), "imports", "libcudart.so.12", "Repair it"),
    "small /dev/shm": Fault(on_stage(plant.small_shared_memory), "/dev/shm", "of 32 MiB free", "--shm-size=8g"),
    "port taken": Fault(
        lambda scene: plant.port_taken(scene.stage, 29500), "port", "29500 is in use on node-0", "--master_port"
    ),
    "data missing": Fault(
        lambda scene: plant.folder_of_its_own(scene.stage, scene.data, [scene.stage.second]), "data", "on node-1: ", ""
    ),
    "data on a disk that hangs": Fault(
        lambda scene: plant.disk_that_hangs(scene.stage, scene.data / "manifest.json"),
        "reach",
        "after `reading the run's configuration, data and folder`",
        "stuck disk or driver",
        timeout_s=30,
    ),
    "run folder not shared": Fault(
        lambda scene: plant.folder_of_its_own(scene.stage, scene.runs, [scene.stage.second]),
        "run folder",
        "is not there on node-1",
        "NFS",
        status="warn",
        network_test=True,
    ),
    "disk too small": Fault(
        lambda scene: plant.folder_of_its_own(scene.stage, scene.runs, scene.stage.playground.hosts, "20m"),
        "disk",
        "20.0 MiB free",
        "--keep-last",
    ),
    "peer is loopback": Fault(
        on_stage(plant.resolves_to_loopback),
        "address",
        "on node-1: node-0 resolves to 127.0.1.1",
        "/etc/hosts",
    ),
}


def test_a_healthy_pair_is_green(scene: Scene) -> None:
    healthy = Fault(nothing, "", "", "", network_test=True)
    done = run_doctor(scene, healthy)
    rows = json.loads(done.stdout)["rows"]
    assert [row for row in rows if row["status"] != "ok"] == []
    assert done.returncode == 0
    assert {"reach", "address", "run folder", "data", "run config", "all-reduce"} <= {row["name"] for row in rows}
    assert os.listdir(scene.runs) == [], "nothing is left behind"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, scene: Scene) -> None:
    fault = FAULTS[name]
    with fault.plant(scene):
        done = run_doctor(scene, fault)
    assert done.returncode == (1 if fault.status == "fail" else 0), done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    wrong = [row for row in rows if row["status"] != "ok"]
    assert {row["name"] for row in wrong} == {fault.row}, wrong
    (row, *_) = [row for row in wrong if (row["name"], row["status"]) == (fault.row, fault.status)]
    assert fault.found in row["found"]
    assert fault.fix in row["fix"]


def test_nothing_runs_on_when_the_doctor_is_done(scene: Scene) -> None:
    run_doctor(scene, Fault(nothing, "", "", "", network_test=True))
    for host in scene.stage.playground.hosts:
        assert host.pids_running("llmscale") == []
        assert host.run(["ls", "/dev/shm"]).stdout == ""
