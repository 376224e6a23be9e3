"""Check that every host is reachable, has the right time and runs the same software. Facts are gathered there."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from llmscale.cluster.doctor.facts import (
    CheckRow,
    CodeFacts,
    HostFacts,
    ImportFacts,
    differ,
    format_by_host,
    format_hosts,
    green,
    red,
    yellow,
)
from llmscale.cluster.remote import PACKAGE, SSH_FAILED, Finished
from llmscale.config.bundled_files import install_command
from llmscale.files.source_hashes import source_hashes
from llmscale.training.run_folder import library_versions
from llmscale.untrusted.interpreter import code_command

#: A larger difference between clocks confuses logs, build tools and time-outs; one above the second limit breaks
#: signed requests too (object stores, Kerberos).
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 5.0

#: Libraries whose version changes results or the protocol between ranks. Other libraries change a file format at most.
_STRICT = ("torch", "deepspeed", "mosaicml-streaming")

#: Patterns of ssh's messages, with finding and fix. The first match wins.
_SSH_FAULTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one in known_hosts",
        "If the host was installed again: ssh-keygen -R {host}, then ssh-keyscan -H {host} >> ~/.ssh/known_hosts.",
    ),
    (
        "Host key verification failed",
        "its host key is not known here",
        "Compare the fingerprint, then: ssh-keyscan -H {host} >> ~/.ssh/known_hosts.",
    ),
    (
        "Permission denied",
        "it does not accept your key",
        "ssh-copy-id {host} (first ssh-keygen, if you have none), and load the key into ssh-agent if it has a "
        "passphrase.",
    ),
    (
        "Could not resolve hostname",
        "its name does not resolve",
        "Correct the hostfile, or add {host} to DNS, /etc/hosts or ~/.ssh/config.",
    ),
    (
        "Connection refused",
        "no ssh server is listening",
        "Start it on {host}: systemctl start ssh. If it listens on another port, write `Port` for it in ~/.ssh/config.",
    ),
    (
        "during banner exchange",
        "its ssh server does not answer",
        "The machine may be out of memory, or sshd stuck: restart it on {host} from its console.",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "no network path to it",
        "Start {host} and its network, and open port 22 in firewalls and security groups.",
    ),
    (
        r"Connection (closed|reset)|kex_exchange_identification",
        "its ssh server closes the connection",
        "On {host}: journalctl -u ssh. MaxStartups and AllowUsers in sshd_config are the usual reasons.",
    ),
)


@dataclass(frozen=True)
class ClockReading:
    """A host's clock, read between two readings of this machine's clock. Seconds."""

    offset_s: float
    """Lead of the host's clock, if the request took as long as the answer."""
    uncertainty_s: float
    """Half of the round trip, the largest error of the offset."""


def check_reach(answers: Mapping[str, Finished]) -> Iterator[CheckRow]:
    """Yield the rows for the answers to `ssh HOST date`."""
    reached = [host for host, answer in answers.items() if answer.returncode == 0]
    if reached:
        yield green("reach", f"{len(reached)} of {len(answers)} hosts answer through ssh")
    for host, answer in answers.items():
        if answer.returncode:
            found, fix = _explain_ssh(host, answer)
            yield red("reach", f"{host}: {found}", fix)


def _explain_ssh(host: str, answer: Finished) -> tuple[str, str]:
    if answer.timed_out:
        return (
            f"no answer within {answer.seconds:.0f} s",
            f"Log in by hand: ssh {host}. A stuck home directory or login script is the usual reason; a reboot helps.",
        )
    last = " ".join((answer.stderr.strip().splitlines() or ["ssh printed nothing"])[-1].split())
    if answer.returncode == SSH_FAILED:
        for pattern, found, fix in _SSH_FAULTS:
            if re.search(pattern, answer.stderr):
                return f"{found} ({last})", fix.format(host=host)
    return f"`ssh {host} date` failed ({last})", f"Log in by hand: ssh {host}."


