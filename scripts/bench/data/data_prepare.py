"""How fast `llmscale data prepare` is beside other programs that write the same text as tokens to disk.

    python -m scripts.bench.data.data_prepare --tokenizer gpt2.tiktoken [--datatrove-python VENV/bin/python]

Contestants take turns in processes of their own, on the same JSON lines with the same GPT-2 vocabulary and number of
workers: `llmscale data prepare`; nanoGPT's data/openwebtext/prepare.py (datasets.map with tiktoken, then a memmap);
llm-foundry's convert_dataset_hf --concat_tokens (Hugging Face tokenizer, samples of 1,024 tokens, MDSWriter; a copy of
its method, as the package needs Composer); datatrove's DocumentTokenizer in its own environment; and the encoder alone
on texts in memory. Time is from the first read to the last write, without imports. The tokens of all are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scripts.bench.harness import (
    REPOSITORY,
    describe_circumstances,
    describe_machine,
    machine_line,
    output_file,
    peak_bytes,
    python_environment,
    save_result,
    whole_number,
    whole_or_zero,
)

SEQ_LEN = 1024
#: GPT-2's end-of-text, which follows every document.
EOT = 50256


#: Sources and documents of Python and its packages.
ROOTS = (sysconfig.get_path("stdlib"), "/usr/share/doc", "/usr/lib/python3", sysconfig.get_path("purelib"))


def write_corpus(path: Path, most_bytes: int, roots: Sequence[str] = ROOTS) -> int:
    """Write text files of folders as JSON lines, one document per file; return the bytes of their text."""
    size_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents(roots):
            try:
                text = document.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            if text and len(text) < 1 << 20 and size_bytes < most_bytes:
                size_bytes += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
    return size_bytes


def documents(roots: Sequence[str]) -> Iterator[Path]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".txt", ".md", ".rst", ".html", "copyright")):
                    yield Path(folder, name)


def make_hf_tokenizer(ranks: Path, folder: Path) -> None:
    """Write GPT-2's vocabulary as a tokenizer.json."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    made = TikTokenConverter(str(ranks), pattern=pattern, additional_special_tokens=["<|endoftext|>"]).converted()
    folder.mkdir(exist_ok=True)
    made.post_processor = made.post_processor.__class__(trim_offsets=False)
    made.save(str(folder / "tokenizer.json"))


def run_llmscale(corpus: Path, ranks: Path, out: Path, workers: int, **options: object) -> Callable[[], None]:
    from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
    from llmscale.data.prepare.sources.open_source import open_source
    from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

    settings = PrepareOptions(seq_len=SEQ_LEN, **options)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(str(ranks))

    def work(text: Path, name: str) -> None:
        prepare(open_source(str(text)), out / name, tokenizer, settings, num_workers=workers)

    # The warm-up imports everything.
    few = out / "few.jsonl"
    few.write_text(json.dumps({"text": "a few words " * SEQ_LEN}) + "\n")
    work(few, "warm")
    return lambda: work(corpus, "set")


def run_in_order(corpus: Path, ranks: Path, out: Path, workers: int) -> Callable[[], None]:
    """Prepare in the order of the text, to compare the tokens. Not timed."""
    return run_llmscale(corpus, ranks, out, workers, shuffle=False, val_fraction=0.0)


def run_encoder(corpus: Path, ranks: Path, out: Path, workers: int) -> Callable[[], None]:
    """Encode texts in memory: the upper limit."""
    from concurrent.futures import ThreadPoolExecutor

    from llmscale.data.prepare.encoder import choose_encoder
    from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

    encoder, why_slow = choose_encoder(load_tokenizer(str(ranks)), "auto", [])
    print(why_slow or encoder.name, file=sys.stderr)
    batches: list[list[str]] = [[]]
    size = 0
    for line in corpus.open("rb"):
        text = json.loads(line)["text"]
        batches[-1].append(text)
        size += len(text)
        if size >= 1 << 20:
            batches.append([])
            size = 0

    def encode() -> None:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda batch: len(encoder.encode(batch)), batches):
                pass

    return encode


