"""The dry run as a function: its result, what it refuses, and that it restores the process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm_start

ROOT = Path(__file__).resolve().parent.parent.parent

PRELUDE = """
import gc, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.resolve import resolve_step
from llmscale.architecture.shape import GPTShape
from llmscale.dry_run.engine import dry_run
from llmscale.errors import ConfigError

# Dry runs collect garbage, and need not look at what was imported.
gc.freeze()
SMALL = GPTShape(n_layer=1, n_head=2, n_embd=64, vocab_size=100, seq_len=32)
SHAPE = GPTShape(n_layer=2, n_head=4, n_embd=128, vocab_size=500, seq_len=32)

def run(stage, *, ranks=4, accumulation=1, shape=SHAPE, checkpointing="none", section=None, compiler=None, **zero):
    plan = BatchPlan(2 * accumulation * ranks, 2, accumulation, ParallelLayout(ranks), shape.seq_len)
    config = {"zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": True}}
    if section is not None:
        config["activation_checkpointing"] = section
    return dry_run(resolve_step(parse_ds_config(config, "test"), shape, plan, checkpointing), compiler=compiler)

def numbers(result):
    return [result.resident.as_dict(), result.forward.as_dict(), result.backward.as_dict(), result.step.as_dict(),
            result.host_bytes]
"""


def in_a_process(code: str, **variables: str) -> object:
    """Run code after PRELUDE in a process of its own; return the JSON that it prints last."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = warm_start.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_process_is_as_before_and_a_second_run_says_the_same() -> None:
    """Stages 3, 2, 3 with checkpointing: each changes process-wide state in DeepSpeed, which is restored."""
    before, after, first, second, real = in_a_process("""
import deepspeed
from deepspeed.accelerator import get_accelerator

def state():
    return [dist.is_initialized(), deepspeed.comm.is_initialized(), torch.nn.functional.linear.__module__,
            torch.nn.Module._apply.__module__, torch.tensor.__module__ if hasattr(torch.tensor, "__module__") else "",
            get_accelerator().current_device_name(), deepspeed.checkpointing.is_configured(),
            sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))]

before = state()
first = numbers(run(3, shape=SMALL, checkpointing="full"))
run(2, shape=SMALL, accumulation=2)
second = numbers(run(3, shape=SMALL, checkpointing="full"))
layer = torch.nn.Linear(3, 3)
layer(torch.ones(2, 3)).sum().backward()
print(json.dumps([before, state(), first, second, float(layer.weight.grad.sum())]))
""")
    assert before == after
    assert first == second
    assert real == 18.0


def test_recomputation_trades_activations_for_work() -> None:
    none, selective, full = in_a_process("""
results = [run(2, shape=SMALL, checkpointing=mode) for mode in ("none", "selective", "full")]
print(json.dumps([result.forward.activations_bytes for result in results]))
""")
    assert none > selective > full > 0


def test_one_micro_step_keeps_no_gradients_in_fp32_on_the_gpu_when_the_host_has_the_optimizer() -> None:
    one, two, parameters = in_a_process("""
shape = GPTShape(n_layer=4, n_head=2, n_embd=256, vocab_size=100, seq_len=32)
offload = {"device": "cpu"}
results = [run(2, ranks=1, shape=shape, accumulation=steps, offload_optimizer=offload) for steps in (1, 2)]
print(json.dumps([*(result.step.total_bytes for result in results), shape.num_parameters]))
""")
    assert one < 2.5 * parameters < 6 * parameters <= two


def test_more_micro_steps_than_two_allocate_nothing_else() -> None:
    two, many = in_a_process("""
print(json.dumps([numbers(run(2, shape=SMALL, accumulation=accumulation)) for accumulation in (2, 4)]))
""")
    assert two == many


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            'run(3, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"})',
            "a dry run cannot simulate offload to NVMe",
        ),
        (
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); run(2)",
            "needs a process of its own",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(code: str, message: str) -> None:
    error_text = in_a_process(f"""
try:
    {code}
except ConfigError as error:
    print(json.dumps(str(error)))
""")
    assert isinstance(error_text, str)
    assert message in error_text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("stage", range(4))
def test_compiled_blocks_never_need_more(stage: int, mode: str) -> None:
    """Run operator by operator, without inductor's fusion; at stage 3 blocks are gathered as one module."""
    eager, compiled, failure = in_a_process(
        f"""
from llmscale.engine.compilation import BlockCompiler
compiler = BlockCompiler("aot_eager")
results = [run({stage}, checkpointing="{mode}"), run({stage}, checkpointing="{mode}", compiler=compiler)]
totals = [[part.total_bytes for part in (r.resident, r.forward, r.backward, r.step)] for r in results]
assert compiler.graphs == {2 if mode == "full" else 1}
print(json.dumps([*totals, compiler.failure]))
""",
        TORCHDYNAMO_DISABLE="0",
    )
    assert failure is None
    assert all(more <= less for more, less in zip(compiled, eager, strict=True)), (eager, compiled)
