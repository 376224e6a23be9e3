"""Rotary positions' frequencies (Su et al. 2021) and how they are scaled to longer contexts. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from llmscale.errors import ConfigError

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_LINEAR = re.compile(rf"linear:({_NUMBER})")
_LLAMA3 = re.compile(rf"llama3:({_NUMBER}),({_NUMBER}),({_NUMBER}),([0-9]+)")
LEGAL_SCALINGS = "none, linear:FACTOR, or llama3:FACTOR,LOW,HIGH,ORIGINAL_SEQ_LEN such as llama3:8,1,4,8192"


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float

    def __str__(self) -> str:
        return f"linear:{_plain(self.factor)}"

    def scale(self, frequency: float) -> float:
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: slow rotations are divided by `factor`, fast ones kept, and those between are interpolated
    (Grattafiori et al. 2024, section 3.4; `apply_scaling` of Meta's llama-models)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int
    """Context in tokens that the model was first trained on."""

    def __str__(self) -> str:
        factors = (self.factor, self.low_freq_factor, self.high_freq_factor)
        return f"llama3:{','.join(map(_plain, factors))},{self.original_seq_len}"

    def scale(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        turns = self.original_seq_len / wavelength
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - kept) * frequency / self.factor + kept * frequency


RopeScaling = LinearScaling | Llama3Scaling


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """The scaling that a setting names; None for `none`. Raises ConfigError."""
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
    raise ConfigError(
        f"rope_scaling '{text}' is not legal. Legal: {LEGAL_SCALINGS}; FACTOR at least 1, LOW below HIGH."
    )


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def rotary_frequencies(head_dim: int, theta: float, scaling: str) -> list[float]:
    """Radians per position of each of a head's head_dim / 2 pairs, fastest first. Raises ConfigError."""
    rule = parse_rope_scaling(scaling)
    frequencies = [theta ** (-pair / head_dim) for pair in range(0, head_dim, 2)]
    return [rule.scale(frequency) for frequency in frequencies] if rule else frequencies
