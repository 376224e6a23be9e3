from __future__ import annotations

import pytest

from llmscale.cli.main import main


def test_one_of_many_copies_says_that_one_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["launch", "--", "--steps", "1"]) == 2
    assert "mpirun started as many copies of `llmscale launch`" in capsys.readouterr().err
