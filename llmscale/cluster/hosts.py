"""Hosts of a run: those of a hostfile or a Slurm job, the variables that ranks get there, and commands run through ssh.

A hostfile has a line `name slots=N` per host. Lines that DeepSpeed misreads, or only warns about, are errors here.

ssh starts programs with none of the caller's variables, and DeepSpeed's launcher forwards PYTHON* and NCCL* only.
Here the values travel inside the connection, never on a command line: nothing is expanded, and no `ps` shows a key.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmscale.config.bundled_files import HOSTFILES
from llmscale.errors import ConfigError
from llmscale.limits import MAX_GPUS_PER_NODE
from llmscale.untrusted.documents import CONFIG_MAX_BYTES
from llmscale.untrusted.interpreter import drop_empty, module_command
from llmscale.untrusted.paths import in_home, read_regular

#: Names that ssh, pdsh and DeepSpeed's --include all read as one plain name: pdsh expands [ ] and commas, DeepSpeed
#: splits at @ and :, and a leading dash would be an option.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Slurm's variables for the number of ranks per node, in the order of preference.
_SLOT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE")
#: Prefixes of the forwarded variables, by the software that reads them.
_FORWARDED = """
DS_ DEEPSPEED_ LLMSCALE_ PYTHON TORCH PYTORCH TRITON_
CUDA_ NVIDIA_ HIP_ ROCR_ ROCM_ HSA_ ASCEND_ ZE_ CCL_ HABANA_
NCCL_ RCCL_ GLOO_ UCX_ FI_ OMPI_ TP_SOCKET_IFNAME
OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ NUMEXPR_ MALLOC_
HF_ HUGGING TRANSFORMERS_ TOKENIZERS_ TIKTOKEN_ WANDB_
AWS_ S3_ GOOGLE_ GCS_ AZURE_ OCI_ STREAMING_
LD_LIBRARY_PATH XDG_CACHE_HOME http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY
"""
_FORWARDED_PREFIXES = tuple(_FORWARDED.split())
_FORWARDED_NAMES = frozenset(("CC", "CXX", "MAX_JOBS", "NINJA"))
#: Each host's launcher sets these; a value from here would contradict it. CUDA_VISIBLE_DEVICES overrides the launcher.
_NOT_FORWARDED = frozenset(("LLMSCALE_REPORTS", "CUDA_VISIBLE_DEVICES"))
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEEPSPEED_ENV = ".deepspeed_env"
#: Folder of this llmscale, which every host has at the same path.
PACKAGE = Path(__file__).resolve().parents[1]
#: Never ask for a password or about a host key, give up on a host that does not answer, and notice a silent one within
#: 15 s (ssh itself would wait for hours).
SSH_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
#: ssh's exit status for a host that it could not reach, or lost.
SSH_FAILED = 255
#: `timeout`'s exit status for a command that took too long; used here too.
TIMED_OUT = 124
#: Precedes an answer in a module's output: a login script may print text before it.
_ANSWER_MARK = "llmscale-answer "
#: Largest number of hosts that are contacted at the same time.
FAN_OUT = 128
LAUNCHERS = ("ssh", "slurm")


def parse_hostfile(path: str | Path) -> dict[str, int]:
    """Return the slots of each host, in the order of the file, or of llmscale's own file of that name.

    Slots are the ranks to run: GPUs, or processes on a CPU machine. A host has the name that ssh knows.

    Raises ConfigError for a missing or empty file, and for a line that cannot be used.
    """
    path = HOSTFILES.find(Path(path))
    try:
        lines = read_regular(path, CONFIG_MAX_BYTES).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"--hostfile {path} does not exist. Write one with a line `name slots=N` per host, "
            f"or leave --hostfile out to use this machine.{HOSTFILES.why_missing(path)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--hostfile {path} cannot be read: {reason}.") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        name, slots = _parse_line(entry, f"{path}:{number}")
        if name in hosts:
            raise ConfigError(f"{path}:{number}: host '{name}' is listed twice. Give it one line with all slots.")
        hosts[name] = slots
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host. Write one line `name slots=N` per host.")
    return hosts


def _parse_line(entry: str, where: str) -> tuple[str, int]:
    """Return host and slots of a line without its comment. Raises ConfigError whose text begins with `where`."""
    line = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,6})", entry)
    if line is None:
        raise ConfigError(f"{where}: '{entry}' is not `name slots=N`. {_advise(entry)}")
    name = line[1]
    slots = int(line[2])
    if "," in name or ("[" in name and "]:" not in name):
        raise ConfigError(f"{where}: '{name}' looks like a range or a list. Write one line per host.")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: '{name}' is not a plain host name. Use letters, digits, dots, dashes and underscores; begin "
            "with a letter or digit. Set a user, a port or an IPv6 address for it in ~/.ssh/config (User, Port, "
            "HostName)."
        )
    if slots > MAX_GPUS_PER_NODE:
        raise ConfigError(f"{where}: slots={slots} is too many. At most {MAX_GPUS_PER_NODE} ranks run on one host.")
    if slots == 0:
        raise ConfigError(f"{where}: slots=0 runs nothing on '{name}'. Delete the line, or give at least one slot.")
    return name, slots


def _advise(entry: str) -> str:
    """Return the line that a wrong one probably means: its only host, with the number of slots, or its only number."""
    name = re.match(r"[A-Za-z][\w.-]*(?=[\s:,;]|$)", entry)
    counts = re.findall(r"\bslots\s*[=:]\s*([1-9][0-9]{0,2})\b", entry) or re.findall(
        r"[\s:,;=]([1-9][0-9]{0,2})\b", entry
    )
    if name is None or len(counts) > 1:
        return "Write one line `name slots=N` per host."
    if counts:
        return f"Write `{name[0]} slots={counts[0]}`."
    return f"Write `{name[0]} slots=N`, N being its GPUs."


def slurm_hosts(variables: Mapping[str, str], slots: int | None = None) -> dict[str, int]:
    """Return all nodes of the Slurm job, each with `slots` ranks, or as many as the job has GPUs or tasks per node.

    Raises ConfigError outside of a job.
    """
    nodes = variables.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("--launcher slurm: SLURM_JOB_NODELIST is not set, so this is not a Slurm job. Use sbatch.")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--launcher slurm: scontrol cannot be run ({error}).") from None
    if done.returncode or not done.stdout.split():
        raise ConfigError(f"--launcher slurm: scontrol does not know '{nodes}': {done.stderr.strip()}.")
    return dict.fromkeys(done.stdout.split(), slots or _slots(variables))


def _slots(variables: Mapping[str, str]) -> int:
    for name in _SLOT_VARIABLES:
        # SLURM_GPUS_PER_NODE may begin with a type: a100:8.
        number = re.search(r"(\d+)(\(x\d+\))?$", variables.get(name, ""))
        if number and int(number.group(1)) > 0:
            return int(number.group(1))
    return 1


# ---------------------------------------------------------------- variables of the ranks


def gather_environment(
    variables: Mapping[str, str], *, extra: Iterable[str] = (), env_files: Iterable[Path]
) -> dict[str, str]:
    """Return the ranks' variables: the forwarded ones of `variables`, then `env_files`, then `extra`.

    An entry of `extra` is NAME=VALUE, or NAME for the value in `variables`. Raises ConfigError for anything else.
    """
    chosen = {
        name: value
        for name, value in variables.items()
        if name not in _NOT_FORWARDED and (name in _FORWARDED_NAMES or name.startswith(_FORWARDED_PREFIXES))
    }
    for path in filter(Path.is_file, env_files):
        chosen.update(parse_env_file(path))
    given: set[str] = set()
    for word in extra:
        name, equals, value = word.partition("=")
        if not _VARIABLE.fullmatch(name):
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
    """Return a PYTHONPATH with this llmscale before the folders of `given`."""
    return drop_empty(os.pathsep.join([str(PACKAGE.parent), given or ""]))


def deepspeed_env_files() -> list[Path]:
    """Return the files that DeepSpeed reads: in the home folder, then in the current one, which wins."""
    return [in_home("~") / DEEPSPEED_ENV, Path.cwd() / DEEPSPEED_ENV]


def parse_env_file(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines; `#` begins a comment line, and values are taken literally. Raises ConfigError."""
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
        if not equals or not _VARIABLE.fullmatch(name.strip()):
            raise ConfigError(f"{path}:{number}: '{entry}' is not NAME=VALUE.")
        values[name.strip()] = value.strip()
    return values


