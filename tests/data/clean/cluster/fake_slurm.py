"""Slurm on one machine, as far as a job array needs it: sbatch, squeue, sinfo, scontrol and srun, by this file's name.

$FAKE_SLURM holds a folder for each job. sbatch starts a process for it, which waits for the jobs that it depends on and
runs the script once for each task, as Slurm's own programs do.
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
LIVE = ("PENDING", "RUNNING")


def sbatch(words: list[str]) -> None:
    script = Path(words[-1]).read_text()
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
    flags |= dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(words[:-1])))
    assert flags["partition"] in ("cpu", "large"), "invalid partition specified"
    number = next(number for number in range(1, 10_000) if _make(JOBS / str(number)))
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
    for kind, other in re.findall(r"(afterok|afterany):(\d+)", flags.get("dependency", "")):
        while (state := _state(other)) in LIVE:
            time.sleep(0.05)
        if kind == "afterok" and state != "COMPLETED":
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
    for folder in JOBS.iterdir():
        if _state(folder.name) in LIVE and json.loads((folder / "flags").read_text())["job-name"] == name:
            print(folder.name)


def sinfo(words: list[str]) -> None:
    assert "--format=%R|%P|%l" in words
    print("cpu|cpu*|2:00:00\nlarge|large|infinite")


def scontrol(words: list[str]) -> None:
    assert words[:2] == ["show", "hostnames"]
    print("localhost")


def srun(words: list[str]) -> None:
    os.execvp(words[3], words[3:])  # behind -l -n 1


if __name__ == "__main__":
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if words[:1] == ["run"]:
        name, words = "run", words[1:]
    {"sbatch": sbatch, "run": run, "squeue": squeue, "sinfo": sinfo, "scontrol": scontrol, "srun": srun}[name](words)
