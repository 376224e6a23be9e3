"""`llmscale report RUN`: the loss curve and the numbers that matter, in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmscale.checkpoint.history import list_checkpoints
from llmscale.config import flag_type
from llmscale.data.sample_log import read_recorded
from llmscale.report.ascii_chart import draw_chart
from llmscale.report.run_history import load_history, load_run_manifest
from llmscale.terminal.table import output_width, print_fitting
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser
    from llmscale.data.shards.manifest import Manifest


#: Columns of the chart, at most, and those beside it.
_CHART_WIDTH, _CHART_MARGIN = 64, 12


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `report`."""
    parser = subparsers.add_parser("report")
    parser.add_argument("run", type=flag_type.path, metavar="RUN", help="run folder of train.py")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    history = load_history(args.run)
    manifest = load_run_manifest(args.run)
    entropy = _entropy(manifest, "train")
    print_fitting(["loss, nats per token: * training, o validation" + (", --- unigram entropy" if entropy else "")])
    width = min(_CHART_WIDTH, (output_width() or 200) - _CHART_MARGIN)
    print(draw_chart({"*": list(history.train.items()), "o": list(history.validation.items())}, entropy, width=width))
    losses = list(history.train.values())
    last_step = list(history.train)[-1]
    lines = ["", f"training loss    {losses[0]:.3f} -> {losses[-1]:.3f}{_compare(losses[-1], entropy)}"]
    if history.validation:
        final = list(history.validation.values())[-1]
        lines.append(f"validation loss  {final:.3f}{_compare(final, _entropy(manifest, 'val'))}")
    lines.append(
        f"progress         {last_step:,} steps, {history.tokens_seen[last_step]:,} tokens, "
        f"{history.median_tokens_per_second:,.0f} tokens/s"
    )
    print_fitting(lines)
    saved = list_checkpoints(args.run)
    print_visible(f"checkpoint       {saved[0] if saved else 'none yet'}")
    gaps = read_recorded(args.run).gaps
    if gaps:
        print_visible(f"sample record    INCOMPLETE: {'; '.join(gaps)} missing")
    return 0


def _entropy(manifest: Manifest | None, split: str) -> float | None:
    """Unigram entropy of a split in nats: the loss of a model that knows the tokens' frequencies and nothing else."""
    return manifest.splits[split].unigram_entropy_nats if manifest and split in manifest.splits else None


def _compare(loss: float, entropy: float | None) -> str:
    """How the loss stands to the unigram entropy, when that is known."""
    if entropy is None:
        return ""
    side = "below" if loss < entropy else "ABOVE"
    return f"  ({abs(entropy - loss):.3f} {side} the unigram entropy of its tokens, {entropy:.3f})"
