"""Ranks of one machine under `llmscale train`'s hands: stand-ins that print, wait and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.cluster.launch import ranks
from llmscale.cluster.launch.ranks import (
    allowed_cpus,
    bind_ranks,
    count_gpus,
    descendants,
    divide_cpus,
    gpu_nodes,
    kill_descendants,
    process_state,
    rank_environment,
    remove_stale_locks,
    visible_gpus,
)
from tests.conftest import HANG_S, REPOSITORY

#: Starts the code of argv[1] as two ranks.
PARENT = """
import os, sys
from pathlib import Path
from llmscale.cluster.launch import ranks
from llmscale.cluster.launch.ranks import LocalRanks, rank_environment
ranks._NODES = Path(os.environ.get("NODES", ranks._NODES))
environments = rank_environment(os.environ, range(2), {})
sys.exit(LocalRanks([sys.executable, "-c", sys.argv[1]], environments, lambda line: print(line, flush=True)).run())
"""
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(word): os.write(1, f"{rank} {word}\\n".encode())  # at once: another rank writes too
"""
NOTE = "signal.signal(signal.{name}, lambda n, f: (say(signal.Signals(n).name), sys.exit(0)))\n"
HEAR = "signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))\n"


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *prefix: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*prefix, sys.executable, "-c", PARENT, RANK + code],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_variables_are_those_of_deepspeeds_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "count_cpus", lambda: 8)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "2"}
    first, second = rank_environment({"HOME": "/h", "WORLD_SIZE": "64", "RANK": "9"}, range(2), meeting)
    expected = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "HOME": "/h"}
    expected |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"}
    assert {**expected, "RANK": "0", "LOCAL_RANK": "0"}.items() <= first.items()
    assert {**expected, "RANK": "1", "LOCAL_RANK": "1"}.items() <= second.items()


def test_what_the_user_has_set_stays() -> None:
    [only] = rank_environment({"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5,7"}, [0], {})
    assert (only["OMP_NUM_THREADS"], only["CUDA_VISIBLE_DEVICES"]) == ("3", "5")
    assert "OMP_NUM_THREADS" not in rank_environment({}, [0], {})[0]


def test_visible_gpus_are_read_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus({}) is None
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, 1,-1,2"}) == ["GPU-8932f937", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert count_gpus() == 2


def write_topology(folder: Path, cpus_of_nodes: list[str], threads_of_cores: list[str]) -> None:
    for node, cpus in enumerate(cpus_of_nodes):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for threads in threads_of_cores:
        for cpu in threads.split(","):
            (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{threads}\n")


def write_gpus(folder: Path, node_by_address: dict[str, int]) -> None:
    for number, (address, node) in enumerate(node_by_address.items()):
        (folder / "nvidia" / address).mkdir(parents=True)
        (folder / "nvidia" / address / "information").write_text(f"GPU UUID: \t GPU-{number}aa\n")
        (folder / "pci" / address.lower()).mkdir(parents=True)
        (folder / "pci" / address.lower() / "numa_node").write_text(f"{node}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of two cores with two threads each, numbered as Linux does: all cores' first threads, then the second.

    Its files are in the folder.
    """
    write_topology(tmp_path, ["0-1,4-5", "2-3,6-7"], ["0,4", "1,5", "2,6", "3,7"])
    names = {"_NODES": "node", "_CPUS": "cpu", "_NVIDIA_GPUS": "nvidia", "_PCI_DEVICES": "pci"}
    for name, part in names.items():
        monkeypatch.setattr(ranks, name, tmp_path / part)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return tmp_path


def test_threads_of_a_core_and_cores_of_a_node_are_neighbours(machine: Path) -> None:
    assert list(allowed_cpus().items()) == [(0, 0), (4, 0), (1, 0), (5, 0), (2, 1), (6, 1), (3, 1), (7, 1)]
    assert bind_ranks({}, 2) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert bind_ranks({}, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_only_what_the_process_may_use_is_divided(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 2, 5, 6})
    assert bind_ranks({}, 2) == [[1, 5], [2, 6]]
    assert bind_ranks({}, 5) == []


def test_a_rank_is_at_its_gpus_node(machine: Path) -> None:
    write_gpus(machine, {"0000:17:00.0": 1, "0000:65:00.0": 0, "0000:CA:00.0": 1})
    assert gpu_nodes(["0", "1", "2", "3", "GPU-1aa", "MIG-7"]) == [1, 0, 1, -1, 0, -1]
    assert bind_ranks({}, 2) == [[2, 6, 3, 7], [0, 4, 1, 5]]
    assert bind_ranks({"CUDA_VISIBLE_DEVICES": "GPU-1aa,2"}, 2) == [[0, 4, 1, 5], [2, 6, 3, 7]]


@pytest.mark.parametrize(("num_cpus", "nodes"), [(8, [0, 0, 0]), (7, [1, 0]), (256, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_shares_are_disjoint_and_use_every_cpu(num_cpus: int, nodes: list[int]) -> None:
    shares = divide_cpus(range(num_cpus), nodes)
    assert sorted(cpu for share in shares for cpu in share) == list(range(num_cpus))
    assert min(map(len, shares)) == num_cpus // len(nodes)
    assert all(share == list(range(share[0], share[-1] + 1)) for share in shares)


def test_one_node_is_divided_only_beside_gpus(machine: Path) -> None:
    (machine / "node/node1/cpulist").unlink()
    assert bind_ranks({}, 2) == []
    write_gpus(machine, {"0000:17:00.0": -1, "0000:65:00.0": -1})
    assert bind_ranks({}, 2) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_ranks_that_are_bound_already_stay_so(machine: Path) -> None:
    assert bind_ranks({}, 1) == []
    assert bind_ranks({"OMP_PROC_BIND": "false"}, 2) == []
    assert bind_ranks({"SLURM_CPU_BIND": "quiet,mask_cpu:0xff"}, 2) == []
    # What srun sets for `launch`.
    assert len(bind_ranks({"SLURM_CPU_BIND": "quiet,none"}, 2)) == 2


@pytest.mark.parametrize("word", ["", "OMP_PROC_BIND=false"])
def test_started_ranks_have_their_own_cores(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """This host's cores, as if half of them were at another node."""
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("one core")
    half = sorted(own)[: len(own) // 2]
    write_topology(tmp_path, [",".join(map(str, half)), ",".join(map(str, own - {*half}))], [])
    monkeypatch.setenv("NODES", str(tmp_path / "node"))
    name, _, value = word.partition("=")
    if name:
        monkeypatch.setenv(name, value)
    # A child of the rank inherits them, as data workers do.
    code = "import subprocess; print = '-c', 'import os; print(*os.sched_getaffinity(0))'\n"
    code += "say(subprocess.check_output([sys.executable, *print], text=True).strip())"
    output = start(code).communicate(timeout=HANG_S)[0]
    first, second = ({int(cpu) for cpu in line.split()[1:]} for line in sorted(output.splitlines()))
    assert first | second == own
    assert first & second == (own if word else set())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3 * rank)", 3),
        ("sys.exit(1 + rank)", 2),
    ],
)
def test_the_exit_status_is_the_ranks(start: Callable, code: str, status: int) -> None:
    assert start(code).wait(HANG_S) == status


