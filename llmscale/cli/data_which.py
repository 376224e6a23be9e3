"""`llmscale data which`: the samples that a step was made of."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING

from llmscale.cli import flags
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.training.step_samples import StepSample

_TEXT_CHARACTERS = 100


def add_parser(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `which` to `llmscale data`."""
    parser = commands.add_parser("which", help="the samples of a step's global batch: set, shard, index, text")
    parser.add_argument("run", type=flag_type.path, metavar="RUN|CHECKPOINT", help="run folder, or one checkpoint")
    flags.add_own_data(parser)
    parser.add_argument(
        "--step",
        type=flag_type.whole(1, limits.MAX_STEPS),
        required=True,
        metavar="N",
        help="the step, as it is printed",
    )
    parser.add_argument(
        "--samples",
        type=flag_type.whole(0, limits.MAX_BATCH),
        default=16,
        metavar="K",
        help="samples to show (default: 16)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with the whole text, of all")
    parser.needs = [Need("samples", "with --json", lambda args: not args.json)]
    parser.set_defaults(handler=_which)


def _which(args: argparse.Namespace) -> int:
    from llmscale.data.shards.cache import fetch_tokenizer
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
    from llmscale.training.step_samples import find_step_samples

    found = find_step_samples(args.run, args.step, args.data)
    fetch_tokenizer(found.sets.first)
    tokenizer = load_set_tokenizer(found.sets.first.folder, found.sets.manifest)
    if args.json:
        for sample in found.samples:
            print(json.dumps(_as_plain(sample, tokenizer)))
        return 0
    counts = Counter(sample.set_name for sample in found.samples)
    first, last = found.samples[0].position, found.samples[-1].position
    print_visible(
        f"step {args.step:,}: {len(found.samples):,} samples, {first:,} to {last:,} of the run: "
        + ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    )
    for sample in found.samples[: args.samples]:
        text = tokenizer.decode(sample.tokens.tolist())
        print_visible(
            f"{sample.set_name} sample {sample.sample_id:,} ({sample.shard} [{sample.index:,}]): "
            f"{text[:_TEXT_CHARACTERS]!r}{' ...' if len(text) > _TEXT_CHARACTERS else ''}"
        )
    left = len(found.samples) - args.samples
    if left > 0:
        print(f"and {left:,} more; --samples {len(found.samples)} shows them, --json with their whole text")
    return 0


def _as_plain(sample: StepSample, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "position": sample.position,
        "set": sample.set_name,
        "sample": sample.sample_id,
        "shard": sample.shard,
        "index": sample.index,
        "text": tokenizer.decode(sample.tokens.tolist()),
    }