def check_clocks(readings: Mapping[str, ClockReading]) -> Iterator[CheckRow]:
    """Compare each host's clock with this machine's; a difference within the uncertainty of the reading is ignored."""
    wrong = False
    for host, reading in readings.items():
        certain_s = abs(reading.offset_s) - reading.uncertainty_s
        if certain_s <= CLOCK_WARN_S:
            continue
        wrong = True
        side = "ahead of" if reading.offset_s > 0 else "behind"
        make = red if certain_s > CLOCK_FAIL_S else yellow
        yield make(
            "clock",
            f"{host} is {abs(reading.offset_s):.1f} s {side} this machine",
            f"On {host}: timedatectl set-ntp true (or start chrony), and see that UDP port 123 is open.",
        )
    if readings and not wrong:
        most_s = max(abs(reading.offset_s) for reading in readings.values())
        unsure_s = max(reading.uncertainty_s for reading in readings.values())
        yield green("clock", f"within {most_s + unsure_s:.2f} s of this machine's")


def check_probes(problems: Mapping[str, str]) -> Iterator[CheckRow]:
    """Yield rows for hosts whose probe did not run. `problems` has its last line by host."""
    for host, problem in problems.items():
        if re.search(r"No such file or directory|not found", problem) and os.path.basename(sys.executable) in problem:
            fix = f"Create the environment at the same path on every host: {sys.executable} is missing."
        elif "No module named" in problem or "another llmscale" in problem:
            fix = (
                "Put the same llmscale and the same Python environment at the same path on every host (rsync -a, or a "
                "shared file system)."
            )
        elif "no answer" in problem:
            fix = f"Log in to {host} and look for a stuck disk or driver (ps -eo stat,cmd | grep '^D'); a reboot helps."
        else:
            fix = f"Run on {host}: {sys.executable} -m llmscale.cluster.doctor.diagnose '{{}}'"
        yield red("probe", f"{host}: {problem}", fix)


