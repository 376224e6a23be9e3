"""The loss in chunks against the whole one in double precision, and against PyTorch's own in the same precision."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmscale.config.loss_settings import DEFAULT_LOSS, LossSettings
from llmscale.errors import ConfigError
from llmscale.model.gpt import TiedHead
from llmscale.model.layers import Embedding
from llmscale.model.loss import check_fused_loss, chunked_cross_entropy, score_tokens

BATCH, T, WIDTH, VOCABULARY, ROWS = 3, 50, 64, 1001, 1024
TOKENS = BATCH * T
#: One token, no divisor of the number of tokens, more than all.
CHUNKS = (1, 64, 10 * TOKENS)


@dataclass(frozen=True)
class Result:
    loss: Tensor
    x_gradient: Tensor
    weight_gradient: Tensor
    z_squared: Tensor | None = None


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Targets are a view, as the model gets them."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(BATCH, T, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (BATCH, T + 1), generator=generator)[:, 1:]
    return x.to(dtype).requires_grad_(), (0.1 * weight).to(dtype).requires_grad_(), targets


def whole(
    dtype: torch.dtype, *, inputs_in: torch.dtype | None = None, z_loss: float = 0.0, gradient: float = 1.0
) -> Result:
    x, weight, targets = inputs(inputs_in or dtype)
    x, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight))
    logits = F.linear(x, weight)[..., :VOCABULARY]
    logits = logits if dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    z_squared = logits.logsumexp(-1).square().mean()
    (gradient * (loss + z_loss * z_squared)).backward()
    return Result(loss.detach(), x.grad / gradient, weight.grad / gradient, z_squared.detach())


def chunked(dtype: torch.dtype, chunk_tokens: int, *, z_loss: float = 0.0, gradient: float = 1.0) -> Result:
    x, weight, targets = inputs(dtype)
    loss, z_squared, _ = chunked_cross_entropy(x, weight, targets, VOCABULARY, LossSettings(chunk_tokens, z_loss))
    (gradient * loss).backward()
    return Result(loss.detach(), x.grad / gradient, weight.grad / gradient, z_squared)


def error(computed: Tensor, exact: Tensor) -> float:
    return float((computed.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_loss_and_gradients_in_fp32_are_the_whole_ones(chunk_tokens: int, z_loss: float) -> None:
    exact = whole(torch.float64, inputs_in=torch.float32, z_loss=z_loss)
    actual = chunked(torch.float32, chunk_tokens, z_loss=z_loss, gradient=0.25)
    assert actual.loss.dtype == torch.float32
    assert abs(float(actual.loss - exact.loss)) < 1e-6
    assert error(actual.x_gradient, exact.x_gradient) < 1e-6
    assert error(actual.weight_gradient, exact.weight_gradient) < 1e-6
    if z_loss:
        assert error(actual.z_squared, exact.z_squared) < 1e-6
    else:
        assert actual.z_squared is None


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_positions_that_are_no_targets_add_nothing(chunk_tokens: int, z_loss: float) -> None:
    is_target = torch.rand(BATCH, T, generator=torch.Generator().manual_seed(1)) < 0.3
    x, weight, targets = inputs(torch.float64)
    logits = F.linear(x, weight)[..., :VOCABULARY]
    z_squared = (logits.logsumexp(-1).square() * is_target).sum() / TOKENS
    loss = F.cross_entropy(logits[is_target], targets[is_target], reduction="sum") / TOKENS
    (loss + z_loss * z_squared).backward()
    exact = Result(loss.detach(), x.grad, weight.grad, z_squared.detach())
    x, weight, targets = inputs(torch.float32)
    settings = LossSettings(chunk_tokens, z_loss)
    actual = chunked_cross_entropy(x, weight, targets, VOCABULARY, settings, each_sequence=True, is_target=is_target)
    actual.mean.backward()
    assert abs(float(actual.mean.detach() - exact.loss)) < 1e-6
    assert error(x.grad, exact.x_gradient) < 1e-5
    assert error(weight.grad, exact.weight_gradient) < 1e-5
    assert not x.grad[~is_target].any()
    assert actual.of_sequences.mean() == pytest.approx(float(exact.loss), rel=1e-5)
    if z_loss:
        assert error(actual.mean_z_squared, exact.z_squared) < 1e-6


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 65536.0)])
def test_16_bit_is_as_near_as_without_chunks(dtype: torch.dtype, scale: float, chunk_tokens: int) -> None:
    """fp16 with a loss scale, without which its gradients are too small to be numbers."""
    exact = whole(torch.float64, inputs_in=dtype)
    plain, actual = whole(dtype, gradient=scale), chunked(dtype, chunk_tokens, gradient=scale)
    assert error(actual.loss, exact.loss) < 1e-5
    assert error(actual.x_gradient, exact.x_gradient) < 1.5 * error(plain.x_gradient, exact.x_gradient)
    assert error(actual.weight_gradient, exact.weight_gradient) < 1.5 * error(
        plain.weight_gradient, exact.weight_gradient
    )


def test_under_autocast_products_are_in_16_bit_and_gradients_in_the_type_of_the_weights() -> None:
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = chunked_cross_entropy(x, weight, targets, VOCABULARY, LossSettings(64))
    loss.backward()
    exact = whole(torch.float64, inputs_in=torch.float32)
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    assert 1e-4 < error(weight.grad, exact.weight_gradient) < 0.01
    assert error(x.grad, exact.x_gradient) < 0.01


def test_a_sure_and_right_guess_keeps_its_small_gradient() -> None:
    """In bf16 a probability next to 1 is 1: softmax - 1 must be taken before it is rounded."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.0, 0.0], [0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _, _ = chunked_cross_entropy(x, weight, torch.tensor([0]), 2, LossSettings(8))
    loss.backward()
    wanted = -1 / (1 + torch.tensor(7.0).exp())
    assert float(weight.grad[0, 0]) == pytest.approx(float(wanted), rel=2**-7)


