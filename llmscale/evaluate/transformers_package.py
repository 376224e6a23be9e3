"""The transformers package, for lm-eval's model, and for what is compared with it: benchmarks and tests."""

from __future__ import annotations

import importlib
from types import ModuleType

from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError


def import_transformers() -> ModuleType:
    """Import the transformers package, without torchvision where that is broken.

    Streaming requires torchvision, and transformers imports it for images. One that was built for another
    torch (a CPU torch beside PyPI's torchvision, say) fails in that import, and GPT2LMHeadModel with it.
    Raises ConfigError where transformers is missing.
    """
    try:
        import transformers
        from transformers.utils import import_utils
    except ImportError as error:
        raise ConfigError(f"Hugging Face models need transformers below 5: `{install_command('eval')}`.") from error
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        import_utils._torchvision_available = False
    return transformers
