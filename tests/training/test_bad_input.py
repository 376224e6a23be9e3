"""Every mistake of a user: one line that says what to do, exit status 2, nothing written, torch never imported.

Run as a script, this file calls train.py's main once for each command line on stdin, in a process where importing torch
ends everything, and prints what each of them said.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
STAGE_2 = {"zero_optimization": {"stage": 2}}

FILES = {
    "malformed.json": '{"zero_optimization": {"stage": 2},}',
    "top.json": json.dumps({"zero_optimisation": {"stage": 2}}),
    "nested.json": json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}),
    "deep.json": json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_mem": True}}}),
    "list.json": "[]",
    "batch.json": json.dumps({**STAGE_2, "bf16": {"enabled": True}, "train_batch_size": 9}),
    "key.yaml": "global_batch_sise: 8\n",
    "type.toml": 'steps = "ten"\n',
    "broken.yaml": "lr: [1\n",
    "broken.toml": "lr = = 1\n",
    "run.ini": "lr = 1\n",
    "a_file": "",
}


@dataclass(frozen=True)
class Case:
    """A command line, to which the data set and a new run folder are added, and what must be said of it."""

    flags: tuple[str, ...]
    said: str
    """Regular expression; {tmp} is the folder with FILES."""
    world_size: int = 1


CASES = {
    "flag": Case(("--global-batchsize", "8"), r"unknown argument '--global-batchsize'. Did you mean '--global-batch-"),
    "key": Case(("--config", "{tmp}/key.yaml"), "unknown key 'global_batch_sise'. Did you mean 'global_batch_size'?"),
    "type": Case(("--steps", "ten"), "steps = 'ten': must be a valid integer"),
    "type in a file": Case(("--config", "{tmp}/type.toml"), "steps = 'ten': must be a valid integer"),
    "range": Case(("--dropout", "1.5"), "dropout = '1.5': must be less than 1"),
    "choice": Case(("--schedule", "cos"), "schedule = 'cos': must be 'cosine', 'linear', 'constant' or 'wsd'"),
    "suffix": Case(("--config", "{tmp}/run.ini"), r"run.ini: the suffix says the format, and must be .yaml, .yml or"),
    "no run file": Case(("--config", "{tmp}/none.yaml"), "none.yaml: No such file or directory"),
    "broken YAML": Case(("--config", "{tmp}/broken.yaml"), "broken.yaml is not valid yaml: .*line 2"),
    "broken TOML": Case(("--config", "{tmp}/broken.toml"), "broken.toml is not valid toml: .*line 1"),
    "two units": Case(("--steps", "5", "--tokens", "500"), "steps and tokens say the same thing in other units"),
    "allowed": Case(("--allow-changed", "sed"), "allow_changed = 'sed' is not known. Did you mean 'seed'?"),
    "preset": Case(("--model", "gpt2-124"), "model 'gpt2-124' is not a preset. Did you mean 'gpt2-124m'?"),
    "no data": Case(("--data", "{tmp}/none"), "none does not exist. Make it with `llmscale data prepare --input PATH"),
    "empty data": Case(("--data", "{tmp}/empty"), "empty is empty. Make it with `llmscale data prepare --input PATH"),
    "data is a file": Case(("--data", "{tmp}/a_file"), "a_file is a file; --data takes the folder"),
    "text as data": Case(("--data", "{tmp}"), "is not a prepared dataset: it has no manifest.json. Make it with"),
    "damaged set": Case(("--data", "{tmp}/damaged"), "manifest.json is not JSON"),
    "seq_len": Case(("--seq-len", "64"), "seq_len 64 does not match the data set in .*, whose samples have 32 tokens"),
    "heads": Case(("--n-head", "5"), "n_embd 32 is not divisible by n_head 5. Legal n_head for this width: 1, 2, 4, 8"),
    "world size": Case((), "global_batch_size 8 cannot be divided over 3 ranks. Legal world sizes.*: 1, 2, 4, 8.", 3),
    "micro-batch": Case(("--micro-batch-size", "3"), "micro_batch_size 3 does not divide .* Legal.*: 1, 2, 4.", 2),
    "batch in tokens": Case(("--no-batch", "--global-batch-tokens", "100"), "multiple of seq_len 32. .* 96 or 128"),
    "warm-up": Case(("--steps", "5", "--warmup-steps", "5"), "warmup_steps 5 must be less than the 5 steps"),
    "no ds": Case(("--ds", "ds_configs/zero22.json"), "zero22.json does not exist. Did you mean 'zero2.json'?"),
    "malformed ds": Case(("--ds", "{tmp}/malformed.json"), "malformed.json is not JSON: .* at line 1"),
    "ds is no object": Case(("--ds", "{tmp}/list.json"), "list.json must hold a JSON object"),
    "ds key": Case(("--ds", "{tmp}/top.json"), "'zero_optimisation' is not a key .* Did you mean 'zero_optimization'?"),
    "nested ds key": Case(("--ds", "{tmp}/nested.json"), "'zero_optimization.overlap_com' .* mean 'overlap_comm'?"),
    "deep ds key": Case(("--ds", "{tmp}/deep.json"), "'zero_optimization.offload_param.pin_mem' .* mean 'pin_memory'?"),
    "ds batch": Case(("--ds", "{tmp}/batch.json"), "train_batch_size 9 contradicts the batch plan's 8"),
    "fp16 at stage 0": Case(("--ds", "ds_configs/zero0.json", "--precision", "fp16"), "fp16 does not train at stage 0"),
    "adafactor": Case(("--optimizer", "adafactor"), "'adafactor' cannot run at ZeRO stage 2: .* --optimizer adamw"),
    "run is a file": Case(("--run", "{tmp}/a_file"), "--run .*a_file: .*a_file is a file; name a folder"),
    "run below a file": Case(("--run", "{tmp}/a_file/run"), "--run .*a_file/run: .*a_file is a file; name a folder"),
    "begin over a run": Case(("--run", "{tmp}/old", "--resume", "none"), "--resume none begins .* step-00000002"),
    "weights over a run": Case(("--run", "{tmp}/old", "--init-from", "{tmp}/old"), "--init-from begins a new run, but"),
    "resume from nothing": Case(("--resume", "{tmp}/empty"), "empty has no checkpoints yet. Name a run folder"),
    "weights from nothing": Case(("--init-from", "{tmp}/none"), "none does not exist. Name a run folder"),
    "two beginnings": Case(("--init-from", "{tmp}/old", "--resume", "{tmp}/old"), "--init-from starts at step 0 and"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_set: Path) -> Path:
    """FILES, an empty folder, a set whose manifest is damaged, and a run folder that has a checkpoint."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    shutil.copytree(tiny_set, folder / "damaged")
    (folder / "damaged" / "manifest.json").write_text("{")
    (folder / "old" / "checkpoints" / "step-00000002").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path, tiny_set: Path) -> dict[str, list]:
    """What every command line said: [exit status, stdout, stderr]."""
    requests = []
    for name, case in CASES.items():
        flags = [flag.replace("{tmp}", str(folder)) for flag in case.flags]
        fixed = {"--data": str(tiny_set), "--run": str(folder / "new" / name.replace(" ", "-")), "--model": "tiny-1m"}
        fixed |= {"--n-layer": "2", "--n-head": "2", "--n-embd": "32", "--global-batch-size": "8"}
        if "--no-batch" in flags:
            flags.remove("--no-batch")
            del fixed["--global-batch-size"]
        words = [word for flag, value in fixed.items() if flag not in flags for word in (flag, value)]
        requests.append((name, [*words, *flags], case.world_size))
    blocked = folder / "blocked"
    for library in ("torch", "deepspeed", "streaming"):
        (blocked / library).mkdir(parents=True)
        (blocked / library / "__init__.py").write_text(f"raise SystemExit('{library} was imported')\n")
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": f"{blocked}{os.pathsep}{REPOSITORY}"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(name: str, answers: dict[str, list], folder: Path) -> None:
    status, out, err = answers[name]
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert re.search(CASES[name].said, err), err
    assert not (folder / "new").exists()


