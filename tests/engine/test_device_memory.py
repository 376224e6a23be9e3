from __future__ import annotations

import pytest
import torch

from llmscale.engine.device_memory import peak_memory_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this is device memory")
def test_peak_memory_is_in_bytes() -> None:
    assert 50 * 2**20 < peak_memory_bytes() < 2**40, "a Python process with torch"
