"""Rotations of queries and keys, and their extensions beyond the context that a model was trained on. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from llmscale.errors import ConfigError

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_LINEAR = re.compile(rf"linear:({_NUMBER})")
_LLAMA3 = re.compile(rf"llama3:({_NUMBER}),({_NUMBER}),({_NUMBER}),([0-9]+)")
_YARN = re.compile(rf"yarn:({_NUMBER}),([0-9]+)")
LEGAL_SCALINGS = (
    "none, linear:FACTOR, llama3:FACTOR,LOW,HIGH,ORIGINAL_SEQ_LEN such as llama3:8,1,4,8192, or "
    "yarn:FACTOR,ORIGINAL_SEQ_LEN"
)


#: Turns within the original context from which YaRN keeps a pair, and up to which it slows one.
YARN_FAST = 32
YARN_SLOW = 1


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float

    def __str__(self) -> str:
        return f"linear:{_plain(self.factor)}"

    def scale(self, frequencies: list[float]) -> list[float]:
        return [frequency / self.factor for frequency in frequencies]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow rotations are divided by `factor`, fast ones kept, others interpolated
    (Grattafiori et al. 2024, section 3.4; `apply_scaling` of Meta's llama-models)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int
    """Context in tokens that the model was first trained on."""

    def __str__(self) -> str:
        factors = (self.factor, self.low_freq_factor, self.high_freq_factor)
        return f"llama3:{','.join(map(_plain, factors))},{self.original_seq_len}"

    def scale(self, frequencies: list[float]) -> list[float]:
        return [self._scale(frequency) for frequency in frequencies]

    def _scale(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        turns = self.original_seq_len / wavelength
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - share) * frequency / self.factor + share * frequency


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs that turn seldom are slowed by `factor`, fast ones kept, others interpolated by their number, and
    attention is sharpened (Peng et al. 2023; `_compute_yarn_parameters` of transformers with its defaults)."""

    factor: float
    original_seq_len: int
    """Context in tokens that the model was first trained on."""

    def __str__(self) -> str:
        return f"yarn:{_plain(self.factor)},{self.original_seq_len}"

    def scale(self, frequencies: list[float]) -> list[float]:
        # A pair turns original_seq_len x frequency / 2 pi times; the logarithm of that is linear in its number.
        step = math.log(frequencies[0] / frequencies[-1]) / max(1, len(frequencies) - 1)

        def number_of(turns: float) -> float:
            if step:
                return math.log(self.original_seq_len / (turns * 2 * math.pi)) / step
            return 0.0

        low = max(0, math.floor(number_of(YARN_FAST)))
        high = min(2 * len(frequencies) - 1, math.ceil(number_of(YARN_SLOW)))
        width = high - low or 0.001
        slowed = [min(1.0, max(0.0, (number - low) / width)) for number in range(len(frequencies))]
        return [f / self.factor * s + f * (1 - s) for f, s in zip(frequencies, slowed, strict=True)]

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and of keys."""
        return 0.1 * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """Parse the `rope_scaling` setting; None for `none`. Raises ConfigError."""
    if text == "none":
        return None
    if match := _LINEAR.fullmatch(text):
        factor = float(match[1])
        if 1 <= factor <= 1e6:
            return LinearScaling(factor)
    elif match := _LLAMA3.fullmatch(text):
        factor, low, high = (float(match[n]) for n in (1, 2, 3))
        if 1 <= factor <= 1e6 and 0 < low < high <= 1e6 and 1 <= int(match[4]) <= 1 << 30:
            return Llama3Scaling(factor, low, high, int(match[4]))
    elif match := _YARN.fullmatch(text):
        factor = float(match[1])
        if 1 <= factor <= 1e6 and 1 <= int(match[2]) <= 1 << 30:
            return YarnScaling(factor, int(match[2]))
    raise ConfigError(
        f"rope_scaling '{text}' is not legal. Legal: {LEGAL_SCALINGS}; FACTOR at least 1, LOW below HIGH."
    )


def _plain(number: float) -> str:
    if number == int(number):
        return str(int(number))
    return repr(number)


def rotary_frequencies(head_dim: int, theta: float, scaling: str) -> list[float]:
    """Return the radians per position of a head's head_dim / 2 pairs, fastest first. Raises ConfigError."""
    rule = parse_rope_scaling(scaling)
    frequencies = [theta ** (-pair / head_dim) for pair in range(0, head_dim, 2)]
    if rule:
        return rule.scale(frequencies)
    return frequencies


def rotary_factor(scaling: str) -> float:
    """Return the factor of rotated queries and keys: 1 without YaRN. Raises ConfigError."""
    rule = parse_rope_scaling(scaling)
    return rule.attention_factor if isinstance(rule, YarnScaling) else 1.0