def test_without_gradients_nothing_of_them_is_kept() -> None:
    x, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        loss, _, _ = chunked_cross_entropy(x, weight, targets, VOCABULARY, LossSettings(64))
    assert not loss.requires_grad
    assert torch.equal(loss, chunked(torch.float32, 64).loss)


def test_a_second_backward_pass_gives_the_same_again() -> None:
    x, weight, targets = inputs(torch.float32)
    loss, _, _ = chunked_cross_entropy(x, weight, targets, VOCABULARY, LossSettings(64))
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * first)


@pytest.mark.parametrize("chunk_tokens", [2048, 16384])
def test_in_fp16_many_tokens_with_one_target_do_not_overflow(chunk_tokens: int) -> None:
    """The gradient of that target's row is a sum over all of them, divided by their number only afterwards."""
    x = torch.full((16384, 8), 8.0).requires_grad_()
    weight, targets = torch.zeros(16, 8, requires_grad=True), torch.zeros(16384, dtype=torch.long)
    F.cross_entropy(F.linear(x, weight), targets).backward()
    expected = weight.grad
    x, weight = x.detach().half().requires_grad_(), weight.detach().half().requires_grad_()
    loss, _, _ = chunked_cross_entropy(x, weight, targets, 16, LossSettings(chunk_tokens))
    (64 * loss).backward()
    assert expected is not None and weight.grad is not None
    torch.testing.assert_close(weight.grad.float() / 64, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_scores_are_those_of_whole_logits_without_the_padding(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator) for size in ((2, 6, 8), (16, 8)))
    weight[11:] *= 100
    targets = torch.randint(11, (2, 6), generator=generator)
    logits = (x @ weight.t())[..., :11]
    targets[0, :3] = logits[0, :3].argmax(-1)
    scores = score_tokens(x.requires_grad_(), weight, targets, 11, chunk_tokens)
    assert not scores.requires_grad
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(scores[..., 0], expected, atol=1e-6)
    assert torch.equal(scores[..., 1].bool(), logits.argmax(-1) == targets)


def test_products_are_in_autocasts_type_and_scores_in_fp32() -> None:
    x, weight, targets = torch.randn(1, 4, 8), torch.randn(16, 8), torch.zeros(1, 4, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        scores = score_tokens(x, weight, targets, 16, 4)
    rounded = (x.bfloat16()[0] @ weight.bfloat16().t()).float().log_softmax(-1)[:, 0]
    assert scores.dtype == torch.float32
    assert torch.allclose(scores[0, :, 0], rounded, atol=1e-6)


has_liger = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
needs_liger = pytest.mark.skipif(not has_liger, reason="needs llmscale[liger] and Triton")


@needs_liger
def test_loss_and_gradients_are_as_exact_as_torchs() -> None:
    job = Path(__file__).with_name("fused_loss_job.py")
    # Triton decides when its modules are imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(job.parents[2])}
    run = subprocess.run([sys.executable, str(job)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    cases = json.loads(run.stdout.splitlines()[-1])
    assert len(cases) == 18
    for case, errors in cases.items():
        for fused, plain in errors:
            assert fused <= max(1.5 * plain, 1e-6), case


@needs_liger
def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on GPUs, and this run on cpu"):
        check_fused_loss("cpu")


def test_without_liger_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", None)
    with pytest.raises(ConfigError, match=r"pip install -e .*\[liger\]"):
        check_fused_loss("cuda")


def random_head(loss: LossSettings = DEFAULT_LOSS) -> tuple[Embedding, TiedHead]:
    """Ten rows, of which seven are of the vocabulary."""
    embedding = Embedding(10, 4, torch.Generator().manual_seed(0))
    head = TiedHead(embedding, 7, loss)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(10, 4))
    return embedding, head


def test_head_follows_the_embedding_without_its_padding_and_is_not_saved() -> None:
    embedding, head = random_head()
    x = torch.randn(2, 3, 4)
    assert torch.allclose(head(x), x @ embedding.weight[:7].t(), atol=1e-6)
    assert head.state_dict() == {}


def test_with_targets_it_is_the_loss_and_a_z_loss_is_in_the_gradients_alone() -> None:
    x, targets = torch.randn(2, 3, 4), torch.randint(7, (2, 3))
    embedding, head = random_head(LossSettings(chunk_tokens=4, z_loss=0.5))
    logits = head(x)
    loss = head(x, targets)
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), atol=1e-6)
    z_squared = logits.logsumexp(-1).square().mean()
    assert torch.allclose(head.z_squared, z_squared, atol=1e-6)
    head(x, targets)
    assert torch.allclose(head.z_squared, 2 * z_squared, atol=1e-6)
    wanted = torch.autograd.grad(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.5 * z_squared, embedding.weight
    )[0]
    loss.backward()
    assert torch.allclose(embedding.weight.grad, wanted, atol=1e-6)


def test_a_validation_has_no_z_loss() -> None:
    _, head = random_head(LossSettings(z_loss=0.5))
    head.eval()
    head(torch.randn(2, 3, 4), torch.randint(7, (2, 3)))
    assert head.z_squared is None
