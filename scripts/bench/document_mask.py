"""What --document-mask costs: forward and backward passes with and without it, in turns, in one process.

The other two models differ in nothing but the mask: one sees the whole sequence, which needs none, the other a sliding
window of half of it. Prints the fastest time of each as a multiple of the first one's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from flag_types import output_file, whole_number
from machine import describe_circumstances, describe_machine, save_result

from llmscale.config.presets import get_preset
from llmscale.model.gpt import GPT

END = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-10m", metavar="PRESET")
    parser.add_argument("--seq-lens", type=whole_number, nargs="+", default=[256, 512, 1024, 2048], metavar="T")
    parser.add_argument(
        "--tokens", type=whole_number, default=4096, metavar="N", help="of one micro-batch (default: 4096)"
    )
    parser.add_argument(
        "--document-tokens", type=whole_number, default=200, metavar="N", help="mean length (default: 200)"
    )
    parser.add_argument("--turns", type=whole_number, default=5, metavar="N", help="of each model (default: 5)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    machine = describe_machine()
    rows = []
    print("seq_len  no mask (s)  documents  window")
    for seq_len in args.seq_lens:
        seconds = measure(args, seq_len)
        alone = seconds["no mask"]
        rows.append({"seq_len": seq_len, "seconds": seconds})
        print(f"{seq_len:7}  {alone:11.3f}  {seconds['documents'] / alone:8.2f}x  {seconds['window'] / alone:5.2f}x")
    settings = ("model", "tokens", "document_tokens", "turns")
    save_result(args.json, {**describe_circumstances(machine, args, settings), "rows": rows})
    return 0


def measure(args: argparse.Namespace, seq_len: int) -> dict[str, float]:
    """Seconds of the fastest a forward and backward pass by what is masked."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = get_preset(args.model).shape(256, seq_len)
    shapes = {
        "no mask": plain,
        "documents": replace(plain, document_end=END),
        "window": replace(plain, sliding_window=max(1, seq_len // 2)),
    }
    generator = torch.Generator().manual_seed(0)
    size = (max(1, args.tokens // seq_len), seq_len + 1)
    tokens = torch.randint(1, 256, size, generator=generator)
    tokens[torch.rand(size, generator=generator) < 1 / args.document_tokens] = END
    tokens = tokens.to(device)
    models = {name: GPT(shape, seed=0).to(device) for name, shape in shapes.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(args.turns + 1):
        for name, model in models.items():
            seconds = _timed(lambda model=model: _pass(model, tokens, device))
            if turn:  # the first one warms up
                times[name].append(seconds)
    return {name: min(found) for name, found in times.items()}


def _pass(model: GPT, tokens: torch.Tensor, device: str) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
