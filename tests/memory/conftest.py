"""Choose a sample of the cells that are compared with a dry run, and make dry runs cheap."""

from __future__ import annotations

import gc
from zlib import crc32

import pytest

#: Tests whose cells each take a dry run of about two seconds.
DRY_RUN_TESTS = (
    "test_every_phase_is_that_of_the_dry_run",
    "test_every_phase_of_every_family_is_that_of_the_dry_run",
)
#: One cell in this number belongs to the default suite; the others are slow.
SAMPLE_EVERY = 6


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cells outside the sample as slow. The choice depends on the name of the cell alone."""
    for item in items:
        is_cell = getattr(item, "originalname", None) in DRY_RUN_TESTS
        if is_cell and crc32(item.name.encode()) % SAMPLE_EVERY:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def libraries_are_frozen() -> None:
    """Keep the objects of torch and DeepSpeed out of the dry runs' garbage collections."""
    pytest.importorskip("deepspeed")
    gc.collect()
    gc.freeze()
