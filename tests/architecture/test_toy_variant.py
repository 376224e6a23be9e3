"""A model that llmscale does not have, described here: parameters, FLOPs and states follow from that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llmscale.architecture.layers import (
    Architecture,
    ParameterTensors,
    attention,
    elementwise,
    embedding,
    head,
    linear,
    rms_norm,
)
from tests import warm_start
from tests.architecture.toy_decoder import LARGE, SMALL, ToyDecoder, ToyShape

ROOT = Path(__file__).resolve().parent.parent.parent
STATES_JOB = Path(__file__).with_name("toy_states_job.py")


def describe_toy(shape: ToyShape) -> Architecture:
    """RMS norms, fewer key-value heads, a gated MLP, an untied head. The constructor makes both norms first."""
    h, kv, m = shape.n_embd, shape.n_kv_head * shape.head_dim, shape.mlp_width
    return Architecture(
        before_blocks=(embedding("embedding", shape.vocab_size, h),),
        block=(
            rms_norm("norm_1", h),
            linear("q", h, h, bias=False),
            linear("k", h, kv, bias=False),
            linear("v", h, kv, bias=False),
            attention(shape.n_head, shape.head_dim),
            linear("o", h, h, bias=False),
            elementwise(h),
            rms_norm("norm_2", h),
            linear("gate", h, m, bias=False),
            linear("up", h, m, bias=False),
            elementwise(2 * m),
            linear("down", m, h, bias=False),
            elementwise(h),
        ),
        n_layer=shape.n_layer,
        after_blocks=(rms_norm("norm", h), head("head", shape.vocab_size, h)),
        parameter_order=("norm_1", "norm_2", "q", "k", "v", "o", "gate", "up", "down"),
    )


def build_toy(shape: ToyShape) -> nn.Module:
    return ToyDecoder(shape, lambda block, x: block(x))


@pytest.mark.parametrize("shape", [shape for _, shape in SMALL] + [LARGE], ids=str)
def test_parameters_are_the_module_s(shape: ToyShape) -> None:
    with torch.device("meta"):
        named = list(build_toy(shape).named_parameters())
    tensors = ParameterTensors(describe_toy(shape)).all
    assert [(tensor.name, tensor.parameter.shape) for tensor in tensors] == [(n, tuple(p.shape)) for n, p in named]
    assert describe_toy(shape).num_parameters == sum(parameter.numel() for _, parameter in named)


def test_gradients_come_in_the_described_order() -> None:
    shape = ToyShape(2, 4, 2, 8, 24, 64, 16)
    model, arrived = build_toy(shape), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    tokens = torch.zeros(1, 17, dtype=torch.long)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    order = [tensor.name for layer in ParameterTensors(describe_toy(shape)).gradient_order for tensor in layer]
    # q, k, v and gate, up read the same input: which of them autograd comes to first is its own affair.
    assert [first_of(name) for name in arrived] == [first_of(name) for name in order]


def first_of(name: str) -> str:
    return name.replace(".k.", ".q.").replace(".v.", ".q.").replace(".up.", ".gate.")


@pytest.mark.parametrize(("sequences", "shape"), SMALL, ids=str)
def test_flops_are_those_that_torch_counts(sequences: int, shape: ToyShape) -> None:
    """Of matrix products and attention, which FlopCounterMode counts without the causal half taken off, as we do."""
    with torch.device("meta"):
        model = build_toy(shape)
        tokens = torch.zeros(sequences, shape.seq_len + 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counted, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        forward = counted.get_total_flops()
        loss.backward()
    per_token = describe_toy(shape).work.flops(shape.seq_len)
    assert forward == sequences * shape.seq_len * per_token
    assert counted.get_total_flops() == 3 * sequences * shape.seq_len * per_token


def test_training_flops_are_6_n_and_attention() -> None:
    model = describe_toy(LARGE)
    in_products = model.num_parameters - model.token_embedding.elements
    attended = 12 * LARGE.n_layer * LARGE.n_embd * 8192
    assert model.flops_per_token(8192) == 6 * in_products + attended


@pytest.mark.parametrize("stages", [("1", "3"), pytest.param(("0", "2"), marks=pytest.mark.slow)])
def test_states_are_what_the_engine_allocates(stages: tuple[str, ...]) -> None:
    """DeepSpeed's own, around the toy on fake tensors, but for roundings to 512 bytes. In a process of its
    own: a dry run patches DeepSpeed."""
    command = [sys.executable, str(STATES_JOB), *stages]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = warm_start.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    states = json.loads(done.stdout.splitlines()[-1])
    assert tuple(states) == stages
    for stage in stages:
        assert states[stage]["closed_form"] == pytest.approx(states[stage]["dry_run"], rel=1e-3, abs=16 * 512)
