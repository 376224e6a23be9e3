"""Named model sizes with the learning rates and batch sizes of their papers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import Activation
from llmscale.config.human_numbers import parse_quantity
from llmscale.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Preset:
    """A published model size. The vocabulary comes from the data set, so it is not here."""

    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    """Context length in tokens."""
    learning_rate: float
    """Peak learning rate."""
    global_batch_tokens: int
    """Tokens per optimizer step."""
    activation: Activation
    source: str
    """Where the numbers come from."""


_GPT2 = "Radford et al. 2019, table 2; learning rate and batch of the GPT-3 model of its size"
_GPT3 = "Brown et al. 2020, table 2.1"
_TINY = "for CPUs and tests"

#: GPT-3's tables give batch sizes in tokens as 0.5M, 1M, 1.5M (here 2^19, 2^20, 3 x 2^19 ...), sequences of 2048.
#: GPT-3 13B is printed with 5140 wide and 40 heads of 128; 40 x 128 = 5120 is what can be built.
PRESETS: dict[str, Preset] = {
    "tiny-1m": Preset(4, 4, 128, 128, 1e-3, 4096, "gelu_tanh", _TINY),
    "tiny-3m": Preset(6, 6, 192, 256, 1e-3, 8192, "gelu_tanh", _TINY),
    "tiny-10m": Preset(6, 6, 384, 256, 1e-3, 16384, "gelu_tanh", _TINY),
    "gpt2-124m": Preset(12, 12, 768, 1024, 6e-4, 2**19, "gelu_tanh", _GPT2),
    "gpt2-350m": Preset(24, 16, 1024, 1024, 3e-4, 2**19, "gelu_tanh", _GPT2),
    "gpt2-774m": Preset(36, 20, 1280, 1024, 2.5e-4, 2**19, "gelu_tanh", _GPT2),
    "gpt2-1.5b": Preset(48, 25, 1600, 1024, 2e-4, 2**20, "gelu_tanh", _GPT2),
    "gpt3-125m": Preset(12, 12, 768, 2048, 6e-4, 2**19, "gelu_tanh", _GPT3),
    "gpt3-350m": Preset(24, 16, 1024, 2048, 3e-4, 2**19, "gelu_tanh", _GPT3),
    "gpt3-760m": Preset(24, 16, 1536, 2048, 2.5e-4, 2**19, "gelu_tanh", _GPT3),
    "gpt3-1.3b": Preset(24, 16, 2048, 2048, 2e-4, 2**20, "gelu_tanh", _GPT3),
    "gpt3-2.7b": Preset(32, 32, 2560, 2048, 1.6e-4, 2**20, "gelu_tanh", _GPT3),
    "gpt3-6.7b": Preset(32, 32, 4096, 2048, 1.2e-4, 2**21, "gelu_tanh", _GPT3),
    "gpt3-13b": Preset(40, 40, 5120, 2048, 1e-4, 2**21, "gelu_tanh", _GPT3),
    "gpt3-175b": Preset(96, 96, 12288, 2048, 0.6e-4, 3 * 2**20 + 2**17, "gelu_tanh", _GPT3),
}


def get_preset(name: str) -> Preset:
    """The preset of that name; raises ConfigError naming the closest and all legal names."""
    if name not in PRESETS:
        raise ConfigError(
            f"model '{name}' is not a preset.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}. "
            "For any other shape give n_layer, n_head and n_embd."
        )
    return PRESETS[name]


def nominal_parameters(name: str) -> float:
    """The size that a preset is called by: of a GPT at its own context and GPT-2's vocabulary, of a tiny one about its
    blocks alone."""
    return parse_quantity(name.rpartition("-")[2])
