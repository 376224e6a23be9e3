"""The stages, in this process: together they decide what a local run decides, whatever the tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.clean.clean_set import clean
from llmscale.data.clean.cleaned_set import load_clean_manifest
from llmscale.data.clean.cluster import clean_on_cluster
from llmscale.data.clean.cluster.clean_on_cluster import cut
from llmscale.data.clean.cluster.compared import find_repeated
from llmscale.data.clean.cluster.settings import Cluster, RaySettings
from llmscale.data.clean.cluster.stages import Stage
from llmscale.data.clean.cluster.work_files import WorkFiles
from llmscale.data.clean.pipeline import CleanOptions, StepName, TokenizerName
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError, MachineError
from llmscale.terminal.progress import Progress
from tests.data.clean.cluster.conftest import Crawl, check_same
from tests.data.clean.conftest import MakeProse, Write, kept_of


class _Here:
    """Runs tasks one after the other, those of a stage in a random order; may die."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.dies_at: tuple[str, int] | None = None
        self.is_busy = False
        self.begins: Callable[[WorkFiles], None] = lambda files: None

    def check_free(self) -> None:
        if self.is_busy:
            raise DataError("busy")

    def run(self, stages: Sequence[Stage], files: WorkFiles, progress: Progress) -> None:
        self.begins(files)
        for stage in stages:
            for task in random.Random(0).sample(range(stage.num_tasks), stage.num_tasks):
                if (stage.name, task) in self.done:
                    continue
                if (stage.name, task) == self.dies_at:
                    raise MachineError("died")
                stage.work(task)
                self.done.append((stage.name, task))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> _Here:
    executor = _Here()

    @contextmanager
    def connected(cluster: Cluster, out: Path) -> Iterator[_Here]:
        yield executor

    monkeypatch.setattr(clean_on_cluster, "_connected", connected)
    return executor


def _clean(folder: Path, out: Path, options: CleanOptions, tasks: int | None = None, **more: int) -> None:
    cluster = Cluster(RaySettings(), tasks) if tasks else None
    clean(open_source(str(folder)), out, options, num_workers=1, cluster=cluster, **more)


