"""Run a piece of this package, or a line of shell, on hosts: in this working folder, with the settings that ranks
get."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmscale.cluster.environment import deepspeed_env_files, gather_environment
from llmscale.cluster.remote import FAN_OUT, Finished, run_on_hosts
from llmscale.untrusted.interpreter import module_command

#: Goes to the folder that its first argument names, sets what comes through stdin, and becomes the rest.
_PREPARE = 'cd "$0" && eval "$(cat)" && exec "$@"'


@dataclass(frozen=True)
class Asker:
    """How hosts are asked; tests replace `run`."""

    run: Callable[..., dict[str, Finished]] = run_on_hosts
    """As llmscale.cluster.remote.run_on_hosts."""

    def module(
        self, hosts: Sequence[str], module: str, arguments: Sequence[str], timeout_s: float
    ) -> dict[str, Finished]:
        """Run a module on every host. Raises ConfigError for a .deepspeed_env that cannot be read."""
        command = ["sh", "-c", _PREPARE, os.getcwd(), *module_command(module, *arguments)]
        return self.run(hosts, command, timeout_s=timeout_s, stdin=_exports())

    def modules(self, module: str, arguments: Mapping[str, Sequence[str]], timeout_s: float) -> dict[str, Finished]:
        """The same module on all hosts at once, each with its own arguments."""
        with ThreadPoolExecutor(min(len(arguments), FAN_OUT)) as pool:
            answers = pool.map(lambda host: self.module([host], module, arguments[host], timeout_s)[host], arguments)
            return dict(zip(arguments, answers, strict=True))

    def shell(
        self, hosts: Sequence[str], script: str, arguments: Sequence[str], timeout_s: float
    ) -> dict[str, Finished]:
        """A line for `sh`, its arguments as $1, $2 and so on."""
        return self.run(hosts, ["sh", "-c", script, "sh", *arguments], timeout_s=timeout_s)


def _exports() -> str:
    """The ranks' variables as lines of shell. They go through stdin: no `ps` shows a key."""
    variables = gather_environment(os.environ, env_files=deepspeed_env_files())
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def last_words(answer: Finished) -> str:
    """Why a command failed, in one line."""
    if answer.timed_out:
        return f"no answer within {answer.seconds:.0f} s"
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    return " ".join(lines[-1].split()) if lines else f"ended with status {answer.returncode}"
