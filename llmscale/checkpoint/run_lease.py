"""Hold a run in a store: one trainer at a time, by compare-and-swap of its `latest.json`. No torch.

The holder changes `latest.json` every few seconds. Another start takes the run over once that has not happened for
BEATS_MISSED intervals of its own clock; from then on no write of the old holder can succeed.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.checkpoint.remote_run import INDEX_NAME, Holder, RunIndex, parse_index
from llmscale.config.user_paths import url_of
from llmscale.data.storage.faults import Overtaken
from llmscale.data.storage.objects import Store, probe_conditions
from llmscale.errors import ConfigError

#: Seconds between two signs of life, unless the environment shortens them, and how many may be missed.
BEAT_VARIABLE = "LLMSCALE_BEAT_S"
_BEAT_S, BEATS_MISSED = 15.0, 4


def boot_name() -> str:
    """Return what a process id needs to be unique: this boot, and this container's process namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return secrets.token_hex(8)


def _beat_seconds() -> float:
    """Return the seconds between two signs of life. Raises ConfigError for an illegal BEAT_VARIABLE."""
    text = os.environ.get(BEAT_VARIABLE) or str(_BEAT_S)
    with suppress(ValueError):
        if 0.05 <= float(text) <= 600:
            return float(text)
    raise ConfigError(f"{BEAT_VARIABLE} is {text[:40]!r}. Legal: seconds from 0.05 to 600; default: {_BEAT_S:g}.")


class Lease:
    """Rank 0's hold on a run in a store."""

    def __init__(self, store: Store, url: str, index: RunIndex, version: str) -> None:
        """`url` is that of latest.json, `version` its own."""
        self._store, self._url, self._version = store, url, version
        self.index = index
        """Content of latest.json as this trainer wrote it."""
        self._turn = threading.Lock()

    def update(self, change: Callable[[RunIndex], RunIndex]) -> None:
        """Write a changed description with a sign of life. Raises Overtaken when another trainer has the run."""
        with self._turn:
            changed = change(self.index)
            if changed.holder is not None:
                changed = replace(changed, holder=replace(changed.holder, beat=changed.holder.beat + 1))
            try:
                self._version = self._store.replace(self._url, changed.encode(), self._version)
            except Overtaken:
                # An earlier write, whose answer never came, may have arrived.
                stored = self._store.read_versioned(self._url)
                if stored is None or parse_index(stored[0], self._url).epoch != self.index.epoch:
                    raise
                self._version = self._store.replace(self._url, changed.encode(), stored[1])
            self.index = changed

    def release(self) -> None:
        """Let another start have the run at once."""
        self.update(lambda index: replace(index, holder=None))


def take_lease(run: Path, report: Callable[[str], None]) -> tuple[Lease, RunIndex | None]:
    """Take the run whose copy is `run`; return the lease and the description before. Waits for a holder that may be
    gone. Raises ConfigError when another trainer holds it."""
    url = str(url_of(run))
    store, index_url = Store(url), f"{url}/{INDEX_NAME}"
    before, version = _wait_until_free(store, url, report) or (None, "")
    if before is None:
        probe_conditions(url)
    token = secrets.token_hex(8)
    holder = Holder(token, platform.node(), os.getpid(), boot_name(), 0, _beat_seconds())
    index = before or RunIndex(secrets.token_hex(8))
    index = replace(index, epoch=index.epoch + 1, last_token=token, holder=holder)
    try:
        version = (
            store.replace(index_url, index.encode(), version) if before else store.create(index_url, index.encode())
        )
    except Overtaken:
        raise _in_use(url, "another start, which was faster") from None
    return Lease(store, index_url, index, version), before


def _wait_until_free(store: Store, url: str, report: Callable[[str], None]) -> tuple[RunIndex, str] | None:
    """Return the newest description of a run and its version, None for a new run, once no trainer holds it.

    Raises ConfigError when its holder is alive.
    """
    first, end = None, 0.0
    while stored := store.read_versioned(f"{url}/{INDEX_NAME}"):
        index = parse_index(stored[0], url)
        holder = index.holder
        if holder is None or (holder.boot == boot_name() and not os.path.exists(f"/proc/{holder.pid}")):
            return index, stored[1]
        named = f"process {holder.pid} on host {holder.host}"
        if first is None:
            first, limit_s = holder, BEATS_MISSED * holder.beat_s
            end = time.monotonic() + limit_s
            report(f"{url} is held by {named}; waiting {limit_s:.0f} s for a sign of life before taking it over")
        elif holder != first:
            raise _in_use(url, named)
        elif time.monotonic() >= end:
            return index, stored[1]
        time.sleep(min(holder.beat_s, max(0.0, end - time.monotonic())))
    return None


def _in_use(url: str, who: str) -> ConfigError:
    return ConfigError(f"--run {url} is in use by {who}. Wait for it to end, or name another run.")


def remove_folders(store: Store, url: str, folders: Iterable[str]) -> None:
    """Remove folders of a run that latest.json does not name any more. Raises DataError."""
    for folder in folders:
        for stored in store.list_objects(f"{url}/{folder}"):
            store.delete(stored.url)


def prune_run(run: Path, names: Sequence[str], report: Callable[[str], None]) -> None:
    """Remove checkpoints from a run in a store. Raises ConfigError while a trainer holds the run, and DataError."""
    url, (lease, before) = str(url_of(run)), take_lease(run, report)
    try:
        known = before.checkpoints if before else {}
        remaining = {name: remote for name, remote in known.items() if name not in names}
        # A trainer's copy of it remains the newest.
        token = before.last_token if before else ""
        lease.update(lambda index: replace(index, checkpoints=remaining, last_token=token))
        gone = [f"{CHECKPOINTS_NAME}/{remote}" for name, remote in known.items() if name in names]
        remove_folders(Store(url), url, gone)
    finally:
        lease.release()