def test_a_killed_rank_is_named_with_its_signal_and_the_others_are_ended(start: Callable) -> None:
    parent = start("say(os.getpid()); os.kill(os.getpid(), 9) if rank else time.sleep(1000)")
    output = parent.communicate(timeout=HANG_S)[0]
    assert parent.returncode == 128 + signal.SIGKILL
    # That the kernel did it is said only if it has killed a process meanwhile.
    assert "was killed by SIGKILL from another process: the kernel has killed none for lack of host memory" in output
    for pid in [int(line.split()[1]) for line in output.splitlines() if line[0] in "01"]:
        assert not Path(f"/proc/{pid}").exists()


def test_the_killed_rank_is_to_blame_not_one_that_lost_its_peer(start: Callable) -> None:
    parent = start("time.sleep(0.5); os.kill(os.getpid(), 9) if rank else (time.sleep(0.1), sys.exit(1))")
    assert parent.wait(HANG_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_reaches_every_rank_once_and_none_before_it_can_hear(start: Callable, name: str) -> None:
    """Sent while it is blocked, as in a rank that starts."""
    parent = start("say('up'); time.sleep(1.0)\n" + NOTE.format(name=name) + HEAR + "time.sleep(1000)")
    assert sorted(parent.stdout.readline() for _ in range(2)) == ["0 up\n", "1 up\n"]
    parent.send_signal(getattr(signal, name))
    output = parent.communicate(timeout=HANG_S)[0]
    assert sorted(output.splitlines()) == [f"0 {name}", f"1 {name}"]
    assert parent.returncode == 0


def test_ctrl_c_in_the_terminal_comes_once_and_a_third_one_ends_all(start: Callable) -> None:
    code = "signal.signal(signal.SIGINT, lambda n, f: say('SIGINT'))\n" + HEAR + "say(os.getpid())\n"
    parent = start(code + "while True: time.sleep(1)")
    pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    for _ in range(2):
        os.killpg(parent.pid, signal.SIGINT)
        assert sorted(parent.stdout.readline() for _ in range(2)) == ["0 SIGINT\n", "1 SIGINT\n"]
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(HANG_S) == 130
    assert parent.stdout.read().count("SIGINT") <= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_nohup_keeps_a_closed_terminal_from_all(start: Callable) -> None:
    parent = start(HEAR + "say(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN); time.sleep(2)", "nohup")
    lines = [parent.stdout.readline() for _ in range(2)]
    parent.send_signal(signal.SIGHUP)
    assert parent.wait(HANG_S) == 0
    assert all("True" in line for line in lines), lines


def test_what_a_rank_leaves_behind_is_ended(start: Callable) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '77'], start_new_session=True); say(p.pid)"
    parent = start(code)
    output = parent.communicate(timeout=HANG_S)[0]
    assert parent.returncode == 0
    for line in output.splitlines():
        assert not Path(f"/proc/{line.split()[1]}").exists()


def test_a_tree_is_ended_by_its_numbers() -> None:
    script = "sleep 100 & sleep 100 & setsid sleep 100 & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        while len(descendants(shell.pid)) < 3:
            time.sleep(0.01)
        children = descendants(shell.pid)
        kill_descendants(shell.pid)
        assert [state for state in map(process_state, children) if state not in ("", "Z")] == []
    assert process_state(shell.pid) == ""


def test_stale_locks_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 3600
    for name in ("dead", "held", "young"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if name != "young":
            os.utime(tmp_path / name / "lock", (old, old))
    with (tmp_path / "held" / "lock").open():
        assert remove_stale_locks() == [str(tmp_path / "dead" / "lock")]


def test_a_lock_of_processes_that_have_ended_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "py311_cpu" / "async_io").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "async_io" / "lock"
    lock.touch()
    assert remove_stale_locks(since_s=time.time() + 1) == []
    assert remove_stale_locks(since_s=lock.stat().st_mtime) == [str(lock)]
