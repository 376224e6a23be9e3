"""Layers of the GPT's blocks, each with the weights it begins with.

Initial weights are the same numbers for a seed at every ZeRO stage, precision and device. `deepspeed.zero.Init` shards
a module's parameters as soon as the module's constructor returns, and makes new tensors in the training precision. Each
constructor therefore draws its weights itself, in fp32 on the CPU, and rounds them to the parameter's type.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from llmscale.architecture.layers import INIT_STD
from llmscale.architecture.shape import Activation, GPTShape

#: Numbers drawn from one seed. A core draws 10^8 a second, 29 minutes for GPT-3 175B, so large tensors are drawn in
#: chunks on all threads. Chunks also limit the extra fp32 memory to 64 MiB a thread.
CHUNK_ELEMENTS = 2**24


def residual_std(n_layer: int) -> float:
    """Return the standard deviation of the projections that end in the residual stream.

    Each of the n_layer blocks adds two of them, so the factor 1/sqrt(2 n_layer) keeps the variance of their sum that of
    one (Radford et al. 2019, section 2.3).
    """
    return INIT_STD / math.sqrt(2 * n_layer)


def fill_normal_(parameter: Tensor, std: float, generator: torch.Generator, *, part: int = 0, parts: int = 1) -> None:
    """Overwrite `parameter` with numbers from N(0, std^2), the same for every number of threads.

    `generator` draws the seed of each chunk; stacked matrices are drawn one by one. The parameter may be one of several
    equal parts of a stack. Parameters without storage (meta device, fake tensors) are skipped.
    """
    if parameter.is_meta or isinstance(parameter, FakeTensor):
        return
    if parameter.dim() > 2:
        matrices = parameter.detach()
    else:
        matrices = parameter.detach()[None]
    chunks = [chunk for matrix in matrices for chunk in matrix.view(-1).split(CHUNK_ELEMENTS)]
    seeds = [int(torch.randint(2**63 - 1, (1,), generator=generator)) for _ in range(parts * len(chunks))]
    seeds = seeds[part * len(chunks) : (part + 1) * len(chunks)]
    fill = partial(_fill_chunk, std)
    if len(chunks) == 1:
        fill(chunks[0], seeds[0])
        return
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(fill, chunks, seeds))


def _fill_chunk(std: float, chunk: Tensor, seed: int) -> None:
    # Not empty().normal_(): zero.Init replaces torch.empty by one that ignores the requested dtype, and a draw in bf16
    # is another sequence than one in fp32.
    generator = torch.Generator().manual_seed(seed)
    size = (chunk.numel(),)
    chunk.copy_(torch.normal(0.0, std, size, generator=generator, dtype=torch.float32, device="cpu"))


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters of the linear layers that are stacked in one of ours (Hu et al. 2021).

    They add (alpha / r) B A x to W x, of which W is frozen.
    """

    rank: int
    scale: float
    rows: tuple[int, ...]
    """Outputs of each linear layer."""

    def output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute x [n, inputs], a [adapters x rank, inputs], b [outputs, rank] -> [n, outputs], 0 for b = 0."""
        inner = F.linear(x, a) * self.scale
        if len(self.rows) == 1:
            return F.linear(inner, b)
        parts = zip(inner.split(self.rank, dim=1), b.split(self.rows), strict=True)
        return torch.cat([F.linear(part, of_part) for part, of_part in parts], dim=1)


def find_adapter(shape: GPTShape, layer: str) -> Adapter | None:
    """Return the adapters of a block's linear layer, or None."""
    rows = shape.adapter_rows(layer)
    if rows:
        return Adapter(shape.lora_rank, shape.lora_alpha / shape.lora_rank, rows)
    return None


