"""Read a model's small files (configuration, tokenizer) from the Hugging Face cache, else from the Hub.

Each request is one attempt, bounded in size and time, and needs no library: `estimate` and the tokenizers work without
huggingface_hub. Fetched files go to huggingface_hub's cache, under a lock: one rank of a host asks the Hub. Weights are
downloaded by huggingface_hub itself (checkpoint/initial_weights.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmscale.errors import LlmscaleError
from llmscale.untrusted.documents import Rules, parse_json
from llmscale.untrusted.paths import in_home, is_plain_name, read_regular

if TYPE_CHECKING:
    import urllib.request

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TIMEOUT_S = 10.0
#: Limit of the Hub's answer about a model, which lists all files.
_INFO_BYTES = 4 << 20
#: Limit of the answer about a dataset, which may list tens of thousands of files.
_DATA_SET_BYTES = 64 << 20
#: The Hub's tokens have 37 characters; other servers' may be longer.
_TOKEN = re.compile(r"[!-~]{1,2000}")
_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True)
class HubFiles:
    """Files of one model at one commit."""

    name: str
    """NAME@COMMIT, whose files never change."""
    contents: dict[str, bytes]
    """Contents by file name, without files that the model lacks."""
    folder: Path | None
    """Their folder in the cache; None if the cache is not writable."""


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form [ORGANISATION/]NAME[@REVISION]."""
    return _NAME.fullmatch(name) is not None


def forgotten_prefix(text: str) -> str:
    """Return a hint to add `hf:` to a name such as Qwen/Qwen3-0.6B, else an empty string."""
    looks_like_a_path = re.search(r"\.[a-z]\w*$|^(runs|data)/", text) or os.path.lexists(text.partition("/")[0])
    return f" Did you mean 'hf:{text}'?" if "/" in text and is_hub_name(text) and not looks_like_a_path else ""


# ---------------------------------------------------------------- the user's settings


def hub_endpoint() -> str:
    """Return the URL of the Hub, which HF_ENDPOINT can replace."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Return whether the user forbade network access."""
    return offline_variable() is not None


def offline_variable() -> str | None:
    """Return the variable by which the user forbade network access, of the two that huggingface_hub reads, or None."""
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)), None)


