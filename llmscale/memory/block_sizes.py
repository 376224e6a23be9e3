"""Bytes of the tensors of one transformer block and of the output head, for one micro-batch. No torch.

Symbols: b micro-batch, t tokens of a sequence, h n_embd, a heads, d head_dim, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmscale.config.ds_sections import Precision
from llmscale.config.shape import GPTShape
from llmscale.memory.breakdown import allocated_bytes

#: `flash`: a fused kernel, which never writes the t x t scores. `eager`: separate matrix products and softmax, as in
#: the papers' formulas; llmscale's model does not have it.
Attention = Literal["flash", "eager"]
#: The linear layers of a block, in the order in which they run.
LAYERS = ("qkv", "proj", "up", "down")


@dataclass(frozen=True)
class BlockSizes:
    """Every size in bytes, rounded up as the allocator does."""

    shape: GPTShape
    micro_batch_size: int
    precision: Precision
    attention: Attention = "flash"
    zero_stage: int = 0

    def tensor(self, elements: int, bytes_per_element: int | None = None) -> int:
        """A tensor of so many elements, by default in the type of the matrix products."""
        return allocated_bytes(elements, bytes_per_element or self.compute_bytes)

    @property
    def compute_bytes(self) -> int:
        """Per element of the matrix products and of the activations between them."""
        return 4 if self.precision == "fp32" else 2

    @property
    def stream_bytes(self) -> int:
        """Per element of the residual stream: fp32 under autocast, which leaves embeddings and layer norms in fp32."""
        return 4 if self.precision in ("fp32", "autocast") else 2

    @property
    def autocast(self) -> bool:
        return self.precision == "autocast"

    @property
    def saves_cast_inputs(self) -> bool:
        """Whether linear layers save autocast's copies of their inputs and weights; ZeRO-3's save the originals."""
        return self.autocast and self.zero_stage < 3

    @property
    def dropout(self) -> bool:
        return self.shape.dropout > 0

    @property
    def rows(self) -> int:
        """Tokens of the micro-batch, b t."""
        return self.micro_batch_size * self.shape.seq_len

    @property
    def stream(self) -> int:
        """[b, t, h] in the residual stream."""
        return self.tensor(self.rows * self.shape.n_embd, self.stream_bytes)

    @property
    def width(self) -> int:
        """[b, t, h] between matrix products."""
        return self.tensor(self.rows * self.shape.n_embd)

    @property
    def qkv(self) -> int:
        """[b, t, 3h]."""
        return self.tensor(self.rows * 3 * self.shape.n_embd)

    @property
    def hidden(self) -> int:
        """[b, t, 4h]."""
        return self.tensor(self.rows * 4 * self.shape.n_embd)

    @property
    def mask(self) -> int:
        """Dropout's mask of [b, t, h]: one byte an element."""
        return self.tensor(self.rows * self.shape.n_embd, 1)

    @property
    def norm_statistics(self) -> int:
        """Layer norm's mean and 1/std, [b, t] each, in fp32 whatever the input."""
        return 2 * self.tensor(self.rows, 4)

    @property
    def flash(self) -> bool:
        """FlashAttention takes 16 bit and heads of up to 256; PyTorch's memory-efficient kernel takes the rest."""
        return self.compute_bytes == 2 and self.shape.head_dim <= 256

    @property
    def head_padding(self) -> int:
        """Columns that PyTorch appends to every head for FlashAttention, in copies of q, k and v."""
        return -self.shape.head_dim % 8 if self.flash and self.attention == "flash" else 0

    @property
    def heads(self) -> int:
        """q, k, v or attention's output as the kernel takes them: [b, a, t, d], d padded to a multiple of 8."""
        return self.tensor(self.rows * self.shape.n_head * (self.shape.head_dim + self.head_padding))

    @property
    def attention_statistics(self) -> int:
        """What a fused kernel saves beside its inputs and output: the log-sum-exp of every row of scores, 4 a b t bytes
        (Dao et al. 2022, algorithm 2), and the state of the random numbers, two blocks."""
        t = self.shape.seq_len if self.flash else _round_up(self.shape.seq_len, 32)
        return self.tensor(self.micro_batch_size * self.shape.n_head * t, 4) + 2 * self.tensor(1)

    @property
    def attention_workspace(self) -> int:
        """What the backward kernel takes while it runs (sources: llmscale/dry_run/cuda_kernels.py): FlashAttention-2 a
        sum of dQ in fp32, with t rounded up to 128 and d to 32 or 64; the fp32 kernel the product dO x O."""
        heads, t, d = self.micro_batch_size * self.shape.n_head, self.shape.seq_len, self.shape.head_dim
        if not self.flash:
            return self.tensor(heads * t * d, 4) + 2 * self.tensor(heads * t, 4)
        rows, columns = heads * _round_up(t, 128), _round_up(d, 32 if d <= 128 else 64)
        return self.tensor(rows * columns, 4) + self.tensor(rows, 4)

    @property
    def scores(self) -> int:
        """[b, a, t, t], with eager attention."""
        return self.tensor(self.rows * self.shape.n_head * self.shape.seq_len)

    @property
    def scores_mask(self) -> int:
        """Dropout's mask of the scores: one byte an element."""
        return self.tensor(self.rows * self.shape.n_head * self.shape.seq_len, 1)

    def weight(self, layer: str) -> int:
        """Elements of a linear layer's matrix."""
        return {"qkv": 3, "proj": 1, "up": 4, "down": 4}[layer] * self.shape.n_embd**2

    def bias(self, layer: str) -> int:
        """Elements of a linear layer's bias."""
        return {"qkv": 3, "proj": 1, "up": 4, "down": 1}[layer] * self.shape.n_embd if self.shape.bias else 0

    def weight_cast(self, layer: str) -> int:
        """Autocast's copy of a linear layer's matrix."""
        return self.tensor(self.weight(layer)) if self.autocast else 0

    def bias_cast(self, layer: str) -> int:
        """Autocast's copy of a linear layer's bias, which no backward pass reads."""
        return self.tensor(self.bias(layer)) if self.autocast else 0

    @property
    def norm_parameters(self) -> int:
        return self.shape.n_embd * (2 if self.shape.bias else 1)

    @property
    def table(self) -> int:
        """Elements of the token table, padding rows included."""
        return self.shape.padded_vocab_size * self.shape.n_embd

    @property
    def logits(self) -> int:
        """[b, t, rows of the token table]."""
        return self.tensor(self.rows * self.shape.padded_vocab_size)

    @property
    def fp32_logits(self) -> int:
        """[b, t, V] in fp32, without the padding."""
        return self.tensor(self.rows * self.shape.vocab_size, 4)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
