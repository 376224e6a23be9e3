"""Small files of a model on the Hugging Face Hub: from its cache on this machine, else over the network.

One attempt, bounded in size and time: huggingface_hub would retry for half a minute, and print each attempt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmscale.errors import LlmscaleError
from llmscale.untrusted.documents import Rules, parse_json
from llmscale.untrusted.paths import read_regular

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0
#: The Hub's answer about a model lists all its files.
_INFO_BYTES = 4 << 20


@dataclass(frozen=True)
class HubFiles:
    """Files of one model at one commit."""

    name: str
    """NAME@COMMIT, which names the same files for ever."""
    contents: dict[str, bytes]
    """By file name; those that the model lacks are left out."""


def is_hub_name(name: str) -> bool:
    """Whether `name` could be a model's: NAME or ORGANISATION/NAME, with @REVISION or without."""
    return _NAME.fullmatch(name) is not None


def read_hub_files(
    name: str, needed: str, others: Iterable[str], max_bytes: int, error: type[LlmscaleError]
) -> HubFiles:
    """`needed` and those of `others` that there are, each of at most `max_bytes`, all of one commit.

    `name` is one that is_hub_name takes; without @REVISION it is the newest, in the cache where that has it. Raises
    `error` when `needed` cannot be had.
    """
    model, _, revision = name.partition("@")
    snapshot = find_snapshot(model, revision or "main", needed)
    names = (needed, *others)
    try:
        if snapshot is not None:
            found = {part: snapshot / part for part in names if (snapshot / part).is_file()}
            contents = {part: read_regular(path, max_bytes) for part, path in found.items()}
            return HubFiles(f"{model}@{snapshot.name}", contents)
        if is_offline():
            raise OSError("HF_HUB_OFFLINE is set")
        commit = _commit_of(model, revision or "main", error)
        fetched = {part: fetch_from_hub(f"{model}/resolve/{commit}/{part}", max_bytes) for part in names}
    except (OSError, ValueError) as fault:
        reason = " ".join(str(getattr(fault, "reason", None) or getattr(fault, "strerror", None) or fault).split())
        raise error(
            f"{name} is no file or folder here, not in the Hugging Face cache, and cannot be fetched from the Hub "
            f"({reason}). Download the model's {needed} with the files beside it, and give their folder."
        ) from None
    present = {part: given for part, given in fetched.items() if given is not None}
    if needed not in present:
        raise error(f"{model} on the Hub has no {needed} at the revision {revision or 'main'}.")
    return HubFiles(f"{model}@{commit}", present)


def is_offline() -> bool:
    """Whether the user forbade the network, in huggingface_hub's words."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def hub_cache(model: str) -> Path:
    """Where huggingface_hub keeps a model on this machine."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"


def find_snapshot(model: str, revision: str, needed: str) -> Path | None:
    """The cached folder of a revision that holds `needed`; of a branch, what it was when it was fetched."""
    cache = hub_cache(model)
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = read_regular(cache / "refs" / revision, 64).decode("ascii").strip()
        except (OSError, ValueError):
            return None
    folder = cache / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and (folder / needed).is_file() else None


def _commit_of(model: str, revision: str, error: type[LlmscaleError]) -> str:
    """The commit that a branch or tag is at now. Raises OSError, ValueError, `error`."""
    if _COMMIT.fullmatch(revision):
        return revision
    answer = fetch_from_hub(f"api/models/{model}/revision/{revision}", _INFO_BYTES)
    if answer is None:
        raise OSError(f"the Hub knows no model {model} with a revision {revision}")
    commit = parse_json(answer, Rules(error, max_bytes=_INFO_BYTES), f"The Hub's answer about {model}").get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError("its answer names no commit")
    return commit


def fetch_from_hub(place: str, max_bytes: int) -> bytes | None:
    """A file of the Hub, `NAME/resolve/REVISION/FILE`; None where there is none. Raises OSError, ValueError."""
    import http.client
    import urllib.error  # brings the whole of http, ssl and email
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{place}")
    if token := os.environ.get("HF_TOKEN"):
        # Not to where the Hub redirects to: large files lie with others.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            contents: bytes = answer.read(max_bytes + 1)
    except urllib.error.HTTPError as fault:
        if fault.code == 404:
            return None
        hint = "" if fault.code not in (401, 403) else "; a model with conditions needs its reader's HF_TOKEN"
        raise OSError(f"the Hub answers {fault.code} {fault.reason} for {place}{hint}") from None
    except http.client.HTTPException as fault:
        raise OSError(f"the Hub's answer for {place} breaks off or is none: {type(fault).__name__}") from None
    if len(contents) > max_bytes:
        raise ValueError(f"{place} is larger than the {max_bytes:,} bytes that it may have")
    return contents
