from __future__ import annotations

import gc
import os

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