def test_without_a_mistake_the_same_command_line_goes_on_to_torch(folder: Path, tiny_set: Path) -> None:
    """Or else the cases above would prove nothing."""
    done = subprocess.run(
        [sys.executable, "llmscale/train.py", "--data", str(tiny_set), "--run", str(folder / "good")],
        env={**os.environ, "PYTHONPATH": str(folder / "blocked")},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, ["torch was imported"])


def test_of_all_ranks_of_a_host_one_speaks(ranks: Callable) -> None:
    job = ranks(["llmscale/train.py", "--stepz", "5"], 2)
    outputs = job.wait()
    assert job.exit_codes == [2, 2]
    assert outputs[0] == "error: unknown argument '--stepz'. Did you mean '--steps'? `train.py --help` lists all.\n"
    assert outputs[1] == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_without_permission(tmp_path: Path, tiny_set: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    done = subprocess.run(
        [sys.executable, "llmscale/train.py", "--data", str(tiny_set), "--run", str(tmp_path / "closed" / "run")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.search("error: --run .*closed/run: .*closed may not be written to; name a folder elsewhere.", done.stderr)


def answer(argv: list[str], world_size: int) -> tuple[int | str | None, str, str]:
    from llmscale.train import main

    os.environ.update(
        RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29712"
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: int | str | None = main(argv)
        except SystemExit as ended:
            status = str(ended)
    return status, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    print(json.dumps({name: answer(argv, world_size) for name, argv, world_size in json.load(sys.stdin)}))
