"""How many documents a second `llmscale data clean` cleans beside datatrove, with the same steps on the same text.

    python -m scripts.bench.data.data_clean --datatrove-python VENV/bin/python

Both take turns in processes of their own, on the same JSON lines with the same number of workers: first the quality
filters (Gopher's repetition and quality, C4's without terminal punctuation, FineWeb's), then near duplicates (MinHash,
each with its defaults: datatrove's 14 buckets of 8 minima over 5-grams, in four passes). Time is from the first read to
the last write. Also counted: equal decisions, and found near duplicates among planted copies of every tenth document
with 3 % of its words replaced. datatrove's environment needs `datatrove[processing]`, `spacy` and `orjson`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.bench.data.data_prepare import documents
from scripts.bench.harness import (
    REPOSITORY,
    describe_circumstances,
    describe_machine,
    machine_line,
    output_file,
    python_environment,
    save_result,
    whole_number,
    whole_or_zero,
)

STEPS = {"quality": ("gopher-repetition", "gopher-quality", "c4", "fineweb"), "near": ("near",)}
PLANTED_EVERY, PLANTED_EDITS = 10, 0.03


def write_parts(folder: Path, most_bytes: int, parts: int) -> tuple[int, int, list[int]]:
    """Write a file per worker, as a task of datatrove reads complete files; return documents, bytes, planted copies."""
    folder.mkdir()
    texts = read_prose(most_bytes)
    rng = random.Random(0)
    originals = [text for text in texts[::PLANTED_EVERY] if len(text.split()) > 100]
    begin = len(texts)
    texts += [_edited(text, rng) for text in originals]
    each = -(-len(texts) // parts)
    for part in range(parts):
        with (folder / f"part{part}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(part * each, min((part + 1) * each, len(texts))):
                file.write(json.dumps({"id": str(number), "text": texts[number]}) + "\n")
    return len(texts), sum(len(text.encode()) for text in texts), list(range(begin, len(texts)))


def read_prose(most_bytes: int) -> list[str]:
    """Return documents of Python and its packages, with the docstrings of a module as one document."""
    texts, size_bytes = [], 0
    for path in documents([sysconfig.get_path("stdlib"), "/usr/share/doc", sysconfig.get_path("purelib")]):
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                text = "\n\n".join(_docstrings(ast.parse(text)))
        except (OSError, ValueError, SyntaxError):
            continue
        if 200 <= len(text) < 1 << 20:
            size_bytes += len(text.encode())
            texts.append(text)
        if size_bytes >= most_bytes:
            break
    return texts


def _docstrings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from filter(None, [ast.get_docstring(node)])


def _edited(text: str, rng: random.Random) -> str:
    """Return `text` with the share PLANTED_EDITS of its words replaced."""
    words = re.split(r"(\s+)", text)
    places = [place for place, word in enumerate(words) if word.strip()]
    for place in rng.sample(places, max(1, round(PLANTED_EDITS * len(places)))):
        words[place] = f"edit{rng.randrange(10**6)}"
    return "".join(words)


def run_llmscale(task: str, folder: Path, out: Path, workers: int) -> Callable[[], None]:
    from llmscale.data.clean.annotate import CleanOptions
    from llmscale.data.clean.run import clean
    from llmscale.data.prepare.sources.open_source import open_source

    def work() -> None:
        options = CleanOptions(steps=STEPS[task])  # type: ignore[arg-type]
        clean(open_source(str(folder)), out / "clean", options, num_workers=workers)

    return work


def run_datatrove(task: str, folder: Path, out: Path, workers: int) -> Callable[[], None]:
    """Run datatrove in its own environment."""
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]
    from datatrove.pipeline import dedup, filters  # type: ignore[import-not-found]
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]
    from datatrove.pipeline.writers import JsonlWriter  # type: ignore[import-not-found]

    def execute(name: str, steps: list[object], tasks: int) -> None:
        LocalPipelineExecutor(steps, tasks=tasks, workers=workers, logging_dir=str(out / "logs" / name)).run()

    def quality() -> None:
        steps = [
            JsonlReader(str(folder)),
            filters.GopherRepetitionFilter(),
            filters.GopherQualityFilter(),
            filters.C4QualityFilter(filter_no_terminal_punct=False),
            filters.FineWebQualityFilter(),
            JsonlWriter(str(out / "clean")),
        ]
        execute("quality", steps, workers)

    def near() -> None:
        config = dedup.minhash.MinhashConfig()
        signatures, buckets, removed = (str(out / name) for name in ("signatures", "buckets", "removed"))
        execute("1", [JsonlReader(str(folder)), dedup.MinhashDedupSignature(signatures, config=config)], workers)
        execute("2", [dedup.MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets)
        execute("3", [dedup.MinhashDedupCluster(buckets, removed, config=config)], 1)
        steps = [JsonlReader(str(folder)), dedup.MinhashDedupFilter(removed), JsonlWriter(str(out / "clean"))]
        execute("4", steps, workers)

    return quality if task == "quality" else near


def compete(name: str, task: str, folder: Path, out: Path, workers: int) -> None:
    """Run a contestant in this process; print seconds."""
    work = {"llmscale": run_llmscale, "datatrove": run_datatrove}[name](task, folder, out, workers)
    begin_s = time.monotonic()
    work()
    print(time.monotonic() - begin_s)


def kept_by(name: str, out: Path) -> set[int]:
    """Return the numbers of the documents that were kept."""
    import gzip
    import io

    import zstandard

    ids: set[int] = set()
    for path in sorted((out / "clean").glob("*.jsonl.*")):
        raw = path.read_bytes()
        contents = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read() if name == "llmscale" else None
        lines = (gzip.decompress(raw) if contents is None else contents).decode().split("\n")
        ids |= {int(json.loads(line)["id"]) for line in lines if line}
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-mb", type=whole_number, default=20)
    parser.add_argument("--rounds", type=whole_number, default=2)
    parser.add_argument("--workers", type=whole_or_zero, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--datatrove-python", type=Path, help="Python of an environment with datatrove and spacy")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--compete", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compete:
        name, task, folder, out = args.compete
        compete(name, task, Path(folder), Path(out), args.workers)
        return
    names = ["llmscale"]
    if args.datatrove_python:
        names.append("datatrove")
    else:
        print("datatrove is skipped: give --datatrove-python, of an environment with datatrove and spacy.")
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, names, Path(folder))
    print(machine_line(machine))
    circumstances = describe_circumstances(machine, args, ("text_mb", "rounds", "workers"))
    save_result(args.json, {**circumstances, **result})


def measure(args: argparse.Namespace, names: list[str], folder: Path) -> dict[str, object]:
    num_documents, size_bytes, planted = write_parts(folder / "text", args.text_mb * 1_000_000, args.workers)
    print(
        f"{num_documents:,} documents, {size_bytes / 1e6:.0f} MB, {args.workers} workers, best of {args.rounds} rounds",
        flush=True,
    )
    tasks = {}
    for task in STEPS:
        runs: dict[str, list[float]] = {name: [] for name in names}
        ids_kept: dict[str, set[int]] = {}
        for _ in range(args.rounds):
            for name in names:
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    runs[name].append(run_one(args, name, task, folder / "text", Path(out)))
                    ids_kept[name] = kept_by(name, Path(out))
        tasks[task] = describe(task, runs, ids_kept, num_documents, size_bytes, planted)
    return {"documents": num_documents, "text_bytes": size_bytes, "planted": len(planted), "tasks": tasks}


def describe(
    task: str,
    runs: dict[str, list[float]],
    ids_kept: dict[str, set[int]],
    num_documents: int,
    size_bytes: int,
    planted: list[int],
) -> dict[str, object]:
    print(f"{task:10}{'documents/s':>14}{'MB/s':>8}{'llmscale is':>14}{'kept':>10}")
    best_s = {name: min(of) for name, of in runs.items()}
    for name, wall_s in best_s.items():
        print(
            f"{name:10}{num_documents / wall_s:14.0f}{size_bytes / 1e6 / wall_s:8.1f}"
            f"{wall_s / best_s['llmscale']:12.2f} x{len(ids_kept[name]):10,}"
        )
    result: dict[str, object] = {
        "best_s": best_s,
        "runs_s": runs,
        "kept": {name: len(ids) for name, ids in ids_kept.items()},
    }
    if len(ids_kept) > 1:
        result["agreement"] = 1 - len(ids_kept["llmscale"] ^ ids_kept["datatrove"]) / num_documents
        print(f"the same documents are kept or not: {result['agreement']:.2%}")
    if task == "near":
        shares = {name: len(set(planted) - ids) / len(planted) for name, ids in ids_kept.items()}
        print("planted copies found:", ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
        result["planted_found"] = shares
    return result


def run_one(args: argparse.Namespace, name: str, task: str, folder: Path, out: Path) -> float:
    """Run a contestant in a process of its own; return its seconds."""
    python = sys.executable if name == "llmscale" else str(args.datatrove_python)
    command = [python, "-m", __spec__.name, "--workers", str(args.workers), "--compete", name, task]
    command += [str(folder), str(out)]
    environment = python_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    wall_s = float(done.stdout.splitlines()[-1])
    print(f"{name}, {task}: {wall_s:.1f} s", file=sys.stderr, flush=True)
    return wall_s


if __name__ == "__main__":
    main()
