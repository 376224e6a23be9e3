"""`llmscale plan`: what a user reads, and how mistakes are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import load_manifest
from llmscale.cli.main import main
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.config.run_flags import keys_asked_by
from llmscale.planning.disk_usage import estimate_disk
from llmscale.training.start import prepare_start


def plan(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    # Text is wrapped; where a line breaks is of no interest.
    return re.sub(r"\n +", " ", capsys.readouterr().out)


def plan_json(capsys: pytest.CaptureFixture[str], words: str) -> dict:
    assert main(["plan", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_chinchillas_budget(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "--flops 5.76e23")
    assert answer["pf_days"] == pytest.approx(6667, abs=0.5)
    assert answer["law"] == "Besiroglu 2024"
    laws = {row["name"]: row for row in answer["laws"]}
    sizes, tokens = laws["Besiroglu 2024"]["num_parameters"], laws["Besiroglu 2024"]["tokens"]
    assert [sizes[key] for key in ("value", "low", "high")] == pytest.approx([72.2e9, 55.4e9, 94.2e9], rel=0.001)
    assert [tokens[key] for key in ("value", "low", "high")] == pytest.approx([1.33e12, 1.02e12, 1.73e12], rel=0.005)
    assert laws["Hoffmann 2022"]["num_parameters"] == pytest.approx(40.3e9, rel=0.002)
    assert laws["Hoffmann 2022"]["tokens"] == pytest.approx(2.38e12, rel=0.003)
    assert laws["Kaplan 2020"]["num_parameters"] == pytest.approx(804e9, rel=0.001)
    assert (answer["shape"]["n_embd"], answer["shape"]["n_embd"] // answer["shape"]["n_head"]) == (9216, 128)
    assert answer["nearest_preset"] == "gpt3-175b"
    out = plan(capsys, "--flops 5.76e23")
    assert re.search(r"\* +Besiroglu 2024 +72\.2B \(55\.4B-94\.2B\) +1\.33T \(1\.02T-1\.73T\)", out)
    assert "differs because it leaves the embeddings" in out
    assert "this is an extrapolation" in out
    assert "--gpu NAME adds hours" in out


def test_experts_are_compared_with_dense_models(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt3-1.3b --no-bias --num-experts 8 --tokens 20B"
    answer = plan_json(capsys, words)
    assert answer["shape"]["num_parameters"] > 3 * answer["shape"]["active_parameters"]
    assert {"Ludziejewski 2025, 1 x experts", "Ludziejewski 2025, 4 x experts"} < {
        row["name"] for row in answer["laws"]
    }
    out = plan(capsys, words).replace("\n", " ")
    assert f"{answer['shape']['active_parameters']:,}" in out and "the same loss after as many tokens" in out


def test_serving_electricity_and_buying(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--model llama3-8b --tokens 160B --gpu h100-80gb --price-per-gpu-hour 2.5 --serve 1000:250 --usd-per-kwh 0.1"
    )
    words += " --buy-usd-per-gpu 35000"
    answer = plan_json(capsys, words)
    run, serving = answer["run"], answer["serving"]
    assert run["electricity_usd_per_gpu_hour"] == pytest.approx(0.1 * run["energy_kwh"] / run["gpu_hours"])
    assert run["owning_usd_per_gpu_hour"] == pytest.approx(35000 / (4 * 8766) + 0.7 * 1.2 * 0.1)
    assert serving["usd_per_day"] == pytest.approx(24 * 2.5 * serving["num_gpus"])
    out = plan(capsys, words)
    assert "requests of 1,000 + 250 tokens on 1 x h100-80gb, 256 at a time: " in out
    assert f"output ${serving['usd_per_million_output_tokens']:.3f}" in out
    assert "; cheaper, if they work more than 41% of that time, than renting at $2.5" in out
    assert plan_json(capsys, "--model gpt2-124m --tokens 1B --gpu l4 --serve 9:9")["serving"]["usd_per_day"] is None


def test_gpt2_on_10b_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "--model gpt2-124m --tokens 10B")
    assert (answer["steps"], answer["tokens_per_step"], answer["global_batch_size"]) == (19_073, 524_288, 512)
    assert (answer["shape"]["seq_len"], answer["nearest_preset"]) == (1024, "gpt2-124m")
    out = plan(capsys, "--model gpt2-124m --tokens 10B")
    assert "10B tokens = 19,073 steps of 524,288 tokens (512 sequences of 1,024)" in out
    assert "that is the preset gpt2-124m" in out
    assert "deepspeed llmscale/train.py --ds ds.json --model gpt2-124m --global-batch-size 512 --steps 19073\n" in out


def test_gpus_that_do_not_divide_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-124m --tokens 10B --gpu a100-80gb --num-gpus 7 --global-batch-size 64"
    assert "accumulation (gradients summed in fp32), fillers 9.4% more work: " in plan(capsys, words)
    assert plan_json(capsys, words)["run"]["filler_share"] == pytest.approx(6 / 64)
    assert "fillers" not in plan(capsys, words.replace("--global-batch-size 64", ""))


def test_1024_a100s_for_33_days_at_1_10(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "--gpu-hours 811,008 --gpu a100-80gb --num-nodes 128 --price-per-gpu-hour 1.10")
    assert answer["run"]["cost_usd"] == pytest.approx(892e3, rel=0.001)
    assert answer["run"]["hours"] == pytest.approx(33 * 24, rel=0.001)


def test_money_buys_hours_and_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--budget-usd 10000 --price-per-gpu-hour 2.5 --gpu h100-80gb --num-nodes 1"
    run = plan_json(capsys, words)["run"]
    assert (run["gpu"], run["gpus_per_node"], run["num_nodes"], run["precision"]) == ("h100-80gb", 8, 1, "bf16")
    assert run["strategy"]["zero_stage"] in (0, 1, 2, 3)
    assert run["micro_batch_size"] * run["gradient_accumulation_steps"] > 1
    assert run["grad_accum_dtype"] == "fp32"
    assert re.search(r"rows?\b", run["why"])
    assert (run["hours"], run["gpu_hours"]) == pytest.approx((500, 4000), rel=0.001)
    assert (run["energy_kwh"], run["pue"], run["cost_usd"]) == pytest.approx((3360, 1.2, 10_000), rel=0.001)
    out = plan(capsys, words)
    assert "GPUs       8 x h100-80gb, bf16" in out
    text = " ".join(out.split()).replace("- ", "-")
    assert re.search(
        r"ZeRO ZeRO stage \d.*micro-batch \d+ x \d+ accumulation \(gradients summed in fp32\): .*rows?\b", text
    )
    assert "time       20.8 days; 4,000 GPU-hours" in out
    assert "energy     3.36 MWh: boards at 700 W, their limit (NVIDIA H100 datasheet (SXM)), PUE 1.2 (assumed)" in out
    assert "cost       $10,000 at $2.5 per GPU-hour" in out
    assert "--gpu h100-80gb --num-gpus 8 --num-nodes 1 --emit ds.json" in out


@pytest.mark.parametrize(
    "gpus",
    [
        "--gpu a100-80gb --num-nodes 2",
        "--gpu a100-80gb --num-nodes 2 --interconnect ethernet-1g",
        "--gpu-memory-gib 40 --bf16-tflops 200",
        "--gpu t4 --num-gpus 4",
    ],
)
def test_the_commands_that_come_next_are_right(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_set: Path, gpus: str
) -> None:
    """What is printed is given to estimate, and to train.py; both agree with the plan."""
    out = plan(capsys, f"--model gpt2-350m --tokens 5B --seq-len 2048 --global-batch-size 128 {gpus}")
    estimate, train = (
        next(line for line in out.splitlines() if line.startswith(word)) for word in ("llmscale estimate", "deepspeed")
    )
    ds = tmp_path / "ds.json"
    assert main(estimate.replace("ds.json", str(ds)).split()[1:]) == 0
    answer = capsys.readouterr().out
    assert train.partition(" --micro-batch-size ")[2] in answer, "the same micro-batch and checkpointing"
    assert f"ZeRO stage {json.loads(ds.read_text())['zero_optimization']['stage']}," in out
    flags = train.replace("ds.json", str(ds)).partition("llmscale/train.py ")[2].split()
    ranks = 16 if "--hostfile HOSTFILE" in train else int(train.split("--num_gpus ")[1].split()[0])
    assert flags[flags.index("--seq-len") + 1] == "2048"
    flags[flags.index("--seq-len") + 1] = "32"  # the tiny set's
    config = parse_run_config([*flags, "--data", str(tiny_set), "--run", str(tmp_path / "run")])
    assert prepare_start(config, ranks).resolved.plan.global_batch_size == 128


def test_muons_states_and_the_losss_chunk_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-124m --tokens 1B --gpu a100-80gb --num-gpus 2"
    adamw, muon = plan_json(capsys, words), plan_json(capsys, f"{words} --optimizer muon")
    assert muon["disk"]["checkpoint_bytes"] < adamw["disk"]["checkpoint_bytes"]
    commands = [line for line in plan(capsys, f"{words} --optimizer muon --loss-chunk-tokens 512").splitlines()[-4:]]
    for program in ("llmscale estimate", "deepspeed"):
        command = next(line for line in commands if line.startswith(program))
        assert "--optimizer muon --loss-chunk-tokens 512" in command


def test_a_card_that_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-124m --gpu-memory-gib 48 --bf16-tflops 150 --num-gpus 1"
    run = plan_json(capsys, words)["run"]
    assert (run["gpu"], run["gpus_per_node"], run["energy_kwh"]) == ("custom", 1, None)
    assert run["gpu_hours"] > 0
    assert "energy" not in plan(capsys, words)


def test_a_large_model_takes_as_many_nodes_as_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json(capsys, "--params 70B --gpu h100-80gb")["run"]["num_nodes"] > 1
    out = plan(capsys, "--params 70B --gpu h100-80gb")
    assert re.search(
        r"GPUs +\d+ nodes x 8 x h100-80gb, bf16 \(the fewest nodes that hold it and finish in 90 days\)", out
    )


def test_total_cost_of_ownership(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--loss 2.2 --inference-tokens 1T --gpu a100-80gb --num-nodes 1 --price-per-gpu-hour 1.1"
    answer = plan_json(capsys, words)
    lifetime = answer["lifetime"]
    assert lifetime["inference_flops"] == pytest.approx(2 * answer["shape"]["num_parameters"] * 1e12)
    assert lifetime["total_flops"] == pytest.approx(answer["flops"] + lifetime["inference_flops"])
    assert lifetime["total_flops"] < lifetime["training_optimal_total_flops"]
    out = plan(capsys, words)
    assert re.search(r"inference +1T tokens: \S+ FLOPs", out)
    assert re.search(r"lifetime +\S+ FLOPs = \$[\d,]+ for training and inference together \d+% less than", out)
    assert "--inference-mfu" in out


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan(capsys, f"--flops 1e21 --plot {tmp_path / 'plan.png'}")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_what_fits_in_no_way_is_status_1_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt3-175b", "--seq-len", "8192", "--gpu", "t4", "--num-nodes", "1"]
    assert main([*words, "--json"]) == 1
    run = json.loads(capsys.readouterr().out)["run"]
    assert re.search(r" needs [\d.,]+ GiB more per GPU. More GPUs alone", run["why"])
    assert (run["strategy"], run["tokens_per_second"]) == (None, None)
    assert main(words) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing fits these GPUs: the row that misses least" in out
    assert "speed not known" in out


def test_offload_says_how_much_host_memory_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--model gpt3-13b --gpu t4 --num-gpus 1 --num-nodes 1")
    parts = re.search(r"host +([\d.]+) GiB of .*: ([\d.]+) GiB of off.*, ([\d.]+) GiB of a .*, and 1 x (4.00) GiB", out)
    assert parts
    memory, *summands = map(float, parts.groups())
    assert memory == pytest.approx(sum(summands), abs=0.2)


def test_it_answers_without_torch(llmscale: Callable) -> None:
    done = llmscale("plan", "--params", "7B", "--gpu", "h100-80gb", "--num-nodes", "1", torch_free=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_checkpoint_takes_what_the_plan_says(trained_run: Path) -> None:
    checkpoint = list_checkpoints(trained_run)[0]
    shape = GPTShape(**json.loads((trained_run / "config.json").read_text())["resolved"]["shape"])
    planned = estimate_disk(shape, 1, 1, RunConfig()).checkpoint_bytes
    # 16 tensors, three states: names and headers are not in the plan.
    assert planned <= load_manifest(checkpoint).num_bytes <= planned + 3 * 20 * 2048


def test_the_printed_command_has_every_key_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "global_batch_size": "64",
        "optimizer": "muon",
        "precision": "fp16",
        "loss_chunk_tokens": "1024",
        "keep_last": "5",
        "keep_every": "100",
        "expert_parallel_size": "2",
    }
    assert given.keys() == set(keys_asked_by("plan")), "a new key of plan is given here too"
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in given.items()]
    out = plan(capsys, f"--model tiny-moe-3m --tokens 1B --gpu h100-80gb --seq-len 512 {' '.join(flags)}")
    (train,) = [line for line in out.splitlines() if "--ds ds.json" in line]
    assert all(flag in train for flag in [*flags, "--model tiny-moe-3m", "--seq-len 512"])
    assert "8 GPUs a node are assumed, where `estimate` assumes 1" in out


def test_several_gpus_are_compared_by_their_prices(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-350m --tokens 5B --gpu rtx4090 a100-80gb --num-gpus 4 --days 20"
    priced = f"{words} --price-per-gpu-hour 0.4 4 --watts 300 350"
    runs = [plan["run"] for plan in plan_json(capsys, priced)["gpus"]]
    assert [run["gpu"] for run in runs] == ["rtx4090", "a100-80gb"]
    assert [run["cost_usd"] for run in runs] == pytest.approx([0.4 * runs[0]["gpu_hours"], 4 * runs[1]["gpu_hours"]])
    assert [run["energy_kwh"] / run["gpu_hours"] for run in runs] == pytest.approx([0.3 * 1.2, 0.35 * 1.2])
    twice = plan_json(capsys, words.replace("rtx4090 a100-80gb", "a100-80gb A100-80GB"))
    assert twice == plan_json(capsys, words.replace("rtx4090 a100-80gb", "a100-80gb"))
    # The one is less expensive, the other faster.
    assert re.search(r"^\* +rtx4090 ", plan(capsys, priced), re.MULTILINE)
    assert re.search(r"^\* +a100-80gb ", plan(capsys, words), re.MULTILINE)
    # Equal ones are one GPU.
    assert plan_json(capsys, words.replace("rtx4090", "a100-80gb"))["run"]["gpu"] == "a100-80gb"


def test_a_deadline_that_is_missed_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt2-124m", "--tokens", "10B", "--gpu", "t4", "--num-nodes", "1", "--num-gpus", "1"]
    assert main([*words, "--days", "2"]) == 1
    text = capsys.readouterr().out
    assert re.match(r"Not in 2 days: 1 x t4 take .*: \d+ nodes finish in 2 days\.\n", text)
    assert re.search(r"That is too long: \d+ nodes finish in 2 days", " ".join(text.split()))
    assert main([*words, "--days", "7"]) == 0


def test_what_cannot_be_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "700B", "--gpu", "rtx4090", "--num-nodes", "1"]) == 1
    assert capsys.readouterr().out.startswith("Nothing fits: ")
    words = "plan --params 70B --gpu rtx4090 a100-80gb --price 0.4 1.5 --days 1"
    assert main(words.split()) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "None of these GPUs can do it in 1 day:"
    assert "finish in 1 day;" in second


def test_the_command_keeps_checkpoints_by_the_hour(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-124m --tokens 10B --gpu a100-80gb --num-nodes 1 --num-gpus 1 --keep-hours 2"
    answer = plan_json(capsys, words)
    flags = plan(capsys, words).splitlines()[-2].split()
    every, saved = (int(flags[flags.index(flag) + 1]) for flag in ("--keep-every", "--save-every"))
    assert every % saved == 0 and saved <= 500
    assert every * answer["run"]["hours"] / answer["steps"] == pytest.approx(2, rel=0.01)
