"""`llmscale sample RUN "prompt"`: text from a run's newest weights."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from llmscale.config import flag_type, limits

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `sample`."""
    parser = subparsers.add_parser("sample")
    parser.add_argument(
        "run", type=flag_type.path, metavar="RUN", help="run folder of train.py, or one checkpoint of it"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=flag_type.whole(0, limits.MAX_SEQ_LEN),
        default=200,
        help="tokens to generate (default %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=flag_type.number(0, 1e6), default=0.8, help="0 takes the likeliest (default %(default)s)"
    )
    parser.add_argument(
        "--top-k",
        type=flag_type.whole(1, limits.MAX_VOCAB),
        default=50,
        help="draw from the k likeliest tokens (default %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=flag_type.number(0, 1, above=True),
        default=None,
        help="draw from the likeliest that reach this probability",
    )
    parser.add_argument(
        "--seed", type=flag_type.whole(0, limits.MAX_SEED), default=1337, help="of the draws (default %(default)s)"
    )
    parser.add_argument(
        "--num-samples", type=flag_type.whole(1, 10**6), default=1, help="texts to generate (default %(default)s)"
    )
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.locate import find_checkpoint
    from llmscale.untrusted.terminal import make_visible, print_visible

    folder = find_checkpoint(args.run, lambda line: print_visible(line, file=sys.stderr))
    # torch is imported only now: a wrong folder is answered at once.
    from llmscale.engine.silence_libraries import quiet_libraries
    from llmscale.evaluate.load_model import load_trained_model
    from llmscale.evaluate.text import generate_text

    quiet_libraries()
    trained = load_trained_model(folder)
    for number in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- {number + 1} ---")
        sys.stdout.write(make_visible(args.prompt))
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
            sys.stdout.write(make_visible(piece))
            sys.stdout.flush()
        print()
    return 0
