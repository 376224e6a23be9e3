"""A model on the Hugging Face Hub, and small files of it: from its cache on this machine, else over the network.

One attempt, bounded in size and time: huggingface_hub would retry for half a minute, and print each attempt. What is
fetched is kept where huggingface_hub keeps it, and by one process at a time: of a host's ranks, one asks the Hub.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from llmscale.errors import LlmscaleError
from llmscale.untrusted.documents import Rules, parse_json
from llmscale.untrusted.paths import is_plain_name, read_regular

if TYPE_CHECKING:
    import urllib.request
    from http.client import HTTPMessage

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Whether a revision names the same files for ever."""
    return _COMMIT.fullmatch(revision) is not None


def hub_home() -> Path:
    """The folder of huggingface_hub on this machine."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME", f"{caches}/huggingface")).expanduser()


def hub_cache(model: str) -> Path:
    """Where huggingface_hub keeps a model on this machine."""
    return Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub")).expanduser() / f"models--{model.replace('/', '--')}"


def find_snapshot(model: str, revision: str, needed: str) -> Path | None:
    """The cached folder of a revision that holds `needed`; of a branch, what it was when it was fetched."""
    cache = hub_cache(model)
    commit = revision
    if not is_commit(revision):
        try:
            commit = read_regular(cache / "refs" / revision, 64).decode("ascii").strip()
        except (OSError, ValueError):
            return None
    folder = cache / "snapshots" / commit
    return folder if is_commit(commit) and (folder / needed).is_file() else None


def cached_commits(model: str, needed: str) -> str:
    """What to ask for where the cache has that file of a model, and not what this revision was at."""
    found = (hub_cache(model) / "snapshots").glob("*")
    commits = [path.name for path in found if is_commit(path.name) and (path / needed).is_file()]
    return f"The cache has {model}@{min(commits)}, which can be named so. " if commits else ""


def absence_path(model: str, commit: str, part: str) -> Path:
    """The empty file by which huggingface_hub remembers that a commit has no such file."""
    return hub_cache(model) / ".no_exist" / commit / part


def note_absent(model: str, commit: str, part: str) -> None:
    """Remember it, where the cache can be written."""
    with contextlib.suppress(OSError):
        path = absence_path(model, commit, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def keep_files(model: str, revision: str, commit: str, contents: Mapping[str, bytes]) -> Path | None:
    """Put fetched files into the cache; None where it cannot be written."""
    cache = hub_cache(model)
    folder = cache / "snapshots" / commit
    try:
        for part, content in contents.items():
            if not (folder / part).is_file():
                _write(folder / part, content)
        if revision != commit:
            _write(cache / "refs" / revision, commit.encode())
    except OSError:
        return None
    return folder


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: others read the cache meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def one_at_a_time(model: str) -> Iterator[None]:
    """Let one process of this host fetch; the others find in the cache what it fetched. Not where locks cannot be."""
    cache = hub_cache(model)
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            locks = cache.parent / ".locks" / cache.name
            locks.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(open(locks / "llmscale-lock", "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TIMEOUT_S = 10.0
#: The Hub's answer about a model lists all its files.
_INFO_BYTES = 4 << 20
#: Its answer about a data set may list tens of thousands.
_DATA_SET_BYTES = 64 << 20
#: Those of the Hub have 37 letters; other servers may give longer ones.
_TOKEN = re.compile(r"[!-~]{1,2000}")
_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True)
class HubFiles:
    """Files of one model at one commit."""

    name: str
    """NAME@COMMIT, which names the same files for ever."""
    contents: dict[str, bytes]
    """By file name; those that the model lacks are left out."""
    folder: Path | None
    """Where the cache has them; None where it cannot be written."""


def is_hub_name(name: str) -> bool:
    """Whether `name` could be a model's: NAME or ORGANISATION/NAME, with @REVISION or without."""
    return _NAME.fullmatch(name) is not None


def forgotten_prefix(text: str) -> str:
    """Return the question whether `hf:` was forgotten before a name such as Qwen/Qwen3-0.6B, else an empty string."""
    looks_like_a_path = re.search(r"\.[a-z]\w*$|^(runs|data)/", text) or os.path.lexists(text.partition("/")[0])
    return f" Did you mean 'hf:{text}'?" if "/" in text and is_hub_name(text) and not looks_like_a_path else ""


class _Refused(OSError):
    """The Hub has answered, and not with the file."""


