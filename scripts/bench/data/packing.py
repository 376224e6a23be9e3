"""Compare the packings of `llmscale data prepare`: the text as one stream, and rows that start at a document.

    python -m scripts.bench.data.packing --steps 400

The same documents, the Python standard library in a vocabulary of 4,096 tokens, are packed into rows of each length.
Printed are the tokens that are in no row, the rows whose first token begins its document, the tokens whose document
begins in their row, and tokens packed per second. With --steps, a model of 2 blocks of 128 then trains equally long on
the rows of each packing, at --train-length; both are evaluated on the validation rows of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmscale.data.prepare.packing import BestFitPacking, Packing, PackingState, StreamPacking, Tokens
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from scripts.bench.harness import (
    describe_circumstances,
    describe_machine,
    machine_line,
    output_file,
    run_llmscale,
    save_result,
    whole_number,
    whole_or_zero,
    words,
)

PACKINGS = ("stream", "best-fit")
#: End-of-text in the measured documents, whose other tokens are numbered.
EOT = 0


def main() -> int:
    args = parse_arguments()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        settings = words(f"--input python-stdlib --vocab-size {args.vocabulary}")
        run_llmscale("data", "train-tokenizer", *settings, "--out", f"{folder}/tokenizer")
        documents = number_documents(Path(folder) / "tokenizer")
        sizes = [len(document) for document in documents]
        print(
            f"{len(sizes):,} documents, {sum(sizes):,} tokens: median {np.median(sizes):,.0f}, mean "
            f"{np.mean(sizes):,.0f}, longest {max(sizes):,}\n\n"
            f"{'row':>7} {'packing':9}{'lost':>8}{'rows that begin':>17}{'tokens that see':>17}{'M tokens/s':>12}\n"
            f"{'':17}{'':8}{'a document':>17}{'their beginning':>17}",
            flush=True,
        )
        rows = [measure(documents, length, packing) for length in args.lengths for packing in PACKINGS]
        losses = compare_training(args, Path(folder)) if args.steps else {}
    settings = [name for name in vars(args) if name != "json"]
    save_result(args.json, {**describe_circumstances(machine, args, settings), "rows": rows, "losses": losses})
    print(machine_line(machine))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=whole_number, default=4096, help="tokens (default: 4,096)")
    lengths = [1024, 4096, 16384, 65536]
    parser.add_argument("--lengths", type=whole_number, nargs="+", default=lengths, help="tokens of a row")
    parser.add_argument("--steps", type=whole_or_zero, default=0, help="steps of a run (default: 0, no training)")
    parser.add_argument("--train-length", type=whole_number, default=1024, help="tokens of its rows (default: 1,024)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the raw measurements to this file")
    return parser.parse_args()


def number_documents(tokenizer: Path) -> list[Tokens]:
    """Return documents as long as the text's, whose tokens are numbered throughout, each with end-of-text."""
    encode = load_tokenizer(str(tokenizer)).encode_batch
    texts = [str(record.content) for record in open_source("python-stdlib").records((), None) if record.content]
    sizes = [len(tokens) for tokens in encode(texts)]
    ends = np.cumsum(sizes)
    return [np.append(np.arange(end - size, end) + 1, EOT) for size, end in zip(sizes, ends, strict=True)]


def measure(documents: list[Tokens], length: int, name: str) -> dict[str, object]:
    """Pack all documents into rows of `length` + 1 tokens; print and return a line of the table."""
    waiting = PackingState(np.zeros(0, np.int64))
    packing: Packing = StreamPacking(length, waiting)
    if name == "best-fit":
        packing = BestFitPacking(length, "int64", EOT, waiting)  # type: ignore[arg-type]  # numbers of tokens
    begin_s = time.process_time()
    rows = np.concatenate([*(packing.cut(batch) for batch in batches(documents)), packing.finish()])
    took_s = time.process_time() - begin_s
    num_tokens = sum(map(len, documents))
    lost = (packing.num_cropped + packing.num_tail) / num_tokens
    firsts = np.array([document[0] for document in documents])
    starts = np.isin(rows[:, 0], firsts).mean()
    seen = np.mean([see_beginning(row, firsts) for row in rows])
    print(f"{length:7,} {name:9}{lost:8.2%}{starts:17.1%}{seen:17.1%}{num_tokens / took_s / 1e6:12.1f}", flush=True)
    return {"length": length, "packing": name, "lost": lost, "starts": starts, "sees": seen, "cpu_s": took_s}


def batches(documents: list[Tokens]) -> Iterator[Tokens]:
    """Yield the documents a hundred at a time, as `prepare` passes them on."""
    for first in range(0, len(documents), 100):
        yield np.concatenate(documents[first : first + 100])


def see_beginning(row: Tokens, firsts: Tokens) -> float:
    """Return the share of a row's tokens whose document begins in it; `firsts`: first tokens of all documents."""
    # An end belongs to the token before.
    numbers = np.maximum.accumulate(np.where(row == EOT, 0, np.arange(len(row))))
    own_first = firsts[np.searchsorted(firsts, np.maximum(row[numbers], 1), side="right") - 1]
    return float(np.isin(own_first, row).mean())


def compare_training(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train on each packing; print and return validation losses by "trained on, evaluated on"."""
    for packing in PACKINGS:
        settings = f"--seq-len {args.train_length} --packing {packing} --val-fraction 0.05"
        data = ("--input", "python-stdlib", "--tokenizer", f"{folder}/tokenizer", "--out", f"{folder}/{packing}")
        run_llmscale("data", "prepare", *data, *words(settings))
        model = "--model tiny-modern-10m --n-layer 2 --n-embd 128 --n-head 2 --n-kv-head 2"
        settings = f"--steps {args.steps} --save-every {args.steps} --no-async-save --val-every 0 --num-workers 0"
        settings += " --nproc-per-node 1 --ds zero0 --global-batch-size 8 --lr 2e-3 --precision fp32"
        places = ("--data", f"{folder}/{packing}", "--run", f"{folder}/run-{packing}")
        run_llmscale("train", *words(f"{model} {settings}"), *places)
    print(f"\nvalidation loss after {args.steps} steps of 8 rows of {args.train_length:,} tokens, nats per token")
    print(f"{'trained on':12}{'rows of the stream':>20}{'rows of best-fit':>20}")
    losses: dict[str, float] = {}
    for trained in PACKINGS:
        for seen in PACKINGS:
            run_llmscale("eval", f"{folder}/run-{trained}", "--data", f"{folder}/{seen}", "--json", f"{folder}/e.json")
            losses[f"{trained}, {seen}"] = json.loads((folder / "e.json").read_text())["validation"]["loss"]
        print(f"{trained:12}" + "".join(f"{losses[f'{trained}, {seen}']:20.4f}" for seen in PACKINGS), flush=True)
    return losses


if __name__ == "__main__":
    sys.exit(main())
