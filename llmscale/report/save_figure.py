"""Import matplotlib where a picture is drawn, and write the picture to a file atomically."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Suffixes that matplotlib writes; without a suffix the format is PNG.
_SUFFIXES = ("", ".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is computed. Raises ConfigError."""
    check_output_file("--plot", path, overwrite=True)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: '{path.suffix}' is not legal. Legal: {', '.join(filter(None, _SUFFIXES))}.")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: `{install_command('plot')}`.")


def import_pyplot(needed_by: str = "--plot needs") -> ModuleType:
    """Import pyplot for drawing into files. Raises ConfigError without matplotlib, which begins with `needed_by`."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError(f"{needed_by} matplotlib: `{install_command('plot')}`.") from None
    return pyplot


def save_figure(figure: Figure, path: Path, flag: str = "--plot", format: str = "") -> None:
    """Write a figure to `path`, which `flag` named, and close it. Raises ConfigError.

    Without `format`, the suffix decides; without a suffix, PNG.
    """
    from matplotlib import pyplot

    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=130, format=format or path.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {str(error).rstrip('.')}.") from None
    finally:
        pyplot.close(figure)
    write_output_file(flag, path, picture.getvalue())
