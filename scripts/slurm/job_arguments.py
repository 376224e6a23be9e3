"""job_arguments.py ARGUMENTS OF TRAIN.PY...: the same for this start of the job, each ended by a zero byte.

A job that is requeued is started with the arguments that it was submitted with. What begins a run (--init-from) or goes
back in it (--resume CHECKPOINT) must not do so again once that has saved something. What was saved before the job is
noted beside its output, in job-ID.saved-before.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Works from a clone that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.cluster.launch.supervisor import begins_somewhere, restart_arguments, saved_checkpoints
from llmscale.config.arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.errors import LlmscaleError
from llmscale.files.whole import write_durably


def job_arguments(arguments: Sequence[str], note: Path, restarts: int) -> list[str]:
    """What train.py is started with; `note` is written at the first start that comes here and read at the others."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # --help
            config = parse_run_config(arguments)
        if not begins_somewhere(config):
            return list(arguments)
        return _of_beginning(arguments, config, note, restarts)
    except (LlmscaleError, SystemExit):
        # train.py says what is wrong with them.
        return list(arguments)


def _of_beginning(arguments: Sequence[str], config: RunConfig, note: Path, restarts: int) -> list[str]:
    saved = saved_checkpoints(config)
    if restarts == 0 or not note.exists():
        # Without a note the start before ended ahead of it: nothing of this job's is saved.
        write_durably(note, json.dumps(sorted(saved)))
        return list(arguments)
    before = {(int(history), int(step)) for history, step in json.loads(note.read_text())}
    return list(arguments) if saved <= before else restart_arguments(arguments, config)


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    note = Path(f"job-{os.environ['SLURM_JOB_ID']}.saved-before.json")
    for argument in job_arguments(argv, note, int(os.environ.get("SLURM_RESTART_COUNT") or 0)):
        sys.stdout.write(f"{argument}\0")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
