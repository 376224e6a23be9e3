"""Prose that passes every filter, made of words that nobody has written."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from llmscale.data.clean.annotate import CleanOptions, StepName
from llmscale.data.prepare.sources.clean_folder import load_clean_manifest

_STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]
MakeProse = Callable[[random.Random, int], str]
Write = Callable[[Path, list[str]], Path]
ALL: tuple[StepName, ...] = (
    "exact", "language", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near", "decontaminate",
)  # fmt: skip


def _vocabulary() -> list[str]:
    rng = random.Random(0)
    syllables = ["ba", "ne", "ri", "to", "lu", "sham", "gre", "vin", "ost", "kel", "pra", "dun"]
    return sorted({"".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(2000)})


@pytest.fixture(scope="session")
def make_prose() -> MakeProse:
    """A text of so many words, in sentences and paragraphs."""
    vocabulary = _vocabulary()

    def make(rng: random.Random, num_words: int) -> str:
        sentences: list[str] = []
        left = num_words
        while left > 0:
            length = min(left, rng.randint(8, 16))
            words = [rng.choice(_STOP_WORDS if rng.random() < 0.3 else vocabulary) for _ in range(length)]
            sentences.append(" ".join(words).capitalize() + ".")
            left -= length
        paragraphs = [" ".join(sentences[begin : begin + 6]) for begin in range(0, len(sentences), 6)]
        return "\n\n".join(paragraphs)

    return make


@pytest.fixture(scope="session")
def write_jsonl() -> Write:
    def write(path: Path, texts: list[str]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    return write


def records_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in _unpack(path).decode().split("\n") if line]


def _unpack(path: Path) -> bytes:
    contents = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes()), read_across_frames=True)
    return bytes(contents.read())


def kept_of(out: Path) -> list[dict[str, object]]:
    return [record for path in sorted(out.glob("documents-*")) for record in records_of(path)]


def removed_of(out: Path) -> dict[str, list[dict[str, object]]]:
    """Return removed records by step; the files of a cluster's parts are joined in order."""
    records: dict[str, list[dict[str, object]]] = {}
    for path in sorted((out / "removed").iterdir()):
        records.setdefault(_step_of(path), []).extend(records_of(path))
    return records


def _step_of(path: Path) -> str:
    step = re.fullmatch(r"\d\d-([a-z0-9-]+?)(-\d{5})?\.jsonl\.zst", path.name)
    assert step is not None
    return step[1]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def crawl(tmp_path: Path, make_prose: MakeProse, write_jsonl: Write) -> tuple[Path, CleanOptions]:
    """250 documents, some of which each step takes or changes."""
    rng = random.Random(0)
    texts = [make_prose(rng, rng.randint(80, 300)) for _ in range(150)]
    texts += rng.sample(texts, 20)  # exact copies
    texts += [text + " Indeed so." for text in rng.sample(texts[:150], 20)]  # near ones
    texts += [make_prose(rng, 40) for _ in range(10)]  # too short
    texts += [make_prose(rng, 60) + "\n\n" + "again and again the same\n" * 60 for _ in range(10)]
    texts += [make_prose(rng, 100) + "\n\nuse of {braces} in every line.\n\n" + make_prose(rng, 50) for _ in range(10)]
    texts += [make_prose(rng, 100) + f"\n\nThis javascript line {number} goes." for number in range(10)]
    texts += ["\n".join(f"{make_prose(rng, 4)[:28]}" for _ in range(60)) for _ in range(10)]
    items = [make_prose(rng, 30) for _ in range(10)]
    texts += [f"{make_prose(rng, 120)} {item} {make_prose(rng, 120)}" for item in items]
    rng.shuffle(texts)
    evaluation = write_jsonl(tmp_path / "evaluation.jsonl", items)
    steps = tuple(step for step in ALL if step != "language")  # nobody's language
    return write_jsonl(tmp_path / "crawl.jsonl", texts), CleanOptions(steps=steps, decontaminate=(evaluation,))


@dataclass(frozen=True)
class Crawl:
    """Text in files of different sizes."""

    folder: Path
    options: CleanOptions
    """All steps except `language`."""

    def command(self, out: Path) -> list[str]:
        return [
            "data",
            "clean",
            "--input",
            str(self.folder),
            "--out",
            str(out),
            "--decontaminate",
            str(self.options.decontaminate[0]),
        ]

    def erase(self) -> None:
        """Overwrite the text with spaces, so that reading it again would lose it, but keep sizes and times."""
        for path in self.folder.iterdir():
            status = path.stat()
            path.write_bytes(b" " * (status.st_size - 1) + b"\n")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


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


def check_same(one: Path, other: Path) -> None:
    """Check that two runs kept and removed the same bytes in the same order, and report the same counts."""
    assert contents_of(one) == contents_of(other)
    manifests = [load_clean_manifest(folder) or {} for folder in (one, other)]
    first, second = (
        {key: value for key, value in manifest.items() if key not in ("documents", "removed", "cluster", "request")}
        for manifest in manifests
    )
    assert first and first == second


def contents_of(out: Path) -> dict[str, bytes]:
    """Return uncompressed text: all documents under "", and what each step removed under its name."""
    content = {"": b"".join(map(_unpack, sorted(out.glob("documents-*"))))}
    for path in sorted((out / "removed").iterdir()):
        step = _step_of(path)
        content[step] = content.get(step, b"") + _unpack(path)
    return {step: contents for step, contents in content.items() if contents}
