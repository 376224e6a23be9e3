"""With DeepSpeed's thresholds scaled to a tiny model, every combination of settings trains as plain stage 0 does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import build_train_command, read_records, words
from tests.pairs import Settings, draw_pairs
from tests.runs_in_turn import train_in_turn
from tests.scaled_thresholds import MODEL, write_scaled_ds

FIXED = words("--steps 3 --warmup-steps 0 --schedule constant --lr 3e-3 --precision fp32 --global-batch-size 12")
#: Flags of a value of a key.
BLOCKS = {
    "gpt2": "",
    "llama": "--norm rmsnorm --no-bias --positions rotary --activation silu --gated-mlp --n-kv-head 2 --qk-norm head "
    "--mlp-width 85 --no-tied --sliding-window 12",
    "post-norm": "--norm rmsnorm --norm-placement post --qk-norm width --positions rotary",
    "experts": "--num-experts 4 --expert-width 40 --shared-expert-width 24",
    "divided experts": "--num-experts 4 --expert-width 40 --shared-expert-width 24 --expert-parallel-size 2",
}
TRAINED = {
    "all": "",
    "lora": "--lora-rank 2",
    "frozen": "--freeze w[tp]e*,blocks.0.*,blocks.3.mlp.*",
    # The first weights that are trained are those of an MLP.
    "attention frozen": "--freeze w[tp]e*,blocks.*.attn.*,blocks.*.ln_*",
}
CHOICES: dict[str, Sequence[Any]] = {
    "stage": (3, 2, 1, 0),
    "mode": ("selective", "full", "none"),
    "offload": ("none", "optimizer", "both"),
    "hpz": (1, 2),
    "ranks": (2, 3, 4, 1),
    "split": (1, 2),
    "block": tuple(BLOCKS),
    "trained": tuple(TRAINED),
    "tile": (0, 5),
    "optimizer": ("adamw", "muon"),
    "dropout": (0, 0.1),
    "mask": (False, True),
    "micro": (1, 2),
    "compiled": (False,),
}
#: Settings without any feature.
PLAIN: Settings = {"stage": 0, "mode": "none", "offload": "none", "hpz": 1, "tile": 0, "compiled": False}


def is_legal(cell: Settings) -> bool:
    """Return False for what llmscale refuses."""
    stage, ranks, block = cell["stage"], cell["ranks"], cell["block"]
    has_experts = "experts" in block
    return not any(
        (
            cell["offload"] == "optimizer" and stage == 0,
            cell["offload"] == "both" and stage < 3,
            cell["hpz"] > 1 and (stage < 3 or ranks % 2 or cell["offload"] == "both" or block == "divided experts"),
            cell["split"] > 1 and ranks % 2,
            block == "divided experts" and (ranks % 2 or stage == 0),
            cell["tile"] and (cell["dropout"] or has_experts or cell["compiled"]),
        )
    )


def plain_cell(cell: Settings) -> Settings:
    """Return the same training at stage 0 with nothing else. Where numbers are drawn or tokens are counted by
    micro-batch, its micro-batches are the same."""
    block = "experts" if cell["block"] == "divided experts" else cell["block"]
    depends_on_split = cell["dropout"] or "experts" in block
    return {**cell, **PLAIN, "block": block, "split": cell["split"] if depends_on_split else 1}


def flags_of(cell: Settings) -> list[str]:
    """Return the flags of a run without its ds_config."""
    switches = {"--document-mask": cell["mask"]}
    values = {
        "--activation-checkpointing": cell["mode"],
        "--sequence-parallel-size": cell["split"],
        "--mlp-tile-tokens": cell["tile"],
        "--optimizer": cell["optimizer"],
        "--dropout": cell["dropout"],
        "--micro-batch-size": cell["micro"],
        "--compile": "on" if cell["compiled"] else "off",
    }
    given = [word for flag, value in values.items() for word in (flag, str(value))]
    given += [flag for flag, is_on in switches.items() if is_on]
    return [*FIXED, *given, *words(BLOCKS[cell["block"]]), *words(TRAINED[cell["trained"]])]


class Runs:
    """Trains cells, those of one kind of ranks in turn, and each plain one once."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.of_cell: dict[str, Path] = {}

    def train(self, cells: Sequence[Settings]) -> None:
        """Train cells that have not been trained."""
        new = {str(cell): cell for cell in cells if str(cell) not in self.of_cell}
        for (ranks, _), group in itertools.groupby(sorted(new.values(), key=_kind), _kind):
            train_in_turn(list(self.commands(list(group))), ranks, traces_only=True)

    def commands(self, cells: Sequence[Settings]) -> Iterator[list[str]]:
        for cell in cells:
            run = self.folder / str(len(self.of_cell))
            self.of_cell[str(cell)] = run
            zero = {"zero_hpz_partition_size": cell["hpz"]} if cell["hpz"] > 1 else {}
            ds = write_scaled_ds(run.with_suffix(".json"), cell["stage"], cell["offload"], **zero)
            base = [] if cell["trained"] != "lora" else ["--init-from", str(self.base_of(cell))]
            yield self.command(run, ds, *flags_of(cell), *base)

    def base_of(self, cell: Settings) -> Path:
        """Return the run whose weights adapters are beside."""
        parts = BLOCKS[plain_cell(cell)["block"]]
        run = self.folder / f"base {parts}".replace(" ", "_")
        if not run.exists():
            ds = write_scaled_ds(run.with_suffix(".json"), 0)
            train_in_turn([self.command(run, ds, *FIXED, "--steps", "1", "--save-every", "1", *words(parts))], 1)
        return run

    def command(self, run: Path, ds: Path, *flags: str) -> list[str]:
        return build_train_command(self.data, run, "--save-every", "0", "--ds", str(ds), *flags, model=MODEL)

    def check(self, cells: Sequence[Settings]) -> None:
        """Train cells and their plain ones, and compare losses and gradient norms step by step."""
        self.train([*map(plain_cell, cells), *cells])
        wrong = []
        for cell in cells:
            actual, expected = (self.numbers_of(one) for one in (cell, plain_cell(cell)))
            assert len(expected) == 3
            if actual != pytest.approx(expected, rel=1e-5):
                wrong.append((cell, actual, expected))
        assert not wrong, wrong

    def numbers_of(self, cell: Settings) -> dict[int, float]:
        records = read_records(self.of_cell[str(cell)], "train")
        return {record["step"]: record["loss"] for record in records}


