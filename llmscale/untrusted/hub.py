"""Read a model's small files (configuration, tokenizer) from the Hugging Face cache, else from the Hub.

huggingface_hub asks, downloads and caches; it is slow to import, so functions do it. One process of a host at a time
asks about a model, and the others read the cache. Weights come by the same library (checkpoint/initial_weights.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from llmscale.errors import LlmscaleError, causes_of, http_status
from llmscale.untrusted.paths import is_plain_name, read_regular

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w.-]*)?", re.ASCII)
#: Limit of an answer about a model or a file, and of waiting for another process that fetches a model's small files.
_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 600.0


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


def without_prefix(source: str, spec: str, kind: type[LlmscaleError]) -> str:
    """Return the folder or name in `hf:NAME`; `source` is the flag with it. Raises `kind` if it is empty."""
    name = spec.removeprefix("hf:")
    if not name.strip(":"):
        raise kind(f"{source} names nothing. Give hf:FOLDER or hf:NAME, such as hf:gpt2 or hf:ORGANISATION/NAME.")
    return name


def forgotten_prefix(text: str) -> str:
    """Return a hint to add `hf:` to a name such as Qwen/Qwen3-0.6B, else an empty string."""
    looks_like_a_path = re.search(r"\.[a-z]\w*$|^(runs|data)/", text) or os.path.lexists(text.partition("/")[0])
    if "/" in text and is_hub_name(text) and not looks_like_a_path:
        return f" Did you mean 'hf:{text}'?"
    return ""


def is_offline() -> bool:
    """Return whether the user forbade network access."""
    return offline_variable() is not None


def offline_variable() -> str | None:
    """Return the variable by which the user forbade network access, of the two that huggingface_hub reads, or None."""
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)), None)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "true", "yes", "on")


# ---------------------------------------------------------------- the cache


def cache_of(model: str) -> Path:
    """Return the folder of a model in the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE, repo_folder_name(repo_id=model, repo_type="model"))


def find_snapshot(model: str, revision: str, needed: str) -> Path | None:
    """Return the cached folder of a revision if it holds `needed`; a branch is as it was when fetched."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, needed, revision=revision)
    if isinstance(path, str):
        return Path(path).parent
    return None


def is_known_absent(name: str, part: str) -> bool:
    """Return whether the cache records that NAME@COMMIT has no such file."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    model, _, commit = name.partition("@")
    return try_to_load_from_cache(model, part, revision=commit) is _CACHED_NO_EXIST


@contextmanager
def _locked_cache(model: str) -> Iterator[Path]:
    """Hold a model's lock and yield the cache, or a temporary folder where the cache cannot be written."""
    from tempfile import TemporaryDirectory  # slow to import

    from huggingface_hub.utils import WeakFileLock

    cache = cache_of(model).parent
    with ExitStack() as stack:
        try:
            cache_of(model).mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(cache_of(model) / ".llmscale-lock", timeout=_LOCK_TIMEOUT_S))
        except OSError:
            cache = Path(stack.enter_context(TemporaryDirectory()))
        yield cache


# ---------------------------------------------------------------- models


def read_hub_files(
    name: str, needed: str, others: Iterable[str], max_bytes: int, error: type[LlmscaleError], source: str = ""
) -> HubFiles:
    """Return `needed` and the existing files among `others`, all of one commit, each at most `max_bytes`.

    `name` passes is_hub_name; without @REVISION it is the newest, or the cached one if that has `needed`. `source`
    names it in messages. Raises `error` when `needed` is unavailable.
    """
    model, _, revision = name.partition("@")
    revision = revision or "main"
    names = (needed, *others)

    def read(folder: Path) -> HubFiles:
        contents = {part: read_regular(folder / part, max_bytes) for part in names if (folder / part).is_file()}
        return HubFiles(f"{model}@{folder.name}", contents, folder if folder.is_relative_to(cache_of(model)) else None)

    try:
        if folder := _find_complete(model, revision, names):
            return read(folder)
        with _locked_cache(model) as cache:
            # Another process may have fetched them while this one waited.
            folder = _find_complete(model, revision, names) or _fetch(model, revision, names, max_bytes, cache)
            if folder is not None:
                return read(folder)
    except Exception as fault:  # the library's errors, its transport's, and OSError
        reason = explain_fault(fault, f"model {model} with a revision {revision}")
        raise error(
            f"{source or name} is not a file or folder here, is not in the Hugging Face cache, and cannot be fetched "
            f"from the Hub ({reason}). Download the model's {needed} with the files beside it, and give their folder."
        ) from None
    raise error(f"{model} on the Hub has no {needed} at the revision {revision}.")


