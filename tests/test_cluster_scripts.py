"""scripts/slurm, scripts/cloud and the image workflow, run against stand-ins for Slurm and rclone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm_start
from tests.conftest import HANG_S, free_port, last_wins

ROOT = Path(__file__).resolve().parent.parent
SLURM = ROOT / "scripts" / "slurm"
SBATCH_SCRIPTS = ("train.sbatch", "train_plain.sbatch")
#: Nothing may be expanded, split or executed on the way to train.py.
AWKWARD = ["--wandb-name", "two  words", 'a"b', "it's", "$(touch owned)", "`touch owned`", "a;b", "*", "--flag=", ""]

#: Starts the command once per task, each in a process group of its own, and sends SIGUSR1 and SIGTERM on to the groups,
#: as Slurm does; ends with the highest exit status.
FAKE_SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
count = int(words[words.index("--ntasks") + 1])
start = next(i for i, word in enumerate(words) if word.endswith("node.sh"))
tasks = [
    subprocess.Popen(words[start:], env={{**os.environ, "SLURM_NODEID": str(i)}}, start_new_session=True)
    for i in range(count)
]
def forward(number, frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)
signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
#: Records what it was asked, and answers with two names for this machine.
FAKE_SCONTROL = """#!/bin/bash
printf '%s\\n' "$*" >>"$RECORDS/scontrol"
if [[ $1 == show ]]; then printf 'localhost\\n127.0.0.1\\n' | head -n "$SLURM_JOB_NUM_NODES"; fi
if [[ $1 == requeue ]]; then exit "${REQUEUE_STATUS:-0}"; fi
"""
#: A launcher that runs until a signal comes, takes a while to save, and ends as $END says.
FAKE_LAUNCH = """#!{python}
import json, os, pathlib, signal, sys, time
records = pathlib.Path(os.environ["RECORDS"])
signals = []
def note(number, frame):
    signals.append(signal.Signals(number).name)
    (records / "signals").write_text(" ".join(signals))
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
(records / "arguments").write_text(json.dumps(sys.argv[1:]))
while "WAIT" in os.environ and not signals:
    time.sleep(0.02)
time.sleep(0.5)
(records / "saved").touch()
sys.exit(int(os.environ.get("END", "0")))
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Start]:
    """`start_script(command, **environment)` starts a command in a clone, with the programs in tmp_path/bin first."""
    programs, repository = tmp_path / "bin", tmp_path / "repository"
    programs.mkdir()
    repository.mkdir()
    # Without the .venv of a real clone, whose llmscale the scripts put before every other.
    for name in ("scripts", "llmscale", "ds_configs"):
        (repository / name).symlink_to(ROOT / name)
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        process = subprocess.Popen(
            command,
            cwd=repository,
            env={
                **inherited,
                "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            # srun and the launchers are sessions of their own; SIGTERM reaches them through the script.
            process.terminate()
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def slurm(start_script: Start, tmp_path: Path) -> Start:
    """`slurm(script, *arguments, **environment)` starts a script as sbatch would, from a copy in a spool folder."""
    programs, records = tmp_path / "bin", tmp_path / "records"
    records.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL), ("llmscale", FAKE_LAUNCH)):
        (programs / name).write_text(text.format(python=sys.executable) if "{python}" in text else text)
        (programs / name).chmod(0o755)

    def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        spooled = tmp_path / "slurm_script"
        shutil.copy(SLURM / script, spooled)
        job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_NUM_NODES": "2"}
        place = {"SLURM_SUBMIT_DIR": str(tmp_path / "repository"), "RECORDS": str(records), "RANKS_PER_NODE": "1"}
        return start_script(["bash", str(spooled), *arguments], **(job | place | environment))

    return start


def wait_for(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Until it is true; fails when it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def requeues(tmp_path: Path) -> list[str]:
    """Every `scontrol requeue` that was called."""
    calls = tmp_path / "records" / "scontrol"
    return [line for line in calls.read_text().splitlines() if "requeue" in line] if calls.exists() else []


def write_end(run: Path, event: str) -> None:
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "event", "event": event, "step": 7}) + "\n")


def test_arguments_reach_the_supervisor_unchanged(slurm: Start, tmp_path: Path) -> None:
    job = slurm("train.sbatch", *AWKWARD)
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, output
    arguments = json.loads((tmp_path / "records" / "arguments").read_text())
    assert arguments == ["launch", "--launcher", "slurm", "--slots", "1", "--", *AWKWARD]
    assert not list(tmp_path.rglob("owned"))
    assert requeues(tmp_path) == []


