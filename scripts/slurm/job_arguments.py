"""job_arguments.py ARGUMENTS OF TRAIN.PY...: print the arguments for this start of the job, separated by zero bytes.

A requeued job starts with the arguments of its submission. Flags that begin a run (--init-from) or go back in it
(--resume CHECKPOINT) must not do so again after the job has saved a checkpoint. The checkpoints that existed before the
job are recorded beside its output, in job-ID.saved-before.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# So that a clone works without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmscale.cluster.launch.supervisor import begins_somewhere, restart_arguments, saved_checkpoints
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.errors import LlmscaleError
from llmscale.files.atomic_write import write_durably


def job_arguments(arguments: Sequence[str], note: Path, restarts: int) -> list[str]:
    """Return the arguments for train.py. The first start writes `note`, later ones read it."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # --help
            config = parse_run_config(arguments)
        if not begins_somewhere(config):
            return list(arguments)
        return _without_first_start(arguments, config, note, restarts)
    except (LlmscaleError, SystemExit):
        # train.py reports the error.
        return list(arguments)


def _without_first_start(arguments: Sequence[str], config: RunConfig, note: Path, restarts: int) -> list[str]:
    saved = saved_checkpoints(config)
    if restarts == 0 or not note.exists():
        # Without a note the earlier start ended before writing it: this job has saved nothing.
        write_durably(note, json.dumps(sorted(saved)))
        return list(arguments)
    before = {(int(history), int(step)) for history, step in json.loads(note.read_text())}
    return list(arguments) if saved <= before else restart_arguments(arguments, config)


def main(argv: Sequence[str]) -> int:
    note = Path(f"job-{os.environ['SLURM_JOB_ID']}.saved-before.json")
    for argument in job_arguments(argv, note, int(os.environ.get("SLURM_RESTART_COUNT") or 0)):
        sys.stdout.write(f"{argument}\0")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
