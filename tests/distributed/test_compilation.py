"""Compiled blocks are an implementation detail: every ZeRO stage has the losses, validation and text of eager ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import read_losses, words

STEPS = 6
FLAGS = words(
    f"--steps {STEPS} --warmup-steps 2 --lr 3e-3 --precision fp32 --dropout 0.1 --n-layer 2 --micro-batch-size 2 "
    "--val-every 3 --val-samples 7 --sample-every 3 --save-every 3"
)
#: Steps whose losses and validation agree to the sixth decimal.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def train(
    ranks: Callable,
    train_command: Callable,
    tmp_path: Path,
    inductor_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Path, str]]:
    """`train(name, stage, *flags)`: the run folder and what its ranks printed."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    monkeypatch.setenv("TORCH_LOGS", "recompiles,graph_breaks")

    def run(name: str, stage: int, *flags: str, world_size: int = 2) -> tuple[Path, str]:
        folder = tmp_path / name
        command = train_command("--ds", f"ds_configs/zero{stage}.json", *FLAGS, "--run", str(folder), *flags)
        job = ranks(command, world_size)
        output = "".join(job.wait(600))
        assert job.exit_codes == [0] * world_size, output
        assert "Graph break" not in output, output
        # The second graph of `full` counts as a recompilation; there is no other one.
        more_graphs = output.count("Recompiling function")
        assert more_graphs == (world_size if "blocks: 2 graphs compiled" in output else 0), output
        return folder, output

    return run


def assert_same(run: Path, reference: Path, first_step: int = 1) -> None:
    for kind in ("train", "validation"):
        expected = {step: loss for step, loss in read_losses(reference, kind).items() if step >= first_step}
        assert read_losses(run, kind) == pytest.approx(expected, abs=TOLERANCE)


def samples(output: str) -> list[str]:
    return re.findall(r"sample: (.*)", output)


@pytest.mark.slow
def test_a_run_at_stage_3_goes_on_compiled(train: Callable) -> None:
    selective = ("--activation-checkpointing", "selective")
    eager, message = train("eager", 3, *selective, world_size=1)
    assert "blocks: eager (--compile auto compiles on GPUs" in message
    checkpoint = str(eager / "checkpoints" / "step-00000003")
    compiled, output = train("compiled", 3, *selective, "--resume", checkpoint, "--compile", "on", world_size=1)
    assert_same(compiled, eager, first_step=4)
    assert samples(output) == samples(message)[1:]
    assert "blocks: compiled with inductor (--compile on)" in output
    assert re.search(r"blocks: 1 graph compiled in [\d.]+ s", output)
    assert "changed since the checkpoint: compile off -> inductor" in output


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "graphs"), [("none", "1 graph"), ("selective", "1 graph"), ("full", "2 graphs")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_mode(train: Callable, stage: int, mode: str, graphs: str) -> None:
    """DeepSpeed's checkpointing runs a block twice, the first time without gradients: a graph each."""
    flags = ("--activation-checkpointing", mode)
    eager, message = train("eager", stage, *flags)
    compiled, output = train("compiled", stage, *flags, "--compile", "on")
    assert f"blocks: {graphs} compiled in" in output
    assert_same(compiled, eager)
    assert samples(output) == samples(message)
    resumed, _ = train("resumed", stage, *flags, "--resume", str(compiled / "checkpoints" / "step-00000003"))
    assert_same(resumed, eager, first_step=4)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode"), [(1, "none"), (2, "full"), (3, "selective")])
def test_divided_sequences_exchange_within_the_graph(train: Callable, stage: int, mode: str) -> None:
    flags = ("--activation-checkpointing", mode, "--sequence-parallel-size", "2", "--document-mask")
    eager, _ = train("eager", stage, *flags)
    compiled, output = train("compiled", stage, *flags, "--compile", "on")
    assert re.search("blocks: [12] graphs? compiled in", output)
    assert_same(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_without_a_compiler_a_run_says_so_and_goes_on(
    train: Callable, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    flags = ("--activation-checkpointing", mode)
    eager, _ = train("eager", 3, *flags)
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled, output = train("compiled", 3, *flags, "--compile", "on")
    assert "WARNING: the compiler failed on ranks 0-1, whose blocks run eagerly" in output
    assert_same(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_16_bit_on_a_cpu_is_traced_and_not_compiled(train: Callable, precision: str) -> None:
    flags = ("--activation-checkpointing", "selective", "--precision", precision)
    eager, _ = train("eager", 3, *flags)
    compiled, output = train("compiled", 3, *flags, "--compile", "on")
    assert "blocks: compiled with aot_eager (which saves no time: torch 2.13's inductor fails" in output
    expected = read_losses(eager)
    assert read_losses(compiled) == pytest.approx(expected, rel=2e-3)
