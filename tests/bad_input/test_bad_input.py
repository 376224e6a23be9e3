"""Some 300 bad inputs to every program: one line that names the value, status 2, nothing written, at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.data.shards.manifest import MANIFEST_NAME, load_manifest
from tests.bad_input.cases import CASES
from tests.bad_input.run_cases import TORCH_STATUS
from tests.conftest import REPOSITORY
from tests.safetensors_files import write_file

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
    "malformed.json": '{"zero_optimization": {"stage": 2},}',
    "many.json": json.dumps({"zero_optimisation": {"stage": 2}, "foo": 1}),
    "top.json": json.dumps({"zero_optimisation": {"stage": 2}}),
    "nested.json": json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}),
    "deep.json": json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_mem": True}}}),
    "list.json": "[]",
    "key.yaml": "global_batch_sise: 8\n",
    "type.toml": 'steps = "ten"\n',
    "broken.yaml": "lr: [1\n",
    "run.ini": "lr = 1\n",
    "bool.yaml": "steps: yes\n",
    "inf.yaml": "lr: .inf\n",
    "iters.yaml": "max_iters: 5\n",
    "dupkebab.yaml": "global-batch-size: 8\nglobal_batch_size: 16\n",
    "nested.yaml": "config: other.yaml\n",
    "hostbig": "localhost slots=" + "9" * 5000 + "\n",
    "onehost": "a slots=1\n",
    "hostmany": "localhost slots=100000\n",
    "hostarabic": "localhost slots=٣\n",
    "nul.txt": "abc\0def" * 100,
    "plain.jsonl": json.dumps({"text": "words " * 20}) + "\n",
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
    for name, eot_token in (("endless", None), ("beyond", 257)):
        shutil.copytree(tiny_set, folder / name)
        manifest = replace(load_manifest(folder / name), eot_token=eot_token)  # type: ignore[arg-type]
        (folder / name / MANIFEST_NAME).write_text(manifest.to_json())
    shutil.copytree(REPOSITORY / "ds_configs", folder / "ds_configs")
    shutil.copytree(tiny_set, folder / "damaged")
    (folder / "damaged" / MANIFEST_NAME).write_text("{")
    (folder / "old" / "checkpoints" / "step-00000002").mkdir(parents=True)
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "textlink").symlink_to("texts")
    make_published_models(folder / "hub")
    return folder


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 260}
_GPT2_SIZES = {
    "wte.weight": [260, 8],
    "wpe.weight": [64, 8],
    "ln_f.weight": [8],
    "ln_f.bias": [8],
    **{f"h.0.ln_{n}.{kind}": [8] for n in (1, 2) for kind in ("weight", "bias")},
    "h.0.attn.c_attn.weight": [8, 24],
    "h.0.attn.c_attn.bias": [24],
    "h.0.attn.c_proj.weight": [8, 8],
    "h.0.attn.c_proj.bias": [8],
    "h.0.mlp.c_fc.weight": [8, 32],
    "h.0.mlp.c_fc.bias": [32],
    "h.0.mlp.c_proj.weight": [32, 8],
    "h.0.mlp.c_proj.bias": [8],
}
GPT2_TENSORS = {f"transformer.{name}": ("F32", size) for name, size in _GPT2_SIZES.items()}


def make_published_models(hub: Path) -> None:
    """Folders of transformers; `hub/good` can be trained, of the others one thing is wrong."""

    def make(name: str, tensors: dict | None = None, **entries: object) -> Path:
        (hub / name).mkdir(parents=True)
        (hub / name / "config.json").write_text(json.dumps({**GPT2, **entries}))
        path = hub / name / "model.safetensors"
        write_file(path, GPT2_TENSORS if tensors is None else tensors)
        return path

    fc = "transformer.h.0.mlp.c_fc.weight"
    make("good")
    make("mamba", model_type="mamba")
    make("coded", auto_map={"AutoModel": "modeling.Model"})
    make("quantised", quantization_config={"bits": 4})
    make("small", vocab_size=100, tensors={**GPT2_TENSORS, "transformer.wte.weight": ("F32", [100, 8])})
    make("short", n_positions=16, tensors={**GPT2_TENSORS, "transformer.wpe.weight": ("F32", [16, 8])})
    make("large", vocab_size=50257, tensors={**GPT2_TENSORS, "transformer.wte.weight": ("F32", [50257, 8])})
    make("missing", {name: tensor for name, tensor in GPT2_TENSORS.items() if name != fc})
    make("int8", {**GPT2_TENSORS, fc: ("I8", [8, 32])})
    make("rope", model_type="llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
         rope_scaling={"rope_type": "dynamic", "factor": 4.0})  # fmt: skip
    (hub / "adapter").mkdir()
    (hub / "adapter" / "adapter_config.json").write_text("{}")
    make("escaping").unlink()
    index = {"weight_map": dict.fromkeys(GPT2_TENSORS, "../good/model.safetensors")}
    (hub / "escaping" / "model.safetensors.index.json").write_text(json.dumps(index))


def as_request(line: str) -> dict:
    words = shlex.split(line.replace("LONG", "x" * 300).replace("NINES", "9" * 5000).replace("$'a\nb'", "'a\nb'"))
    environment = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    program, *argv = words
    if program == "train" and "--data" not in argv and not any(word.startswith("--data=") for word in argv):
        argv += ["--data", "set"]
    return {"program": program, "argv": argv, "env": environment, "time_limit_s": 300.0}


ACCEPTED = (
    "train",
    "train --init-from hf:hub/good",
    "train --model hf:hub/good --n-layer 3",
    "train --steps 1_000 --lr 1e-3 --seed 0",
    "OMP_NUM_THREADS=4,2 CUDA_VISIBLE_DEVICES= train",
)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict]:
    """What each command said, all of them run by one process that forks."""
    lines = [*(line for line, _ in CASES), *ACCEPTED]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/bad_input/run_cases.py")],
        input=json.dumps([as_request(line) for line in lines]),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line[:90] for line, _ in CASES])
def test_one_line_says_what_is_wrong_and_nothing_is_written(
    line: str, message: str | None, answers: dict[str, dict]
) -> None:
    answer = answers[line]
    error = answer["stderr"]
    assert answer["status"] == 2, answer
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1, error
    assert len(error) < 2000
    assert re.search(message or "^error: ", error), error
    assert answer["written"] == []
    if line.split()[0] not in ("llmscale",):
        assert not answer["torch"]


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_the_table_leaves_out_is_accepted(line: str, answers: dict[str, dict]) -> None:
    """Or else the lines above would prove nothing."""
    assert answers[line]["status"] == TORCH_STATUS


def test_of_all_ranks_of_a_host_one_speaks(ranks: Callable) -> None:
    job = ranks(["llmscale/train.py", "--stepz", "5"], 2)
    outputs = job.wait()
    assert job.exit_codes == [2, 2]
    assert outputs[0] == "error: unknown argument '--stepz'. Did you mean '--steps'? `train.py --help all` lists all.\n"
    assert outputs[1] == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_without_permission(tmp_path: Path, tiny_set: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    command = [sys.executable, "llmscale/train.py", "--data", str(tiny_set), "--run", str(tmp_path / "closed" / "run")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search("error: --run .*closed/run: .*closed may not be written to; name a folder elsewhere.", done.stderr)
