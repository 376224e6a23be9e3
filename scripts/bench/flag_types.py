"""`type=` of the scripts' flags: what is wrong is refused before anything is prepared or measured. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.config import command_line
from llmscale.config.hardware import get_gpu
from llmscale.config.presets import get_preset
from llmscale.config.user_paths import check_output_file
from llmscale.errors import ConfigError

#: matplotlib draws more; these are what a browser or a paper shows.
PICTURES = (".png", ".svg", ".pdf")
#: A number of anything: steps, ranks, tokens.
whole_number = command_line.whole_number(1, 10**9)
#: The same, or none.
whole_or_zero = command_line.whole_number(0, 10**9)
positive = command_line.number(0, 1e6, above=True)
fraction = command_line.number(0, 1, above=True)


def preset_name(text: str) -> str:
    """Of a published shape."""
    return _known(get_preset, text)


def gpu_name(text: str) -> str:
    """Of the table."""
    return _known(get_gpu, text)


def output_file(text: str) -> Path:
    """A file that can be written or overwritten."""
    file = command_line.local_path(text)
    try:
        check_output_file("the file", file, overwrite=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file


def picture_file(text: str) -> Path:
    """The same, of a format that its suffix says."""
    file = output_file(text)
    if file.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"the suffix says the format, and must be {', '.join(PICTURES)}, not '{text}'")
    return file


def _known(get: Callable[[str], object], name: str) -> str:
    try:
        get(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name
