"""What `data clean` writes can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.data.clean.write import DocumentShards
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.shards import compressed


@pytest.mark.parametrize(("always_bytes", "num_files"), [(1 << 16, range(5, 100)), (1 << 26, range(1, 2))])
def test_text_that_repeats_itself_does_not_unfold_too_far(
    always_bytes: int, num_files: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "_ALWAYS_BYTES", always_bytes)
    shards = DocumentShards(tmp_path, 1 << 30)
    texts = [f"{'again and ' * 1000}{number % 2}" for number in range(200)]
    for number, text in enumerate(texts):
        shards.write({"id": number, "text": text})
    shards.finish_file()
    facts = shards.files
    assert len(facts) in num_files and sum(file.records for file in facts) == len(texts)
    assert list(open_source(str(tmp_path)).documents()) == texts
