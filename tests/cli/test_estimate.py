"""`llmscale estimate`: what a user reads before renting a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.config.deepspeed.resolve import read_ds_config
from llmscale.config.hardware import INTERCONNECTS
from llmscale.config.hf_model import with_published_shape
from llmscale.config.resolve import SetFacts, resolve_shape
from llmscale.config.run_arguments import parse_run_config
from llmscale.training.start import prepare_start

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("--gpu", "a100-40gb", "--num-gpus", "8")
COMMAND = ("estimate", "--model", "gpt2-1.5b", *MACHINES)
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
NEOX = {"model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
NEOX |= {"intermediate_size": 16384, "vocab_size": 50432}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run(*words)` in this process: status, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        status = main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def read_json(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, dict]]:
    """`read_json(*words)` with --json in this process: status and values."""

    def call(*words: str) -> tuple[int, dict]:
        status, output, _ = run(*words, "--json")
        return status, json.loads(output)

    return call


@pytest.mark.parametrize(
    "words",
    [
        COMMAND,
        (*COMMAND, "--json"),
        (*COMMAND, "--ds", str(ROOT / "ds_configs/zero3.json")),
        ("estimate", "--max-model", *MACHINES, "--activation-checkpointing", "none"),
        ("estimate", "--gpu", "list"),
    ],
)
def test_it_answers_without_torch(llmscale: Run, words: tuple[str, ...]) -> None:
    done = llmscale(*words, torch_free=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("columns", ["", "100"])
def test_the_answer_comes_first_and_few_rows_after_it(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run(*COMMAND)[1].splitlines()
    answer = next(i for i, line in enumerate(lines) if line.startswith("* ZeRO stage 1, "))
    assert "GiB, 12.0 free; 127,616 tokens/s, 53% MFU" in " ".join(" ".join(lines[answer : answer + 2]).split())
    command = next(i for i, line in enumerate(lines) if "llmscale/train.py --ds zero1" in line)
    head = next(i for i, line in enumerate(lines) if " ZeRO offload" in line)
    assert answer < command < head
    assert lines[head].split() == ["ZeRO", "offload", "checkpt", "batch", "total", "fits", "tok/s", "MFU"]
    rows = lines[head + 1 : lines.index("", head)]
    assert [row.strip("* ")[0] for row in rows] == ["0", "1", "2", "3"]
    assert max(map(len, rows)) <= 100
    text = " ".join(" ".join(lines).split())
    assert "--all: 23 more rows" in text and "allocator" not in text


def test_all_rows_and_what_is_assumed_are_flags(run: Callable[..., tuple[int, str, str]]) -> None:
    lines = run("estimate", "--model", "gpt3-6.7b", *MACHINES, "--all", "--why")[1].splitlines()
    rows = [line for line in lines if re.search(r" \d+ x \d+ ", line) and "GiB" not in line]
    assert len(rows) == 27 and any(re.search(r" no, [\d.,]+ over ", line) for line in rows)
    text = " ".join(lines)
    assert "10% that the allocator holds beyond the tensors" in text
    assert "on 51 other published runs within 8 % in the median" in text


def test_the_known_formula_stands_beside_ours(run: Callable[..., tuple[int, str, str]]) -> None:
    """69 GB of activations are what a loop without fused attention needs."""
    words = ("estimate", "--model", "gpt2-124m", "--gpu", "a100-80gb", "--precision", "fp32")
    output = run(*words, "--micro-batch-size", "32", "--explain")[1]
    lines = [line for line in output.splitlines() if re.match(r"[= ] +-?\d+\.\d  ", line)]
    numbers = [float(line[1:10]) for line in lines]
    stream, scores, logits, naive = numbers[:4]
    assert (stream + scores) * 2**30 / 1e9 == pytest.approx(69, abs=0.3)
    assert naive == pytest.approx(stream + scores + logits, abs=0.2)
    assert numbers[-1] == pytest.approx(sum(numbers[3:-1]), abs=0.3)
    assert 0 < numbers[-1] < naive / 4


def test_several_gpus_are_compared_with_their_prices(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    words = ("estimate", "--model", "gpt2-1.5b", "--num-gpus", "8", "--gpu", "a100-40gb", "h100-80gb")
    status, values = read_json(*words, "--price", "1", "2")
    assert status == 0
    assert [row["gpu"] for row in values["gpus"]] == ["a100-40gb", "h100-80gb"]
    for row, price in zip(values["gpus"], (1, 2), strict=True):
        rate = row["throughput"]["tokens_per_second"]
        assert row["usd_per_billion_tokens"] == pytest.approx(8 * price / 3600 / rate * 1e9)
    alone = read_json(*COMMAND, "--price", "1")[1]
    row = alone["rows"][alone["recommended"]["row"]]
    assert row["usd_per_billion_tokens"] == values["gpus"][0]["usd_per_billion_tokens"]
    assert re.search(r"^\* +h100-80gb .* 14.2$", run(*words, "--price", "1", "2")[1], re.MULTILINE)
    for more, words_of_error in (("--price 3 2 1", "3 values for 2 GPUs"), ("--emit ds.json", "exclude each other")):
        status, _, error = run(*words, *more.split())
        assert status == 2 and words_of_error in error


def test_a_gpu_of_which_no_published_run_is_known_is_named(run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("estimate", "--model", "gpt2-124m", "--price-per-gpu-hour", "0.4", "2.5", "--gpu")
    known = run(*words, "h100-80gb", "a100-80gb")[1]
    compared = run(*words, "rtx4090", "h100-80gb")[1]
    alone = run("estimate", "--model", "gpt2-124m", "--gpu", "rtx4090")[1]
    assert "No published run" not in known
    for text in (compared, alone):
        assert "No published run on rtx4090 has checked this estimate" in " ".join(text.split())


def test_the_wide_table_has_a_row_for_every_strategy_and_all_columns_at_any_width(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, output, _ = run(*COMMAND, "--wide")
    assert status == 0
    lines = output.splitlines()
    head = next(line for line in lines if " ZeRO offload" in line)
    for name in ("param", "grad", "optim", "activ", "logits", "comm", "temp", "reserve", "context", "total", "fits"):
        assert name in head.split()
    assert {"host", "NVMe", "tok/s", "MFU", "peak", "batch"} <= set(head.split())
    rows = [line for line in lines if "GiB" not in line and re.search(r" \d+ x \d", line)]
    assert len(rows) == 27
    assert max(len(line) for line in (head, *rows)) <= 160
    (marked,) = [line for line in rows if line.startswith("*")]
    assert " free" in marked


def test_the_numbers_of_a_row_add_up(read_json: Callable[..., tuple[int, dict]]) -> None:
    _, values = read_json(*COMMAND)
    assert len(values["rows"]) == 27
    for row in values["rows"]:
        estimate = row["estimate"]
        assert sum(estimate["peak"].values()) == estimate["allocated_bytes"]
        assert estimate["moments"][estimate["peak_moment"]] == estimate["peak"]
        assert estimate["total_bytes"] == estimate["reserved_bytes"] + estimate["context_bytes"]
        assert row["spare_bytes"] == values["machines"]["gpu_bytes"] - estimate["total_bytes"]
        assert row["fits"] == (row["spare_bytes"] >= 0)
        assert row["host_bytes_per_node"] == 8 * estimate["host_bytes"]
        batch = row["micro_batch_size"] * row["gradient_accumulation_steps"] * 8
        assert batch == values["global_batch_size"] == 1024
    chosen = values["rows"][values["recommended"]["row"]]
    assert chosen["fits"]
    rates = [row["throughput"]["tokens_per_second"] for row in values["rows"] if row["fits"]]
    assert chosen["throughput"]["tokens_per_second"] >= 0.97 * max(rates)


def test_nothing_fits_is_status_1_with_the_cheapest_change(run: Callable[..., tuple[int, str, str]]) -> None:
    status, output, _ = run(
        *("estimate", "--model", "gpt3-13b", "--gpu", "rtx4090", "--num-gpus", "4", "--host-memory-gib", "16")
    )
    assert status == 1
    assert "Nothing fits. The row that misses least needs " in output
    assert "The cheapest change: " in output
    assert " GPUs (--num-nodes " in output


def test_a_ds_config_that_does_not_fit_gets_the_smallest_change(run: Callable[..., tuple[int, str, str]]) -> None:
    zero0 = str(ROOT / "ds_configs/zero0.json")
    status, output, _ = run("estimate", "--model", "gpt3-2.7b", *MACHINES, "--ds", zero0)
    assert status == 1
    assert "The smallest change that fits: ZeRO stage " in output
    status, output, _ = run(*COMMAND, "--micro-batch-size", "512", "--global-batch-size", "4096")
    assert status == 1
    assert "--micro-batch-size " in output
    assert " instead of 512" in output


def test_several_ds_configs_stand_side_by_side_and_are_explained(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    files = [str(ROOT / f"ds_configs/{name}.json") for name in ("zero1", "zero2_offload", "zero3_ckpt")]
    status, values = read_json(*COMMAND, "--ds", *files)
    assert status == 0
    names = ["zero1.json", "zero2_offload.json", "zero3_ckpt.json"]
    assert [row["ds_config"] for row in values["rows"]] == names
    assert [row["strategy"]["zero_stage"] for row in values["rows"]] == [1, 2, 3]
    assert [row["strategy"]["offload_optimizer"] for row in values["rows"]] == ["none", "cpu", "none"]
    assert [row["strategy"]["activation_checkpointing"] for row in values["rows"]] == ["none", "none", "full"]
    assert all("end of backward" in row["estimate"]["moments"] for row in values["rows"])
    output = run(*COMMAND, "--ds", *files)[1]
    for name in names:
        assert any(line.startswith(f"{name}: ZeRO stage ") for line in output.splitlines())
    assert "deepspeed --num_gpus 8 llmscale/train.py --ds " in output


def test_gpus_that_do_not_divide_the_batch(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    words = ("estimate", "--model", "gpt2-124m", "--gpu", "a100-80gb", "--num-gpus", "7", "--global-batch-size", "64")
    status, out, _ = run(*words, "--why")
    assert status == 0
    assert re.search(r"^\* +0 +- +- +2 x 5 +9% ", out, re.MULTILINE)
    assert "fillers: work beyond that of the batch" in out
    _, values = read_json(*words)
    assert {round(row["filler_share"], 4) for row in values["rows"]} == {0.0938}
    _, values = read_json(*words, "--micro-batch-size", "8")
    assert {row["filler_share"] for row in values["rows"]} == {0.75}
    slower = values["rows"][0]["throughput"]["tokens_per_second"]
    assert slower < read_json(*words)[1]["rows"][0]["throughput"]["tokens_per_second"], "fillers are no tokens"
    _, out, _ = run(*COMMAND)
    assert "fillers" not in out


def test_emit_writes_what_train_py_takes(
    run: Callable[..., tuple[int, str, str]],
    read_json: Callable[..., tuple[int, dict]],
    tmp_path: Path,
    tiny_set: Path,
) -> None:
    path = tmp_path / "chosen.json"
    words = ("estimate", "--model", "gpt2-124m", "--gpu", "t4", "--num-gpus", "2", "--seq-len", "32")
    words += ("--vocab-size", "257", "--dropout", "0.1")
    status, output, _ = run(*words, "--emit", str(path))
    assert status == 0
    ds = read_ds_config(path)
    assert ds.warnings == ()
    assert ds.precision == "fp16"  # a T4 has no bf16
    command = next(line for line in output.splitlines() if "llmscale/train.py" in line)
    flags = command.split("llmscale/train.py ")[1].split()
    prepared = prepare_start(parse_run_config([*flags, "--data", str(tiny_set), "--run", str(tmp_path / "run")]), 2)
    _, values = read_json(*words)
    row, resolved = values["rows"][values["recommended"]["row"]], prepared.resolved
    assert resolved.plan.micro_batch_size == row["micro_batch_size"]
    assert resolved.plan.gradient_accumulation_steps == row["gradient_accumulation_steps"]
    assert resolved.shape.dropout == 0.1
    assert resolved.zero_stage == row["strategy"]["zero_stage"]
    assert resolved.checkpointing == row["strategy"]["activation_checkpointing"]


def test_emit_does_not_overwrite(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "chosen.json"
    path.write_text("mine")
    status, output, error = run(*COMMAND, "--emit", str(path))
    assert (status, output) == (2, "")
    assert "exists already" in error
    assert path.read_text() == "mine"
    assert run(*COMMAND, "--emit", str(path), "--force")[0] == 0
    assert json.loads(path.read_text())["zero_optimization"]["stage"] in (0, 1, 2, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["chosen.json"]


def test_selective_checkpointing_is_a_flag_and_full_is_in_the_file(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for mode, in_file in (("selective", False), ("full", True), ("none", False)):
        path = tmp_path / f"{mode}.json"
        _, output, _ = run(*COMMAND, "--activation-checkpointing", mode, "--emit", str(path))
        assert ("activation_checkpointing" in json.loads(path.read_text())) == in_file
        assert ("--activation-checkpointing selective" in output) == (mode == "selective")


@pytest.mark.parametrize(
    ("ds", "given", "repeated"),
    [
        ("zero2", "full", True),
        ("zero2", "selective", True),
        ("zero2_ckpt", "full", False),  # its section says so
        ("zero2_ckpt", "none", True),
    ],
)
def test_the_command_repeats_what_the_ds_config_does_not_say(
    run: Callable[..., tuple[int, str, str]], ds: str, given: str, repeated: bool
) -> None:
    flags = ("--activation-checkpointing", given, "--precision", "fp32")
    _, output, _ = run(*COMMAND, "--ds", f"ds_configs/{ds}.json", *flags)
    command = next(line for line in output.splitlines() if "llmscale/train.py" in line)
    assert (f"--activation-checkpointing {given}" in command) == repeated
    assert "--precision fp32" in command


def test_nothing_is_emitted_when_nothing_fits(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "chosen.json"
    status, _, _ = run(
        *("estimate", "--model", "gpt3-13b", "--gpu", "t4", "--host-memory-gib", "16", "--emit", str(path))
    )
    assert status == 1
    assert not path.exists()


def test_the_largest_model_of_each_strategy(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    words = ("estimate", "--max-model", *MACHINES, "--activation-checkpointing", "full")
    status, values = read_json(*words)
    models = values["largest_models"]
    assert status == 0
    assert len(models) == 9
    assert {model["strategy"]["activation_checkpointing"] for model in models} == {"full"}
    largest = max(model["num_parameters"] for model in models)
    marked = [line for line in run(*words)[1].splitlines() if line.startswith("*")]
    assert len(marked) == [model["num_parameters"] for model in models].count(largest)
    assert all(model["total_bytes"] <= 39.25 * 2**30 for model in models)


def test_a_gpu_that_is_not_in_the_table(read_json: Callable[..., tuple[int, dict]]) -> None:
    _, values = read_json("estimate", "--model", "gpt2-124m", "--gpu-memory-gib", "48", "--bf16-tflops", "200")
    assert values["machines"]["gpu_bytes"] == 48 * 2**30
    assert values["gpu"]["dense_16bit_flops"] == 200e12


def test_host_memory_rules_rows_out(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    words = (*COMMAND, "--ds", str(ROOT / "ds_configs/zero2_offload.json"), "--host-memory-gib")
    assert read_json(*words, "512")[0] == 0
    status, values = read_json(*words, "8")
    (row,) = values["rows"]
    assert (status, row["fits"], values["recommended"]) == (1, False, None)
    assert row["spare_bytes"] >= 0
    assert row["host_bytes_per_node"] > 8 * 2**30
    assert "no, host " in run(*words, "8")[1]


def test_a_transformers_model_is_estimated_as_ours(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]], tmp_path: Path
) -> None:
    """Of a vocabulary that is no multiple of 128."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 128_200}))
    words = (*MACHINES, "--seq-len", "2048", "--global-batch-size", "64", "--activation-checkpointing", "full")
    by_hf, by_model = (
        read_json("estimate", *model, *words)
        for model in (("--hf", str(tmp_path)), ("--model", "llama3-8b", "--vocab-size", "128200", "--norm-eps", "1e-6"))
    )
    sizes = {key: value for key, value in by_hf[1]["shape"].items() if key != "rope_theta"}
    assert sizes == {key: by_model[1]["shape"][key] for key in sizes}
    assert by_hf[1]["rows"] == by_model[1]["rows"]
    output = run("estimate", "--hf", str(tmp_path), *words)[1]
    assert "its table of 128,200 rows is padded to 128,256 here" in output


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_a_transformers_model_that_is_not_ours_is_simulated(llmscale: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEOX | SMALL))
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    words = ("estimate", "--hf", str(tmp_path), *MACHINES, "--seq-len", "64", "--ds", str(tmp_path / "mine.json"))
    done = llmscale(*words)
    assert done.returncode == 0, done.stderr
    assert "166,080 parameters (gpt_neox), sequences of 64" in done.stdout
    assert "* mine.json: ZeRO stage 2, micro-batch 1 x 2: " in done.stdout
    assert "only row that fits" in done.stdout
    assert "transformers' own, with its default attention" in " ".join(done.stdout.split())


