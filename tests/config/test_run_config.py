from __future__ import annotations

import pytest
from pydantic import ValidationError

from llmscale.config.arguments import parse_run_config
from llmscale.config.run_config import CHANGES_THAT_BREAK, RunConfig, describe_keys


def test_every_key_says_what_it_means() -> None:
    silent = [name for name in RunConfig.model_fields if not describe_keys().get(name)]
    assert silent == []


def test_help_lists_every_key_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run_config(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    missing = [name for name in RunConfig.model_fields if f"--{name.replace('_', '-')}" not in text]
    assert missing == []
    assert "Sequences per optimizer step over all ranks" in " ".join(text.split())


def test_help_of_allow_changed_names_what_can_be_allowed() -> None:
    assert all(key in describe_keys()["allow_changed"] for key in CHANGES_THAT_BREAK)


def test_a_config_cannot_be_changed_after_it_was_made() -> None:
    with pytest.raises(ValidationError):
        RunConfig().lr = 1.0  # type: ignore[misc]
