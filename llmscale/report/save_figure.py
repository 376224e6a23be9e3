"""A picture as a file: whole, or not there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.user_paths import write_output_file
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path, flag: str = "--plot", format: str = "") -> None:
    """Write it to `path`, which `flag` named, and close it. Where `format` is empty, the suffix says it (PNG without
    one). Raises ConfigError."""
    from matplotlib import pyplot

    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=130, format=format or path.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {str(error).rstrip('.')}.") from None
    finally:
        pyplot.close(figure)
    write_output_file(flag, path, picture.getvalue())
