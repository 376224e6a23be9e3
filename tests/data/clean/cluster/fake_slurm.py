"""Slurm on one machine, as far as a job array needs it: sbatch, squeue, sinfo, scontrol and srun, by this file's name.

$FAKE_SLURM holds a folder for each job. sbatch starts a process for it, which waits for the jobs that it depends on and
runs the script once for each task, as Slurm's own programs do. sbatch refuses the job whose number is in `refused`
there, once; where there are `tasks`, srun runs them in the place of datatrove's: one of these, each a line of Python.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

JOBS = Path(os.environ.get("FAKE_SLURM", "."))
#: The longest that `tasks` may be sent in.
ARRAY_SIZE = 2
LIVE = {"PENDING", "RUNNING"}


def sbatch(words: list[str]) -> None:
    script = Path(words[-1]).read_text()
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
    flags |= dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(words[:-1])))
    assert flags["partition"] in ("cpu", "large"), "invalid partition specified"
    number = next(number for number in range(1, 10_000) if _make(JOBS / str(number)))
    if (JOBS / "refused").exists() and (JOBS / "refused").read_text() == str(number):
        (JOBS / str(number)).rmdir()
        (JOBS / "refused").unlink()
        sys.exit("job violates accounting policy")
    folder = JOBS / str(number)
    (folder / "script").write_text(script)
    (folder / "flags").write_text(json.dumps(flags))
    (folder / "state").write_text("PENDING")
    environment = dict(word.split("=", 1) for word in flags["export"].split(",")[1:])
    subprocess.Popen(
        [sys.executable, __file__, "run", str(number)],
        env={**os.environ, **environment},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(f"Submitted batch job {number}")


def _make(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def run(words: list[str]) -> None:
    number = words[0]
    folder = JOBS / number
    flags = json.loads((folder / "flags").read_text())
    for kind, others in re.findall(r"(afterok|afterany):([\d:]+)", flags.get("dependency", "")):
        while LIVE & (states := {_state(other) for other in others.split(":")}):
            time.sleep(0.05)
        if kind == "afterok" and states != {"COMPLETED"}:
            assert flags["kill-on-invalid-dep"] == "yes"
            (folder / "state").write_text("CANCELLED")
            return
    (folder / "state").write_text("RUNNING")
    last = int(flags["array"].partition("%")[0].partition("-")[2])
    failed = False
    for task in range(last + 1):
        environment = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": number, "SLURM_NODELIST": "here"}
        with open(flags["output"].replace("%A", number).replace("%a", str(task)), "wb") as output:
            done = subprocess.run(
                ["bash", str(folder / "script")], env={**os.environ, **environment}, stdout=output, stderr=output
            )
        failed |= done.returncode != 0
    (folder / "state").write_text("FAILED" if failed else "COMPLETED")


def _state(number: str) -> str:
    return (JOBS / number / "state").read_text()


def squeue(words: list[str]) -> None:
    [name] = [word.partition("=")[2] for word in words if word.startswith("--name=")]
    for folder in JOBS.glob("[0-9]*"):
        if _state(folder.name) in LIVE and json.loads((folder / "flags").read_text())["job-name"] == name:
            print(folder.name)


def sinfo(words: list[str]) -> None:
    assert "--format=%R|%P|%l" in words
    print("cpu|cpu*|2:00:00\nlarge|large|infinite")


def scontrol(words: list[str]) -> None:
    assert words[:2] == ["show", "hostnames"]
    print("localhost")


def srun(words: list[str]) -> None:
    if not (JOBS / "tasks").exists():
        os.execvp(words[3], words[3:])  # behind -l -n 1
    logs = Path(words[4]).parent
    place = int(os.environ["SLURM_ARRAY_TASK_ID"]) + ARRAY_SIZE * int(os.environ["RUN_OFFSET"])
    tasks = json.loads((logs / "ranks_to_run.json").read_text())
    if place >= len(tasks):
        return
    task = tasks[place]
    exec((JOBS / "tasks").read_text(), {"stage": logs.name, "task": task, "files": logs.parents[1], "time": time})
    (logs / "completions").mkdir(exist_ok=True)
    (logs / "completions" / f"{task:05}").touch()


if __name__ == "__main__":
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if words[:1] == ["run"]:
        name, words = "run", words[1:]
    {"sbatch": sbatch, "run": run, "squeue": squeue, "sinfo": sinfo, "scontrol": scontrol, "srun": srun}[name](words)
