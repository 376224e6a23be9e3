"""The shape of our GPT: every number that decides its parameters, FLOPs and activations. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llmscale.architecture.description import Architecture
from llmscale.architecture.gpt2 import describe_gpt2
from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.errors import ConfigError

Activation = Literal["gelu", "gelu_tanh", "relu"]

#: The embedding table is padded to a multiple of this many rows, so that the logits' matrix product has an even
#: shape for tensor cores (Megatron-LM pads to the same multiple).
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class GPTShape:
    """A GPT-2/GPT-3 decoder: pre-norm blocks, learned positions, tied embeddings, MLP of width 4 x n_embd.

    Raises ConfigError when the numbers cannot form a model.
    """

    n_layer: int
    """Transformer blocks."""
    n_head: int
    """Attention heads per block; must divide n_embd."""
    n_embd: int
    """Width of the residual stream."""
    vocab_size: int
    """Token ids the tokenizer can produce; the table itself has padded_vocab_size rows."""
    seq_len: int
    """Positions: the longest sequence in tokens."""
    activation: Activation = "gelu"
    """MLP non-linearity: exact GELU, its tanh approximation (GPT-2's) or ReLU (OPT's)."""
    dropout: float = 0.0
    """Probability of dropping an activation: embeddings, attention weights, residual branches."""
    bias: bool = True
    """Biases in linear layers and layer norms, as in GPT-2."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "seq_len"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        if self.n_embd % self.n_head:
            legal = [n for n in range(1, min(self.n_embd, 256) + 1) if self.n_embd % n == 0]
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}. "
                f"Legal n_head for this width: {', '.join(map(str, legal))}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be in [0, 1), not {self.dropout}.")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of VOCAB_MULTIPLE."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.n_embd

    @cached_property
    def architecture(self) -> Architecture:
        """The model that these numbers make."""
        return describe_gpt2(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            mlp_width=self.mlp_width,
            rows=self.padded_vocab_size,
            seq_len=self.seq_len,
            bias=self.bias,
            tied=True,
        )

    @cached_property
    def tensors(self) -> ParameterTensors:
        """Its parameters one by one."""
        return ParameterTensors(self.architecture)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return self.architecture.block_parameters

    @property
    def num_parameters(self) -> int:
        """Parameters that DeepSpeed stores: tied embeddings counted once, padding rows included."""
        return self.architecture.num_parameters

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward, at the full sequence length."""
        return self.architecture.flops_per_token(self.seq_len)