STEPS: list[tuple[StepName, ...]] = [
    ("exact", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near", "decontaminate"),
    ("near", "c4", "exact"),
    ("near",),
    ("c4", "exact"),
    ("gopher-quality", "c4"),
]


@pytest.mark.parametrize(("steps", "tasks"), zip(STEPS, [5, 2, 3, 4, 5], strict=True))
def test_tasks_decide_what_a_local_run_decides(
    steps: tuple[StepName, ...], tasks: int, crawl_files: Crawl, here: _Here, tmp_path: Path
) -> None:
    options = replace(
        crawl_files.options,
        steps=steps,
        decontaminate=crawl_files.options.decontaminate if "decontaminate" in steps else (),
        tokenizer=TokenizerName("bytes"),
    )
    _clean(crawl_files.folder, tmp_path / "local", options)
    _clean(crawl_files.folder, tmp_path / "tasks", options, tasks)
    check_same(tmp_path / "local", tmp_path / "tasks")
    if "decontaminate" not in steps:  # whose documents come last
        assert kept_of(tmp_path / "tasks") == kept_of(tmp_path / "local")
    manifest = load_clean_manifest(tmp_path / "tasks")
    assert manifest is not None
    names = [file["name"] for file in manifest["documents"]]  # type: ignore[attr-defined]
    assert names == sorted(path.name for path in (tmp_path / "tasks").glob("documents-*"))
    assert not list(tmp_path.glob(".tasks*"))
    # Either is the other's answer.
    before = len(here.done)
    _clean(crawl_files.folder, tmp_path / "local", options, tasks)
    assert len(here.done) == before


def test_many_that_share_a_template_are_compared_as_locally(
    make_prose: MakeProse, write_jsonl: Write, here: _Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, and more candidates than are looked at."""
    monkeypatch.setattr("llmscale.data.clean.near._MOST_COMPARED", 5)
    monkeypatch.setattr("llmscale.data.clean.cluster.compared._BATCH_DOCUMENTS", 16)
    rng = random.Random(3)
    words = make_prose(rng, 200).split()
    texts = []
    for _ in range(120):
        for _ in range(8):
            words[rng.randrange(len(words))] = f"w{rng.randrange(10**6)}"
        texts.append(" ".join(words))
    rng.shuffle(texts)
    (tmp_path / "text").mkdir()
    for number in range(4):
        write_jsonl(tmp_path / "text" / f"{number}.jsonl", texts[number * 30 : number * 30 + 30])
    options = CleanOptions(steps=("near",))
    _clean(tmp_path / "text", tmp_path / "local", options)
    _clean(tmp_path / "text", tmp_path / "tasks", options, 4)
    check_same(tmp_path / "local", tmp_path / "tasks")
    assert 1 < len(kept_of(tmp_path / "tasks")) < 100


@pytest.mark.parametrize("dies_at", [("1-look", 3), ("2-repeated", 4), ("3-decide", 0), ("4-write", 2)])
def test_what_died_goes_on_and_until_then_nothing_is_there(
    dies_at: tuple[str, int], crawl_files: Crawl, here: _Here, tmp_path: Path
) -> None:
    options = replace(crawl_files.options, steps=("exact", "near"), decontaminate=())
    here.dies_at = dies_at
    with pytest.raises(MachineError, match="died"):
        _clean(crawl_files.folder, tmp_path / "tasks", options, 5)
    assert not (tmp_path / "tasks").exists()
    here.dies_at = None
    here.is_busy = True  # with its own tasks, which another request must not disturb
    with pytest.raises(DataError, match="busy"):
        _clean(crawl_files.folder, tmp_path / "tasks", options, 4)
    _clean(crawl_files.folder, tmp_path / "tasks", options, 5)
    _clean(crawl_files.folder, tmp_path / "local", options)
    check_same(tmp_path / "local", tmp_path / "tasks")


def test_what_tasks_of_an_earlier_command_use_and_say_stays(crawl_files: Crawl, here: _Here, tmp_path: Path) -> None:
    here.dies_at = ("1-look", 1)
    with pytest.raises(MachineError, match="died"):
        _clean(crawl_files.folder, tmp_path / "tasks", crawl_files.options, 2)
    here.dies_at = None
    work = tmp_path / ".tasks.partial-clean"
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in work.glob("evaluation*")}
    (work / "errors").mkdir()
    (work / "errors" / "1-look-00001.json").write_text("{}")
    seen = []

    def begins(files: WorkFiles) -> None:
        seen.append(files.error("1-look", 1).exists())
        assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in work.glob("evaluation*")} == before

    here.begins = begins
    _clean(crawl_files.folder, tmp_path / "tasks", crawl_files.options, 2)
    assert len(before) == 3 and seen == [True]


def test_records_that_are_none_are_counted_over_all_tasks(here: _Here, crawl_files: Crawl, tmp_path: Path) -> None:
    options = replace(crawl_files.options, steps=("exact",), decontaminate=())
    for number in (1, 3):
        with (crawl_files.folder / f"{number}.jsonl").open("a") as file:
            file.write("no record\n")
    with pytest.raises(DataError, match=r"2 records .* --max-rejected 1"):
        _clean(crawl_files.folder, tmp_path / "tasks", options, 5, max_rejected=1)
    assert not (tmp_path / "tasks").exists() and not (tmp_path / "tasks.rejected.jsonl").exists()
    _clean(crawl_files.folder, tmp_path / "tasks", options, 5, max_rejected=2)
    rejected = (tmp_path / "tasks.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["contents"] for line in rejected] == ["no record"] * 2


def test_nothing_left_is_an_error(here: _Here, crawl_files: Crawl, tmp_path: Path) -> None:
    options = CleanOptions(steps=("language",), languages=("zh",))
    with pytest.raises(DataError, match=r"nothing is left of 250 documents\. The step language"):
        _clean(crawl_files.folder, tmp_path / "tasks", options, 2)
    assert not (tmp_path / "tasks").exists()


def test_input_is_cut_at_files_into_parts_of_equal_size(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number, size in enumerate([10, 400, 10, 10, 300, 100, 200, 1]):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} " * size)
    source = open_source(str(tmp_path / "text"))
    documents = list(source.documents())
    for most, expected in ((1, 1), (3, 3), (8, 8), (100, 8)):
        parts = cut(source, most)
        assert len(parts) == expected
        assert [text for part in parts for text in part.documents()] == documents
    sizes = [part.total_bytes or 0 for part in cut(source, 3)]
    assert max(sizes) < 2 * min(sizes)
    two = open_source(str(tmp_path / "text"), str(tmp_path / "text"))
    assert [text for part in cut(two, 4) for text in part.documents()] == 2 * documents


def test_repeated_keys_are_all_found() -> None:
    keys = np.random.default_rng(0).integers(0, 300, 400, np.uint64)
    values, counts = np.unique(keys, return_counts=True)
    expected = np.isin(keys, values[counts > 1])
    assert expected.any() and not expected.all()
    np.testing.assert_array_equal(find_repeated(keys), expected)
    assert find_repeated(keys[:0]).shape == (0,)
