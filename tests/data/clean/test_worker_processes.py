"""Workers that die are an error that says so."""

from __future__ import annotations

import multiprocessing

import pytest

from llmscale.data.clean import annotate
from llmscale.data.clean.annotate import CleanOptions, start_workers
from llmscale.errors import MachineError


def test_a_worker_that_is_killed() -> None:
    with start_workers(CleanOptions(steps=("exact", "near")), None, 2) as annotate_batch:
        found = annotate_batch(["one text", "", "another"])
        assert [len(document.findings) for document in found.documents] == [2, 1, 2] and len(found.sketches) == 2
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        with pytest.raises(MachineError, match="fewer --workers"):
            annotate_batch(["one text"])
    assert not multiprocessing.active_children()


def test_workers_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm has no room for their semaphores."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(annotate, "ProcessPoolExecutor", fail)
    workers = start_workers(CleanOptions(steps=("exact",)), None, 2)
    with pytest.raises(MachineError, match=r"No space left on device.*/dev/shm.*--workers 1"), workers:
        pass
