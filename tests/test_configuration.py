from __future__ import annotations

import re
import sys
from pathlib import Path

from llmscale.config.deepspeed.schema import DsFile
from llmscale.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent


def test_the_reference_is_what_the_models_say(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "write_configuration", raising=False)
    import write_configuration

    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == write_configuration.page(), "run `python scripts/write_configuration.py`"
    keys = re.findall(r"`(?:\w+\.)?(\w+)`", page)
    for key in {*RunConfig.model_fields, *DsFile.model_fields, "offload_optimizer", "until"} - {"config"}:
        assert key in keys
