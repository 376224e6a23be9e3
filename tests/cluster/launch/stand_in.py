"""Hosts that are processes of this machine, with ranks that do what a test says: `llmscale launch` in a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.hosts import gather_environment, module_argv
from llmscale.cluster.launch.supervisor import Attempt, LaunchOptions, Supervisor, read_attempts
from llmscale.config.run_arguments import parse_run_config
from llmscale.training.inputs import with_prepared_text
from tests.conftest import TINY_MODEL

#: In place of train.py. The code of a test knows `rank`, `attempt`, `heartbeat` and the arguments.
RANK = """
import json, os, signal, sys, time
from llmscale.training.watchdog import Heartbeat
heartbeat = Heartbeat.from_environment()
heartbeat.install()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run = sys.argv[sys.argv.index("--run") + 1]
attempt = sum('"end": null' in line for line in open(f"{run}/attempts.jsonl"))
def train(first, last):
    for step in range(first, last + 1):
        heartbeat.beat("training", step)
def fail(message, status=1):
    print(f"error: {message}", flush=True)
    heartbeat.fail(message)
    end(status)
def end(status):
    heartbeat.end(status)
    sys.stdout.flush()
    os._exit(status)
exec(open(os.environ["LLMSCALE_STAND_IN"]).read())
end(0)
"""


@dataclass
class StandIn:
    """A launch whose hosts are processes of this machine."""

    folder: Path
    data: Path
    lines: list[str] = field(default_factory=list)
    stop_signals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_folder = self.folder / "run"
        (self.folder / "train.py").write_text(RANK)

    def launch(
        self,
        code: str,
        slots: Mapping[str, int] | None = None,
        flags: tuple[str, ...] = (),
        command: Callable[[str], list[str]] | None = None,
        show: Callable[[str], None] | None = None,
        **options: object,
    ) -> int:
        """Run `code` in each rank, and return the exit status. `options` are fields of LaunchOptions."""
        (self.folder / "code.py").write_text(code)
        limits = ("--hang-timeout-s", "120", "--start-timeout-s", "120")
        arguments = ["--data", str(self.data), *TINY_MODEL, "--run", str(self.run_folder), "--global-batch-size", "12"]
        environment = {"LLMSCALE_STAND_IN": str(self.folder / "code.py"), "OMP_NUM_THREADS": "1"}
        values = {
            "hosts": slots or {"a": 1, "b": 1},
            "host_command": command or host_command,
            "script": str(self.folder / "train.py"),
            "arguments": [*arguments, *(flags if "--hang-timeout-s" in flags else (*limits, *flags))],
            "environment": gather_environment(environment, env_files=[]),
            "max_restarts": 6,
            "same_step_limit": 3,
            "connect_timeout_s": 120.0,
            "lost_after_s": 60.0,
            "wait_for_hosts_s": 120.0,
            "min_hosts": 1,
            "master_addr": None,
            "master_port": None,
            **options,
        }
        launch = LaunchOptions(**values)  # type: ignore[arg-type]
        prepared = with_prepared_text(parse_run_config(launch.arguments))
        return Supervisor(launch, prepared, self.stop_signals, show or self.lines.append).run()

    @property
    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run_folder)

    @property
    def ends(self) -> list[str | None]:
        return [attempt.end for attempt in self.attempts]


def host_command(_host: str) -> list[str]:
    return ["env", "--unset=SSH_CONNECTION", *module_argv("llmscale.cluster.launch.host")]
