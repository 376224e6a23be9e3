"""Experts equal a plain loop over them; routing counts each token once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import LossSettings
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.model.attention_context import AttentionContext, KVCache
from llmscale.model.experts import BALANCE, ENTROPY, MOVED, Z_SQUARED, SparseMLP
from llmscale.model.gpt import GPT
from llmscale.model.layers import activate

SHAPE = GPTShape(
    n_layer=3,
    n_head=2,
    n_embd=24,
    vocab_size=90,
    seq_len=12,
    num_experts=5,
    norm="rmsnorm",
    bias=False,
    positions="rotary",
    activation="silu",
    gated_mlp=True,
)
LOSSES = LossSettings(balance_loss=0.01, router_z_loss=0.001)


def run_loop(mlp: SparseMLP, x: Tensor) -> Tensor:
    """Compute a sparse MLP on [tokens, n_embd], one token and one expert after the other."""
    shape, results = mlp.shape, []
    for token in x:
        logits = mlp.router.weight.float() @ token.float()
        scores = logits.softmax(0) if shape.router_score == "softmax" else logits.sigmoid()
        bias = 0 if mlp.router.bias is None else mlp.router.bias
        chosen = sorted(range(shape.num_experts), key=lambda expert: -(scores + bias)[expert].item())
        chosen = chosen[: shape.experts_per_token]
        total = sum(scores[expert] for expert in chosen) if shape.normalize_router else 1
        y = torch.zeros_like(token) if mlp.shared is None else mlp.shared(token[None])[0]
        for expert in chosen:
            up = mlp.experts.up[expert] @ token
            if shape.gated_mlp:
                hidden = activate(up[: shape.expert_width], shape.activation) * up[shape.expert_width :]
            else:
                hidden = activate(up, shape.activation)
            y = y + (mlp.experts.down[expert] @ hidden) * (scores[expert] / total * shape.router_scale).to(y.dtype)
        results.append(y)
    return torch.stack(results)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1, "gated_mlp": False, "activation": "gelu", "normalize_router": False},
        {"expert_width": 37, "shared_expert_width": 16, "router_scale": 2.5},
        {"router_score": "sigmoid", "router_bias": True, "experts_per_token": 3},
        {"num_experts": 1, "experts_per_token": 1},
    ],
    ids=str,
)
def test_experts_equal_a_plain_loop(changes: dict[str, object]) -> None:
    shape = SHAPE.changed(changes)
    mlp = SparseMLP(shape, torch.Generator().manual_seed(1), LossSettings())
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.mul_(20)
        if mlp.router.bias is not None:
            mlp.router.bias.copy_(torch.tensor([0.4, 0.0, -0.4, 0.2, 0.0]))
    results = []
    for run in (lambda x: mlp(x[None], AttentionContext())[0][0], lambda x: run_loop(mlp, x)):
        x = torch.randn(30, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = run(x)
        inputs = [x, *mlp.parameters()]
        results.append([y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), inputs)])
    for own, expected in zip(*results, strict=True):
        assert (own - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_16_bit_are_near_the_loop(dtype: torch.dtype) -> None:
    mlp = SparseMLP(replace(SHAPE, router_bias=True), torch.Generator().manual_seed(1), LossSettings()).to(dtype)
    assert mlp.router.bias is not None and mlp.router.bias.dtype == torch.float32
    x = torch.randn(30, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = run_loop(mlp, x).float()
    assert (mlp(x[None], AttentionContext())[0][0].float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_gradients_of_an_expert_without_tokens_are_zero() -> None:
    mlp = SparseMLP(replace(SHAPE, router_bias=True), torch.Generator().manual_seed(1), LossSettings())
    assert mlp.router.bias is not None
    mlp.router.bias[2] = -10.0
    y, row = mlp(torch.randn(1, 12, 24), AttentionContext())
    y.sum().backward()
    assert row is not None and row[2] == 0 and mlp.experts.up.grad is not None
    assert mlp.experts.up.grad[2].abs().max() == 0 and mlp.experts.up.grad[1].abs().max() > 0


def test_experts_are_chosen_by_block() -> None:
    shape = replace(SHAPE, n_layer=7, dense_layers=1, expert_interval=2)
    assert [block.is_sparse for block in GPT(shape, seed=0).blocks] == [False, False, True, False, True, False, True]
    named = [(tensor.name, tensor.parameter.shape) for tensor in shape.tensors.all]
    model = GPT(shape, seed=0)
    assert named == [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    idle = 3 * 3 * shape.expert_width * shape.n_embd * 3
    assert shape.active_parameters == shape.num_parameters - idle


def test_an_experts_first_weights_are_its_own() -> None:
    few, many = (GPT(replace(SHAPE, num_experts=count), seed=3).blocks[0].mlp.experts.up for count in (4, 5))
    assert not torch.equal(many[0], many[1])
    assert few.std().item() == pytest.approx(0.02, rel=0.05)


def routed(checkpointing: str = "none", shape: GPTShape = SHAPE) -> tuple[GPT, Tensor, dict[str, Tensor]]:
    """Train on one micro-batch of 4 sequences; returns model, printed loss and gradients."""
    checkpoint = build_block_checkpoint(checkpointing, {})  # type: ignore[arg-type]  # a mode
    model = GPT(shape, seed=5, loss=LOSSES, checkpoint=checkpoint)
    tokens = torch.randint(90, (4, 13), generator=torch.Generator().manual_seed(6))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return model, loss.detach(), {name: of.grad for name, of in model.named_parameters() if of.grad is not None}


def test_the_printed_loss_is_the_language_models() -> None:
    model, loss, gradients = routed()
    plain = GPT(SHAPE, seed=5)
    tokens = torch.randint(90, (4, 13), generator=torch.Generator().manual_seed(6))
    without = plain(tokens[:, :-1], tokens[:, 1:])
    without.backward()
    assert loss == without.detach() == model.eval()(tokens[:, :-1], tokens[:, 1:])
    router = "blocks.0.mlp.router.weight"
    assert not torch.allclose(gradients[router], plain.get_parameter(router).grad, atol=1e-4)


def test_gradients_are_those_of_the_published_losses() -> None:
    """Switch's balance loss of each sequence and ST-MoE's z-loss, from the routers' logits."""
    shape = replace(SHAPE, n_layer=2)
    _, _, gradients = routed(shape=shape)
    model, logits = GPT(shape, seed=5), []
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda *call: logits.append(call[-1]))
    tokens = torch.randint(90, (4, 13), generator=torch.Generator().manual_seed(6))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    for block, sequence in itertools.product(range(2), range(4)):
        own = logits[block].view(4, 12, 5)[sequence]
        shares = own.softmax(-1)
        fractions = F.one_hot(shares.topk(2).indices, 5).sum((0, 1)) / 24
        loss = loss + 0.01 * 5 * (fractions * shares.mean(0)).sum() / 4 + 0.001 * own.logsumexp(-1).square().mean() / 4
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-7, rtol=1e-5), name