def run_nanogpt(corpus: Path, ranks: Path, out: Path, workers: int) -> Callable[[], None]:
    import numpy as np
    from datasets import load_dataset

    from llmscale.data.tokenizers.load_tokenizer import load_tokenizer

    encoding = load_tokenizer(str(ranks))._encoding  # type: ignore[attr-defined]  # tiktoken's own

    def process(example: dict[str, str]) -> dict[str, object]:
        ids = encoding.encode_ordinary(example["text"])
        ids.append(EOT)
        return {"ids": ids, "len": len(ids)}

    def work() -> None:
        dataset = load_dataset("json", data_files=str(corpus), split="train", num_proc=workers)
        tokenized = dataset.map(process, remove_columns=["text"], num_proc=workers)
        length = np.sum(tokenized["len"], dtype=np.uint64)
        array = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(int(length),))
        place = 0
        num_shards = min(1024, len(tokenized))
        for index in range(num_shards):
            batch = tokenized.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
            tokens = np.concatenate(list(batch["ids"]))
            array[place : place + len(tokens)] = tokens
            place += len(tokens)
        array.flush()

    return work


def run_foundry(corpus: Path, ranks: Path, out: Path, workers: int) -> Callable[[], None]:
    import numpy as np
    from datasets import load_dataset
    from torch.utils.data import DataLoader, IterableDataset
    from transformers import PreTrainedTokenizerFast

    from llmscale.data.prepare.sources.tokens import streaming_module

    make_hf_tokenizer(ranks, out)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"), model_max_length=10**9)

    class ConcatTokens(IterableDataset):  # type: ignore[type-arg]
        def __init__(self, dataset: object) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            buffer: list[int] = []
            for sample in self.dataset:  # type: ignore[attr-defined]
                buffer = buffer + tokenizer(sample["text"], truncation=False, padding=False)["input_ids"] + [EOT]
                while len(buffer) >= SEQ_LEN:
                    yield {"tokens": np.asarray(buffer[:SEQ_LEN], dtype=np.int32)}
                    buffer = buffer[SEQ_LEN:]

    def work() -> None:
        dataset = load_dataset("json", data_files=str(corpus), split="train", streaming=True)
        writer = streaming_module("format.mds").MDSWriter(columns={"tokens": "ndarray:int32"}, out=str(out / "mds"))
        # As build_dataloader does: one worker for a dataset that is one file.
        for batch in DataLoader(ConcatTokens(dataset), batch_size=512, num_workers=1, prefetch_factor=2,
                                collate_fn=list):  # fmt: skip
            for sample in batch:
                writer.write(sample)
        writer.finish()

    return work


def run_datatrove(corpus: Path, ranks: Path, out: Path, workers: int) -> Callable[[], None]:
    """Run datatrove in its own environment; `out` contains tokenizer.json."""
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]
    from datatrove.pipeline.tokens import DocumentTokenizer  # type: ignore[import-not-found]

    def work() -> None:
        reader = JsonlReader(str(corpus.parent), glob_pattern=corpus.name)
        writer = DocumentTokenizer(
            output_folder=str(out / "tokens"),
            local_working_dir=str(out / "scratch"),
            tokenizer_name_or_path=str(out / "tokenizer.json"),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
            batch_size=1000,
        )
        # A task reads whole files, so one file is one task.
        LocalPipelineExecutor([reader, writer], tasks=1, workers=1, logging_dir=str(out / "logs")).run()

    return work


CONTESTANTS: dict[str, Callable[[Path, Path, Path, int], Callable[[], None]]] = {
    "llmscale": run_llmscale,
    "in order": run_in_order,
    "encoder alone": run_encoder,
    "nanoGPT": run_nanogpt,
    "llm-foundry": run_foundry,
    "datatrove": run_datatrove,
}


def compete(name: str, corpus: Path, ranks: Path, out: Path, workers: int) -> None:
    """Run a contestant in this process; print seconds, processor seconds and MiB."""
    work = CONTESTANTS[name](corpus, ranks, out, workers)
    before = processor_s()
    begin_s = time.monotonic()
    work()
    took_s = time.monotonic() - begin_s
    print(json.dumps({"wall_s": took_s, "processor_s": processor_s() - before, "peak_mib": peak_bytes() >> 20}))


