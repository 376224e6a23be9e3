"""`llmscale launch`: attempt after attempt, until the run is finished, is asked to stop, or cannot be helped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.attempt import AttemptRun, Layout, Limits, Outcome, choose_layout
from llmscale.cluster.launch.attempts import (
    Attempt,
    RetryPolicy,
    attempt_logs,
    decide,
    next_number,
    read_attempts,
    restart_arguments,
    saved_checkpoints,
    write_attempt,
)
from llmscale.cluster.launch.hosts import HostPool
from llmscale.cluster.launch.protocol import Hello
from llmscale.config.run_config import parse_run_config
from llmscale.errors import ConfigError
from llmscale.training.changes import check_start
from llmscale.training.prepare_run import prepare_run
from llmscale.training.run_folder import RunFolderClaim

LAUNCH_LOCK_NAME = ".launch.lock"
#: Between two tries to reach enough hosts.
_REGATHER_S = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    """The resolved arguments of `llmscale launch`."""

    hosts: Sequence[Host]
    agent_command: Callable[[Host], list[str]]
    """From a host to the command that starts its agent."""
    script: str
    """train.py's path, on every host."""
    arguments: Sequence[str]
    """train.py's."""
    environment: Mapping[str, str]
    """For the ranks."""
    starter: str
    limits: Limits
    policy: RetryPolicy
    connect_timeout_s: float
    wait_for_hosts_s: float
    """How long a restart waits for `min_hosts` to come back."""
    min_hosts: int
    master_addr: str | None
    master_port: int | None


