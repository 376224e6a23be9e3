"""The probe: what it reads on this machine, and that nothing that hangs or fails holds it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import CheckpointManifest, StoredFile, save_manifest
from llmscale.cluster.doctor.devices import gather_gpus
from llmscale.cluster.doctor.diagnose import _gather, gather_facts
from llmscale.cluster.doctor.facts import GpuFacts, ProbeRequest, parse_facts, parse_request, print_facts, print_request
from llmscale.cluster.doctor.network import gather_network
from llmscale.cluster.doctor.run import describe_folder, gather_ds, gather_run
from llmscale.cluster.doctor.software import gather_code, hash_sources
from llmscale.cluster.doctor.system import gather_system
from llmscale.cluster.extension_locks import find_locks
from llmscale.errors import ConfigError
from tests.cluster.doctor.host_facts import build_host
from tests.conftest import HANG_S

REPOSITORY = Path(__file__).resolve().parents[3]


def test_facts_survive_the_way_through_ssh() -> None:
    facts = build_host(num_gpus=2)
    assert parse_facts(f"Welcome to Ubuntu\n{print_facts(facts)}\n") == facts


def test_a_request_arrives() -> None:
    request = ProbeRequest(
        peers=("a", "b"), port=1234, world_size=4, ds="x y.json", train_flags=("--data", "it's $HOME")
    )
    assert parse_request(print_request(request)) == request


@pytest.mark.parametrize("output", ["", "Welcome\n", 'llmscale-facts {"code": {"python": 3}}'])
def test_what_is_not_ours_is_refused(output: str) -> None:
    with pytest.raises(ConfigError, match=r"printed no facts|another llmscale"):
        parse_facts(output)


def test_a_request_of_another_llmscale_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmscale.cluster.doctor.diagnose", '{"port": "x"}'],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_what_hangs_or_fails_is_late_and_the_rest_is_there() -> None:
    def fail() -> object:
        raise OSError("Stale file handle")

    began = time.monotonic()
    found, late = _gather({"good": lambda: 1, "stuck": lambda: time.sleep(30), "bad": fail}, timeout_s=2)
    assert time.monotonic() - began < 25, "sooner than what is stuck"
    assert found == {"good": 1}
    assert late == {"stuck": "no answer within 2 s", "bad": "OSError: Stale file handle"}


def test_every_group_is_gathered_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmscale.cluster.doctor.diagnose.gather_imports", lambda timeout_s: None)
    facts = gather_facts(ProbeRequest(timeout_s=60))
    assert facts.late == {}
    assert all(getattr(facts, name) is not None for name in ("code", "gpus", "network", "system"))


def test_the_hash_of_sources_is_that_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    source = tmp_path / "inner" / "a.py"
    source.write_text("x = 1\n")
    (tmp_path / "note.txt").write_text("not code")
    first = hash_sources(tmp_path)
    (tmp_path / "note.txt").write_text("changed")
    assert hash_sources(tmp_path) == first
    source.write_text("x = 2\n")
    second = hash_sources(tmp_path)
    source.rename(tmp_path / "a.py")
    assert len({first, second, hash_sources(tmp_path)}) == 3


def test_versions_are_those_that_are_installed() -> None:
    import torch

    code = gather_code()
    assert code.libraries["torch"] == torch.__version__
    assert code.torch_cuda == torch.version.cuda


FAKE_NVIDIA_SMI = """#!/bin/sh
case "$*" in
*driver_version*)
  echo "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 512, 570.124.06"
  echo "1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 40000, 570.124.06" ;;
