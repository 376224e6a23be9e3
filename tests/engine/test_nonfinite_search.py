"""Run as a script, this file searches in compiled blocks, in a process of its own: pytest's has TORCHDYNAMO_DISABLE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import torch

from llmscale.architecture.shape import build_shape
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.nonfinite_search import NonfiniteParameters, NonfiniteSearch
from llmscale.model.gpt import GPT
from tests.conftest import REPOSITORY

SHAPE = build_shape({"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 100, "seq_len": 16})


def take_step(model: GPT) -> None:
    tokens = torch.arange(2 * 17).view(2, 17)
    model(tokens[:, :-1], tokens[:, 1:]).backward()


def spoil(model: GPT) -> str:
    """The name of the parameter that is infinite from now on."""
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.down.weight").fill_(float("inf"))
    return "blocks.1.mlp.down.weight"


def search(model: GPT, compiler: BlockCompiler | None) -> NonfiniteParameters:
    looking = NonfiniteSearch(SimpleNamespace(module=model), compiler)  # type: ignore[arg-type]
    take_step(model)
    return looking.end()


def test_the_first_parameters_are_those_of_the_module_that_puts_it_out() -> None:
    model = GPT(SHAPE, seed=1)
    assert search(model, None) == NonfiniteParameters((), ())
    name = spoil(model)
    assert search(model, None).forward[0] == name


def test_a_search_that_is_given_up_leaves_no_hook() -> None:
    model, compiler = GPT(SHAPE, seed=1), BlockCompiler("aot_eager")
    looking = NonfiniteSearch(SimpleNamespace(module=model), compiler)  # type: ignore[arg-type]
    assert compiler.is_paused
    looking.close()
    assert not compiler.is_paused
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_compiled_blocks_are_searched_like_others_and_compiled_again_afterwards() -> None:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["forward"][0] == found["spoiled"], found
    assert (found["graphs"], found["is_paused"]) == (1, False)


def main() -> None:
    model, compiler = GPT(SHAPE, seed=1), BlockCompiler("aot_eager")
    compiler.compile_blocks(model, zero_stage=0, checkpointing="none")
    take_step(model)
    name = spoil(model)
    found = search(model, compiler)
    take_step(model)
    values = {"forward": found.forward, "spoiled": name, "graphs": compiler.graphs, "is_paused": compiler.is_paused}
    print(json.dumps(values))


if __name__ == "__main__":
    main()
