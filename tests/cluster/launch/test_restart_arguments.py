"""train.py's arguments at a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.cluster.launch.restart_arguments import restart_arguments
from llmscale.config.arguments import parse_run_config

DATA = ["--data", "set", "--steps", "3"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["--resume", "auto"], ["--resume", "auto"]),
        (["--resume", "none"], ["--resume", "auto"]),
        (["--resume=runs/x/checkpoints/step-3"], ["--resume", "auto"]),
        (["--init-from", "other"], ["--resume", "auto", "--init-from", "null"]),
        (["--skip-steps", "3:4", "--skip-steps=5:6"], ["--resume", "auto", "--skip-steps", "[]"]),
        (["--init_from=other", "--seed", "4"], ["--seed", "4", "--resume", "auto", "--init-from", "null"]),
    ],
)
def test_a_restart_goes_on_and_does_not_begin_again(given: list[str], expected: list[str]) -> None:
    arguments = [*DATA, *given]
    restarted = restart_arguments(arguments, parse_run_config(arguments))
    assert restarted == [*DATA, *expected]
    config = parse_run_config(restarted)
    assert config.init_from is None
    assert config.skip_steps == []
    assert config.resume == "auto"


def test_a_run_file_that_begins_from_weights_is_overruled(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("init_from: other\nsteps: 3\n")
    arguments = ["--config", str(file)]
    restarted = restart_arguments(arguments, parse_run_config(arguments))
    assert parse_run_config(restarted).init_from is None
