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
    name, *rest = entry.split()
    other_form = re.fullmatch(r"([A-Za-z0-9][\w.-]*)[:,;]([0-9]{1,4})", entry)
    if other_form and int(other_form[2]) <= MAX_GPUS_PER_NODE:
        raise ConfigError(f"{where}: '{entry}' is not `name slots=N`. Write `{other_form[1]} slots={other_form[2]}`.")
    if not _COUNTS.match(name):
        _check_name(name, where)
    if not rest:
        raise ConfigError(f"{where}: '{entry}' does not say how many ranks to run there. {_advise(entry)}")
    slots = re.fullmatch(r"slots=([0-9]{1,6})", rest[0])
    if len(rest) > 1 or slots is None:
        raise ConfigError(f"{where}: '{entry}' is not `name slots=N`, with no space around the =. {_advise(entry)}")
    if int(slots.group(1)) > MAX_GPUS_PER_NODE:
        raise ConfigError(f"{where}: {rest[0]} is too many. At most {MAX_GPUS_PER_NODE} ranks run on one host.")
    if int(slots.group(1)) == 0:
        raise ConfigError(f"{where}: slots=0 runs nothing on '{name}'. Delete the line, or give at least one slot.")
    return Host(name, int(slots.group(1)))


#: Words for a number of ranks in the files of other launchers, each with its value.
_COUNTS = re.compile(
    r"(?i)\b(slots?|max[-_]?slots|(?:num[-_]?|n)?gpus?|ppn|np|n?procs?|cpus?)\b(?:\s*[=:]\s*|\s+)(\S+)"
)
#: A first word that is a command, and its options.
_COMMAND = re.compile(r"(?:ssh|rsh|pdsh|mpirun|srun)\b(?:\s+-\w+(?:\s+[0-9]+)?)*(?:\s+|$)")


def _advise(entry: str) -> str:
    """Return the line that a wrong one probably means; N is a number that it does not hold."""
    counts = {word.lower().replace("-", "_"): value.rstrip(",;") for word, value in _COUNTS.findall(entry)}
    words = re.split(r"[\s,;]+", _COUNTS.sub(" ", _COMMAND.sub("", entry, count=1)).strip())
    numbers = [word for word in words if word.isdecimal()]
    names = [word for word in words if word not in numbers and _NAME.fullmatch(word)]
    stated = [counts["slots"]] if "slots" in counts else [*counts.values(), *numbers]
    is_count = len(stated) == 1 and re.fullmatch("[1-9][0-9]{0,5}", stated[0]) is not None
    count = stated[0] if is_count and int(stated[0]) <= MAX_GPUS_PER_NODE else "N"
    # A word that is neither belongs to a file of another kind.
    if len(names) != 1 or (not stated and len(words) > 1):
        return "Write one line `name slots=N` per host."
    return f"Write `{names[0]} slots={count}`{', N being its GPUs' if count == 'N' else ''}."


def _check_name(name: str, where: str) -> None:
    """Raise ConfigError for a name that ssh, pdsh or DeepSpeed would misread."""
    if _NAME.fullmatch(name):
        return
    if "," in name or ("[" in name and "]:" not in name):
        raise ConfigError(f"{where}: '{name}' looks like a range or a list. Write one line per host.")
    raise ConfigError(
        f"{where}: '{name}' is not a plain host name. Use letters, digits, dots, dashes and underscores; begin with a "
        "letter or digit. Set a user, a port or an IPv6 address for it in ~/.ssh/config (User, Port, HostName)."
    )
