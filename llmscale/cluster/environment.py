"""Which variables of this shell the ranks on other hosts get, and `.deepspeed_env`.

ssh starts programs with none of the caller's variables, and DeepSpeed's launcher hands over PYTHON* and NCCL* only.
Here the values travel inside the connection, never on a command line: nothing is expanded, and no `ps` shows a key.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES
from llmscale.untrusted.interpreter import drop_empty
from llmscale.untrusted.paths import read_regular

#: Beginnings of names, by what reads them.
FORWARDED = (
    *("DS_", "DEEPSPEED_", "LLMSCALE_", "PYTHON", "TORCH", "PYTORCH", "TRITON_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "ASCEND_", "ZE_", "CCL_", "HABANA_"),
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OMPI_", "TP_SOCKET_IFNAME"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
    *("HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "TIKTOKEN_", "WANDB_"),
    *("AWS_", "S3_", "GOOGLE_", "GCS_", "AZURE_", "OCI_", "STREAMING_"),
    *("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "CC", "CXX", "MAX_JOBS", "NINJA", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
#: Whole names only: as beginnings they would take in too much.
_WHOLE = frozenset(("CC", "CXX", "MAX_JOBS", "NINJA"))
#: Each host's launcher sets these; a value from here would contradict it. CUDA_VISIBLE_DEVICES it overrides.
_NOT_FORWARDED = frozenset(("LLMSCALE_WATCH", "CUDA_VISIBLE_DEVICES"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEEPSPEED_ENV = ".deepspeed_env"
#: This llmscale, which every host has at the same path.
PACKAGE = Path(__file__).resolve().parents[1]


def gather_environment(
    variables: Mapping[str, str], *, extra: Iterable[str] = (), env_files: Iterable[Path]
) -> dict[str, str]:
    """The ranks' variables: what is forwarded of `variables`, then `env_files`, then `extra` (NAME=VALUE, or NAME for
    the value here). Raises ConfigError for what is neither."""
    chosen = {name: value for name, value in variables.items() if _is_forwarded(name)}
    for path in env_files:
        if path.is_file():
            chosen.update(parse_env_file(path))
    given: set[str] = set()
    for word in extra:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--env '{word}' is not NAME or NAME=VALUE.")
        if not equals and name not in variables:
            raise ConfigError(f"--env {name}: this shell has no such variable. Set it, or write --env {name}=VALUE.")
        if name in given:
            raise ConfigError(f"--env {name} is given twice. Give it once.")
        given.add(name)
        chosen[name] = value if equals else variables[name]
    chosen["PYTHONPATH"] = search_path(chosen.get("PYTHONPATH"))
    # A remote shell does not know this virtual environment: ninja is beside its Python.
    chosen.setdefault("PATH", f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', os.defpath)}")
    return chosen


def search_path(given: str | None) -> str:
    """Return PYTHONPATH with this llmscale before what it already names."""
    return drop_empty(os.pathsep.join([str(PACKAGE.parent), given or ""]))


def deepspeed_env_files() -> list[Path]:
    """Where DeepSpeed looks: the home folder, then the current one, which wins."""
    return [Path.home() / DEEPSPEED_ENV, Path.cwd() / DEEPSPEED_ENV]


def parse_env_file(path: Path) -> dict[str, str]:
    """NAME=VALUE per line, `#` begins a comment line; the value is taken as it stands. Raises ConfigError."""
    values = {}
    try:
        text = read_regular(path, CONFIG_MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, equals, value = entry.removeprefix("export ").partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ConfigError(f"{path}:{number}: '{entry}' is not NAME=VALUE.")
        values[name.strip()] = value.strip()
    return values


def _is_forwarded(name: str) -> bool:
    if name in _NOT_FORWARDED:
        return False
    return name in _WHOLE or any(name.startswith(start) for start in FORWARDED if start not in _WHOLE)
