"""`llmscale estimate --interconnect list`: which ZeRO stage for which network between nodes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from llmscale.cli.estimate.as_json import search_as_dict
from llmscale.cli.estimate.request import read_request
from llmscale.cli.estimate.rows import EXIT_NOTHING_FITS
from llmscale.cli.estimate.table import align
from llmscale.cli.train_command import model_words
from llmscale.config.interconnect import Interconnect
from llmscale.dry_run.on_demand import with_recordings
from llmscale.errors import ConfigError
from llmscale.planning.recommend import fastest_by_link
from llmscale.terminal.table import print_fitting


def run(args: argparse.Namespace) -> int:
    """0 when something fits, 1 when nothing does. Raises ConfigError where there is no network, or no rate known."""
    request = read_request(args)
    search = request.search
    if search.job.machines.num_nodes == 1:
        raise ConfigError("--interconnect list compares networks between nodes; this is one node. Give --num-nodes.")
    rates = with_recordings(lambda: fastest_by_link(search), model_words(request.model_keys))
    if rates is None:
        raise ConfigError(
            f"--interconnect list compares tokens/s; the rate of {search.gpu.name} in {search.precision} is not known."
        )
    if args.json:
        values = search_as_dict(search) | {
            "tokens_per_second": {interconnect.name: best for interconnect, best in rates},
        }
        del values["interconnect"]
        print(json.dumps(values, indent=1))
    else:
        shape = search.job.shape
        head = (
            f"{shape.num_parameters:,} parameters on {request.machines_in_words}, {search.precision}, global batch "
            f"{search.job.global_batch_size:,} x {shape.seq_len:,} tokens"
        )
        what = "Estimated tokens/s of each ZeRO stage's fastest row that fits; * the fastest of a line."
        print_fitting([head, what, "", *_lines(rates)])
    if any(best for _, best in rates):
        return 0
    print("Nothing fits: without --interconnect list the table says by how much.", file=sys.stderr)
    return EXIT_NOTHING_FITS


def _lines(rates: Sequence[tuple[Interconnect, dict[str, float]]]) -> Iterator[str]:
    stages = sorted({stage for _, best in rates for stage in best})
    rows = []
    for interconnect, best in rates:
        marks = {stage: "*" * (rate == max(best.values())) for stage, rate in best.items()}
        cells = (f"{marks[stage]}{best[stage]:,.0f}" if stage in best else "-" for stage in stages)
        rows.append([interconnect.name, *cells, interconnect.description])
    return align(["network", *(f"ZeRO {stage}" for stage in stages), "source"], rows)
