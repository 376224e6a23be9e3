"""Some 300 bad inputs to every program: one line that names the value, status 2, nothing written, at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_input.cases import CASES
from tests.bad_input.run_cases import TORCH_STATUS
from tests.conftest import REPOSITORY

STAGE_2 = {"zero_optimization": {"stage": 2}}
_TWO = {"a": 0, "</s>": 1}


def _tokenizer(vocab: dict[str, int]) -> dict[str, object]:
    return {"added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}


FILES = {
    "empty": "",
    "big64.json": json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**30}}),
    "scale.json": json.dumps({**STAGE_2, "fp16": {"enabled": True, "initial_scale_power": 100000}}),
    "clip.json": json.dumps({**STAGE_2, "gradient_clipping": 1e308}),
    "grad_clip.json": json.dumps({**STAGE_2, "grad_clip": 1.0}),
    "bool.yaml": "steps: yes\n",
    "inf.yaml": "lr: .inf\n",
    "iters.yaml": "max_iters: 5\n",
    "dupkebab.yaml": "global-batch-size: 8\nglobal_batch_size: 16\n",
    "nested.yaml": "config: other.yaml\n",
    "hostbig": "localhost slots=" + "9" * 5000 + "\n",
    "hostmany": "localhost slots=100000\n",
    "hostarabic": "localhost slots=٣\n",
    "nul.txt": "abc\0def" * 100,
    **{
        f"models/{name}/{file}": json.dumps(record)
        for name, files in {
            "slow": {"vocab.json": {"a": 0}},
            "beyond": {"tokenizer.json": _tokenizer({"a": 1 << 40})},
            "own_code": {
                "tokenizer.json": _tokenizer(_TWO),
                "tokenizer_config.json": {"auto_map": {"AutoTokenizer": 1}},
            },
            "no_end": {"tokenizer.json": _tokenizer({"a": 0})},
            "two_ends": {
                "tokenizer.json": _tokenizer(_TWO),
                "tokenizer_config.json": {"eos_token": "</s>"},
                "generation_config.json": {"eos_token_id": [1, 0]},
            },
        }.items()
        for file, record in files.items()
    },
    "models/deep/tokenizer.json": "[" * 100_000,
    "models/nan/tokenizer.json": '{"model": {"vocab": {"a": NaN}}}',
    "deep.jsonl": "[" * 100_000 + "]" * 100_000 + "\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_set: Path) -> Path:
    """FILES, text, a prepared set, ds_configs, and things that are no files."""
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"\xe9\xe8" * 100)
    for name in ("texts", "inset", "adir"):
        (folder / name).mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text("hello world\n" * 50)
    shutil.copytree(tiny_set, folder / "set")
    shutil.copytree(tiny_set, folder / "mixed" / "prepared")
    shutil.copytree(REPOSITORY / "ds_configs", folder / "ds_configs")
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "textlink").symlink_to("texts")
    return folder


def as_request(line: str) -> dict:
    words = shlex.split(line.replace("LONG", "x" * 300).replace("NINES", "9" * 5000).replace("$'a\nb'", "'a\nb'"))
    environment = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    program, *argv = words
    if program == "train" and "--data" not in argv and not any(word.startswith("--data=") for word in argv):
        argv += ["--data", "set"]
    return {"program": program, "argv": argv, "env": environment, "time_limit_s": 30.0}


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict]:
    """What each command said, all of them run by one process that forks."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/bad_input/run_cases.py")],
        input=json.dumps([as_request(line) for line, _ in CASES]),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([line for line, _ in CASES], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("line", "said"), CASES, ids=[line[:90] for line, _ in CASES])
def test_one_line_says_what_is_wrong_and_nothing_is_written(
    line: str, said: str | None, answers: dict[str, dict]
) -> None:
    answer = answers[line]
    error = answer["stderr"]
    assert answer["status"] == 2, answer
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1, error
    assert len(error) < 2000
    assert re.search(said or "^error: ", error), error
    assert answer["written"] == []
    if line.split()[0] not in ("llmscale",):
        assert not answer["torch"]


def test_what_the_table_leaves_out_is_accepted(folder: Path) -> None:
    """Or else the lines above would prove nothing."""
    lines = ["train", "train --steps 1_000 --lr 1e-3 --seed 0", "OMP_NUM_THREADS=4,2 CUDA_VISIBLE_DEVICES= train"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/bad_input/run_cases.py")],
        input=json.dumps([as_request(line) for line in lines]),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert [answer["status"] for answer in json.loads(done.stdout)] == [TORCH_STATUS] * 3
