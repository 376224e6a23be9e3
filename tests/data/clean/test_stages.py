"""Stages on a Ray cluster, run in this process: together they decide what a local run decides, for any parts."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.data.clean import run
from llmscale.data.clean.annotate import CleanOptions, StepName, TokenizerName, start_workers
from llmscale.data.clean.on_ray import RayCluster, cut
from llmscale.data.clean.run import clean
from llmscale.data.clean.stages import CleanJob, Stage, plan_stages
from llmscale.data.prepare.sources.clean_folder import load_clean_manifest
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError, MachineError
from llmscale.terminal.progress import Progress
from tests.data.clean.conftest import Crawl, MakeProse, Write, check_same, contents_of, files_of, kept_of


class _Here:
    """Runs tasks in this process, those of a stage in random order; may die."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.dies_at: tuple[str, int] | None = None

    def run_stages(self, work: CleanJob, progress: Progress) -> Iterator[Stage]:
        for stage in plan_stages(len(work.parts)):
            for task in random.Random(0).sample(range(stage.num_tasks), stage.num_tasks):
                if stage.result(work, task).exists():
                    continue
                if (stage.name, task) == self.dies_at:
                    raise MachineError("died")
                stage.run(work, task)
                self.done.append((stage.name, task))
            yield stage


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> _Here:
    executor = _Here()

    @contextmanager
    def connected(cluster: RayCluster) -> Iterator[Callable[[CleanJob, Progress], Iterator[Stage]]]:
        yield executor.run_stages

    monkeypatch.setattr(run, "connected", connected)
    return executor


def _clean(folder: Path, out: Path, options: CleanOptions, parts: int | None = None, **more: int) -> None:
    cluster = RayCluster(num_parts=parts) if parts else None
    clean(open_source(str(folder)), out, options, num_workers=1, cluster=cluster, **more)


STEPS: list[tuple[StepName, ...]] = [
    ("exact", "gopher-repetition", "gopher-quality", "c4", "fineweb", "near", "decontaminate"),
    ("near", "c4", "exact"),
    ("near",),
    ("c4", "exact"),
    ("gopher-quality", "c4"),
]


@pytest.mark.parametrize(("steps", "parts"), list(zip(STEPS, [5, 2, 3, 4, 5], strict=True)))
def test_parts_decide_what_a_local_run_decides(
    steps: tuple[StepName, ...], parts: int, crawl_files: Crawl, here: _Here, tmp_path: Path
) -> None:
    options = replace(
        crawl_files.options,
        steps=steps,
        decontaminate=crawl_files.options.decontaminate if "decontaminate" in steps else (),
        tokenizer=TokenizerName("bytes"),
    )
    _clean(crawl_files.folder, tmp_path / "local", options)
    _clean(crawl_files.folder, tmp_path / "parts", options, parts)
    check_same(tmp_path / "local", tmp_path / "parts")
    manifest = load_clean_manifest(tmp_path / "parts")
    assert manifest is not None
    names = [file["name"] for file in manifest["documents"]]  # type: ignore[attr-defined]
    assert names == sorted(path.name for path in (tmp_path / "parts").glob("documents-*"))
    assert not list(tmp_path.glob(".parts*"))
    # Each is the answer to the other's request.
    before = len(here.done)
    _clean(crawl_files.folder, tmp_path / "local", options, parts)
    assert len(here.done) == before


def test_many_that_share_a_template_are_compared_as_locally(
    make_prose: MakeProse, write_jsonl: Write, here: _Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, and more candidates than are compared."""
    monkeypatch.setattr("llmscale.data.clean.duplicates._MOST_COMPARED", 5)
    monkeypatch.setattr("llmscale.data.prepare.tokenise.BATCH_CHARACTERS", 20_000)
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
    _clean(tmp_path / "text", tmp_path / "parts", options, 4)
    check_same(tmp_path / "local", tmp_path / "parts")
    assert 1 < len(kept_of(tmp_path / "parts")) < 100


@pytest.mark.parametrize("dies_at", [("1-annotate", 3), ("2-duplicates", 0), ("3-write", 2)])
def test_an_interrupted_run_resumes_and_publishes_nothing_until_then(
    dies_at: tuple[str, int], crawl_files: Crawl, here: _Here, tmp_path: Path
) -> None:
    options = replace(crawl_files.options, steps=("exact", "near"), decontaminate=())
    _clean(crawl_files.folder, tmp_path / "local", options)
    here.dies_at = dies_at
    with pytest.raises(MachineError, match="died"):
        _clean(crawl_files.folder, tmp_path / "parts", options, 5)
    assert not (tmp_path / "parts").exists()
    here.dies_at = None
    _clean(crawl_files.folder, tmp_path / "parts", options, 5)
    assert len(here.done) == len(set(here.done)) == 11
    check_same(tmp_path / "local", tmp_path / "parts")


def test_joining_again_gives_the_same(
    crawl_files: Crawl, here: _Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while the parts are joined loses no file."""

    def killed(folder: Path) -> None:
        raise MachineError("killed")

    _clean(crawl_files.folder, tmp_path / "once", crawl_files.options, 3)
    with monkeypatch.context() as context, pytest.raises(MachineError, match="killed"):
        context.setattr(run, "sync_tree", killed)
        _clean(crawl_files.folder, tmp_path / "twice", crawl_files.options, 3)
    _clean(crawl_files.folder, tmp_path / "twice", crawl_files.options, 3)
    assert files_of(tmp_path / "once") == files_of(tmp_path / "twice")
    assert len(list((tmp_path / "once").glob("documents-*"))) == 3 and "decontaminate" in contents_of(tmp_path / "once")


def test_malformed_records_are_counted_over_all_parts(here: _Here, crawl_files: Crawl, tmp_path: Path) -> None:
    options = replace(crawl_files.options, steps=("exact",), decontaminate=())
    for number in (1, 3):
        with (crawl_files.folder / f"{number}.jsonl").open("a") as file:
            file.write("no record\n")
    with pytest.raises(DataError, match=r"2 malformed records.* --max-rejected 1"):
        _clean(crawl_files.folder, tmp_path / "parts", options, 5, max_rejected=1)
    assert not (tmp_path / "parts").exists() and not (tmp_path / "parts.rejected.jsonl").exists()
    assert {name for name, _ in here.done} == {"1-annotate"}
    _clean(crawl_files.folder, tmp_path / "parts", options, 5, max_rejected=2)
    rejected = (tmp_path / "parts.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["contents"] for line in rejected] == ["no record"] * 2


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


def test_a_worker_that_is_killed() -> None:
    with start_workers(CleanOptions(steps=("exact", "near")), None, 2) as annotate_batch:
        annotations = annotate_batch(["one text", "", "another"])
        assert [len(document.findings) for document in annotations.documents] == [2, 1, 2]
        assert len(annotations.sketches.minima) == 2
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        with pytest.raises(MachineError, match="fewer --workers"):
            annotate_batch(["one text"])
    assert not multiprocessing.active_children()
