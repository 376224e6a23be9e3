from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.dry_run.engine import gpt_kernels
from llmscale.dry_run.simulated_gpu import cuda_kernels, fake_world, kernel_workspace
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.model.gpt import GPT

_aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """Names of the operators that run, without overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls() -> Iterator[Calls]:
    with FakeTensorMode(), cuda_kernels(), Calls() as calls:
        yield calls


def attend(dtype: torch.dtype, head_dim: int, dropout: float = 0.0) -> torch.Tensor:
    q, k, v = (torch.empty(2, 4, 64, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernel"),
    [
        (torch.bfloat16, 64, "_scaled_dot_product_flash_attention"),
        (torch.float16, 256, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 36, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 320, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 33, "bmm"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_takes_the_kernel_of_a_gpu(
    calls: Calls, dtype: torch.dtype, head_dim: int, kernel: str, dropout: float
) -> None:
    y = attend(dtype, head_dim, dropout)
    assert (y.shape, y.dtype) == ((2, 4, 64, head_dim), dtype)
    assert kernel in calls.names
    assert sum("attention" in name for name in calls.names) == (kernel != "bmm")
    y.float().sum().backward()


@pytest.mark.parametrize(("capability", "shares"), [((7, 5), False), ((8, 0), True), (None, True)])
def test_a_gpu_before_ampere_runs_the_model_s_attention_by_another_kernel(
    capability: ComputeCapability | None, shares: bool
) -> None:
    """Which shares no keys: the model repeats them."""
    shape = GPTShape(n_layer=1, n_head=4, n_kv_head=2, n_embd=64, vocab_size=100, seq_len=16)
    with FakeTensorMode(), cuda_kernels(capability), gpt_kernels(capability), Calls() as calls:
        model = GPT(shape, seed=0)
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
        model(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long))
    assert ("_scaled_dot_product_flash_attention" in calls.names) == shares
    assert ("_scaled_dot_product_efficient_attention" in calls.names) != shares


def test_flash_attention_gets_heads_of_a_multiple_of_8(calls: Calls) -> None:
    attend(torch.bfloat16, 36)
    assert calls.names.count("constant_pad_nd") == 3


def test_keys_that_heads_share_are_repeated_where_flash_attention_does_not_run(calls: Calls) -> None:
    q = torch.empty(1, 4, 8, 8)
    F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True)
    assert "bmm" in calls.names and not any("attention" in name for name in calls.names)


@pytest.mark.parametrize("mask", ["bool", "short rows"])
def test_a_mask_that_the_kernel_cannot_read_is_copied(calls: Calls, mask: str) -> None:
    """The copy has the queries' type, and rows of a multiple of 8."""
    q = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    masks = {"bool": torch.empty(8, 8, dtype=torch.bool), "short rows": torch.empty(8, 9, dtype=q.dtype)[:, :8]}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        F.scaled_dot_product_attention(q, q, q, attn_mask=masks[mask])
    assert "_scaled_dot_product_efficient_attention" in calls.names
    assert (1, 2, 8, 8) in [tensor.shape for tensor in saved if tensor.stride()[-2:] == (8, 1) and tensor is not q]


def test_a_mask_of_another_type_is_refused_as_by_torch(calls: Calls) -> None:
    q = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"attn_mask is torch\.float32, and queries are torch\.bfloat16"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.empty(8, 8))


def test_a_mask_takes_the_memory_efficient_kernel(calls: Calls) -> None:
    q = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.empty(8, 8, dtype=torch.bfloat16))
    assert "_scaled_dot_product_efficient_attention" in calls.names


