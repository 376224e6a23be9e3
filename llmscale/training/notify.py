"""--notify: the user's command, which gets a run's facts when it ends, fails or meets a loss spike. No torch.

The command runs by `sh -c` as the user gave it, with the variables of the run. Facts are one JSON object on its stdin,
never part of the command: no text of a run is read by a shell. Whatever the command does, the run continues.

Who started the ranks sees how they end, also by SIGKILL: `llmscale launch`, `llmscale train`, else rank 0 itself.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from llmscale.config.published import last_part, publish_texts
from llmscale.config.run_urls import shown
from llmscale.error_handling import say
from llmscale.training.run_folder import without_nan
from llmscale.untrusted.terminal import make_visible_line

#: Time limit of the command: what asked a run to stop often kills it half a minute later.
HOOK_S = 20.0
_MAX_ERROR_BYTES = 300


def notify(command: str | None, run: Path, event: str, facts: Mapping[str, object]) -> None:
    """Run `command`, if there is one, with an event on its stdin, and wait for it. Never raises."""
    if command is None:
        return
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"event": event, "run": last_part(shown(run)), "host": platform.node(), "time": now, **facts}
    text = json.dumps(without_nan(publish_texts(facts)))
    try:
        # Files, because a process that the command leaves in the background would hold pipes open.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(text.encode() + b"\n")
            stdin.seek(0)
            problem = _run(command, stdin.fileno(), stderr.fileno())
            stderr.seek(0)
            last = stderr.read()[-_MAX_ERROR_BYTES:].decode(errors="replace").strip()
    except OSError as error:
        problem, last = f"cannot be started: {error.strerror or error}", ""
    if problem:
        say(f"WARNING: --notify {problem}{make_visible_line(f': {last}' if last else '')}")


def _run(command: str, stdin: int, stderr: int) -> str:
    """Return why the command failed, or an empty string. Raises OSError."""
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
    )
    try:
        status = process.wait(HOOK_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"took longer than {HOOK_S:.0f} s and was killed"
    return f"ended with status {status}" if status else ""


def notify_in_background(command: str | None, run: Path, event: str, facts: Mapping[str, object]) -> None:
    """Run `command` while training continues."""
    if command is not None:
        threading.Thread(target=notify, args=(command, run, event, facts), name="notify", daemon=True).start()