def test_flags_of_formulas_have_no_effect_on_a_simulated_model(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    hf = ("--hf", str(tmp_path))
    module = ("--module", "mine.py:build", "--batch", "mine.py:batch")
    for words, expected in (
        ((*hf, "--n-layer", "3"), "--n-layer has no effect with --hf"),
        ((*hf, "--dry-run"), "--dry-run has no effect with --hf"),
        ((*hf, "--activation-checkpointing", "selective"), "Use full or none."),
        ((*module, "--seq-len", "64"), "--seq-len has no effect with --module mine.py:build"),
        ((*module, "--model", "gpt2-124m"), "--module and --model exclude each other"),
        (module[:2], "--module mine.py:build needs --batch FILE:FUNCTION"),
        ((*module[2:], "--model", "gpt2-124m"), "--batch needs --module"),
    ):
        status, _, error = run("estimate", *words, *MACHINES)
        assert status == 2 and expected in error, error


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x).square().mean()

def build():
    print("hello")
    return Net()

def batch():
    return {"x": torch.zeros(4, 64)}

def broken():
    raise ValueError("two\\nlines")

number = 3
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_a_module_of_ones_own_is_simulated(llmscale: Run, tmp_path: Path) -> None:
    """What it prints is not in the answer."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    build, batch = (f"{tmp_path}/mine.py:{name}" for name in ("build", "batch"))
    words = ("estimate", "--module", build, "--batch", batch, *MACHINES, "--ds", str(tmp_path / "mine.json"))
    done = llmscale(*words, "--json", "--global-batch-size", "96")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["micro_batch_size"], row["micro_steps"], row["fits"]) == (4, 3, True)
    assert row["strategy"]["zero_stage"] == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_every_stage_and_offload_of_a_module_is_a_row() -> None:
    import torch

    from llmscale import api
    from tests.own_module import LENGTH, Net

    tokens = torch.zeros(4, LENGTH, dtype=torch.long)
    answer = api.estimate_module(Net, (tokens, tokens), gpu="a100-80gb", num_gpus=8)
    rows = [(row["strategy"]["zero_stage"], row["strategy"]["offload_optimizer"]) for row in answer["rows"]]
    assert rows == [(0, "none"), (1, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "cpu")]
    assert answer["recommended"]["row"] == 0


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        ("mine.py:buil", "mine.py:batch", r"has no function 'buil'\. Did you mean 'build'\?"),
        ("mine.py:number", "mine.py:batch", r"has no function 'number'"),
        ("none.py:build", "mine.py:batch", r"the file .*none\.py does not exist"),
        ("mine.py", "mine.py:batch", r"must be a file and a function in it, such as my_model\.py:build"),
        ("mine.py:build", "mine.py:broken", r"--batch .*mine\.py:broken raised ValueError: two lines$"),
        ("mine.py:build", "mine.py:build", r"has the type Net: it must be a dict"),
        ("bad.py:build", "mine.py:batch", r"--module .*bad\.py raised ModuleNotFoundError: No module named 'nothing'$"),
    ],
)
def test_functions_that_are_not_there_are_one_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, module: str, batch: str, expected: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "bad.py").write_text("import nothing")
    words = ("--module", f"{tmp_path}/{module}", "--batch", f"{tmp_path}/{batch}")
    status, _, error = run("estimate", *words, *MACHINES)
    assert status == 2
    assert re.search(expected, error.strip()), error


def test_the_command_builds_the_shape_that_was_estimated(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]], tmp_path: Path
) -> None:
    """Also of a published model, on data whose tokenizer has fewer tokens than were asked for."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ("--model", f"hf:{tmp_path}", "--vocab-size", "32000", "--seq-len", "2048", "--document-mask")
    words = ("estimate", *given, *MACHINES, "--ds", str(ROOT / "ds_configs/zero3_offload.json"))
    command = next(line for line in run(*words)[1].splitlines() if "llmscale/train.py" in line)
    config = parse_run_config(command.split("llmscale/train.py ")[1].split())
    shape = resolve_shape(with_published_shape(config, None), SetFacts(31_000, 2048, 100, 0))
    assert asdict(shape) == {key: value for key, value in read_json(*words)[1]["shape"].items() if key in asdict(shape)}