*ecc.errors*) {health} ;;
*compute-apps*) echo "GPU-bb, 4711"; echo "GPU-bb, 4712" ;;
esac
"""


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_cards_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health = 'echo "GPU-aa, 0, No, No, No"; echo "GPU-bb, 7, [N/A], Yes, No"'
    fake_nvidia_smi(tmp_path, FAKE_NVIDIA_SMI.replace("{health}", health), monkeypatch)
    facts = gather_gpus(10)
    first, second = facts.gpus
    assert facts.problem is None
    assert facts.driver == "570.124.06"
    assert (first.name, first.memory_bytes, first.processes) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20, ())
    assert (first.uncorrected_errors, first.needs_reset) == (0, False)
    assert (second.used_bytes, second.processes) == (40000 * 2**20, (4711, 4712))
    assert (second.uncorrected_errors, second.needs_reset) == (7, True)


def test_an_old_driver_that_does_not_know_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, FAKE_NVIDIA_SMI.replace("{health}", "exit 2"), monkeypatch)
    facts = gather_gpus(10)
    assert [card.uncorrected_errors for card in facts.gpus] == [None, None]
    assert not any(card.needs_reset for card in facts.gpus)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('#!/bin/sh\necho "Failed to initialize NVML: Driver/library version mismatch"; exit 18', "version mismatch"),
        ("#!/bin/sh\nsleep 30", "no answer within"),
    ],
)
def test_a_driver_that_fails(script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    facts = gather_gpus(0.5)
    assert facts.gpus == ()
    assert facts.problem is not None and problem in facts.problem


def test_no_nvidia_smi_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather_gpus(1) == GpuFacts((), None, None)


def test_the_network_of_this_machine() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        network = gather_network(ProbeRequest(peers=("localhost", "no-such-host.invalid"), port=port))
    assert network.hostname == socket.gethostname()
    assert not network.port_free
    assert network.routes["no-such-host.invalid"].address is None
    loopback = network.interface_of("127.0.0.1")
    assert loopback is not None and loopback.name == "lo" and loopback.up
    assert network.first_address is None or not network.first_address.startswith("127.")


def test_limits_of_this_machine() -> None:
    system = gather_system()
    assert system.open_files > 0
    assert system.shm_bytes >= system.shm_free_bytes >= 0
    assert system.memory_bytes > 2**28
    assert set(system.tools) == {"c++", "ninja"}


def test_a_lock_is_held_while_a_process_has_it_open(tmp_path: Path) -> None:
    """As torch's FileBaton makes it: O_CREAT | O_EXCL, open until the build is done."""
    (tmp_path / "py311_cpu" / "async_io").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    held = tmp_path / "py311_cpu" / "async_io" / "lock"
    left = tmp_path / "other" / "lock"
    left.touch()
    os.utime(left, (time.time() - 500, time.time() - 500))
    descriptor = os.open(held, os.O_CREAT | os.O_EXCL)
    try:
        locks = {lock.path: lock for lock in find_locks(tmp_path)}
    finally:
        os.close(descriptor)
    assert locks[str(held)].held
    assert not locks[str(left)].held
    assert 490 < locks[str(left)].age_s < 600
    assert not next(lock for lock in find_locks(tmp_path) if lock.path == str(held)).held


def test_built_ops_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert gather_system().built_ops == ()
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    assert gather_system().built_ops == ("async_io",)


def test_a_run_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    facts = describe_folder(tmp_path / "a" / "b")
    assert facts.exists_at == str(tmp_path)
    assert facts.writable
    assert facts.free_bytes > 0
    assert (facts.num_checkpoints, facts.checkpoints_bytes) == (0, 0)
    assert not (tmp_path / "a").exists()


def test_the_checkpoints_in_a_run_folder_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    manifest = CheckpointManifest(10, 0, 1, 0, "fp32", "now", (StoredFile("__0_0.distcp", 1000, ""),))
    save_manifest(folder, manifest)
    facts = describe_folder(tmp_path)
    assert (facts.num_checkpoints, facts.checkpoints_bytes) == (1, 1000)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("")
    assert describe_folder(tmp_path).num_checkpoints == 0


def test_a_ds_config_by_the_closed_schema(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimisation": {"stage": 2}, "gradient_clipping": "much"}))
    wrong = gather_ds(str(path))
    assert len(wrong.problems) == 2, "all of them, not train.py's first"
    assert any("Did you mean 'zero_optimization'?" in problem for problem in wrong.problems)
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "sub_group_size": 100}}))
    idle = gather_ds(str(path))
    assert idle.problems == ()
    assert "sub_group_size has no effect at stage 2" in idle.warnings[0]
    assert idle.sha256 != wrong.sha256
    missing = gather_ds(str(tmp_path / "no.json"))
    assert len(missing.problems) == 1 and "does not exist" in missing.problems[0]
    assert missing.sha256 is None


def test_a_run_as_train_would_find_it(tiny_set: Path, tmp_path: Path) -> None:
    flags = [
        "--ds",
        "ds_configs/zero2.json",
        "--data",
        str(tiny_set),
        "--run",
        str(tmp_path / "r"),
        "--model",
        "tiny-1m",
    ]
    run = gather_run([*flags, "--global-batch-size", "8"], world_size=2)
    assert run.problem is None and run.config.problems == ()
    assert run.data is not None and run.data.problem is None
    assert (run.data.vocab_size, run.data.seq_len) == (257, 32)
    assert run.data.num_train_samples > 100
    refused = gather_run([*flags, "--global-batch-size", "1"], world_size=2)
    assert refused.problem is not None and "fewer sequences than there are ranks" in refused.problem
    assert not (tmp_path / "r").exists()


def test_a_run_whose_flags_are_wrong() -> None:
    run = gather_run(["--no-such-flag", "1"], world_size=1)
    assert len(run.config.problems) == 1 and "--no-such-flag" in run.config.problems[0]
    assert run.data is None and run.folder is None


def test_a_set_with_a_missing_shard(tiny_set: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "set"
    shutil.copytree(tiny_set, damaged)
    shard = next(damaged.glob("train/*.mds"))
    shard.unlink()
    run = gather_run(["--data", str(damaged), "--run", str(tmp_path / "r")], world_size=1)
    assert run.data is not None and run.data.problem is not None
    assert shard.name in run.data.problem
