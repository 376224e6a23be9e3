"""`llmscale launch`: start attempts until the run is finished, is asked to stop, or fails for good.

Also the record of attempts (attempts.jsonl) and the decision to try again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import islice, takewhile
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.cluster.hosts import place
from llmscale.cluster.launch.attempt import AttemptRun, Outcome
from llmscale.errors import ConfigError
from llmscale.files.folder_lock import LOCK_NAME, lock_folder
from llmscale.files.record_log import RecordLog
from llmscale.report.run_list import notify_of_end
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.inputs import Inputs, PreparedRun, read_inputs
from llmscale.training.run_folder import ATTEMPTS_NAME, LOGS_NAME, RunFolderClaim
from llmscale.training.start import check_space, resolve_ranks, resolve_start
from llmscale.training.stop_request import LAUNCH_VARIABLE
from llmscale.training.watchdog import stacks_path
from llmscale.untrusted.documents import load_json_lines

# ---------------------------------------------------------------- the record of attempts

#: Wait before a restart. It doubles with each attempt that ends as the one before.
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
LAUNCH_LOCK_NAME = ".launch.lock"
#: Wait between two attempts to reach enough hosts.
_REGATHER_S = 5.0


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. It is recorded when it begins, and again when it has ended."""

    number: int
    """Number from 1, over all launches of the run."""
    began: str
    """UTC, ISO 8601."""
    hosts: dict[str, int]
    """Number of ranks by host, in rank order."""
    world_size: int
    master: str
    """Rendezvous of the ranks, address:port."""
    left_out: dict[str, str]
    """Hosts that were not used, with the reason."""
    logs: str
    """Folder of this attempt's logs, one file per rank."""
    seconds: float | None = None
    """Duration until the end of its last process."""
    training_after_s: float | None = None
    """Duration until its first finished step; None without one."""
    first_step: int | None = None
    """First step that was finished in this attempt."""
    last_step: int | None = None
    """Last step that was finished in this attempt."""
    end: str | None = None
    """"finished", "stopped", "failed", "hung", "host lost", "no hosts", "user error" or "supervisor lost"; None while
    it runs."""
    reason: str | None = None
    """One line about the end."""


#: Checks the types of a record, and ignores fields of another version.
_ATTEMPT = TypeAdapter(Attempt)


def read_attempts(run: Path) -> list[Attempt]:
    """Return all attempts, each as it was last recorded. Damaged lines are skipped: the record must not stop a run."""
    attempts: dict[int, Attempt] = {}
    with contextlib.suppress(FileNotFoundError):
        for record in load_json_lines(run / ATTEMPTS_NAME):
            with contextlib.suppress(ValidationError):
                attempt = _ATTEMPT.validate_python(record)
                attempts[attempt.number] = attempt
    return [attempts[number] for number in sorted(attempts)]


# ---------------------------------------------------------------- when to try again


def decide(attempts: Sequence[Attempt], max_restarts: int, same_step_limit: int) -> float | str:
    """Return the seconds until the next attempt of this launch, whose last one has failed, or why to give up."""
    last = attempts[-1]
    same = sum(1 for _ in takewhile(lambda one: (one.last_step, one.end) == (last.last_step, last.end), attempts[::-1]))
    if same >= same_step_limit:
        if last.last_step is None:
            where = "before its first step"
        else:
            where = f"after step {last.last_step}"
        return f"{same} attempts in a row ended {where} ({last.end}: {last.reason})"
    if len(attempts) > max_restarts:
        return f"{max_restarts} restarts were not enough (--max-restarts)"
    return min(FIRST_WAIT_S * 2 ** (same - 1), LONGEST_WAIT_S)


# ---------------------------------------------------------------- one launch


@dataclass(frozen=True)
class LaunchOptions:
    """The resolved arguments of `llmscale launch`."""

    hosts: Mapping[str, int]
    """Slots of each host, in rank order."""
    host_command: Callable[[str], list[str]]
    """Function from a host to the command that serves the launch there."""
    script: str
    """Path of train.py on every host."""
    arguments: Sequence[str]
    """Arguments of train.py."""
    environment: dict[str, str]
    """Variables for the ranks."""
    max_restarts: int
    """Number of restarts in one launch."""
    same_step_limit: int
    """Number of consecutive attempts that end after the same step before the launch gives up."""
    connect_timeout_s: float
    lost_after_s: float
    wait_for_hosts_s: float
    """Time limit for `min_hosts` to answer."""
    min_hosts: int
    master_addr: str | None
    master_port: int | None


