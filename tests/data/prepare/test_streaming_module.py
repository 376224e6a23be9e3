from __future__ import annotations

import importlib.util
import sys

import pytest

from tests import warm_start

if importlib.util.find_spec("streaming") is None:
    pytest.skip("needs mosaicml-streaming", allow_module_level=True)

MODULES = ["compression", "format.mds", "format.mds.encodings", "partition", "shuffle"]


def _run(code: str) -> str:
    done = warm_start.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_can_be_the_first() -> None:
    code = f"""
import os
from llmscale.data.prepare.sources.tokens import streaming_module
for first in {MODULES!r}:
    if not os.fork():
        print(streaming_module(first).__name__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, first
"""
    assert _run(code).split() == [f"streaming.base.{first}" for first in MODULES]


def test_nothing_heavy_is_imported_and_no_placeholder_stays() -> None:
    code = (
        "import sys; from llmscale.data.prepare.sources.tokens import streaming_module as m; "
        "m('compression'); m('format.mds'); "
        "print([n for n in ('torchvision', 'transformers', 'boto3', 'google', 'streaming', 'streaming.base', "
        "'streaming.vision') if n in sys.modules])"
    )
    assert _run(code) == "[]"


@pytest.mark.slow
def test_the_real_package_can_be_imported_afterwards_and_before() -> None:
    after = (
        "import sys, types; sys.modules['streaming.vision'] = types.ModuleType('streaming.vision'); "
        "from llmscale.data.prepare.sources.tokens import streaming_module as m; ours = m('format.mds').MDSWriter; "
        "import streaming; print(streaming.MDSWriter is ours, streaming.StreamingDataset.__name__)"
    )
    before = (
        "import sys, types; sys.modules['streaming.vision'] = types.ModuleType('streaming.vision'); import streaming; "
        "from llmscale.data.prepare.sources.tokens import streaming_module as m; ours = m('format.mds').MDSWriter; "
        "print(streaming.MDSWriter is ours, streaming.StreamingDataset.__name__)"
    )
    assert _run(after) == _run(before) == "True StreamingDataset"
