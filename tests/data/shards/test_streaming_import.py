from __future__ import annotations

import sys

import pytest

from tests import warm_start

MODULES = ["format", "format.mds", "stream", "storage.download", "partition", "shuffle", "hashing"]


def _run(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = warm_start.run(command, capture_output=True, text=True, env={**_environment(), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")}


@pytest.mark.parametrize("first", MODULES)
def test_every_module_can_be_the_first(first: str) -> None:
    code = f"from llmscale.data.shards.streaming_import import streaming_module as m; print(m({first!r}).__name__)"
    assert _run(code) == f"streaming.base.{first}"


def test_nothing_heavy_is_imported_and_no_placeholder_stays() -> None:
    code = (
        "import sys; from llmscale.data.shards.streaming_import import streaming_module as m; "
        "m('stream'); m('format.mds'); "
        "print([n for n in ('torchvision', 'transformers', 'boto3', 'google', 'streaming', 'streaming.base', "
        "'streaming.vision') if n in sys.modules])"
    )
    assert _run(code) == "[]"


@pytest.mark.slow
def test_the_real_package_can_be_imported_afterwards_and_before() -> None:
    after = (
        "import sys, types; sys.modules['streaming.vision'] = types.ModuleType('streaming.vision'); "
        "from llmscale.data.shards.streaming_import import streaming_module as m; ours = m('format.mds').MDSWriter; "
        "import streaming; print(streaming.MDSWriter is ours, streaming.StreamingDataset.__name__)"
    )
    before = (
        "import sys, types; sys.modules['streaming.vision'] = types.ModuleType('streaming.vision'); import streaming; "
        "from llmscale.data.shards.streaming_import import streaming_module as m; ours = m('format.mds').MDSWriter; "
        "print(streaming.MDSWriter is ours, streaming.StreamingDataset.__name__)"
    )
    assert _run(after) == _run(before) == "True StreamingDataset"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"LOCAL_SIZE": "4"}, "4"), ({"LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "2"), ({}, "1")],
)
def test_streaming_sees_the_ranks_that_deepspeed_launched(environment: dict[str, str], expected: str) -> None:
    code = (
        "from llmscale.data.shards.streaming_import import streaming_module as m; "
        "print(m('distributed').get_local_world_size())"
    )
    assert _run(code, **environment) == expected
