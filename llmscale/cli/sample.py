"""`llmscale sample RUN "prompt"`: text from a run's newest weights."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `sample`."""
    parser = subparsers.add_parser("sample", help="generate text from a run's newest weights")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of train.py, or one checkpoint of it")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--max-new-tokens", type=_at_least(0), default=200, help="tokens to generate (default %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.8, help="0 takes the likeliest (default %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=_at_least(1), default=50, help="draw from the k likeliest tokens (default %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=_probability, default=None, help="draw from the likeliest that reach this probability"
    )
    parser.add_argument("--seed", type=int, default=1337, help="of the draws (default %(default)s)")
    parser.add_argument("--num-samples", type=_at_least(1), default=1, help="texts to generate (default %(default)s)")
    parser.set_defaults(handler=_run)


def _at_least(lowest: int) -> Callable[[str], int]:
    """For argparse: a whole number. A wrong setting is answered before torch is imported and a model is loaded."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {lowest}, not '{text}'")
        return int(text)

    return parse


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or a positive number, not '{text}'")
    return value


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not '{text}'")
    return value


def _number(text: str) -> float:
    """NaN, which is in no range, when it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.find import find_checkpoint

    folder = find_checkpoint(args.run)
    # torch is imported only now: a wrong folder is answered at once.
    from llmscale.engine.quiet import quiet_libraries
    from llmscale.evaluate.load_model import load_trained_model
    from llmscale.evaluate.text import generate_text

    quiet_libraries()
    trained = load_trained_model(folder)
    for number in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- {number + 1} ---")
        sys.stdout.write(args.prompt)
        pieces = generate_text(
            trained.model,
            trained.tokenizer,
            args.prompt,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed + number,
        )
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
    return 0
