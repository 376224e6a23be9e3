"""Estimate the longest sequences of Llama 3 8B on H100s, beside those that ALST was run with.

    python -m scripts.bench.memory.longest

A row is the longest of `llmscale estimate --max-seq-len --activation-checkpointing full`, where all GPUs divide one
sequence. Nothing is trained.
"""

from __future__ import annotations

import argparse

from llmscale.cli.estimate_rows import read_request
from llmscale.cli.flags import read_gpus
from llmscale.cli.main import build_parser
from llmscale.planning.search import Candidate, find_longest, with_inputs_on_host
from scripts.bench.harness import describe_machine, machine_line

COMMAND = ("estimate", "--model", "llama3-8b", "--gpu", "h100-80gb", "--precision", "bf16", "--max-seq-len")
#: Nodes, GPUs of a node, and the length that ALST's authors trained with (Bekman et al. 2025, arXiv 2506.13996).
MACHINES = ((1, 1, 500_000), (1, 8, 3_700_000), (4, 8, 15_000_000))


def main() -> None:
    """Print a row for each number of GPUs and tile."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    machine = describe_machine()
    print("Llama 3 8B, h100-80gb, bf16, micro-batch 1; all GPUs divide one sequence; host memory not limited\n")
    print(f"{'nodes':>5} {'GPUs':>4} {'tile':>5} {'longest':>11} {'ALST':>11}  {'GiB: GPU':>8} {'node':>7}  strategy")
    for nodes, gpus, published in MACHINES:
        for tile in (0, 4096):
            fit, checkpointing = find(nodes, gpus, tile)
            length, strategy = fit.plan.seq_len, fit.strategy
            sizes = f"{fit.estimate.total_bytes / 2**30:8.1f} {fit.host_bytes_per_node / 2**30:7,.0f}"
            words = f"ZeRO {strategy.zero_stage}, {strategy.offload}, {checkpointing}"
            print(f"{nodes:5} {gpus:4} {tile or '-':>5} {length:11,} {published:11,}  {sizes}  {words}", flush=True)
    print(machine_line(machine))


def find(nodes: int, gpus: int, tile: int) -> tuple[Candidate, str]:
    """Return the longest row that fits, and its checkpointing."""
    words = [*COMMAND, "--num-nodes", str(nodes), "--num-gpus", str(gpus), "--activation-checkpointing", "full"]
    words += ["--sequence-parallel-size", str(nodes * gpus), "--mlp-tile-tokens", str(tile)]
    args = build_parser(words).parse_args([*words, "--global-batch-size", str(nodes * gpus)])
    request = read_request(args, read_gpus(args)[0])
    trials = [*with_inputs_on_host(request.trials, request.nvme_path)]
    rows = find_longest(trials, request.cluster, [nodes * gpus])
    fits = [(fit, row.checkpointing) for row in rows if (fit := row.fits[nodes * gpus])]
    return max(fits, key=lambda candidate: candidate[0].plan.seq_len)


if __name__ == "__main__":
    main()
