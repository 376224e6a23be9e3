from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.errors import DataError
from llmscale.training.failure import FAILURE_NAME, forget_failure, record_failure


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("no token\nsecond line"), "no token"),
        (RuntimeError("\n CUDA out of memory. \nTried"), "RuntimeError: CUDA out of memory."),
        (ValueError(), "ValueError"),
        (KeyError("x" * 10_000), "KeyError: '" + "x" * 589),
    ],
)
def test_the_first_rank_that_fails_says_why(error: Exception, said: str, tmp_path: Path) -> None:
    record_failure(tmp_path, error, step=3, rank=1)
    record_failure(tmp_path, RuntimeError("connection closed by peer"), step=3, rank=0)
    record = json.loads((tmp_path / FAILURE_NAME).read_text())
    assert (record["error"], record["step"], record["rank"]) == (said, 3, 1)
    assert [path.name for path in tmp_path.iterdir()] == [FAILURE_NAME]
    forget_failure(tmp_path)
    forget_failure(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_or_full_is_no_second_error(tmp_path: Path) -> None:
    record_failure(tmp_path / "gone", RuntimeError("x"), step=0, rank=0)
    assert not list(tmp_path.iterdir())
    (tmp_path / FAILURE_NAME).mkdir()
    record_failure(tmp_path, RuntimeError("x"), step=0, rank=0)
    forget_failure(tmp_path)