def test_a_block_of_no_family_needs_no_torch(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("torch", "deepspeed"):
        monkeypatch.setitem(sys.modules, missing, None)
    for words in (
        ("estimate", "--model", "gpt2-124m", "--norm", "rmsnorm", *MACHINES),
        ("plan", "--model", "gpt2-124m", "--norm", "rmsnorm", "--tokens", "1B", *MACHINES),
        ("estimate", "--max-model", "--model", "gpt2-124m", "--norm", "rmsnorm", *MACHINES),
    ):
        assert run(*words)[0] == 0


def test_the_largest_model_of_a_family_is_scaled_by_its_presets(run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("estimate", "--max-model", *MACHINES, "--activation-checkpointing", "full")
    output = run(*words, "--model", "llama3-8b")[1]
    assert "llama3-3b" in output
    assert "gpt3" not in output.lower() and "gpt-3" not in output.lower()
    assert "blocks are gpt-modern-124m's" in run(*words, "--model", "gpt-modern-124m")[1]


def test_the_picture_has_the_rows_of_the_answer_and_ends_near_the_gpus_memory(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from llmscale.report import planning_plots
    from llmscale.report.save_figure import save_figure

    path, drawn = tmp_path / "memory.png", []

    def save(figure, path: Path) -> None:  # type: ignore[no-untyped-def]
        (axes,) = figure.axes
        drawn.append((len(axes.get_yticks()), axes.get_xlim()[1], {text.get_text() for text in axes.texts}))
        save_figure(figure, path)

    monkeypatch.setattr(planning_plots, "save_figure", save)
    words = ("estimate", "--model", "gpt3-13b", "--gpu", "a100-40gb", "--num-gpus", "4", "--plot", str(path))
    for flags in ((), ("--all",)):
        assert run(*words, *flags)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    (few, few_end, _), (everything, end, numbers) = drawn
    assert 3 <= few <= 5 < everything == 27
    assert few_end == end < 1.25 * 39.25
    assert "264.4 »" in numbers


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_dry_run_stands_beside_the_closed_form(llmscale: Run) -> None:
    words = ("estimate", "--model", "tiny-1m", *MACHINES, "--ds", str(ROOT / "ds_configs/zero2.json"), "--dry-run")
    done = llmscale(*words, "--json", "--seq-len", "64", "--global-batch-size", "64")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    (simulated,) = values["dry_runs"]
    for phase in ("forward", "backward", "step"):
        counted, calculated = (sum(simulated["phases"][phase][by].values()) for by in ("dry_run", "closed_form"))
        assert calculated == pytest.approx(counted, rel=0.03)


def test_bf16_in_a_file_on_a_card_without_it(run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("estimate", "--model", "gpt2-124m", "--gpu", "t4", "--ds")
    status, _, error = run(*words, str(ROOT / "ds_configs/zero2.json"))
    assert status == 2
    assert "zero2.json: a t4 has no bf16 arithmetic. Use fp16" in error
    assert run(*words, str(ROOT / "ds_configs/zero2_fp16.json"))[0] == 0


def test_which_stage_for_which_network(run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--model", "gpt3-13b", "--gpu", "h100-80gb", "--num-gpus", "8", "--num-nodes", "4")
    status, output, _ = run("estimate", *words, "--interconnect", "list", "--json")
    assert status == 0
    rates = json.loads(output)["tokens_per_second"]
    assert set(rates) == {interconnect.name for interconnect in INTERCONNECTS}
    for name in ("ib-100g", "ethernet-1g"):
        status, output, _ = run("estimate", *words, "--interconnect", name, "--json")
        rows = json.loads(output)["rows"]
        best = max(row["throughput"]["tokens_per_second"] for row in rows if row["fits"])
        assert max(rates[name].values()) == pytest.approx(best)
    # The slower the network, the more it pays to gather within nodes.
    gains = [rates[name]["3 hpZ"] / rates[name]["3"] for name in ("ib-800g", "ib-100g", "ethernet-25g")]
    assert 1 < gains[0] < gains[1] < gains[2]


def test_muons_and_adafactors_states_are_smaller(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    flags = (*COMMAND, "--ds", "zero0", "--micro-batch-size", "1")
    values = {name: read_json(*flags, "--optimizer", name)[1]["rows"][0] for name in ("adamw", "muon", "adafactor")}
    held = {name: row["estimate"]["moments"]["forward"]["optimizer_bytes"] for name, row in values.items()}
    assert held["adamw"] - held["muon"] == pytest.approx(4 * 48 * 12 * 1600**2, rel=1e-3)
    assert held["adamw"] - held["adafactor"] == pytest.approx(8 * 48 * 12 * 1600**2, rel=0.06)
    rows = read_json(*COMMAND, "--optimizer", "adafactor")[1]["rows"]
    assert {row["strategy"]["zero_stage"] for row in rows} == {0}
    words = ("estimate", "--model", "gpt2-124m", "--optimizer", "adafactor", "--gpu")
    for refused in (("a100-40gb", "--ds", "zero2"), ("t4",)):
        status, _, error = run(*words, *refused)
        assert status == 2 and "Use --optimizer adamw" in error


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--model gpt2-1.5b --gpu a100-40gb --num-gpus 8 --interconnect list", 2),
        ("--max-seq-len --model llama3-8b --gpu h100-80gb --activation-checkpointing full --ds zero0", 1),
        ("--max-model --gpu-memory-gib 1 --bf16-tflops 9 --activation-checkpointing none", 1),
    ],
)
def test_what_has_no_answer_is_a_status(run: Callable[..., tuple[int, str, str]], words: str, status: int) -> None:
    assert run("estimate", *words.split())[0] == status


def test_what_a_ds_config_a_preset_and_an_old_gpu_decide(
    read_json: Callable[..., tuple[int, dict]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}))
    words = (
        "estimate",
        "--model",
        "llama3-1b",
        "--seq-len",
        "2048",
        "--precision",
        "fp16",
        "--global-batch-size",
        "64",
    )
    words += ("--ds", str(path))
    old, new = (read_json(*words, "--gpu", gpu)[1] for gpu in ("v100-32gb", "a100-40gb"))
    assert new["shape"]["vocab_size"] == 128_256
    assert new["rows"][0]["micro_batch_size"] == 2
    # Before Ampere the kernel takes repeated keys and values.
    before, after = (values["rows"][0]["estimate"]["moments"]["block backward"] for values in (old, new))
    assert before["activations_bytes"] > after["activations_bytes"]


LONGEST = ("estimate", "--max-seq-len", "--model", "llama3-8b", "--gpu", "h100-80gb")


def test_the_longest_sequences_are_in_the_json_as_in_the_table(
    run: Callable[..., tuple[int, str, str]], read_json: Callable[..., tuple[int, dict]]
) -> None:
    status, values = read_json(*LONGEST)
    assert status == 0
    assert values["shape"]["n_layer"] == 32 and values["tokens_per_second"].keys() == {"1"}
    rows = values["longest"]
    assert all(row["seq_len"].keys() == {"1"} for row in rows)
    lengths = [row["seq_len"]["1"] or 0 for row in rows]
    best = rows[lengths.index(max(lengths))]
    assert best["cpu_checkpointing"] and best["strategy"]["zero_stage"] == 3
    status, output, _ = run(*LONGEST)
    assert status == 0
    assert f"*{max(lengths):,}" in output
    table = [line for line in output.splitlines() if line.startswith("   ") and line.strip()[0] in "0123"]
    assert [
        int(line.split()[-1].strip("*").replace(",", "").replace("-", "0")) for line in table[: len(rows)]
    ] == lengths
