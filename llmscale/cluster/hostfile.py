"""Read a hostfile: `name slots=N` per line. Lines that DeepSpeed misreads, or only warns about, are errors here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmscale.config.bundled_files import HOSTFILES
from llmscale.errors import ConfigError
from llmscale.limits import MAX_GPUS_PER_NODE
from llmscale.untrusted.documents import CONFIG_MAX_BYTES
from llmscale.untrusted.paths import read_regular

#: Names that ssh, pdsh and DeepSpeed's --include all read as one plain name: pdsh expands [ ] and commas, DeepSpeed
#: splits at @ and :, and a leading dash would be an option.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    """Name that ssh knows."""
    slots: int
    """Ranks to run there: GPUs, or processes on a CPU machine."""


def parse_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts in the order of the file, or of llmscale's own file of that name.

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
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        host = _parse_line(entry, f"{path}:{number}")
        if host.name in hosts:
            raise ConfigError(f"{path}:{number}: host '{host.name}' is listed twice. Give it one line with all slots.")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host. Write one line `name slots=N` per host.")
    return tuple(hosts.values())


def _parse_line(entry: str, where: str) -> Host:
    """Parse a line without its comment. Raises ConfigError whose text begins with `where`."""
    line = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,6})", entry)
    if line is None:
        raise ConfigError(f"{where}: '{entry}' is not `name slots=N`. {_advise(entry)}")
    name, slots = line[1], int(line[2])
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
    return Host(name, slots)


def _advise(entry: str) -> str:
    """Return the line that a wrong one probably means: its only host, with the number of slots, or its only number."""
    name = re.match(r"[A-Za-z][\w.-]*(?=[\s:,;]|$)", entry)
    counts = re.findall(r"\bslots\s*[=:]\s*([1-9][0-9]{0,2})\b", entry) or re.findall(
        r"[\s:,;=]([1-9][0-9]{0,2})\b", entry
    )
    if name is None or len(counts) > 1:
        return "Write one line `name slots=N` per host."
    return f"Write `{name[0]} slots={counts[0]}`." if counts else f"Write `{name[0]} slots=N`, N being its GPUs."
