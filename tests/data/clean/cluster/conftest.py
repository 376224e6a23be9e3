"""A crawl in several files, and what a local run makes of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmscale.data.clean.cleaned_set import load_clean_manifest
from llmscale.data.clean.pipeline import CleanOptions
from tests.data.clean.conftest import kept_of, removed_of


@dataclass(frozen=True)
class Crawl:
    """Text in files of different sizes."""

    folder: Path
    options: CleanOptions
    """Of all steps but `language`."""

    def words(self, out: Path) -> list[str]:
        """Of a command that cleans it so."""
        return [
            *("data", "clean", "--input", str(self.folder), "--out", str(out)),
            *("--decontaminate", str(self.options.decontaminate[0])),
        ]


@pytest.fixture
def crawl_files(crawl: tuple[Path, CleanOptions], tmp_path: Path) -> Crawl:
    path, options = crawl
    lines = path.read_text().splitlines(keepends=True)
    folder = tmp_path / "crawl"
    folder.mkdir()
    ends = [0, 20, 90, 100, 190, len(lines)]
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        (folder / f"{number}.jsonl").write_text("".join(lines[begin:end]))
    return Crawl(folder, options)


def amounts(manifest: dict[str, object] | None) -> dict[str, object]:
    """Everything but the files."""
    assert manifest is not None
    return {key: value for key, value in manifest.items() if key not in ("documents", "removed", "cluster", "request")}


def check_same(one: Path, other: Path) -> None:
    """Two runs kept and removed the same, and say the same of it; the order of documents with evaluation text apart."""

    def key(record: dict[str, object]) -> str:
        return json.dumps(record)

    assert sorted(kept_of(one), key=key) == sorted(kept_of(other), key=key)
    first, second = removed_of(one), removed_of(other)
    for step in {**first, **second}:
        assert sorted(first.get(step, []), key=key) == sorted(second.get(step, []), key=key), step
    assert amounts(load_clean_manifest(one)) == amounts(load_clean_manifest(other))
