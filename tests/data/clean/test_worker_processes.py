"""Workers that die are an error that says so."""

from __future__ import annotations

import multiprocessing

import pytest

from llmscale.data.clean.annotate import CleanOptions, start_workers
from llmscale.errors import MachineError


def test_a_worker_that_is_killed() -> None:
    with start_workers(CleanOptions(steps=("exact", "near")), None, 2) as annotate_batch:
        annotations = annotate_batch(["one text", "", "another"])
        assert [len(document.findings) for document in annotations.documents] == [2, 1, 2] and len(
            annotations.sketches
        ) == 2
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        with pytest.raises(MachineError, match="fewer --workers"):
            annotate_batch(["one text"])
    assert not multiprocessing.active_children()
