"""Facts about the software of this host: Python, llmscale's sources, libraries, and whether they import. No torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from llmscale.cluster.doctor.host_facts import CodeFacts, ImportFacts
from llmscale.cluster.environment import PACKAGE
from llmscale.files.source_hashes import source_hashes
from llmscale.training.run_folder import LIBRARIES
from llmscale.untrusted.interpreter import code_command

#: Run in a process of its own: an import can hang, crash, or take GPU memory.
_IMPORT_CODE = """
import json, os, sys
from llmscale.engine.silence_libraries import quiet_libraries
quiet_libraries()
import torch, deepspeed
import llmscale.training.build_session
print("facts", json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]), flush=True)
os._exit(0)
"""


def gather_code() -> CodeFacts:
    """Versions without importing anything."""
    cuda = _torch_cuda()
    return CodeFacts(
        python=platform.python_version(),
        executable=sys.executable,
        package=str(PACKAGE),
        sha256=hash_sources(PACKAGE),
        libraries={name: installed_version(name) for name in LIBRARIES},
        torch_cuda=cuda,
        nccl=_nccl_version() if cuda else None,
        fits_torchvision=cuda is not None or bool(re.search(r"\+cpu\b", _version_file("torchvision"))),
    )


def hash_sources(package: Path) -> str:
    """sha256 over the names and contents of all Python files of a package."""
    return hashlib.sha256(json.dumps(source_hashes(package)).encode()).hexdigest()


def installed_version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA version in torch/version.py, which says it without an import of torch."""
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", _version_file("torch"), flags=re.MULTILINE)
    return found.group(1) if found else None


def _version_file(package: str) -> str:
    """Return the text of a package's version.py, empty where the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    return (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")


def _nccl_version() -> str | None:
    """Of the wheel beside torch, else of the system's library."""
    for distribution in metadata.distributions():
        if (distribution.metadata["Name"] or "").startswith("nvidia-nccl-"):
            return distribution.version
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def gather_imports(timeout_s: float) -> ImportFacts:
    """Import what train.py imports, in a process of its own. Raises OSError."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            code_command(_IMPORT_CODE), capture_output=True, text=True, timeout=timeout_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return ImportFacts(f"not done within {timeout_s:.0f} s", False, 0, timeout_s)
    seconds = time.monotonic() - began
    answers = [line for line in done.stdout.splitlines() if line.startswith("facts ")]
    if done.returncode or not answers:
        words = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return ImportFacts(words[-1], False, 0, seconds)
    available, count = json.loads(answers[-1].removeprefix("facts "))
    return ImportFacts(None, available, count, seconds)