def read_hub_files(
    name: str, needed: str, others: Iterable[str], max_bytes: int, error: type[LlmscaleError], source: str = ""
) -> HubFiles:
    """`needed` and those of `others` that there are, each of at most `max_bytes`, all of one commit.

    `name` is one that is_hub_name takes; without @REVISION it is the newest, in the cache where that has `needed`.
    `source` names it in messages. Raises `error` when `needed` cannot be had.
    """
    model, _, revision = name.partition("@")
    names, source = (needed, *others), source or name
    try:
        snapshot = find_snapshot(model, revision or "main", needed)
        if snapshot is None or any(_may_be_fetched(model, snapshot, part) for part in names):
            with one_at_a_time(model):
                return _read_or_fetch(model, revision or "main", names, max_bytes, error)
        return HubFiles(f"{model}@{snapshot.name}", _read_snapshot(snapshot, names, max_bytes), snapshot)
    except FileNotFoundError:
        raise error(f"{model} on the Hub has no {needed} at the revision {revision or 'main'}.") from None
    except (OSError, ValueError) as fault:
        raise error(
            f"{source} is no file or folder here, not in the Hugging Face cache, and cannot be fetched from the Hub "
            f"({_reason(fault)}). {cached_commits(model, needed)}Download the model's {needed} with the files beside "
            "it, and give their folder."
        ) from None


def _read_or_fetch(
    model: str, revision: str, names: tuple[str, ...], max_bytes: int, error: type[LlmscaleError]
) -> HubFiles:
    """Read what the cache has and fetch the rest, the first of `names` in any case. Raises FileNotFoundError when the
    Hub has no such file, OSError, ValueError, `error`."""
    # Another process may have fetched them meanwhile.
    snapshot = find_snapshot(model, revision, names[0])
    if snapshot is None and is_offline():
        raise OSError(f"{offline_variable()} is set")
    commit = _commit_of(model, revision, error) if snapshot is None else snapshot.name
    contents = {} if snapshot is None else _read_snapshot(snapshot, names, max_bytes)
    for part in names:
        if part in contents or not (snapshot is None or _may_be_fetched(model, snapshot, part)):
            continue
        try:
            fetched = fetch_from_hub(f"{model}/resolve/{commit}/{part}", max_bytes)
        except _Refused:
            raise
        except OSError:
            if snapshot is None:
                raise
            break  # without the network, what is cached is all there is
        if fetched is not None:
            contents[part] = fetched
        elif part == names[0]:
            raise FileNotFoundError(part)
        else:
            note_absent(model, commit, part)
    return HubFiles(f"{model}@{commit}", contents, keep_files(model, revision, commit, contents))


def list_hub_files(name: str, error: type[LlmscaleError]) -> list[str]:
    """Plain names of the files of NAME@REVISION, those in its folders left out. Raises OSError, ValueError, `error`."""
    model, _, revision = name.partition("@")
    siblings = _ask_about(model, revision or "main", error).get("siblings")
    names = [entry.get("rfilename") for entry in siblings if isinstance(entry, dict)] if type(siblings) is list else []
    return [part for part in names if isinstance(part, str) and is_plain_name(part)]


def hub_endpoint() -> str:
    """The Hub, or what the user has in its place."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Whether the user forbade the network."""
    return offline_variable() is not None


def offline_variable() -> str | None:
    """By which the user forbade the network, in huggingface_hub's words: it listens to both."""
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)), None)


def is_known_absent(name: str, part: str) -> bool:
    """Whether NAME@COMMIT is known to have no such file, so that nobody asks again."""
    model, _, commit = name.partition("@")
    return absence_path(model, commit, part).exists()


def fetch_from_hub(place: str, max_bytes: int) -> bytes | None:
    """A file of the Hub, `NAME/resolve/REVISION/FILE`; None where there is none. Raises OSError, ValueError."""
    import http.client
    import urllib.error  # brings the whole of http, ssl and email
    import urllib.request

    request = urllib.request.Request(f"{hub_endpoint()}/{place}")
    if token := read_token():
        # Not to other hosts that the Hub redirects to: large files lie with others.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with _opener().open(request, timeout=_TIMEOUT_S) as answer:
            contents: bytes = answer.read(max_bytes + 1)
            is_cut_off = len(contents) <= max_bytes and bool(answer.length)
    except urllib.error.HTTPError as fault:
        if fault.code == 404:
            return None
        # Asked without a token, the Hub says 401 of names that do not exist, too.
        hint = "; the name is wrong, or needs its reader's login or HF_TOKEN" if fault.code in (401, 403) else ""
        raise _Refused(f"the Hub answers {fault.code} {fault.reason} for {place}{hint}") from None
    except urllib.error.URLError as fault:
        raise OSError(f"no connection to {hub_endpoint()}: {_reason(fault)}") from None
    except http.client.HTTPException as fault:
        raise OSError(f"the Hub's answer for {place} breaks off or is none: {type(fault).__name__}") from None
    if is_cut_off:
        # read() itself says nothing of it when it was given a size.
        raise OSError(f"the Hub's answer for {place} breaks off after {len(contents):,} bytes")
    if len(contents) > max_bytes:
        raise ValueError(f"{place} is larger than the {max_bytes:,} bytes that it may have")
    return contents


