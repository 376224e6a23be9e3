from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from llmscale.cli.quick_answer import quick_answer


def test_what_it_does_without_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    with pytest.raises(ValueError, match="its own"), quick_answer():
        assert not gc.isenabled()
        assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
        raise ValueError("its own")
    assert gc.isenabled()
    assert "PYDANTIC_DISABLE_PLUGINS" not in os.environ


def test_what_the_user_said_of_plugins_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
    with quick_answer():
        assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "logfire-plugin"
    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "logfire-plugin"


def test_what_was_made_is_not_looked_through_at_the_end() -> None:
    before = gc.get_freeze_count()
    try:
        with quick_answer():
            pass
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_an_estimate_imports_nothing_slow_that_it_does_not_need() -> None:
    """Each takes as long as the whole answer."""
    program = (
        "import sys\nfrom llmscale.cli.main import main\n"
        "main(['estimate', '--model', 'gpt2-124m', '--gpu', 'h100-80gb', '--num-gpus', '8'])\n"
        "print(*sorted({'pydantic_settings', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
