"""Every planted bug is found, by the right link; engines without a bug raise no alarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import HANG_S, run_cells
from tests.numerics.honest import Setting, honest_settings
from tests.numerics.mutants import MUTANTS, Mutant

SCRIPT = Path(__file__).with_name("numerics_job.py")
#: Bugs of the default suite: one of each link, a rank, fillers, hpZ.
QUICK = (
    "stale secondary copies",
    "mask sees one ahead",
    "norm lacks a third (DeepSpeed #7718)",
    "micro-step lost, stage 2",
    "fillers in the mean",
    "one rank multiplies wrongly",
    "moments changed between steps",
    "Adafactor's decay -0.5",
)
#: Settings of the default suite, whose engines have no bug.
QUIET = (
    "--ds zero2 --precision bf16 --global-batch-size 10",
    "--ds zero3 --precision fp32 --optimizer muon",
    "--ds zero0 --precision bf16 --document-mask",
    "--ds zero1 --precision bf16 --expert-parallel-size 2",
    "--ds hpz3 --precision bf16",
    "--ds bf16_1 --precision bf16 --global-batch-size 4",
    "--ds zero0 --precision bf16 --optimizer adafactor",
)
#: The setting that makes the difference for bugs that one can separate.
SETTINGS = {
    "race of overlap_comm (DeepSpeed #7965)": "overlap_comm off",
    "micro-step lost, stage 3": "gradient accumulation 1",
    "sums in bf16": "gradient accumulation 1",
    "offload copies a part": "offload off",
    "mean of means": "sequences and experts undivided",
    "experts averaged among holders": "sequences and experts undivided",
    "attention kernel": "attention by torch's math kernel",
    "q, k, v as one matrix": "--optimizer adamw",
    "layer norm sums in 16 bit (torch on CPUs)": "--precision fp32",
    "mask sees one ahead": None,
    "weight decay on norms": None,
}


def plant(mutant: Mutant) -> dict[str, object]:
    return {"flags": mutant.flags, "seq_len": mutant.seq_len, "steps": mutant.steps, "mutant": mutant.name}


def check_mutants(mutants: Sequence[Mutant]) -> None:
    rows = run_cells(SCRIPT, [plant(mutant) for mutant in mutants], 2)
    for mutant, row in zip(mutants, rows, strict=True):
        assert (row["link"] or "") == mutant.link, row
        assert mutant.parameter in ("", row["parameter"]), row
        assert row["rank"] == mutant.rank, row


def check_honest(settings: Sequence[Setting], world_size: int) -> None:
    chosen = [setting for setting in settings if setting.ranks == world_size]
    jobs = [{"flags": setting.flags, "seq_len": setting.seq_len} for setting in chosen]
    # There may be more than a hundred engines.
    rows = run_cells(SCRIPT, jobs, world_size, timeout_s=max(HANG_S, 10 * len(jobs)))
    assert not [row for row in rows if row["link"]]


def test_a_bug_of_each_kind_is_found_where_it_is() -> None:
    check_mutants([mutant for mutant in MUTANTS if mutant.name in QUICK])


def test_engines_without_a_bug_raise_no_alarm() -> None:
    settings = [setting for setting in honest_settings() if setting.flags.endswith(QUIET)]
    assert len(settings) >= len(QUIET)
    check_honest(settings, 2)


@pytest.mark.slow
def test_every_bug_is_found_or_known_to_hide() -> None:
    check_mutants(MUTANTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_honest_setting_raises_an_alarm(world_size: int) -> None:
    check_honest(honest_settings(), world_size)


@pytest.mark.slow
def test_the_setting_that_makes_the_difference_is_named() -> None:
    mutants = [mutant for mutant in MUTANTS if mutant.name in SETTINGS]
    rows = run_cells(SCRIPT, [{**plant(mutant), "finds_setting": True} for mutant in mutants], 2)
    assert {row["mutant"]: row["setting"] for row in rows} == SETTINGS
