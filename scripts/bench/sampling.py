"""What a key-value cache and batches bring: tokens per second with and without, the same texts, taking turns.

usage: python scripts/bench/sampling.py [--json FILE] [--threads 1] [--rounds 3] [--tokens 192]

Everything is a ratio within one run, the median (smallest-largest) over the rounds. Models have random weights, and no
text ends early.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from flag_types import output_file, whole_number
from machine import describe_circumstances, describe_machine, median_and_range, save_result, show_range

from llmscale.architecture.shape import GPTShape
from llmscale.evaluate.sampling import SamplingSettings, sample
from llmscale.model.gpt import GPT

MODELS = {
    "gpt2": GPTShape(n_layer=6, n_head=6, n_embd=384, vocab_size=50_257, seq_len=1024, activation="gelu_tanh"),
    "llama": GPTShape(
        n_layer=6, n_head=6, n_embd=384, vocab_size=50_257, seq_len=1024, activation="silu", bias=False, n_kv_head=2,
        mlp_width=1024, gated_mlp=True, norm="rmsnorm", positions="rotary",
    ),
}  # fmt: skip
BATCH = 8


def generate(model: GPT, prompts: Sequence[Sequence[int]], tokens: int, *, use_cache: bool) -> list[list[int]]:
    """`tokens` more of each prompt."""
    settings = SamplingSettings(max_new_tokens=tokens, temperature=0.8, top_k=50, top_p=None)
    texts: list[list[int]] = [[] for _ in prompts]
    seeds = [1337] * len(prompts)
    for step in sample(model, prompts, settings, seeds=seeds, eot_token=None, use_cache=use_cache):
        for number, token in step.items():
            texts[number].append(token)
    return texts


def measure(model: GPT, args: argparse.Namespace) -> dict[str, object]:
    """Tokens per second of each way, and whether all gave the same texts."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(50_257, (args.prompt_len,), generator=generator).tolist() for _ in range(BATCH)]
    ways = {
        "uncached": lambda: generate(model, prompts[:1], args.tokens, use_cache=False),
        "cached": lambda: generate(model, prompts[:1], args.tokens, use_cache=True),
        "8 one by one": lambda: [generate(model, [p], args.tokens, use_cache=True)[0] for p in prompts],
        "8 at once": lambda: generate(model, prompts, args.tokens, use_cache=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            texts[name] = way()
            rates[name].append(len(texts[name]) * args.tokens / (time.perf_counter() - began))
    by_round = zip(*rates.values(), strict=True)
    ratios = [(cached / uncached, at_once / alone) for uncached, cached, alone, at_once in by_round]
    return {
        "tokens_per_second": {name: show_range(median_and_range(of_way), ".1f") for name, of_way in rates.items()},
        "cached_over_uncached": show_range(median_and_range(ratio for ratio, _ in ratios)),
        "batch_over_singles": show_range(median_and_range(ratio for _, ratio in ratios)),
        "same_texts": texts["uncached"] == texts["cached"] and texts["8 one by one"] == texts["8 at once"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")
    parser.add_argument("--threads", type=whole_number, default=1)
    parser.add_argument("--rounds", type=whole_number, default=3)
    parser.add_argument("--prompt-len", type=whole_number, default=64)
    parser.add_argument("--tokens", type=whole_number, default=192)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine, results = describe_machine(), {}
    for name, shape in MODELS.items():
        results[name] = measure(GPT(shape, seed=0).eval(), args)
        print(name, results[name], flush=True)
    settings = ("threads", "rounds", "prompt_len", "tokens")
    save_result(args.json, {"models": results, **describe_circumstances(machine, args, settings)})


if __name__ == "__main__":
    main()