def fill_adapter_(a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Draw `a` from U(-1/sqrt(inputs), 1/sqrt(inputs)), as peft does, and fill `b` with zeros.

    Parameters without storage (meta device, fake tensors) are skipped.
    """
    if a.is_meta or isinstance(a, FakeTensor):
        return
    bound = 1 / math.sqrt(a.shape[1])
    drawn = torch.rand(tuple(a.shape), generator=generator, dtype=torch.float32, device="cpu")
    a.detach().copy_(drawn.mul_(2 * bound).sub_(bound))
    b.detach().zero_()


class Linear(nn.Linear):
    """`nn.Linear` with weights from N(0, std^2) and a bias of zeros."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: torch.Generator,
        *,
        bias: bool,
        std: float = INIT_STD,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        fill_normal_(self.weight, std, generator)
        if bias:
            nn.init.zeros_(self.bias)
        self.adapter = adapter
        if adapter is not None:
            self.lora_A = nn.Parameter(torch.empty(adapter.rank * len(adapter.rows), inputs))
            self.lora_B = nn.Parameter(torch.empty(outputs, adapter.rank))
            fill_adapter_(self.lora_A, self.lora_B, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., inputs] -> [..., outputs] as a two-dimensional product.

        ZeRO-3's replacement of `F.linear` then adds the bias within the product, as PyTorch does. In three dimensions
        it adds the bias in place in a second pass: slower, rounded twice, and a silent change to the result that
        selective activation checkpointing has saved.
        """
        x = input.flatten(0, -2)
        y = F.linear(x, self.weight, self.bias)
        if self.adapter is not None:
            y = y + self.adapter.output(x, self.lora_A, self.lora_B)
        return y.unflatten(0, input.shape[:-1])

    def reset_parameters(self) -> None:
        """Skip `nn.Linear`'s own draw, which would advance the global generator."""


def sums_in_16_bit(weight: Tensor) -> bool:
    """Return whether torch's kernels of layer norm and embedding would sum the weight's gradient over tokens in 16 bit.

    They do on CPUs: at 16,384 tokens a gradient can be off by 80 %. Those of GPUs sum in fp32.
    """
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


class Embedding(nn.Embedding):
    """`nn.Embedding` with rows from N(0, 0.02^2), whose gradient is summed in fp32."""

    def __init__(self, rows: int, width: int, generator: torch.Generator) -> None:
        super().__init__(rows, width)
        fill_normal_(self.weight, INIT_STD, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids [...] -> [..., width]."""
        if torch.is_grad_enabled() and sums_in_16_bit(self.weight):
            return F.embedding(input, self.weight.float()).to(self.weight.dtype)
        return F.embedding(input, self.weight)

    def reset_parameters(self) -> None:
        """Skip `nn.Embedding`'s own draw, which would advance the global generator."""


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose weights' gradients are summed in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension: [..., width] -> [..., width]."""
        if not sums_in_16_bit(self.weight):
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        if self.bias is None:
            bias = None
        else:
            bias = self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in its weights' type: fp32 under autocast, as CUDA's autocast does and a CPU's does not."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension: [..., width] -> [..., width]."""
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)


def build_norm(shape: GPTShape) -> nn.Module:
    """Build a norm as wide as the residual stream."""
    if shape.norm == "rmsnorm":
        return RMSNorm(shape.n_embd, shape.norm_eps)
    return LayerNorm(shape.n_embd, shape.norm_eps, bias=shape.bias)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the MLP's non-linearity."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """Up to mlp_width or another `hidden` width, non-linearity, down again."""

    def __init__(self, shape: GPTShape, generator: torch.Generator, hidden: int = 0) -> None:
        super().__init__()
        self.activation = shape.activation
        self.dropout = shape.dropout
        self.is_gated = shape.gated_mlp
        width = shape.n_embd
        hidden = hidden or shape.mlp_width
        bias = bool(shape.mlp_bias)
        # One matrix product for gate and up, columns [gate | up].
        adapter = find_adapter(shape, "mlp.up")
        rows = 2 * hidden if self.is_gated else hidden
        self.up = Linear(width, rows, generator, bias=bias, adapter=adapter)
        adapter = find_adapter(shape, "mlp.down")
        std = residual_std(shape.n_layer)
        self.down = Linear(hidden, width, generator, bias=bias, std=std, adapter=adapter)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., n_embd] -> [..., n_embd]."""
        return F.dropout(self.down(self._hidden(x)), self.dropout, self.training)

    def _hidden(self, x: Tensor) -> Tensor:
        """Compute [..., hidden]; its temporaries are freed before the next product."""
        if not self.is_gated:
            return activate(self.up(x), self.activation)
        gate, up = self.up(x).chunk(2, dim=-1)
        return activate(gate, self.activation) * up
