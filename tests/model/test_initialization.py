"""Run as a script, this file is one rank of the zero.Init test."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.model.gpt import GPT
from llmscale.model.layers import CHUNK_ELEMENTS, fill_normal_
from tests.rank_end import end_rank

SHAPE = GPTShape(n_layer=8, n_head=4, n_embd=64, vocab_size=300, seq_len=32)
LLAMA = GPTShape(
    8,
    4,
    64,
    300,
    32,
    "silu",
    norm="rmsnorm",
    bias=False,
    positions="rotary",
    gated_mlp=True,
    n_kv_head=2,
    mlp_width=90,
    qk_norm="width",
    tied=False,
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = GPT(SHAPE, seed=7).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second, other = GPT(SHAPE, seed=7).state_dict(), GPT(SHAPE, seed=8).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


def test_no_two_weights_are_alike() -> None:
    state = GPT(SHAPE, seed=7).state_dict()
    heads = [tuple(tensor.flatten()[:4].tolist()) for tensor in state.values() if tensor.dim() == 2]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt2", "llama"])
def test_weights_are_gpt2s(shape: GPTShape) -> None:
    for name, tensor in GPT(shape, seed=0).state_dict().items():
        if tensor.dim() == 2:
            residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(16) if residual else 0.02
            assert tensor.std().item() == pytest.approx(std, rel=0.08), name
            assert abs(tensor.mean().item()) < 0.1 * std, name
        elif name.endswith("bias"):
            assert not tensor.any(), name
        else:
            assert (tensor == 1).all(), name
    padding = GPT(shape, seed=0).wte.weight[SHAPE.vocab_size :]
    assert padding.std().item() == pytest.approx(0.02, rel=0.08)


def test_large_tensors_do_not_depend_on_the_number_of_threads() -> None:
    drawn = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tensor = torch.full((CHUNK_ELEMENTS + 1000,), math.nan)
            fill_normal_(tensor, 0.02, torch.Generator().manual_seed(3))
            drawn.append(tensor)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert drawn[0].std().item() == pytest.approx(0.02, rel=1e-3)
    assert not torch.equal(drawn[0][:1000], drawn[0][CHUNK_ELEMENTS:])


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_init_shards_the_same_numbers(ranks, world_size: int) -> None:
    jobs = ranks([__file__], world_size)
    for output in jobs.wait():
        for precision in DTYPES:
            assert f"{precision} gpt2 equal\n" in output, output
            assert f"{precision} llama equal\n" in output, output
    assert jobs.exit_codes == [0] * world_size


def compare_zero_init_with_a_plain_build() -> None:
    import deepspeed

    from llmscale.engine.process_group import join_world

    join_world()
    for shape, (precision, dtype) in itertools.product((SHAPE, LLAMA), DTYPES.items()):
        ds_config: dict[str, object] = {"train_micro_batch_size_per_gpu": 1}
        ds_config["zero_optimization"] = {"stage": 3}
        if precision != "fp32":
            ds_config[precision] = {"enabled": True}
        random_state = torch.get_rng_state()
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            sharded = GPT(shape, seed=7)
        assert torch.equal(random_state, torch.get_rng_state())
        for (name, ours), theirs in zip(sharded.named_parameters(), GPT(shape, seed=7).parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([ours]):
                assert ours.dtype == dtype, name
                assert torch.equal(ours.cpu(), theirs.detach().to(dtype)), name
        sys.stdout.write(f"{precision} {'llama' if shape is LLAMA else 'gpt2'} equal\n")
    end_rank()


if __name__ == "__main__":
    compare_zero_init_with_a_plain_build()