def _find_complete(model: str, revision: str, names: Sequence[str]) -> Path | None:
    """Return the cached folder of a revision if it has the first of `names`, and the Hub is not to be asked for others.

    Raises ValueError offline without such a folder.
    """
    folder = find_snapshot(model, revision, names[0])
    if is_offline() and folder is None:
        raise ValueError(f"{offline_variable()} is set")
    if folder is None or is_offline():
        return folder
    name = f"{model}@{folder.name}"
    if all((folder / part).is_file() or is_known_absent(name, part) for part in names):
        return folder
    return None


def _fetch(model: str, revision: str, names: Sequence[str], max_bytes: int, cache: Path) -> Path | None:
    """Fetch the files that exist and return their folder in `cache`; None if the first of `names` does not."""
    cached = find_snapshot(model, revision, names[0])
    revision = cached.name if cached else revision
    try:
        sizes = list_hub_files(f"{model}@{revision}")
    except Exception as fault:
        if cached is None or _status(fault):
            raise
        return cached  # no network
    for part in names:
        if sizes.get(part, 0) > max_bytes:
            raise ValueError(f"{model}/{part} is larger than the limit of {max_bytes:,} bytes")
    first = fetch_hub_file(model, revision, names[0], cache)
    if first is None:
        return None
    # The branch may have moved on.
    for part in names[1:]:
        fetch_hub_file(model, first.parent.name, part, cache)
    return first.parent


def fetch_hub_file(model: str, revision: str, part: str, cache: Path | None = None) -> Path | None:
    """Return the path of a file in the cache, fetched if it is not there; None if the model has no such file."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, part, revision=revision, cache_dir=cache, etag_timeout=_TIMEOUT_S))
    except Exception as fault:
        if _status(fault) == 404:
            return None
        raise


def list_hub_files(name: str) -> dict[str, int]:
    """Return the sizes in bytes of the files of NAME@REVISION, without subfolders; 0 for an unknown size."""
    from huggingface_hub import HfApi

    model, _, revision = name.partition("@")
    answer = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    return {file.rfilename: file.size or 0 for file in answer.siblings or () if is_plain_name(file.rfilename)}


# ---------------------------------------------------------------- datasets


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
    from huggingface_hub import HfApi, constants, get_token

    page = f"{constants.ENDPOINT}/datasets/{name}"
    try:
        answer = HfApi().dataset_info(name, expand=["gated"], timeout=_TIMEOUT_S)
        needs_login = answer.gated and get_token() is None
    except Exception as fault:  # the library's errors, its transport's, and OSError
        if _status(fault) == 404:
            raise error(
                f"{source}: the Hub has no dataset {name}. Look for its name, with ORGANISATION/, at {page}."
            ) from None
        if _status(fault):
            local = ""
        else:
            local = " Give files of this machine, or HF_HUB_OFFLINE=1 for the cache."
        raise error(f"{source} cannot be read: {explain_fault(fault, f'dataset {name}')}.{local}") from None
    if needs_login:
        raise error(f"{source} needs permission. Accept its conditions at {page}, and set HF_TOKEN to your login.")


# ---------------------------------------------------------------- faults


def _status(fault: BaseException) -> int | None:
    """Return the HTTP status with which the Hub refused; None without an answer."""
    return next((status for cause in causes_of(fault) if (status := http_status(cause))), None)


def explain_fault(fault: BaseException, what: str) -> str:
    """Return why the Hub gave nothing, on one line; `what` was asked for."""
    from huggingface_hub.constants import ENDPOINT

    if (status := _status(fault)) == 404:
        return f"the Hub knows no {what}"
    if status is not None:
        # Without a token the Hub answers 401 for names that do not exist, too.
        hint = {
            401: "; the name is wrong, or needs a login or HF_TOKEN",
            403: "; accept its conditions on its page, with the account of your login or HF_TOKEN",
        }.get(status, "")
        return f"the Hub answers {status} {HTTPStatus(status).phrase} for {what}{hint}"
    *_, first = causes_of(fault)
    # Drop the query of a URL: the Hub puts credentials there.
    words = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", str(getattr(first, "strerror", None) or first))
    reason = " ".join(words.split())[:300] or type(first).__name__
    is_of_network = isinstance(first, OSError) and first.filename is None
    return f"no connection to {ENDPOINT}: {reason}" if is_of_network else reason