def check_late(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Yield a row for each group of facts that could not be gathered."""
    causes = {
        "run": "the disk of the data or run folder",
        "ds": "the disk of the ds_config",
        "gpus": "the GPU driver (nvidia-smi)",
        "imports": "the disk of the Python environment",
        "system": "the disk of the home directory, or /dev/shm",
        "code": "the disk of the Python environment",
        "network": "name resolution (DNS)",
    }
    for host, found in facts.items():
        for group, reason in (found.late or {}).items():
            yield red("probe", f"{host}: {group}: {reason}", f"Check {causes[group]} on {host}: it does not answer.")


def check_software(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    """Check that Python, llmscale and the libraries are installed, importable and the same on every host."""
    yield from _check_same(
        "python",
        facts,
        lambda host: host.code and host.code.python,
        f"Install the same Python on every host; ranks start with {sys.executable}.",
    )
    yield from _check_same(
        "llmscale",
        facts,
        lambda host: host.code and f"sources {host.code.sha256[:12]}",
        "Copy one source tree to all hosts: rsync -a --delete, or git pull on each, at the same path.",
    )
    yield from _check_libraries(facts)
    yield from _check_same(
        "cuda",
        facts,
        lambda host: host.code and _describe_cuda(host.code.torch_cuda, host.code.nccl),
        "Install the same torch wheel on every host: the versions of NCCL must be equal.",
    )
    if unfit := [host for host, found in facts.items() if found.code and not found.code.fits_torchvision]:
        yield CheckRow(
            "torchvision",
            "ok",
            f"llmscale needs none; `import streaming` elsewhere needs the CPU build on {format_hosts(unfit)}",
            "pip install --force-reinstall --no-deps torchvision -c constraints.txt --index-url "
            "https://download.pytorch.org/whl/cpu",
        )
    yield from _check_imports(facts)


def _describe_cuda(cuda: str | None, nccl: str | None) -> str:
    return f"CUDA {cuda}, NCCL {nccl or 'not found'}" if cuda else "torch without CUDA"


def _check_same(
    name: str, facts: Mapping[str, HostFacts], read: Callable[[HostFacts], object], fix: str
) -> Iterator[CheckRow]:
    values = {host: value for host, found in facts.items() if (value := read(found)) is not None}
    if not values:
        return
    if differ(values):
        yield red(name, format_by_host(values), fix)
    else:
        yield green(name, format_by_host(values))


def _check_libraries(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    codes = {host: found.code for host, found in facts.items() if found.code}
    names = sorted({name for code in codes.values() for name in code.libraries})
    fine = []
    for name in names:
        versions = {host: code.libraries.get(name) or "not installed" for host, code in codes.items()}
        missing = [host for host, version in versions.items() if version == "not installed"]
        if missing and name in _STRICT:
            yield red(
                "libraries",
                f"{name} is not installed on {format_hosts(missing)}",
                f"Install the same environment on every host: {install_command('train')}",
            )
        elif differ(versions):
            make = red if name in _STRICT else yellow
            some = next(version for version in versions.values() if version != "not installed")
            yield make("libraries", f"{name}: {format_by_host(versions)}", f"On every host: pip install {name}=={some}")
        elif not missing:
            fine.append(f"{name} {format_by_host(versions)}")
    if fine:
        yield green("libraries", ", ".join(fine))


def _check_imports(facts: Mapping[str, HostFacts]) -> Iterator[CheckRow]:
    imports = {host: found.imports for host, found in facts.items() if found.imports}
    problems = {host: found.problem for host, found in imports.items() if found.problem}
    if problems:
        yield red(
            "imports",
            f"train.py's imports fail: {format_by_host(problems, name_all=True)}",
            f"Repair that environment ({sys.executable} -c 'import torch, deepspeed' shows the error), for example by "
            f"{install_command('train')}.",
        )
    elif imports:
        slowest_s = max(found.seconds for found in imports.values())
        yield green("imports", f"train.py's imports take {slowest_s:.0f} s")


#: Run in a separate process: an import can hang, crash, or take GPU memory.
_IMPORT_CODE = """
import json, os, sys
from llmscale.engine.deepspeed_patches import quiet_libraries
quiet_libraries()
import torch, deepspeed
import llmscale.training.open_session
print("facts", json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]), flush=True)
os._exit(0)
"""


def gather_code() -> CodeFacts:
    """Return the installed versions, without importing anything."""
    # torch/version.py names the CUDA version without an import of torch.
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", _version_file("torch"), flags=re.MULTILINE)
    cuda = found.group(1) if found else None
    return CodeFacts(
        python=platform.python_version(),
        executable=sys.executable,
        package=str(PACKAGE),
        sha256=hash_sources(PACKAGE),
        libraries=library_versions(),
        torch_cuda=cuda,
        nccl=_nccl_version() if cuda else None,
        fits_torchvision=cuda is not None or bool(re.search(r"\+cpu\b", _version_file("torchvision"))),
    )


def hash_sources(package: Path) -> str:
    """Return a sha256 over the names and contents of a package's Python files."""
    return hashlib.sha256(json.dumps(source_hashes(package)).encode()).hexdigest()


def _version_file(package: str) -> str:
    """Return the text of a package's version.py; empty if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    return (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")


def _nccl_version() -> str | None:
    """Return the version of the wheel beside torch, else of the system's library."""
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
    """Run train.py's imports in a separate process. Raises OSError."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            code_command(_IMPORT_CODE), capture_output=True, text=True, timeout=timeout_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return ImportFacts(f"not finished within {timeout_s:.0f} s", False, 0, timeout_s)
    seconds = time.monotonic() - began
    answers = [line for line in done.stdout.splitlines() if line.startswith("facts ")]
    if done.returncode or not answers:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return ImportFacts(lines[-1], False, 0, seconds)
    available, count = json.loads(answers[-1].removeprefix("facts "))
    return ImportFacts(None, available, count, seconds)
