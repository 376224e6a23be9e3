"""Compiled blocks. This file is also the script that compiles, where TORCHDYNAMO_DISABLE is not set."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.loss_settings import LossSettings
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import CompileTuning
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_patches import quiet_libraries
from llmscale.errors import ConfigError
from llmscale.model.attention_context import KVCache
from llmscale.model.gpt import GPT
from llmscale.planning.compilation import CompileBackend
from tests import warm_start
from tests.conftest import REPOSITORY
from tests.engine.test_activation_checkpointing import BLOCKS as CHECKPOINTED

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 300, "seq_len": 32}
BLOCKS: dict[str, dict[str, object]] = {
    "gpt2": {"dropout": 0.1},
    "llama": {**CHECKPOINTED["llama"], "document_end": 3},
    "experts": {
        "n_layer": 3,
        "num_experts": 4,
        "shared_expert_width": 24,
        "expert_width": 40,
        "gated_mlp": True,
        "dense_layers": 1,
        "router_bias": True,
    },
}
STEPS = 3


def run_job(cache: Path, *arguments: str, **variables: str) -> dict:
    """Run this file as a script and return its output."""
    own = {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY)}
    environment = {**os.environ, **own, **variables}
    done = warm_start.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Detected that context_fn" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_one_graph_and_the_losses_of_eager(actual: dict) -> None:
    """Between steps there were validation, with a smaller last batch, and sampling with a cache."""
    assert (actual["graphs"], actual["compiled"]["failure"]) == (actual["kinds"], None)
    assert actual["breaks"] == 0
    assert actual["compiled"]["text"] == actual["eager"]["text"]
    for name in ("losses", "norms", "validation"):
        assert len(actual["eager"][name]) == STEPS
        assert actual["compiled"][name] == pytest.approx(actual["eager"][name], abs=1e-6), name


@pytest.mark.parametrize(("mode", "is_tuned"), [("default", False), ("max-autotune-no-cudagraphs", True)])
def test_the_mode_is_inductors_while_a_graph_is_compiled(
    mode: CompileTuning, is_tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    seen: list[tuple[bool, bool, bool]] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append((config.max_autotune, config.triton.cudagraphs, config.fallback_random))
        return graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compile_graph)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    assert BlockCompiler("inductor", mode)._compile_graph(graph, []) is graph
    assert seen == [(is_tuned, False, True)]
    assert not config.max_autotune


@pytest.mark.parametrize("flags", ["--compile off --compile-mode max-autotune-no-cudagraphs", "--compile-mode quick"])
def test_a_mode_without_effect_or_of_another_name_is_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"has no effect with --compile off|max-autotune-no-cudagraphs"):
        parse_run_config(flags.split())


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Outcomes on a machine without a C++ compiler, which inductor needs and aot_eager does not."""
    names = ("aot_eager/llama/selective", "aot_eager/experts/none", "inductor/gpt2/selective")
    return run_job(tmp_path_factory.mktemp("inductor"), *names, COMPILER="no-such-compiler")


def test_one_graph_whatever_the_blocks_and_what_they_keep(without_compiler: dict) -> None:
    """Document masks, windows, rotary positions, experts; checkpointing in the graph and not."""
    for name in ("aot_eager/llama/selective", "aot_eager/experts/none"):
        assert_one_graph_and_the_losses_of_eager(without_compiler[name])
    # Selective checkpointing saves as much memory of compiled blocks as of eager ones.
    outcome = without_compiler["aot_eager/llama/selective"]
    assert outcome["compiled"]["kept"] <= outcome["eager"]["kept"]


@pytest.mark.slow
def test_inductor_computes_every_kind_of_block_as_eager_does(tmp_path: Path) -> None:
    names = [f"inductor/{block}/{mode}" for block in BLOCKS for mode in ("none", "selective")]
    for name, outcome in run_job(tmp_path, *names).items():
        assert_one_graph_and_the_losses_of_eager(outcome)
        # With dropout and selective checkpointing, inductor keeps a twentieth more on a CPU than eager blocks do.
        most = 1.06 if name == "inductor/gpt2/selective" else 1.0
        assert outcome["compiled"]["kept"] <= most * outcome["eager"]["kept"]


def test_blocks_go_on_eagerly_where_there_is_no_compiler(without_compiler: dict) -> None:
    actual = without_compiler["inductor/gpt2/selective"]
    assert actual["compiled"]["failure"]
    assert "\n" not in actual["compiled"]["failure"]
    assert actual["compiled"]["losses"] == actual["eager"]["losses"]
    assert actual["compiled"]["norms"] == actual["eager"]["norms"]


def main(names: Iterable[str]) -> None:
    """Print the outcome of each BACKEND/BLOCK/MODE."""
    quiet_libraries()
    torch.set_num_threads(1)
    if "COMPILER" in os.environ:
        torch._inductor.config.cpp.cxx = (None, os.environ["COMPILER"])
    print(json.dumps({name: outcome_of(*name.split("/")) for name in names}))  # type: ignore[arg-type]


def outcome_of(backend: CompileBackend, block: str, mode: CheckpointingMode) -> dict[str, object]:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    shape = build_shape({**SIZES, **BLOCKS[block]})
    loss = LossSettings(balance_loss=0.1, router_z_loss=0.01)
    eager = train(GPT(shape, seed=1, checkpoint=build_block_checkpoint(mode, {}), loss=loss), shape)
    model, compiler = GPT(shape, seed=1, checkpoint=build_block_checkpoint(mode, {}), loss=loss), BlockCompiler(backend)
    compiler.compile_blocks(model, zero_stage=0, checkpointing=mode)
    compiled = train(model, shape)
    return {
        "eager": eager,
        "compiled": {**compiled, "failure": compiler.failure, "compile_s": compiler.compile_s},
        "graphs": compiler.graphs,
        "kinds": len({shape.is_sparse(block) for block in range(shape.n_layer)}),
        "breaks": sum(counters["graph_break"].values()),
    }


def train(model: GPT, shape: GPTShape) -> dict[str, object]:
    """Steps with what a run does between them: validation, and a sample that grows token by token."""
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    actual: dict[str, list] = {"losses": [], "norms": [], "validation": [], "text": []}
    for step in range(STEPS):
        tokens = torch.randint(0, shape.vocab_size, (4, shape.seq_len + 1), generator=draw)
        torch.manual_seed(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        actual["losses"].append(loss.item())
        actual["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            actual["validation"].append(sum(model(t[:, :-1], t[:, 1:]).item() for t in (tokens[:2], tokens[3:])))
            actual["text"].append(sample(model, shape))
        model.train()
    return {**actual, "kept": kept_for_backward(model, shape)}


def sample(model: GPT, shape: GPTShape) -> list[int]:
    cache, tokens = KVCache(shape, 1, 12), torch.tensor([[5, 3, 7]])
    text: list[int] = []
    while len(text) < 8:
        tokens = model(tokens, cache=cache)[:, -1:].argmax(-1)
        text.append(int(tokens))
    return text


def kept_for_backward(model: GPT, shape: GPTShape) -> float:
    """Measure what a forward pass keeps for the backward pass, in fp32 elements per position and channel."""
    tokens = torch.zeros(4, shape.seq_len, dtype=torch.long)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss: Tensor = model(tokens, tokens)
    left = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    loss.backward()
    return left / 4 / (tokens.numel() * shape.n_embd)


if __name__ == "__main__":
    main(sys.argv[1:])