def check_data_set(name: str, source: str, error: type[LlmscaleError]) -> None:
    """Ask the Hub once whether it has a data set that may be read; its library would retry for minutes.

    `source` names it in messages. Raises `error` for a name that the Hub does not know, for one that needs permission,
    and without a connection. Where the user forbids the network, nothing is asked.
    """
    if is_offline() or _is_set("HF_DATASETS_OFFLINE"):
        return
    if "@" in name or not is_hub_name(name):
        raise error(f"{source}: '{name}' is no folder here and no name of the Hub. Legal: ORGANISATION/NAME or NAME.")
    page = f"{hub_endpoint()}/datasets/{name}"
    try:
        answer = fetch_from_hub(f"api/datasets/{name}?expand[]=gated", _DATA_SET_BYTES)
        needs_login = re.search(rb'"gated":\s*"', answer or b"") and read_token() is None
    except (OSError, ValueError) as fault:
        local = "" if isinstance(fault, _Refused) else " Give files of this machine, or HF_HUB_OFFLINE=1 for the cache."
        raise error(f"{source} cannot be read: {_reason(fault)}.{local}") from None
    if answer is None:
        raise error(f"{source}: the Hub has no data set {name}. Look for its name, with ORGANISATION/, at {page}.")
    if needs_login:
        raise error(f"{source} needs permission. Accept its conditions at {page}, and set HF_TOKEN to your login.")


def _opener() -> urllib.request.OpenerDirector:
    """Follows redirects, with the token where they stay with the same host, such as to a model's new name."""
    import urllib.request

    class SameHost(urllib.request.HTTPRedirectHandler):
        def redirect_request(
            self,
            req: urllib.request.Request,
            fp: IO[bytes],
            code: int,
            msg: str,
            headers: HTTPMessage,
            newurl: str,
        ) -> urllib.request.Request | None:
            again = super().redirect_request(req, fp, code, msg, headers, newurl)
            token = req.unredirected_hdrs.get("Authorization")
            if again is not None and token and urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]:
                again.add_unredirected_header("Authorization", token)
            return again

    return urllib.request.build_opener(SameHost)


def read_token() -> str | None:
    """The user's token for the Hub, HF_TOKEN or what `huggingface-cli login` keeps; None for neither.

    Raises OSError, ValueError, which do not show what is there.
    """
    if _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    path = Path(os.environ.get("HF_TOKEN_PATH", hub_home() / "token")).expanduser()
    token, place = os.environ.get("HF_TOKEN", "").strip(), "HF_TOKEN"
    if not token:
        try:
            token, place = read_regular(path, _TOKEN_FILE_BYTES).decode("ascii", "replace").strip(), str(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as fault:
            raise OSError(f"the login file {path} cannot be read: {fault.strerror}") from None
    if token and not _TOKEN.fullmatch(token):
        raise ValueError(f"{place} holds no token: one is a line of letters, digits and signs without spaces")
    return token or None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "true", "yes", "on")


def _reason(fault: Exception) -> str:
    return " ".join(str(getattr(fault, "reason", None) or getattr(fault, "strerror", None) or fault).split())


def _commit_of(model: str, revision: str, error: type[LlmscaleError]) -> str:
    """The commit that a branch or tag is at now. Raises OSError, ValueError, `error`."""
    if is_commit(revision):
        return revision
    commit = _ask_about(model, revision, error).get("sha")
    if not isinstance(commit, str) or not is_commit(commit):
        raise ValueError("its answer names no commit")
    return commit


def _ask_about(model: str, revision: str, error: type[LlmscaleError]) -> dict[str, object]:
    """What the Hub says of a model. Raises OSError, ValueError, `error`."""
    answer = fetch_from_hub(f"api/models/{model}/revision/{revision}", _INFO_BYTES)
    if answer is None:
        raise OSError(f"the Hub knows no model {model} with a revision {revision}")
    rules = Rules(error, max_bytes=_INFO_BYTES, not_finite=True, large_numbers=True)
    return parse_json(answer, rules, f"The Hub's answer about {model}")


def _read_snapshot(snapshot: Path, names: Iterable[str], max_bytes: int) -> dict[str, bytes]:
    return {part: read_regular(snapshot / part, max_bytes) for part in names if (snapshot / part).is_file()}


def _may_be_fetched(model: str, snapshot: Path, part: str) -> bool:
    """Whether a file that a cached folder lacks may be on the Hub."""
    return not ((snapshot / part).is_file() or is_offline() or absence_path(model, snapshot.name, part).exists())