class Supervisor:
    """One launch."""

    def __init__(
        self, options: LaunchOptions, prepared: PreparedRun, stop_signals: list[str], show: Callable[[str], None]
    ) -> None:
        """`prepared` is the run of `options`; `stop_signals` receives the names of signals; `show` prints one line."""
        self._options = options
        self._prepared = prepared
        self._stop_signals = stop_signals
        self._show = show
        self._config = prepared.config
        self._run = self._config.run.absolute()
        # Records that a full disk refuses wait for the next one.
        self._log = RecordLog(self._run / ATTEMPTS_NAME, show)
        self._num_before = 0
        """Number of the last attempt of earlier launches."""
        self._name = f"llmscale launch {os.getpid()} of {platform.node()}, started {_now()}"
        self._attempts: list[Attempt] = []
        """Attempts of this launch, oldest first."""
        self._lost: list[str | None] = []
        """The host whose loss ended each attempt."""

    def run(self) -> int:
        """Run all attempts and return the exit status. Raises ConfigError or DataError before anything is started.

        0: the run is finished, or was asked to stop and has saved. 2: the user must repair something. 1: anything else.
        """
        inputs = self._check_before_start()
        claim = RunFolderClaim(self._run, LAUNCH_LOCK_NAME)
        try:
            claim.take()
            self._close_open_attempt()
            while True:
                self._wait_for_ranks_of_before()
                attempt = self._one_attempt(inputs)
                if attempt is None:
                    return self._stopped_between()
                status = self._after(attempt)
                self._notify(attempt, status)
                if status is not None:
                    return status
        finally:
            if self._attempts:
                self._log.close()
            claim.give_up()

    def _record(self, attempt: Attempt) -> None:
        self._log.append(json.dumps(asdict(attempt)).encode() + b"\n")

    def _notify(self, attempt: Attempt, status: int | None) -> None:
        """Run --notify after an attempt; `status` None: there will be another."""
        is_good = attempt.end in ("finished", "stopped")
        facts = {"attempt": attempt.number, "ended": attempt.end, "restarts": status is None}
        notify_of_end(self._config, 0 if is_good else status or 1, None if is_good else attempt.reason, **facts)

    def _check_before_start(self) -> Inputs:
        """Raise all errors that can be found without asking a host, as if all hosts answer; return what was read."""
        options = self._options
        inputs = read_inputs(self._prepared, options.arguments)
        if options.min_hosts > len(options.hosts):
            num_hosts = len(options.hosts)
            raise ConfigError(f"--min-hosts {options.min_hosts} is more than the number of hosts, {num_hosts}.")
        # With all hosts, the error is train.py's.
        used = self._choose_hosts(inputs, options.hosts) or options.hosts
        check_space(resolve_start(inputs, sum(used.values())))
        return inputs

    def _choose_hosts(self, inputs: Inputs, hosts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the hosts to use: all, or those whose ranks the run can be divided over (sequence and expert groups).

        Empty if these are fewer than `min_hosts`.
        """
        for count in range(len(hosts), max(1, self._options.min_hosts) - 1, -1):
            with contextlib.suppress(ConfigError):
                used = dict(islice(hosts.items(), count))
                resolve_ranks(inputs, sum(used.values()))
                return used
        return {}

    def _close_open_attempt(self) -> None:
        """Count the attempts of earlier launches, and record the end of one whose supervisor was killed."""
        for attempt in read_attempts(self._run):
            self._num_before = attempt.number
            if attempt.end is None:
                reason = "its `llmscale launch` ended without an error message"
                self._record(replace(attempt, end="supervisor lost", reason=reason))
                self._show(f"attempt {attempt.number} lost its supervisor; continuing")

    def _wait_for_ranks_of_before(self) -> None:
        """Wait until ranks that have lost their launcher are gone. Raises ConfigError if the run is still in use."""
        began_s = time.monotonic()
        is_shown = False
        while (self._run / LOCK_NAME).exists() and not self._stop_signals:
            try:
                lock_folder(self._run).close()
                return
            except ConfigError as error:
                if time.monotonic() - began_s > self._options.lost_after_s:
                    raise
                if not is_shown:
                    self._show(f"waiting for ranks of an earlier start: {error}")
                is_shown = True
            self._sleep(0.5)

    def _one_attempt(self, inputs: Inputs) -> Attempt | None:
        """Run one attempt, and record it; None when asked to stop before ranks were started."""
        began = time.monotonic()
        began_utc = _now()
        number = self._num_before + len(self._attempts) + 1
        run = self._gather(inputs)
        hosts = {name: host.slots for name, host in run.hosts.items()}
        if hosts:
            logs = str(self._run / LOGS_NAME / f"attempt-{number:04d}")
        else:
            logs = ""
        attempt = Attempt(number, began_utc, hosts, sum(hosts.values()), "", dict(run.left_out), logs)
        try:
            if self._stop_signals:
                return None
            if hosts:
                rendezvous = run.find_rendezvous(self._options.master_addr, self._options.master_port)
                attempt = replace(attempt, master=":".join(map(str, rendezvous)))
                self._record(attempt)
                where = ", ".join(f"{count} on {name}" for name, count in hosts.items())
                ranks = count_nouns(attempt.world_size, "rank")
                self._show(f"attempt {number}: {ranks}, {where}; rendezvous {attempt.master}; logs in {logs}")
                run.start(rendezvous, self._options.script, self._options.arguments, logs)
                outcome = run.follow(self._stop_signals)
            else:
                reasons = "; ".join(f"{name}: {why}" for name, why in attempt.left_out.items())
                outcome = Outcome(
                    "no hosts", f"fewer than {self._options.min_hosts} hosts could be reached ({reasons})"
                )
        finally:
            run.end()
        self._lost.append(outcome.host if outcome.end == "host lost" else None)
        training_s = run.training_since_s
        attempt = replace(
            attempt,
            seconds=round(time.monotonic() - began, 3),
            training_after_s=None if training_s is None else round(training_s - began, 3),
            first_step=run.first_step,
            last_step=run.last_step,
            end=outcome.end,
            reason=outcome.reason,
        )
        self._record(attempt)
        if hosts:
            self._show_evidence(attempt, run, outcome)
        return attempt

    def _show_evidence(self, attempt: Attempt, run: AttemptRun, outcome: Outcome) -> None:
        self._show(f"attempt {attempt.number}: {attempt.end} after {_step_words(attempt)}: {attempt.reason}")
        if outcome.end == "hung":
            self._show(f"the stacks of all ranks: {stacks_path(self._run, 0).parent}/stacks-rank-*.txt")
        elif outcome.rank is not None:
            # The last lines of the rank that failed.
            for line in run.last_lines.get(outcome.rank, ()):
                self._show(f"  {outcome.host} | {line}")

    def _gather(self, inputs: Inputs) -> AttemptRun:
        """Reach the hosts, and wait until there are enough. Returns no hosts if there never were."""
        options = self._options
        config = self._config
        # A first attempt that reaches no host at all is rather a mistake in the hostfile.
        waits = self._attempts or options.min_hosts > 1
        deadline = time.monotonic() + (options.wait_for_hosts_s if waits else 0.0)
        hello = place(options.environment | {LAUNCH_VARIABLE: self._name})
        while True:
            run = AttemptRun(options.lost_after_s, config.start_timeout_s, config.hang_timeout_s, self._show)
            hosts = self._without_unreliable(run)
            run.gather(hosts, options.host_command, hello, options.connect_timeout_s, self._stop_signals)
            reached = {name: host.slots for name, host in run.hosts.items()}
            used = self._choose_hosts(inputs, reached)
            for name in [*reached][len(used) :]:
                if used:
                    why = "the run cannot be divided over its ranks, too"
                else:
                    why = "it is too little for the run"
                run.dismiss(name, why)
            if used or time.monotonic() > deadline or self._stop_signals:
                return run
            self._show(f"waiting for {max(options.min_hosts, len(reached) + 1)} of {len(options.hosts)} hosts")
            self._sleep(_REGATHER_S)

    def _without_unreliable(self, run: AttemptRun) -> Mapping[str, int]:
        """Return the hosts to ask: not the one whose loss ended the last two attempts, if there are enough others."""
        hosts = self._options.hosts
        last_two = self._lost[-2:]
        lost = last_two[0] if len(last_two) == 2 and last_two[0] == last_two[1] else None
        if lost is None or len(hosts) <= self._options.min_hosts:
            return hosts
        run.left_out[lost] = "its loss ended two attempts in a row; the next restart uses it again"
        self._show(f"WARNING: {lost} is left out: {run.left_out[lost]}")
        return {name: slots for name, slots in hosts.items() if name != lost}

    def _after(self, attempt: Attempt) -> int | None:
        """Return the exit status, or None to try again."""
        self._attempts.append(attempt)
        if attempt.end in ("finished", "stopped"):
            if attempt.end == "finished":
                end = "the run is finished"
            else:
                end = "asked to stop; the ranks have saved"
            self._show(f"{end}, at {_step_words(attempt)}; run folder: {self._run}")
            return 0
        # If an earlier attempt trained with what train.py now refuses, something else is wrong, such as a full disk.
        is_proven = attempt.first_step is None and any(earlier.first_step for earlier in self._attempts[:-1])
        if attempt.end == "user error" and not is_proven:
            self._show("not tried again: it would end the same way")
            return 2
        if attempt.end == "no hosts":
            self._show(f"error: {attempt.reason}. Run `llmscale doctor` to find out why.")
            return 1
        decision = decide(self._attempts, self._options.max_restarts, self._options.same_step_limit)
        if isinstance(decision, str):
            self._show(f"error: giving up: {decision}. Evidence: {attempt.logs}; {self._run}/attempts.jsonl")
            return 1
        if self._stop_signals:
            return self._stopped_between()
        self._show(f"trying again in {decision:.0f} s")
        self._sleep(decision)
        return None

    def _stopped_between(self) -> int:
        """Report a stop while no ranks run, and return the exit status."""
        saved = list_checkpoints(self._run)
        if saved:
            where = f"the newest checkpoint is {saved[0].name}"
        else:
            where = "nothing was saved yet"
        self._show(f"stopped by {self._stop_signals[0]} between two attempts; {where}; run folder: {self._run}")
        return 0

    def _sleep(self, seconds: float) -> None:
        """Wait, unless asked to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop_signals:
            time.sleep(0.1)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _step_words(attempt: Attempt) -> str:
    return "no step" if attempt.last_step is None else f"step {attempt.last_step}"