# ---------------------------------------------------------------- commands on the hosts


@dataclass(frozen=True)
class Finished:
    """Result of a command on one host."""

    returncode: int
    """The command's exit status, SSH_FAILED for an unreachable host, TIMED_OUT for a command that took too long."""
    stdout: str
    stderr: str
    timeout_s: float
    """Time that the command was given."""

    @property
    def answer(self) -> str:
        """JSON that the module has printed with `print_answer`; empty if it has not."""
        lines = [line for line in self.stdout.splitlines() if line.startswith(_ANSWER_MARK)]
        if lines:
            return lines[-1].removeprefix(_ANSWER_MARK)
        return ""

    def describe(self) -> str:
        """Return the last line of the output, after the time if the command took too long."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        if lines:
            last = " ".join(lines[-1].split())
        else:
            last = ""
        if self.returncode == TIMED_OUT:
            return f"no answer within {self.timeout_s:.0f} s" + (f", after `{last}`" if last else "")
        return last or f"ended with status {self.returncode}"


def ask_hosts(module: str, requests: Mapping[str, Mapping[str, object]], timeout_s: float) -> dict[str, Finished]:
    """Run a module of llmscale on several hosts at once; each gets its request by `read_request`.

    This machine (by any of its names) runs it directly, without ssh. Failures of a host are in `Finished.returncode`,
    never raised. Raises ConfigError for an unreadable .deepspeed_env.
    """
    here = place(gather_environment(os.environ, env_files=deepspeed_env_files()))

    def ask(host: str) -> Finished:
        message = json.dumps({**here, "request": requests[host]})
        return run_command(command_for(host, module_argv(module)), timeout_s, message)

    with ThreadPoolExecutor(FAN_OUT) as pool:
        return dict(zip(requests, pool.map(ask, requests), strict=True))


def read_request() -> dict[str, Any]:
    """Return the request of `ask_hosts`, after `take_place`."""
    message = json.load(sys.stdin)
    take_place(message)
    return dict(message["request"])


def print_answer(text: str) -> None:
    """Print the JSON with which a module answers."""
    print(_ANSWER_MARK + text, flush=True)


def place(environment: Mapping[str, str]) -> dict[str, object]:
    """Return this working folder and the ranks' variables, for `take_place` on another host."""
    return {"cwd": os.getcwd(), "environment": dict(environment)}