def _kind(cell: Settings) -> tuple[int, str]:
    """Return what the runs of one start share. DeepSpeed makes a process's groups for hpZ once."""
    is_alone = cell["hpz"] > 1 or cell["compiled"]
    return cell["ranks"], str(cell) if is_alone else ""


@pytest.fixture(scope="module")
def runs(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_set, tmp_path_factory.mktemp("scaled"))


def cell(**settings: Any) -> Settings:
    """The first value of every key, unless given."""
    return {key: values[0] for key, values in CHOICES.items()} | settings


def test_selective_checkpointing_at_stage_3(runs: Runs) -> None:
    runs.check([cell(micro=2)])


@pytest.mark.slow
def test_some_cells(runs: Runs) -> None:
    """Take cells whose plain one is the same."""
    runs.check(
        [
            cell(offload="both", tile=5),
            cell(split=2, mode="full"),
            cell(stage=2, offload="optimizer", mode="full"),
        ]
    )


PAIRS = draw_pairs(CHOICES, is_legal)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CHOICES["ranks"])
def test_every_pair_of_settings(ranks: int, runs: Runs) -> None:
    runs.check([cell for cell in PAIRS if cell["ranks"] == ranks])


COMPILED = draw_pairs(
    {key: values for key, values in CHOICES.items() if key not in ("tile", "micro", "compiled")}
    | {"block": ("llama", "experts"), "tile": (0,), "micro": (1,), "compiled": (True,)},
    is_legal,
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", CHOICES["stage"])
def test_every_pair_of_settings_compiled(stage: int, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs decide when stage 3 gathers; test_compilation.py has kernels."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    runs.check([cell for cell in COMPILED if cell["stage"] == stage])