class Supervisor:
    """One launch."""

    def __init__(self, options: LaunchOptions, stop_signals: list[str], show: Callable[[str], None]) -> None:
        """`stop_signals` gets the names of signals as they come; `show` prints one line."""
        self._options, self._stop_signals, self._show = options, stop_signals, show
        self._config = parse_run_config(options.arguments)
        self._run = self._config.run.absolute()
        self._attempts: list[Attempt] = []
        """Attempts of this launch, oldest first."""

    def run(self) -> int:
        """The exit status: 0 when the run is finished, or was asked to stop and has saved; 2 for what the user must
        mend; 1 otherwise. Raises ConfigError or DataError before anything is started."""
        self._check_before_anything()
        claim = RunFolderClaim(self._run, LAUNCH_LOCK_NAME)
        try:
            claim.take()
            self._saved_before = saved_checkpoints(self._config)
            self._close_open_attempt()
            while True:
                attempt = self._one_attempt()
                if attempt is None:
                    return self._stopped_between()
                status = self._after(attempt)
                if status is not None:
                    return status
        finally:
            claim.give_up()

    def _check_before_anything(self) -> None:
        """Raise what is wrong without asking a host, as if all hosts are there."""
        layout = self._choose_layout(self._options.hosts)
        if layout is None:
            num_hosts = len(self._options.hosts)
            raise ConfigError(f"--min-hosts {self._options.min_hosts} is more than the number of hosts, {num_hosts}.")
        check_start(prepare_run(parse_run_config(self._arguments()), layout.world_size))

    def _choose_layout(self, hosts: Sequence[Host]) -> Layout | None:
        """The layout that the run allows on these hosts. Raises what train.py would say when it allows none."""
        config = parse_run_config(self._arguments())
        refusals: list[ConfigError] = []

        def is_legal(world_size: int) -> bool:
            try:
                prepare_run(config, world_size)
            except ConfigError as error:
                refusals.append(error)
                return False
            return True

        layout = choose_layout(hosts, is_legal, self._options.min_hosts)
        if layout is None and refusals:
            raise refusals[0]
        return layout

    def _arguments(self) -> list[str]:
        """train.py's arguments for the next attempt."""
        if not self._attempts or saved_checkpoints(self._config) <= self._saved_before:
            return list(self._options.arguments)
        return restart_arguments(self._options.arguments, self._config)

    def _close_open_attempt(self) -> None:
        """The attempt of a supervisor that was killed has no end yet."""
        for attempt in read_attempts(self._run):
            if attempt.end is None:
                lost = replace(
                    attempt, end="supervisor lost", reason="its `llmscale launch` ended without an error message"
                )
                write_attempt(self._run, lost)
                self._show(f"attempt {attempt.number} lost its supervisor; continuing")

    def _one_attempt(self) -> Attempt | None:
        """None when asked to stop before ranks were started."""
        began, began_utc = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
        number = max([next_number(self._run), *(attempt.number + 1 for attempt in self._attempts)])
        pool, layout = self._gather()
        run: AttemptRun | None = None
        try:
            if layout is None or self._stop_signals:
                return None if self._stop_signals else self._no_hosts(number, began_utc, pool)
            run = AttemptRun(pool, layout, self._options.limits, self._stop_signals, self._show)
            rendezvous = run.find_rendezvous(self._options.master_addr, self._options.master_port)
            attempt = Attempt(
                number=number,
                began=began_utc,
                hosts={name: layout.ranks_per_host for name in layout.hosts},
                world_size=layout.world_size,
                master=":".join(map(str, rendezvous or ("", ""))),
                left_out=dict(pool.left_out),
                starter=self._options.starter,
                logs=str(attempt_logs(self._run, number)),
            )
            self._write(attempt)
            self._show(f"attempt {number}: {layout.describe()}; meeting at {attempt.master}; logs in {attempt.logs}")
            if rendezvous is None:
                outcome = Outcome("host lost", f"{layout.hosts[0]} did not answer", host=layout.hosts[0])
            else:
                script, arguments = self._options.script, self._arguments()
                run.start(rendezvous, self._options.starter, script, arguments, attempt.logs)
                outcome = run.follow()
        finally:
            if run is not None:
                run.end()
            else:
                pool.disband(5.0, self._options.limits.lost_after_s)
                pool.close()
        return self._closed(attempt, run, outcome, began)

    def _closed(self, attempt: Attempt, run: AttemptRun, outcome: Outcome, began: float) -> Attempt:
        """Write down how an attempt ended, with the evidence."""
        progress = run.progress
        training_since = progress.training_since_s if progress else None
        stacks = run.save_stacks(Path(attempt.logs))
        attempt = replace(
            attempt,
            seconds=round(time.monotonic() - began, 3),
            training_after_s=None if training_since is None else round(training_since - began, 3),
            first_step=progress.first_step if progress else None,
            last_step=progress.last_step if progress else None,
            end=outcome.end,
            reason=outcome.reason,
        )
        self._write(attempt)
        self._show(f"attempt {attempt.number}: {attempt.end} after {_step_words(attempt)}: {attempt.reason}")
        if stacks:
            self._show(f"the stacks of all ranks: {stacks}")
        if outcome.end not in ("finished", "stopped"):
            for line in self._evidence(run.pool, outcome):
                self._show(line)
        return attempt

    def _gather(self) -> tuple[HostPool, Layout | None]:
        """Reach the hosts; on a restart wait until there are enough. The layout is None when there never were."""
        deadline = time.monotonic() + (self._options.wait_for_hosts_s if self._attempts else 0.0)
        while True:
            hello = Hello(
                cwd=os.getcwd(),
                environment=dict(self._options.environment),
                run=str(self._run),
                lease_s=self._options.limits.lease_s,
            )
            pool = HostPool(self._options.hosts, self._options.agent_command, hello, self._show)
            pool.gather(self._options.connect_timeout_s, lambda: bool(self._stop_signals))
            for name, why in pool.left_out.items():
                self._show(f"WARNING: {name} is left out: {why}")
            reached = [host for host in self._options.hosts if host.name in pool.nodes]
            layout = self._choose_layout(reached) if len(reached) >= max(1, self._options.min_hosts) else None
            if layout is not None:
                for host in reached:
                    if host.name not in layout.hosts:
                        pool.dismiss(host.name, "not needed: the global batch cannot be divided over more ranks")
                return pool, layout
            if time.monotonic() > deadline or self._stop_signals:
                return pool, None
            pool.disband(5.0, self._options.limits.lost_after_s)
            pool.close()
            self._show(f"waiting for {self._options.min_hosts} of {len(self._options.hosts)} hosts")
            self._sleep(_REGATHER_S)

    def _no_hosts(self, number: int, began_utc: str, pool: HostPool) -> Attempt:
        reasons = "; ".join(f"{name}: {why}" for name, why in pool.left_out.items())
        attempt = Attempt(
            number=number,
            began=began_utc,
            hosts={},
            world_size=0,
            master="",
            left_out=dict(pool.left_out),
            starter=self._options.starter,
            logs="",
            end="no hosts",
            reason=f"fewer than {self._options.min_hosts} hosts could be reached ({reasons})",
        )
        self._write(attempt)
        return attempt

    def _after(self, attempt: Attempt) -> int | None:
        """Return the exit status, or None to try again."""
        self._attempts.append(attempt)
        if attempt.end in ("finished", "stopped"):
            word = "the run is finished" if attempt.end == "finished" else "asked to stop; the ranks have saved"
            self._show(f"{word}, at {_step_words(attempt)}; run folder: {self._run}")
            return 0
        if attempt.end == "user error" and not self._trained_before(attempt):
            self._show("not tried again: it would end the same way")
            return 2
        if attempt.end == "no hosts":
            self._show(f"error: {attempt.reason}. `llmscale doctor` tells more.")
            return 1
        decision = decide(self._attempts, self._options.policy)
        if decision.give_up:
            self._show(f"error: giving up: {decision.give_up}. Evidence: {attempt.logs}; {self._run}/attempts.jsonl")
            return 1
        if self._stop_signals:
            return self._stopped_between()
        self._show(f"trying again in {decision.wait_s:.0f} s")
        self._sleep(decision.wait_s)
        return None

    def _trained_before(self, attempt: Attempt) -> bool:
        """Return whether an earlier attempt trained with the configuration that train.py has just refused.

        Then the configuration is right, and something else is wrong, such as a full disk.
        """
        return attempt.first_step is None and any(earlier.first_step for earlier in self._attempts[:-1])

    def _stopped_between(self) -> int:
        """Asked to stop while no ranks run: what is saved is all there is."""
        saved = list_checkpoints(self._run)
        where = f"the newest checkpoint is {saved[0].name}" if saved else "nothing was saved yet"
        self._show(f"stopped by {self._stop_signals[0]} between two attempts; {where}; run folder: {self._run}")
        return 0

    def _sleep(self, seconds: float) -> None:
        """Unless asked to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop_signals:
            time.sleep(0.1)

    def _evidence(self, pool: HostPool, outcome: Outcome) -> list[str]:
        """Return the last lines of the rank or launcher to blame, unless the screen shows them already."""
        if outcome.host is None or outcome.end in ("host lost", "hung"):
            return []
        lines = pool.last_lines.get((outcome.host, outcome.rank)) or pool.last_lines.get((outcome.host, None)) or ()
        return [f"  {outcome.host} | {line}" for line in list(lines)[-12:]]

    def _write(self, attempt: Attempt) -> None:
        problem = write_attempt(self._run, attempt)
        if problem:
            self._show(problem)


def _step_words(attempt: Attempt) -> str:
    return "no step" if attempt.last_step is None else f"step {attempt.last_step}"
