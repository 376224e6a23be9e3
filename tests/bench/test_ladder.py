from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.model.gpt import GPT
from scripts.bench.ladder.ladder_gpt import NaiveGPT, Ways
from scripts.bench.ladder.ladder_rungs import FIRST_OF_TRAIN_PY, flags, is_parallel, list_rungs, switches, why_not
from scripts.bench.ladder.ladder_table import compare_memory, judge, row_line
from tests.conftest import REPOSITORY

SHAPE = GPTShape(n_layer=2, n_head=4, n_embd=32, vocab_size=61, seq_len=16, activation="gelu_tanh")
RUNGS = list_rungs(REPOSITORY / "ds_configs")


@pytest.mark.parametrize("number", range(FIRST_OF_TRAIN_PY))
def test_every_lower_rung_is_the_products_model(number: int) -> None:
    """Same weights, same tokens: same loss, and the same gradients of what both have under one name."""
    ways = Ways(**switches(RUNGS, number, set()))
    product = GPT(SHAPE, seed=3)
    naive = NaiveGPT(SHAPE, ways)
    naive.take_weights(product)
    tokens = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(5))
    expected = product(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=ways.bf16):
        loss = naive(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    tolerance = 2e-2 if ways.bf16 else 1e-5
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance / 10 if ways.bf16 else tolerance)
    for name in ("wpe.weight", "blocks.0.attn.proj.weight", "blocks.1.ln_1.bias"):
        mine, theirs = naive.get_parameter(name).grad, product.get_parameter(name).grad
        assert (mine - theirs).norm() < tolerance * theirs.norm()


def test_a_step_changes_the_loss_whatever_the_optimizer_and_the_zeroing() -> None:
    tokens = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(5))
    losses = []
    for ways in (Ways(), Ways(zero_to_none=True), Ways(zero_to_none=True, fused_adamw=True)):
        naive = NaiveGPT(SHAPE, ways)
        naive.take_weights(GPT(SHAPE, seed=3))
        optimizer = naive.build_optimizer(1e-3, is_gpu=False)
        losses.append([naive.train_step(tokens, optimizer).item() for _ in range(3)])
        gradients = [parameter.grad for parameter in naive.parameters()]
        assert all((gradient is None) if ways.zero_to_none else not gradient.any() for gradient in gradients)
    assert losses[0][2] < losses[0][0]
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_each_rung_adds_one_thing() -> None:
    for number in range(1, len(RUNGS)):
        before, now = ({**switches(RUNGS, n, set()), **flags(RUNGS, n, set())} for n in (number - 1, number))
        added = {key: value for key, value in now.items() if before.get(key) != value}
        starts_train_py = number == FIRST_OF_TRAIN_PY
        more_ranks = is_parallel(RUNGS, number) and not is_parallel(RUNGS, number - 1)
        assert len(added) == (0 if starts_train_py or more_ranks else 1), RUNGS[number].name
        assert before.keys() <= now.keys()


def test_what_a_machine_has_not_is_left_out_of_the_rungs_above() -> None:
    left_out = {"gpu", "bf16", "inductor"}
    last = len(RUNGS) - 1
    assert not {"bf16", "reads_loss_every"} & switches(RUNGS, last, left_out).keys()
    assert "--compile" not in flags(RUNGS, last, left_out)
    assert flags(RUNGS, last, left_out)["--ds"].endswith("zero3.json")
    reasons = [why_not(rung, is_gpu=False, world_size=1, precision="bf16") for rung in RUNGS]
    assert sum(reason is not None for reason in reasons) == 4
    assert not any(why_not(rung, is_gpu=True, world_size=2, precision="bf16") for rung in RUNGS)


def test_the_claim_is_judged_by_the_best_rung() -> None:
    rows = [
        {"number": 0, "rung": "naive", "dry_run": {"bytes": 1000}, "memory_bytes": 500, "speed": {"median": 1.0}},
        {"number": 1, "rung": "good", "dry_run": {"bytes": 90}, "memory_bytes": 100, "speed": {"median": 12.0}},
        {"number": 2, "rung": "offload", "dry_run": {"bytes": 200}, "not_here": "no host"},
    ]
    for count in range(1, 4):
        compare_memory(rows[:count])
    claims = judge(rows, is_gpu=False)
    assert (claims["speed"]["rung"], claims["speed"]["met"]) == ("good", True)
    assert claims["memory"]["times"] == pytest.approx(5)
    assert not claims["memory"]["met"]
    assert claims["GPU memory by the dry run"]["met"]
    assert "a GPU: not measured" in claims["speed"]["on"]
    assert "not on this machine: no host" in row_line(rows[2])


@pytest.mark.slow
def test_the_ladder_measures_plain_loops_and_train_py(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.ladder.ladder", "--batch", "1", "--rounds", "1"]
    command += ["--precision", "fp32", "--only", "7", "8", "13", "15", "--json", str(tmp_path / "ladder.json")]
    command += ["--text", str(tmp_path / "ladder.txt"), "--plot", str(tmp_path / "ladder.png")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ladder.json").read_text())["models"]["seed"]
    assert [row["number"] for row in rows] == [0, 7, 8, 13, 15]
    first, chunked, product, sharded, offload = rows
    assert first["first_loss"] == pytest.approx(product["first_loss"], rel=1e-5)
    assert first["first_loss"] == pytest.approx(chunked["first_loss"], rel=1e-5)
    for row in (first, chunked, product, sharded):
        assert row["speed"]["median"] > 0
        assert row["memory_bytes"] > 0
    assert sharded["dry_run"]["ratio"] > product["dry_run"]["ratio"] > 2
    assert "rung" in offload and ("not_here" in offload or "speed" in offload)
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    assert "ten times" in (tmp_path / "ladder.txt").read_text()
