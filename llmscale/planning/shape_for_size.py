"""From a number of parameters to a model that can be built: the nearest preset, and a shape with sensible numbers. No
torch."""

from __future__ import annotations

import math
from dataclasses import replace

from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.largest_model import LARGEST_WIDTH, WIDTH_MULTIPLE, interpolated_shape
from llmscale.terminal.human_numbers import format_quantity

#: Below GPT-3's smallest width its depths say nothing.
_LEAST_DEPTH = 4
_WIDTHS = (
    *range(WIDTH_MULTIPLE, 2048, WIDTH_MULTIPLE),
    *range(2048, 4096, 2 * WIDTH_MULTIPLE),
    *range(4096, LARGEST_WIDTH + 1, 4 * WIDTH_MULTIPLE),
)


def nearest_preset(num_parameters: float, vocab_size: int) -> str:
    """The GPT-2 or GPT-3 whose size is the nearest by ratio."""

    def distance(name: str) -> float:
        return abs(math.log(PRESETS[name].shape(vocab_size).num_parameters / num_parameters))

    return min((name for name, preset in PRESETS.items() if not preset.block), key=distance)


def suggest_shape(num_parameters: float, vocab_size: int, seq_len: int) -> GPTShape:
    """A GPT of about that many parameters, shaped like GPT-3's.

    Heads of 64 up to a width of 2,048 and of 128 above; a width that has an even number of them, a multiple of four in
    large models; and the depth that GPT-3 has at that width, moved by the blocks that are missing or too many; of all
    widths the one where that moves it least. Raises ConfigError when even the narrowest is too large.
    """
    like = GPTShape(1, 1, WIDTH_MULTIPLE, vocab_size, seq_len, "gelu_tanh")
    if num_parameters < like.num_parameters:
        raise ConfigError(
            f"{format_quantity(num_parameters)} parameters are fewer than the {like.num_parameters:,} of one block of "
            f"width {WIDTH_MULTIPLE} and a vocabulary of {vocab_size:,}. Plan for more, or give a smaller --vocab-size."
        )
    most = interpolated_shape(LARGEST_WIDTH, like).num_parameters
    if num_parameters > most:
        raise ConfigError(
            f"{format_quantity(num_parameters)} parameters are more than the largest shape here has "
            f"({format_quantity(most)}). Plan for less."
        )
    best, least = like, math.inf
    for width in _WIDTHS:
        usual = interpolated_shape(width, like)
        usual = replace(usual, n_layer=max(usual.n_layer, _LEAST_DEPTH))
        outside = replace(usual, n_layer=1).num_parameters - usual.block_parameters
        shape = replace(usual, n_layer=max(1, round((num_parameters - outside) / usual.block_parameters)))
        off = abs(math.log(shape.n_layer / usual.n_layer)) + abs(math.log(shape.num_parameters / num_parameters))
        if off < least:
            best, least = shape, off
        if outside > num_parameters:
            break
    return best