def processor_s() -> float:
    """Return processor seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def hash_tokens(name: str, out: Path, most: int) -> str:
    """Return a hash of the first `most` tokens."""
    import numpy as np

    if name == "nanoGPT":
        tokens = np.fromfile(out / "train.bin", np.uint16, most)
    elif name == "datatrove":
        [path] = (out / "tokens").glob("*.ds")
        tokens = np.fromfile(path, np.uint16, most)
    elif name == "llm-foundry":
        from llmscale.data.prepare.sources.open_source import open_source
        from llmscale.data.prepare.sources.source import TokenRules

        records = open_source(str(out / "mds")).records((), TokenRules(EOT + 1, EOT, ()))
        parts = [np.append(record.content, EOT) for record in records]  # type: ignore[union-attr,arg-type]
        tokens = np.concatenate(parts)[:most].astype(np.uint16)
    else:
        from llmscale.data.shards.cache import open_set
        from llmscale.data.shards.token_shards import TokenShards

        shards = TokenShards(open_set(str(out / "set")), "train")
        tokens = shards.read(np.arange(most // SEQ_LEN))[:, :-1].reshape(-1)[:most]
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="GPT-2's ranks, gpt2.tiktoken")
    parser.add_argument("--text", nargs="+", default=ROOTS, metavar="FOLDER", help="default: Python's sources and docs")
    parser.add_argument("--text-mb", type=whole_number, default=100)
    parser.add_argument("--rounds", type=whole_number, default=3)
    parser.add_argument("--workers", type=whole_or_zero, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--datatrove-python", type=Path, help="Python of an environment with datatrove and tokenizers")
    parser.add_argument("--skip", nargs="*", default=[], choices=CONTESTANTS)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--compete", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compete:
        name, corpus, out = args.compete
        compete(name, Path(corpus), args.tokenizer, Path(out), args.workers)
        return
    skip = {*args.skip, "in order"} | ({"datatrove"} if not args.datatrove_python else set())
    names = [name for name in CONTESTANTS if name not in skip]
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, names, Path(folder))
    print(machine_line(machine))
    circumstances = describe_circumstances(machine, args, ("text_mb", "rounds", "workers"))
    save_result(args.json, {**circumstances, **result})


def measure(args: argparse.Namespace, names: list[str], folder: Path) -> dict[str, object]:
    corpus = folder / "corpus.jsonl"
    size_bytes = write_corpus(corpus, args.text_mb * 1_000_000, args.text)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    hashes = {}
    for number in range(args.rounds):
        for name in names:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                times[name].append(run_one(args, name, corpus, Path(out)))
                if number == 0 and name not in ("encoder alone", "llmscale"):
                    hashes[name] = hash_tokens(name, Path(out), most_tokens(size_bytes))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run_one(args, "in order", corpus, Path(out))
        hashes["llmscale"] = hash_tokens("in order", Path(out), most_tokens(size_bytes))
    best = {
        name: {key: min(run[key] for run in runs) for key in ("wall_s", "processor_s")}
        | {"peak_mib": max(run["peak_mib"] for run in runs)}
        for name, runs in times.items()
    }
    print(f"{size_bytes / 1e6:.0f} MB of text, {args.workers} workers, best of {args.rounds} rounds")
    print(
        f"{'':18}{'MB/s':>8}{'MB per processor s':>22}{'llmscale is':>14}{'by processor':>14}{'peak MiB':>10}  tokens"
    )
    for name, run in best.items():
        ratio, by_processor = (run[key] / best["llmscale"][key] for key in ("wall_s", "processor_s"))
        print(
            f"{name:18}{size_bytes / 1e6 / run['wall_s']:8.1f}{size_bytes / 1e6 / run['processor_s']:22.1f}"
            f"{ratio:12.2f} x{by_processor:12.2f} x{run['peak_mib']:10.0f}  {hashes.get(name, '')}"
        )
    print("all tokens are equal" if len(set(hashes.values())) == 1 else f"TOKENS DIFFER: {hashes}")
    return {"text_bytes": size_bytes, "best": best, "runs": times, "first_tokens_sha256": hashes}


def most_tokens(size_bytes: int) -> int:
    """Return a number of tokens that all contestants have, whatever they drop at the end."""
    return size_bytes // 8 // SEQ_LEN * SEQ_LEN


def run_one(args: argparse.Namespace, name: str, corpus: Path, out: Path) -> dict[str, float]:
    python = sys.executable
    if name == "datatrove":
        make_hf_tokenizer(args.tokenizer, out)
        python = str(args.datatrove_python)
    command = [python, "-m", __spec__.name, "--tokenizer", str(args.tokenizer.resolve())]
    command += ["--workers", str(args.workers)]
    environment = python_environment(HF_HOME=str(out / "home"), TOKENIZERS_PARALLELISM="true")
    command += ["--compete", name, str(corpus), str(out)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    record: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {record['wall_s']:.1f} s", file=sys.stderr, flush=True)
    return record


if __name__ == "__main__":
    main()
