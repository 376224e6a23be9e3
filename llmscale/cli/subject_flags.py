"""What `llmscale eval` and `prune` look at: a model, and the split that its loss is taken on."""

from __future__ import annotations

import argparse

from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need


def add_model(parser: argparse.ArgumentParser) -> None:
    """RUN and --step."""
    parser.add_argument(
        "run",
        type=flag_type.path,
        metavar="RUN",
        help="run folder of train.py, one checkpoint of it, or a folder of transformers",
    )
    parser.add_argument(
        "--step",
        type=flag_type.whole(0, limits.MAX_STEPS),
        default=None,
        help="the run's checkpoint of this step (default: its newest)",
    )


def add_own_data(parser: argparse.ArgumentParser) -> None:
    """--data, for a run whose set is at an address."""
    parser.add_argument(
        "--data",
        type=flag_type.path_or_url,
        metavar="URL",
        help="the run's data set, where that is at an address: one that only the checkpoint names is not asked",
    )


def add_loss(parser: FlagParser) -> None:
    """Add --data, --val-samples and --batch-size."""
    parser.needs = [Need("data", "with --val-samples 0", lambda args: args.val_samples)]
    parser.add_argument(
        "--data",
        type=flag_type.path_or_url,
        metavar="SET",
        help="prepared set whose validation split the loss is taken on (default: the run's own)",
    )
    parser.add_argument(
        "--val-samples",
        type=flag_type.whole(0, limits.MAX_SAMPLES),
        default=256,
        help="sequences that the loss is taken on, spread over the split, of a mix each set its part of the run; 0: no "
        "loss (default %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        default=8,
        help="sequences at once; results do not depend on it (default %(default)s)",
    )