def read_token() -> str | None:
    """Return the token in HF_TOKEN or of `hf auth login`, or None.

    Raises OSError, ValueError; their messages do not show the contents.
    """
    if _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    path = in_home(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    token, place = os.environ.get("HF_TOKEN", "").strip(), "HF_TOKEN"
    if not token:
        try:
            token, place = read_regular(path, _TOKEN_FILE_BYTES).decode("ascii", "replace").strip(), str(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as fault:
            raise OSError(f"the login file {path} cannot be read: {fault.strerror}") from None
    if token and not _TOKEN.fullmatch(token):
        raise ValueError(f"{place} holds no token. A token is one line of letters, digits and signs without spaces")
    return token or None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "true", "yes", "on")


# ---------------------------------------------------------------- the cache of huggingface_hub


def hub_home() -> Path:
    """Return huggingface_hub's home folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return in_home(os.environ.get("HF_HOME", f"{caches}/huggingface"))


def hub_cache(model: str) -> Path:
    """Return the folder of a model in the cache."""
    return in_home(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub") / f"models--{model.replace('/', '--')}"


def find_snapshot(model: str, revision: str, needed: str) -> Path | None:
    """Return the cached folder of a revision if it holds `needed`; a branch is as it was when fetched."""
    cache, commit = hub_cache(model), revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = read_regular(cache / "refs" / revision, 64).decode("ascii").strip()
        except (OSError, ValueError):
            return None
    folder = cache / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and (folder / needed).is_file() else None


def _absence_path(model: str, commit: str, part: str) -> Path:
    """Return the path of huggingface_hub's empty marker file: this commit has no such file."""
    return hub_cache(model) / ".no_exist" / commit / part


def is_known_absent(name: str, part: str) -> bool:
    """Return whether the cache records that NAME@COMMIT has no such file."""
    model, _, commit = name.partition("@")
    return _absence_path(model, commit, part).exists()


def note_absent(model: str, commit: str, part: str) -> None:
    """Write the marker that a commit has no such file, if the cache is writable."""
    with contextlib.suppress(OSError):
        _write(_absence_path(model, commit, part), b"")


def _keep_files(model: str, revision: str, commit: str, contents: Mapping[str, bytes]) -> Path | None:
    """Write fetched files into the cache and return their folder; None if the cache is not writable."""
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
    """Write atomically, because other processes read the cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


@contextlib.contextmanager
def _one_at_a_time(model: str) -> Iterator[None]:
    """Hold a model's lock, so that one process of this host fetches and the others read the cache. No lock where the
    file system has none."""
    cache = hub_cache(model)
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            locks = cache.parent / ".locks" / cache.name
            locks.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(open(locks / "llmscale-lock", "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- requests


class _Refused(OSError):
    """The Hub answered with an HTTP error."""


def fetch_from_hub(place: str, max_bytes: int) -> bytes | None:
    """Return a file of the Hub, `NAME/resolve/REVISION/FILE`, or None for 404. Raises OSError, ValueError."""
    import http.client
    import urllib.error  # imports http, ssl and email
    import urllib.request

    request = urllib.request.Request(f"{hub_endpoint()}/{place}")
    if token := read_token():
        # Not sent on redirects to other hosts, which store the large files.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with _opener().open(request, timeout=_TIMEOUT_S) as answer:
            contents: bytes = answer.read(max_bytes + 1)
            is_cut_off = len(contents) <= max_bytes and bool(answer.length)
    except urllib.error.HTTPError as fault:
        if fault.code == 404:
            return None
        # Without a token the Hub answers 401 for names that do not exist, too.
        hint = "; the name is wrong, or needs a login or HF_TOKEN" if fault.code in (401, 403) else ""
        raise _Refused(f"the Hub answers {fault.code} {fault.reason} for {place}{hint}") from None
    except urllib.error.URLError as fault:
        raise OSError(f"no connection to {hub_endpoint()}: {_reason(fault)}") from None
    except http.client.HTTPException as fault:
        raise OSError(f"the Hub's answer for {place} is malformed or breaks off: {type(fault).__name__}") from None
    if is_cut_off:
        # read(size) raises nothing for a short body.
        raise OSError(f"the Hub's answer for {place} breaks off after {len(contents):,} bytes")
    if len(contents) > max_bytes:
        raise ValueError(f"{place} is larger than the limit of {max_bytes:,} bytes")
    return contents


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that keeps the token on redirects to the same host, such as to a model's new name."""
    import urllib.request

    class SameHost(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
            again = super().redirect_request(req, *answer)
            token = req.unredirected_hdrs.get("Authorization")
            if again is not None and token and urlsplit(again.full_url)[:2] == urlsplit(req.full_url)[:2]:
                again.add_unredirected_header("Authorization", token)
            return again

    return urllib.request.build_opener(SameHost)


def _ask_about(model: str, revision: str, error: type[LlmscaleError]) -> dict[str, object]:
    """Return the Hub's metadata of a model. Raises OSError, ValueError, `error`."""
    answer = fetch_from_hub(f"api/models/{model}/revision/{revision}", _INFO_BYTES)
    if answer is None:
        raise OSError(f"the Hub knows no model {model} with a revision {revision}")
    rules = Rules(error, max_bytes=_INFO_BYTES, not_finite=True)
    return parse_json(answer, rules, f"The Hub's answer about {model}")


def _reason(fault: Exception) -> str:
    return " ".join(str(getattr(fault, "reason", None) or getattr(fault, "strerror", None) or fault).split())


# ---------------------------------------------------------------- models and datasets


def read_hub_files(
    name: str, needed: str, others: Iterable[str], max_bytes: int, error: type[LlmscaleError], source: str = ""
) -> HubFiles:
    """Return `needed` and the existing files among `others`, all of one commit, each at most `max_bytes`.

    `name` passes is_hub_name; without @REVISION it is the newest, or the cached one if that has `needed`. `source`
    names it in messages. Raises `error` when `needed` is unavailable.
    """
    model, _, revision = name.partition("@")
    revision, names = revision or "main", (needed, *others)
    try:
        files = _read_cached(model, revision, names, max_bytes)
        if files is None or _may_be_fetched(files, names):
            with _one_at_a_time(model):
                # Another process may have fetched them while this one waited.
                files = _fetch_rest(model, revision, names, max_bytes, error)
        return files
    except FileNotFoundError:
        raise error(f"{model} on the Hub has no {needed} at the revision {revision}.") from None
    except (OSError, ValueError) as fault:
        raise error(
            f"{source or name} is not a file or folder here, is not in the Hugging Face cache, and cannot be fetched "
            f"from the Hub ({_reason(fault)}). Download the model's {needed} with the files beside it, and give their "
            "folder."
        ) from None


def _read_cached(model: str, revision: str, names: Sequence[str], max_bytes: int) -> HubFiles | None:
    """Return the cached files of a revision; None if it lacks the first of `names`. Raises OSError."""
    folder = find_snapshot(model, revision, names[0])
    if folder is None:
        return None
    contents = {part: read_regular(folder / part, max_bytes) for part in names if (folder / part).is_file()}
    return HubFiles(f"{model}@{folder.name}", contents, folder)


def _may_be_fetched(files: HubFiles, names: Iterable[str]) -> list[str]:
    """Return the files that the cache lacks and the Hub may have."""
    if is_offline():
        return []
    return [part for part in names if part not in files.contents and not is_known_absent(files.name, part)]


def _fetch_rest(
    model: str, revision: str, names: Sequence[str], max_bytes: int, error: type[LlmscaleError]
) -> HubFiles:
    """Read cached files and fetch the others. Raises FileNotFoundError when the Hub lacks the first of `names`,
    OSError, ValueError, `error`."""
    cached = _read_cached(model, revision, names, max_bytes)
    if cached is None and is_offline():
        raise OSError(f"{offline_variable()} is set")
    files = cached or HubFiles(f"{model}@{_commit_of(model, revision, error)}", {}, None)
    contents, commit = dict(files.contents), files.name.partition("@")[2]
    for part in _may_be_fetched(files, names):
        try:
            fetched = fetch_from_hub(f"{model}/resolve/{commit}/{part}", max_bytes)
        except OSError as fault:
            if cached is None or isinstance(fault, _Refused):
                raise
            break  # no network: use the cached files
        if fetched is not None:
            contents[part] = fetched
        elif part == names[0]:
            raise FileNotFoundError(part)
        else:
            note_absent(model, commit, part)
    return HubFiles(files.name, contents, _keep_files(model, revision, commit, contents))


def _commit_of(model: str, revision: str, error: type[LlmscaleError]) -> str:
    """Return the current commit of a branch or tag. Raises OSError, ValueError, `error`."""
    commit = revision if _COMMIT.fullmatch(revision) else _ask_about(model, revision, error).get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError("its answer names no commit")
    return commit


def list_hub_files(name: str, error: type[LlmscaleError]) -> list[str]:
    """Return the file names of NAME@REVISION, without subfolders. Raises OSError, ValueError, `error`."""
    model, _, revision = name.partition("@")
    siblings = _ask_about(model, revision or "main", error).get("siblings")
    names = [entry.get("rfilename") for entry in siblings if isinstance(entry, dict)] if type(siblings) is list else []
    return [part for part in names if isinstance(part, str) and is_plain_name(part)]


def check_data_set(name: str, source: str, error: type[LlmscaleError]) -> None:
    """Ask the Hub once whether a dataset exists and is readable; the `datasets` library would retry for minutes.

    `source` names it in messages. Does nothing when the user forbids network access. Raises `error` for an unknown
    name, missing permission, and no connection.
    """
    if is_offline() or _is_set("HF_DATASETS_OFFLINE"):
        return
    if "@" in name or not is_hub_name(name):
        raise error(
            f"{source}: '{name}' is neither a folder here nor a name on the Hub. Legal: ORGANISATION/NAME or NAME."
        )
    page = f"{hub_endpoint()}/datasets/{name}"
    try:
        answer = fetch_from_hub(f"api/datasets/{name}?expand[]=gated", _DATA_SET_BYTES)
        needs_login = re.search(rb'"gated":\s*"', answer or b"") and read_token() is None
    except (OSError, ValueError) as fault:
        local = "" if isinstance(fault, _Refused) else " Give files of this machine, or HF_HUB_OFFLINE=1 for the cache."
        raise error(f"{source} cannot be read: {_reason(fault)}.{local}") from None
    if answer is None:
        raise error(f"{source}: the Hub has no dataset {name}. Look for its name, with ORGANISATION/, at {page}.")
    if needs_login:
        raise error(f"{source} needs permission. Accept its conditions at {page}, and set HF_TOKEN to your login.")