def test_dropout_saves_a_mask_of_one_byte(calls: Calls) -> None:
    saved: list[torch.Tensor] = []
    x = torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        F.dropout(x, 0.1)
    assert [(tensor.shape, tensor.dtype) for tensor in saved] == [((4, 8), torch.bool)]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_does_nothing_makes_nothing(calls: Calls, p: float, training: bool) -> None:
    x = torch.empty(4, 8)
    assert F.dropout(x, p, training) is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_saves_its_statistics_in_fp32(calls: Calls, dtype: torch.dtype) -> None:
    saved: list[torch.Tensor] = []
    x, weight = torch.empty(4, 8, dtype=dtype, requires_grad=True), torch.empty(8, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = F.layer_norm(x, (8,), weight)
    assert y.dtype == dtype
    assert [tensor.dtype for tensor in saved if tensor.shape == (4, 1)] == [torch.float32] * 2
    y.sum().backward()


def test_everything_is_put_back() -> None:
    before = F.scaled_dot_product_attention, F.dropout
    with pytest.raises(KeyError), cuda_kernels():
        assert (F.scaled_dot_product_attention, F.dropout) != before
        raise KeyError
    assert (F.scaled_dot_product_attention, F.dropout) == before


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_gradients_are_summed_in_place_where_real_tensors_are(mode: CheckpointingMode, precision: str) -> None:
    """The residual stream's are, but for those that DeepSpeed's checkpoint holds; the tied table's under autocast."""
    with fake_world(1):
        real = sums_of_real_tensors(mode, precision)
        with FakeTensorMode(), Calls() as calls, cuda_kernels():
            loss = loss_of(mode, precision)
            calls.names.clear()
            loss.backward()
    recomputed = 0 if mode == "none" else 2 * LAYERS  # the sums of the forward pass, run again
    fake = [name for name in calls.names if name in ("add", "add_")]
    assert fake.count("add_") == real.count("add_") > 0
    assert fake.count("add") - recomputed == real.count("add")


LAYERS = 2


def loss_of(mode: CheckpointingMode, precision: str) -> torch.Tensor:
    model = GPT(GPTShape(LAYERS, 4, 64, 300, 32), seed=0, checkpoint=build_block_checkpoint(mode, {}))
    if precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    tokens = torch.zeros(2, 33, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return model(tokens[:, :-1], tokens[:, 1:])


def sums_of_real_tensors(mode: CheckpointingMode, precision: str) -> list[str]:
    """`add` or `add_` for every sum that autograd's engine itself makes."""
    loss = loss_of(mode, precision)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        loss.backward()
    adds = [event for event in record.events() if event.name in ("aten::add", "aten::add_")]
    by_engine = [event for event in adds if event.cpu_parent and "evaluate_function" in event.cpu_parent.name]
    return [event.name.removeprefix("aten::") for event in by_engine]


def test_the_work_space_of_flash_attention() -> None:
    """dQ in fp32 with 200 rows rounded up to 256 and 40 columns to 64, and one fp32 number a row."""
    q = torch.empty(2, 4, 200, 40, dtype=torch.bfloat16, device="meta")
    op = _aten._scaled_dot_product_flash_attention_backward.default
    assert kernel_workspace(op, (q, q, q)) == (2 * 4 * 256 * 64 * 4, 2 * 4 * 256 * 4)
    # Shared keys: dK and dV of every query head.
    assert kernel_workspace(op, (q, q, q[:, :2]))[2:] == (2 * 4 * 200 * 40 * 2,) * 2


#: The heads that FlashAttention-2 has backward kernels for (flash_bwd_hdim*.cu), and head_size_rounded of mha_bwd
#: in csrc/flash_attn/flash_api.cpp: round_multiple(head_size, head_size <= 128 ? 32 : 64); its seqlen_q_rounded is
#: round_multiple(seqlen_q, 128). github.com/Dao-AILab/flash-attention/blob/v2.7.4/csrc/flash_attn/flash_api.cpp
FLASH_HEADS = {8: 32, 32: 32, 40: 64, 80: 96, 96: 96, 128: 128, 136: 192, 160: 192, 192: 192, 200: 256, 256: 256}


@pytest.mark.parametrize("head_dim", FLASH_HEADS)
def test_closed_form_and_dry_run_round_as_flash_attention_s_source(head_dim: int) -> None:
    op = _aten._scaled_dot_product_flash_attention_backward.default
    for t, rounded in {1: 128, 128: 128, 129: 256, 2048: 2048}.items():
        q = torch.empty(2, 3, t, head_dim, dtype=torch.bfloat16, device="meta")
        assert kernel_workspace(op, (q, q, q)) == (6 * rounded * FLASH_HEADS[head_dim] * 4, 6 * rounded * 4)


@pytest.mark.parametrize("t", [1, 32, 33, 200, 1024])
def test_the_log_sum_exp_is_as_long_as_pytorch_s_own_shape_functions_say(t: int) -> None:
    """One fp32 number a row of FlashAttention; of the memory-efficient kernel with rows rounded up to 32."""
    q = torch.empty(2, 3, t, 64, device="meta")
    efficient = _aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)[1]
    flash = _aten._scaled_dot_product_flash_attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), 0.0, True)[1]
    assert (efficient.shape, efficient.dtype) == ((2, 3, -(-t // 32) * 32), torch.float32)
    assert (flash.shape, flash.dtype) == ((2, 3, t), torch.float32)


def test_the_work_space_of_attention_in_fp32() -> None:
    q = torch.empty(2, 4, 200, 40, device="meta")
    op = _aten._scaled_dot_product_efficient_attention_backward.default
    assert kernel_workspace(op, (q, q)) == (2 * 4 * 200 * 40 * 4, 2 * 4 * 200 * 4, 2 * 4 * 200 * 4)


def test_log_softmax_copies_a_slice() -> None:
    logits = torch.empty(10, 128, device="meta")
    assert kernel_workspace(_aten._log_softmax.default, (logits, -1, False)) == ()
    assert kernel_workspace(_aten._log_softmax.default, (logits[:, :100], -1, False)) == (10 * 100 * 4,)
    assert kernel_workspace(_aten.gelu.default, (logits,)) == ()