def take_place(message: Mapping[str, Any]) -> None:
    """Enter the working folder of another host, and take over the ranks' variables."""
    os.environ.update(message["environment"])
    try:
        os.chdir(message["cwd"])
    except OSError as error:
        sys.exit(f"{message['cwd']}: {error.strerror}. Every host needs the code at the same path")


def command_for(host: str, argv: Sequence[str]) -> list[str]:
    """Return the local command that runs `argv` on `host`: `argv` itself on this machine, else ssh."""
    if is_this_machine(host):
        return list(argv)
    # ssh joins its arguments with spaces and hands the line to a shell there: it gets one word, quoted here.
    return ["ssh", "-T", *SSH_OPTIONS, host, "--", shlex.join(argv)]


def is_this_machine(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine; False if it does not resolve."""
    if host == "localhost" or host in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, _, _, _, address in addresses:
        # Only a machine's own addresses can be bound to.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def module_argv(module: str) -> list[str]:
    """Return the command of `python -m module` with this Python and this llmscale, at the same path on every host."""
    return ["env", f"PYTHONPATH={search_path(os.environ.get('PYTHONPATH'))}", *module_command(module)]


def run_command(command: Sequence[str], timeout_s: float, message: str = "") -> Finished:
    """Run a command with a message on its stdin, and end it with its children when it takes too long."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        return Finished(SSH_FAILED, "", f"{command[0]}: {error.strerror}", timeout_s)
    try:
        stdout, stderr = process.communicate(message, timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        code = TIMED_OUT
    return Finished(code, stdout, stderr, timeout_s)


def host_command_by(launcher: str) -> Callable[[str], list[str]]:
    """Return the function from a host to the command that serves a launch there, over its stdin and stdout.

    The command holds no secret: every user of both machines can read it.
    """

    def host_command(host: str) -> list[str]:
        argv = module_argv("llmscale.cluster.launch.host")
        if launcher == "slurm":
            # One task on the node, as ssh would, with its full memory and cores, not the share of one task.
            where = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0", "--cpu-bind=none"]
            return ["srun", *where, "--unbuffered", "--quiet", "--export=ALL", "--kill-on-bad-exit=0", *argv]
        if is_this_machine(host):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return ["env", "--unset=SSH_CONNECTION", *argv]
        return command_for(host, argv)

    return host_command
