"""Rank script of the tests here: check one case after the other in this world, each perhaps with a planted bug.

A cell is {"flags", "seq_len", "steps", "mutant"}.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from llmscale.engine.process_group import World
from llmscale.numerics.block import read_case
from llmscale.numerics.check import check_run, compare_case
from llmscale.numerics.links import LINKS, first_wrong
from tests.numerics.honest import with_own_ds
from tests.numerics.mutants import MUTANTS, planted
from tests.rank_end import answer_cells


def check(job: dict, world: World) -> dict[str, object]:
    """Largest shares by link, and the first comparison that is wrong."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        case = read_case(with_own_ds(job["flags"], Path(folder)))
    case = replace(case, vocab_size=300, seq_len=job["seq_len"], steps=job.get("steps", 2))
    mutant = next((mutant for mutant in MUTANTS if mutant.name == job.get("mutant")), None)
    with planted(mutant):
        if job.get("finds_setting"):
            report = check_run(case, world, None)
            tries = {attempt.setting: attempt.verdict for attempt in report.tries}
            return {"mutant": job["mutant"], "setting": report.setting, "tries": tries}
        _, findings = compare_case(case, world)
    first = first_wrong(findings)
    return {
        "flags": job["flags"],
        "mutant": job.get("mutant"),
        "seconds": round(time.perf_counter() - began, 2),
        "shares": {
            link: max(finding.share for finding in of_link)
            for link in LINKS
            if (of_link := [finding for finding in findings if finding.link == link])
        },
        "link": first and first.link,
        "parameter": first and first.name,
        "rank": first and first.rank,
        "step": first and first.step + 1,
        "share": first and first.share,
        "note": first and first.note,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_cells(check)