def test_routing_counts_each_token_once() -> None:
    shape = replace(SHAPE, router_bias=True, dense_layers=1)
    rows = []
    for checkpointing in ("none", "selective"):
        model, _, _ = routed(checkpointing, shape)
        assert model.routing is not None
        rows.append(model.routing)
    row = rows[0]
    assert torch.equal(row, rows[1]) and row.shape == (2, 9)
    assert row[:, :5].sum(1).tolist() == [4 * 12 * 2] * 2
    assert (row[:, MOVED] == 0).all() and (row[:, ENTROPY] <= 48 * torch.tensor(5.0).log() + 1e-3).all()
    assert (row[:, BALANCE] >= 4).all() and (row[:, Z_SQUARED] > 0).all()


def test_gradients_are_equal_with_selective_checkpointing() -> None:
    plain, selective = routed()[2], routed("selective")[2]
    assert all(torch.equal(plain[name], selective[name]) for name in plain)


def test_a_bias_moves_tokens_to_idle_experts() -> None:
    shape = replace(SHAPE, router_bias=True, router_score="sigmoid")
    mlp = SparseMLP(shape, torch.Generator().manual_seed(1), LossSettings())
    assert mlp.router.bias is not None
    mlp.router.weight.data.mul_(20)
    x, loads = torch.randn(8, 12, 24, generator=torch.Generator().manual_seed(2)), []
    for _ in range(60):
        row = mlp(x, AttentionContext())[1]
        assert row is not None
        loads.append(row[:5])
        mlp.router.balance(row[:5], 0.02)
    assert row is not None and row[MOVED] > 0
    assert loads[-1].std() < loads[0].std() / 3


def test_padding_of_a_part_is_not_counted() -> None:
    mlp = SparseMLP(SHAPE, torch.Generator().manual_seed(1), LOSSES)
    x = torch.randn(2, 12, 24)
    alone, padded = mlp(x[:, :9], AttentionContext()), mlp(x, AttentionContext(padding=3))
    assert torch.allclose(alone[1], padded[1]) and torch.allclose(alone[0], padded[0][:, :9], atol=1e-6)


def test_a_cache_continues_the_same_text() -> None:
    model = GPT(replace(SHAPE, dense_layers=1), seed=5).eval()
    tokens = torch.randint(90, (2, 10), generator=torch.Generator().manual_seed(6))
    cache = KVCache(model.shape, 2, 12)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([6, 1, 1, 2], 1)]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_run_on_fake_tensors_and_in_a_graph(dtype: torch.dtype) -> None:
    mlp = SparseMLP(SHAPE, torch.Generator().manual_seed(1), LOSSES).to(dtype)
    x = torch.randn(2, 12, 24).to(dtype)
    compiled = torch.compile(lambda x: mlp(x, AttentionContext()), backend="aot_eager", fullgraph=True)
    actual = []
    for run in (lambda x: mlp(x, AttentionContext()), compiled):
        y, row = run(x)
        (y.float().sum() + row[BALANCE]).backward()
        actual.append([y.detach(), row.detach(), *(of.grad.clone() for of in mlp.parameters())])
        mlp.zero_grad()
    assert all(torch.equal(own, other) for own, other in zip(*actual, strict=True))
    with FakeTensorMode(), torch.device("cpu"):
        fake = SparseMLP(SHAPE, torch.Generator(), LOSSES)
        for module in (fake.router, fake.experts):
            for name, of in list(module.named_parameters()):
                setattr(module, name, torch.nn.Parameter(of.detach().to(dtype)))
        y, _ = fake(torch.empty(2, 12, 24, dtype=dtype), AttentionContext())
        y.sum().backward()
        assert fake.experts.up.grad is not None and fake.experts.up.grad.shape == fake.experts.up.shape