def test_the_url_of_a_run_is_no_folder(slurm: Start, tmp_path: Path) -> None:
    job = slurm("train.sbatch", "--run", "s3://bucket/runs/a")
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, output
    arguments = json.loads((tmp_path / "records" / "arguments").read_text())
    assert arguments[-2:] == ["--run", "s3://bucket/runs/a"]
    assert not list(tmp_path.rglob("s3:*"))


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_failure_is_the_exit_status_and_no_requeue(slurm: Start, tmp_path: Path, status: int) -> None:
    job = slurm("train.sbatch", END=str(status))
    job.communicate(timeout=HANG_S)
    assert job.returncode == status
    assert requeues(tmp_path) == []


@pytest.mark.parametrize(
    ("signals", "event", "end", "status", "requeued"),
    [
        pytest.param(["SIGUSR1"], "stopped", 0, 0, True, id="time is up"),
        pytest.param(["SIGUSR1"], None, 0, 0, True, id="time is up before the first step"),
        pytest.param(["SIGUSR1"], "finished", 0, 0, False, id="finished in the last minute"),
        pytest.param(["SIGUSR1"], "stopped", 3, 3, False, id="the save failed"),
        pytest.param(["SIGTERM"], "stopped", 0, 0, False, id="scancel"),
        pytest.param(["SIGUSR1", "SIGTERM"], "stopped", 0, 0, True, id="pre-empted with a warning"),
    ],
)
def test_requeue_is_decided_by_signal_and_end(
    slurm: Start,
    tmp_path: Path,
    signals: list[str],
    event: str | None,
    end: int,
    status: int,
    requeued: bool,
) -> None:
    run = tmp_path / "run"
    job = slurm("train.sbatch", "--run", str(run), WAIT="1", END=str(end))
    wait_for((tmp_path / "records" / "arguments").exists)
    if event:
        write_end(run, event)
    for name in signals:
        job.send_signal(signal.Signals[name])
        wait_for(lambda name=name: name in read(tmp_path / "records" / "signals"))
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == status, output
    assert (tmp_path / "records" / "saved").exists(), "the script did not wait for the save"
    assert requeues(tmp_path) == (["requeue 4711"] if requeued else [])


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"REQUEUE_STATUS": "1"}, "the run is saved, but job 4711 could not be requeued"),
        ({"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}, "not finished after 3 restarts"),
    ],
)
def test_an_unfinished_run_that_nobody_continues_is_a_failure(
    slurm: Start, tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    job = slurm("train.sbatch", "--run", str(tmp_path / "run"), WAIT="1", **environment)
    wait_for((tmp_path / "records" / "arguments").exists)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 1
    assert words in output


@pytest.mark.parametrize("script", SBATCH_SCRIPTS)
def test_another_folder_than_the_repository_is_refused(slurm: Start, tmp_path: Path, script: str) -> None:
    job = slurm(script, SLURM_SUBMIT_DIR=str(tmp_path))
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 2
    assert "is not llmscale's repository" in output


def test_an_unknown_launcher_is_named(slurm: Start) -> None:
    job = slurm("train_plain.sbatch", LAUNCHER="mpirun", SLURM_JOB_NUM_NODES="1")
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 2
    assert "LAUNCHER is 'mpirun'. Legal: torchrun, deepspeed." in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes_save_at_a_signal_and_finish_afterwards(
    slurm: Start,
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    launcher: str,
    number: signal.Signals,
) -> None:
    """The real train.py under the real launcher; only srun and scontrol are stand-ins."""
    flags = train_command("--save-every", "0", "--precision", "fp32")[1:]
    metrics = tmp_path / "run" / "metrics.jsonl"
    job = slurm("train_plain.sbatch", *flags, "--steps", "100000", LAUNCHER=launcher)
    wait_for(lambda: job.poll() is not None or '"step": 5' in read(metrics))
    job.send_signal(number)
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, output
    stop = last_event(metrics)
    assert stop["event"] == "stopped"
    assert requeues(tmp_path) == (["requeue 4711"] if number == signal.SIGUSR1 else [])

    total = int(stop["step"]) + 5
    job = slurm("train_plain.sbatch", *flags, "--steps", str(total), LAUNCHER=launcher, SLURM_RESTART_COUNT="1")
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, output
    end = last_event(metrics)
    assert (end["event"], end["step"]) == ("finished", total)
    assert min(read_losses_after(metrics, stop)) == int(stop["step"]) + 1, "the second job did not go on from the first"


def read_losses_after(metrics: Path, event: dict[str, int | str]) -> list[int]:
    """Steps trained since an event."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["step"] for record in records[records.index(event) :] if record["kind"] == "train"]


@pytest.mark.slow
def test_a_signal_before_the_ranks_have_begun_is_not_lost(
    slurm: Start, train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    job = slurm("train_plain.sbatch", *train_command("--precision", "fp32", "--steps", "100000")[1:])
    # The next thing that the script does is srun; torchrun then takes seconds to start its ranks.
    wait_for((tmp_path / "records" / "scontrol").exists)
    time.sleep(0.7)
    assert not (tmp_path / "run").exists(), "too late to test this"
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=HANG_S)[0]
    assert job.returncode == 0, output
    assert requeues(tmp_path) == ["requeue 4711"]


def last_event(metrics: Path) -> dict[str, int | str]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in records if record.get("event") in ("stopped", "finished")][-1]


def test_a_launcher_that_fails_fails_the_job(slurm: Start, tmp_path: Path) -> None:
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text("#!/bin/bash\nexit 9\n")
    torchrun.chmod(0o755)
    job = slurm("train_plain.sbatch", SLURM_JOB_NUM_NODES="1")
    assert job.wait(HANG_S) == 9, job.communicate()[0]


def test_every_sbatch_script_asks_for_a_warning_and_a_requeue() -> None:
    for name in SBATCH_SCRIPTS:
        options = re.findall(r"^#SBATCH (\S+)", (SLURM / name).read_text(), flags=re.MULTILINE)
        assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= set(options)


# What runs in the cloud.

FAKE_RCLONE = """#!/bin/bash
printf '%s\\n' "$*" >>"$RECORDS/rclone"
if [[ $1 == lsf ]]; then exit "${LSF_STATUS:-0}"; fi
if [[ $1 == copy ]]; then mkdir -p "$3" && echo restored >"$3/restored"; fi
"""
FAKE_CLOUD_LLMSCALE = """#!/bin/bash
printf '%s\\n' "$1" >>"$RECORDS/commands"
if [[ $1 == launch ]]; then
    printf '%s\\0' "$@" >"$RECORDS/arguments"
    mkdir -p "$RUN"
    sleep "${TRAIN_S:-0}"
    exit "${END:-0}"
fi
if [[ $1 == doctor ]]; then exit "${DOCTOR_STATUS:-0}"; fi
"""


@pytest.fixture
def vast(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`vast(**environment)` runs the on-start script in a clone that is installed already."""
    programs, records, repository = tmp_path / "bin", tmp_path / "records", tmp_path / "app"
    for folder in (programs, records, repository):
        folder.mkdir()
    for name, text in (("rclone", FAKE_RCLONE), ("llmscale", FAKE_CLOUD_LLMSCALE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    # The installation clones and downloads: it is left out, and the rest is the script's own text.
    text = (ROOT / "scripts" / "cloud" / "vast_start.sh").read_text()
    script = tmp_path / "onstart.sh"
    script.write_text(text.replace("    install_llmscale\n", f"    cd {repository}\n", 1))

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script)],
            env={
                "HOME": str(tmp_path),
                "PATH": f"{programs}:{os.environ['PATH']}",
                "RECORDS": str(records),
                "RUN": "runs/one",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    return run


def test_vast_passes_arguments_unchanged_and_keeps_a_copy(
    vast: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    arguments = "--wandb-name 'two  words' \"it's\" '$(touch owned)' '*' ''"
    done = vast(TRAIN_ARGS=arguments, SYNC_TO="s3:bucket/run", SYNC_EVERY_S="1", TRAIN_S="2.5", LSF_STATUS="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "records" / "commands").split() == ["doctor", "launch"]
    given = read(tmp_path / "records" / "arguments").split("\0")[:-1]
    words = ["--wandb-name", "two  words", "it's", "$(touch owned)", "*", ""]
    assert given == ["launch", "--", *words, "--run", "runs/one"]
    assert not list(tmp_path.rglob("owned"))
    copies = [line for line in read(tmp_path / "records" / "rclone").splitlines() if line.startswith("sync")]
    assert len(copies) >= 2, "one while it trains, one at the end"


def test_vast_continues_from_the_copy(vast: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    assert vast(SYNC_TO="s3:bucket/run").returncode == 0
    assert read(tmp_path / "app" / "runs" / "one" / "restored") == "restored\n"
    assert not (tmp_path / "app" / "runs" / "one.restoring").exists()


def test_vast_never_replaces_a_copy_that_it_cannot_read(
    vast: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = vast(SYNC_TO="s3:bucket/run", LSF_STATUS="1")
    assert done.returncode == 1
    assert "SYNC_TO=s3:bucket/run cannot be read (rclone status 1)" in done.stdout + done.stderr
    assert not (tmp_path / "records" / "commands").exists()
    assert "sync" not in read(tmp_path / "records" / "rclone").split()


@pytest.mark.parametrize(("environment", "status"), [({"END": "9"}, 9), ({"DOCTOR_STATUS": "1"}, 1)])
def test_vast_tells_the_truth_at_the_end(
    vast: Callable[..., subprocess.CompletedProcess[str]], environment: dict[str, str], status: int
) -> None:
    assert vast(**environment).returncode == status


# Recipes of SkyPilot and of a Kubernetes JobSet. Both were checked by hand against the schemas of skypilot 0.14.1 and
# of JobSet v1alpha2 (kubernetes-sigs/jobset 08dfbdf, unknown keys refused).

RECIPES = ("sky", "jobset")
URL = "s3://BUCKET/runs/gpt2"


def read_recipe(name: str) -> Any:
    return yaml.safe_load((ROOT / "scripts" / "cloud" / f"{name}.yaml").read_text())


def jobset_container() -> Any:
    (job,) = read_recipe("jobset")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


def recipe_command(name: str) -> list[str]:
    """Words that the recipe runs on every node."""
    if name == "jobset":
        container = jobset_container()
        return [*container["command"], *container["args"]]
    task = read_recipe(name)
    script = task["run"]
    for variable, value in task["envs"].items():
        script = script.replace(f'"${variable}"', value)
    path, command = script.strip().splitlines()
    assert path == "export PATH=$PWD/.venv/bin:$PATH"
    return shlex.split(command)


def place(name: str, node: int) -> dict[str, str]:
    """Variables that the platform sets on a node of two on this machine."""
    if name == "sky":
        variables = {"NODE_RANK": str(node), "NUM_NODES": "2", "NODE_IPS": "127.0.0.1\n127.0.0.2"}
        return {f"SKYPILOT_{key}": value for key, value in (variables | {"NUM_GPUS_PER_NODE": "0"}).items()}
    given = {variable["name"]: variable["value"] for variable in jobset_container()["env"]}
    assert given["MASTER_ADDR"] == "gpt2-node-0-0.gpt2"
    return given | {"JOB_COMPLETION_INDEX": str(node), "MASTER_ADDR": "localhost", "RANKS_PER_NODE": "1"}


@pytest.fixture
def nodes(start_script: Start) -> Start:
    """`nodes(recipe, node, *flags, **environment)` starts a recipe's command on one node; `flags` win."""

    def start(recipe: str, node: int, *flags: str, **environment: str) -> subprocess.Popen[str]:
        return start_script(last_wins([*recipe_command(recipe), *flags]), **(place(recipe, node) | environment))

    return start


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_starts_each_node_in_its_place(nodes: Start, tmp_path: Path, recipe: str) -> None:
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\nexit 3\n")
    torchrun.chmod(0o755)
    first = "127.0.0.1" if recipe == "sky" else "localhost"
    for node in (0, 1):
        process = nodes(recipe, node)
        message = process.communicate(timeout=HANG_S)[0].splitlines()
        assert process.returncode == 3, "the launcher's status"
        launcher, script = message[: message.index("--")], message[message.index("--") + 1 :]
        given = dict(zip(launcher[::2], launcher[1::2], strict=True))
        expected = {"--nnodes": "2", "--nproc-per-node": "1", "--node-rank": str(node), "--master-addr": first}
        assert given == expected | {"--master-port": "29500"}
        assert script[:3] == ["llmscale/train.py", "--run", URL]
    assert not list(tmp_path.rglob("s3:*")), "a URL is no folder"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resumes_after_a_preemption(
    nodes: Start,
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    recipe: str,
) -> None:
    """Two nodes train over gloo; one is told to end, and both start again with the same command."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    flags = [*train_command("--precision", "fp32")[1:], "--ds", str(ROOT / "ds_configs" / "zero2.json")]

    def start(steps: int) -> list[subprocess.Popen[str]]:
        port = str(free_port())
        return [nodes(recipe, node, *flags, "--steps", str(steps), MASTER_PORT=port) for node in (0, 1)]

    job = start(100_000)
    wait_for(lambda: any(node.poll() is not None for node in job) or '"step": 5' in read(metrics))
    job[1].send_signal(signal.SIGTERM)
    outputs = [node.communicate(timeout=HANG_S)[0] for node in job]
    # Its platform must not take an unfinished run for a finished one.
    assert [node.returncode for node in job] == [0, 143], outputs
    stop = last_event(metrics)
    assert stop["event"] == "stopped"

    total = int(stop["step"]) + 5
    job = start(total)
    outputs = [node.communicate(timeout=HANG_S)[0] for node in job]
    assert [node.returncode for node in job] == [0, 0], outputs
    end = last_event(metrics)
    assert (end["event"], end["step"]) == ("finished", total)
    assert min(read_losses_after(metrics, stop)) == int(stop["step"]) + 1


def test_the_jobset_agrees_with_itself() -> None:
    jobset, container = read_recipe("jobset"), jobset_container()
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    # JobSet names a pod JobSet-job-job index-pod index.JobSet.
    assert given["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}" and spec["network"]["enableDNSHostnames"]
    assert int(given["NUM_NODES"]) == job["completions"] == job["parallelism"]
    assert int(given["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # One pod's failure ends the job; the JobSet starts all pods again. These rules need pods that are never restarted.
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    disruption, exit_codes = job["podFailurePolicy"]["rules"]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert exit_codes["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [143]}
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }


def test_the_sky_task_names_what_skypilot_knows() -> None:
    task = read_recipe("sky")
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    assert set(task["resources"]) == {"accelerators", "use_spot", "disk_size", "job_recovery"}
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143]}
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(ROOT / "scripts" / "cloud" / "sky.yaml")).num_nodes == 2


def test_the_filtered_environment_example_is_what_deepspeed_reads() -> None:
    lines = (ROOT / ".deepspeed_env.example").read_text().splitlines(keepends=True)
    remaining = [line for line in lines if not line.startswith("#") and line.strip()]
    assert len(remaining) > 8
    for line in remaining:
        # As in deepspeed/launcher/runner.py; what is not plain would reach a remote shell.
        key, value = line.split("=", maxsplit=1)
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", key), line
        assert not re.search(r"[^\w@%+=:,./-]", value.strip()), line


def test_cog_names_files_that_exist() -> None:
    config = yaml.safe_load((ROOT / "scripts" / "cloud" / "cog.yaml").read_text())
    for key, name in (("predict", "class Predictor"), ("train", "def train")):
        path, _, symbol = config[key].partition(":")
        assert symbol == name.split()[1]
        assert name in (ROOT / path).read_text()
    assert (ROOT / config["build"]["python_requirements"]).is_file()


def test_the_image_is_pushed_on_tags_only() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "image.yml").read_text())["jobs"]
    assert jobs["build"]["env"]["PUSH"] == "${{ startsWith(github.ref, 'refs/tags/v') }}"
    pushing = [
        step for step in jobs["build"]["steps"] if "login-action" in str(step) or step.get("with", {}).get("push")
    ]
    assert len(pushing) == 2
    assert all(step["if"] == "env.PUSH == 'true'" for step in pushing)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (["start", "finished"], 0),
        (["start", "stopped"], 1),
        (["start", "finished", "start"], 1),
        (["start", "finished", "start", "finished"], 0),
        ([], 1),
    ],
)
def test_a_run_is_finished_by_its_last_word_whatever_else_is_in_its_metrics(
    tmp_path: Path, events: list[str], status: int
) -> None:
    lines = [json.dumps({"kind": "event", "event": event}).encode() for event in events]
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff{\n{"no": json}\n[1]\n{}\n' + b"\n".join(lines) + b'\n{"ki')
    command = [sys.executable, str(SLURM / "is_finished.py"), "--run", str(tmp_path)]
    done = warm_start.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
