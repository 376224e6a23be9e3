"""Steps whose memory is compared, drawn so that every pair of settings occurs; a fresh draw is compared by

    python -m tests.memory.random_cells --seed 7 --cells 40

It prints how far each estimate is from the dry run. `--write FILE` keeps cells with the dry run's bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.loss_settings import LossSettings
from llmscale.config.optimizers import ADAFACTOR, ADAMW, MUON
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.memory.estimate import PHASES, estimate_memory

OPTIMIZERS = {optimizer.name: optimizer for optimizer in (ADAMW, MUON, ADAFACTOR)}

#: Values of every setting of a step. None leaves the default. A name is a field of Cell, or of its model's shape behind
#: `shape.`, or a path in the ds_config behind `ds.`.
SETTINGS: dict[str, tuple[object, ...]] = {
    "model": ("gpt2-124m", "llama3-1b", "qwen3-0.6b", "olmoe-1b-7b"),
    "ranks": (1, 2, 8),
    "micro_batch": (1, 4),
    "accumulation": (1, 2),
    "optimizer": ("adamw", "muon", "adafactor"),
    "mode": ("none", "selective", "full"),
    "chunk_tokens": (2048, 1024),
    "frozen": (None, "wte*", "blocks.*.attn.*"),
    "precision": ("bf16", "fp16", "fp32", "autocast"),
    "sequence_ranks": (1, 2),
    "expert_ranks": (1, 2),
    "shape.n_layer": (2, 3),
    "shape.seq_len": (512, 1024),
    "shape.tied": (True, False),
    "shape.dropout": (None, 0.1),
    "shape.document_end": (None, 0),
    "shape.sliding_window": (None, 256),
    "shape.attention_kernel": (None, "sdpa"),
    "shape.activation": (None, "relu"),
    "shape.norm_placement": (None, "post"),
    "shape.qk_norm": (None, "head", "width"),
    "shape.attention_bias": (None, "qkv"),
    "shape.head_dim": (None, 80),
    "shape.mlp_tile_tokens": (None, 256),
    "ds.zero_optimization.stage": (0, 1, 2, 3),
    "ds.zero_optimization.overlap_comm": (None, True, False),
    "ds.zero_optimization.reduce_bucket_size": (None, 50_000_000, 3_000_000),
    "ds.zero_optimization.offload_optimizer.device": (None, "cpu"),
    "ds.zero_optimization.offload_param.device": (None, "cpu"),
    "ds.zero_optimization.sub_group_size": (None, 10_000_000),
    "ds.zero_optimization.stage3_prefetch_bucket_size": (None, 0),
    "ds.zero_optimization.stage3_param_persistence_threshold": (None, 0),
    "ds.zero_optimization.stage3_max_live_parameters": (None, 20_000_000),
    "ds.zero_optimization.stage3_max_reuse_distance": (None, 0),
    "ds.zero_optimization.zero_hpz_partition_size": (None, 2),
    "ds.communication_data_type": (None, "fp32"),
    "ds.data_types.grad_accum_dtype": (None, "fp32", "bf16"),
    "ds.bf16.immediate_grad_update": (None, True),
    "ds.bf16.bf16_optimizer_states": (None, True),
    "ds.activation_checkpointing.cpu_checkpointing": (None, True),
}
_ROTARY = ("llama3-1b", "qwen3-0.6b", "olmoe-1b-7b")
_STAGE = "ds.zero_optimization.stage"
_OFFLOAD = "ds.zero_optimization.offload_optimizer.device"
#: Settings that a value needs beside it: without them it is refused, or has no effect.
NEEDS: dict[tuple[str, object], dict[str, tuple[object, ...]]] = {
    ("optimizer", "adafactor"): {_STAGE: (0,)},
    ("precision", "fp16"): {_STAGE: (1, 2, 3)},
    ("sequence_ranks", 2): {
        "ranks": (2, 8),
        "shape.dropout": (None,),
    },
    ("expert_ranks", 2): {
        "model": ("olmoe-1b-7b",),
        "ranks": (2, 8),
        _STAGE: (1, 2, 3),
        "ds.zero_optimization.zero_hpz_partition_size": (None,),
    },
    ("shape.sliding_window", 256): {"model": _ROTARY},
    ("shape.norm_placement", "post"): {"model": _ROTARY},
    ("shape.qk_norm", "head"): {"model": _ROTARY},
    ("shape.qk_norm", "width"): {"model": _ROTARY, "sequence_ranks": (1,)},
    ("shape.attention_kernel", "sdpa"): {"shape.document_end": (0,)},
    ("shape.mlp_tile_tokens", 256): {
        "shape.dropout": (None,),
        "model": tuple(name for name in SETTINGS["model"] if name != "olmoe-1b-7b"),
    },
    ("ds.zero_optimization.overlap_comm", True): {_STAGE: (1, 2, 3)},
    ("ds.zero_optimization.overlap_comm", False): {_STAGE: (1, 2, 3)},
    ("ds.zero_optimization.reduce_bucket_size", 50_000_000): {_STAGE: (1, 2, 3)},
    ("ds.zero_optimization.reduce_bucket_size", 3_000_000): {_STAGE: (1, 2, 3)},
    (_OFFLOAD, "cpu"): {_STAGE: (1, 2, 3), "ds.bf16.bf16_optimizer_states": (None,)},
    ("ds.zero_optimization.offload_param.device", "cpu"): {
        _STAGE: (3,),
        "ds.zero_optimization.zero_hpz_partition_size": (None,),
    },
    ("ds.zero_optimization.sub_group_size", 10_000_000): {_STAGE: (3,)},
    ("ds.zero_optimization.stage3_prefetch_bucket_size", 0): {_STAGE: (3,)},
    ("ds.zero_optimization.stage3_param_persistence_threshold", 0): {_STAGE: (3,)},
    ("ds.zero_optimization.stage3_max_live_parameters", 20_000_000): {_STAGE: (3,)},
    ("ds.zero_optimization.stage3_max_reuse_distance", 0): {_STAGE: (3,)},
    ("ds.zero_optimization.zero_hpz_partition_size", 2): {_STAGE: (3,), "ranks": (2, 8)},
    ("ds.data_types.grad_accum_dtype", "bf16"): {"precision": ("bf16",)},
    ("ds.bf16.immediate_grad_update", True): {
        _STAGE: (1,),
        "precision": ("bf16",),
        "ds.data_types.grad_accum_dtype": ("fp32",),
    },
    ("ds.bf16.bf16_optimizer_states", True): {
        _STAGE: (1, 2, 3),
        "precision": ("bf16",),
        "optimizer": ("adamw",),
        _OFFLOAD: (None,),
        "ds.bf16.immediate_grad_update": (None,),
        "ds.data_types.grad_accum_dtype": (None, "bf16"),
    },
    ("ds.activation_checkpointing.cpu_checkpointing", True): {"mode": ("full",)},
}

Choice = tuple[str, object]


@dataclass(frozen=True)
class Cell:
    """A step in the words of a user."""

    model: str
    change: dict[str, object]
    ds: dict[str, object]
    mode: CheckpointingMode
    ranks: int
    micro_batch: int
    accumulation: int
    optimizer: str
    chunk_tokens: int
    frozen: list[str] = field(default_factory=list)
    sequence_ranks: int = 1
    expert_ranks: int = 1

    @property
    def stage(self) -> int:
        zero = self.ds["zero_optimization"]
        assert isinstance(zero, dict)
        return zero["stage"]

    def resolve(self) -> ResolvedStep:
        """Raises ConfigError for settings that do not go together."""
        shape = PRESETS[self.model].shape(50_257).changed(self.change)
        optimizer = OPTIMIZERS[self.optimizer]
        if self.frozen:
            optimizer = optimizer.with_rules([], self.frozen, shape.tensors.all)
        balance = 0.01 if shape.num_experts and not shape.router_bias else 0.0
        plan = build_batch_plan(
            global_batch_size=self.micro_batch * self.accumulation * self.ranks // self.sequence_ranks,
            ranks=ParallelLayout(self.ranks, self.sequence_ranks, self.expert_ranks),
            seq_len=shape.seq_len,
            micro_batch_size=self.micro_batch,
        )
        loss = LossSettings(chunk_tokens=self.chunk_tokens, balance_loss=balance)
        return resolve_step(parse_ds_config(self.ds, "cell"), shape, plan, self.mode, optimizer, loss)


def build_cell(chosen: Mapping[str, object]) -> Cell:
    """Build a cell from a value of every setting."""
    change: dict[str, object] = {}
    ds: dict[str, object] = {}
    fields: dict[str, object] = {}
    for name, value in chosen.items():
        kind, _, path = name.partition(".")
        if value is None:
            continue
        if kind == "shape":
            change[path] = value
        elif kind == "ds":
            _put(ds, path.split("."), value)
        elif name == "precision":
            if value != "fp32":
                _put(ds, ["torch_autocast" if value == "autocast" else str(value), "enabled"], True)
        else:
            fields[name] = [value] if name == "frozen" else value
    if chosen["ds.bf16.bf16_optimizer_states"]:
        _put(ds, ["bf16", "bf16_master_weights_and_grads"], True)
    return Cell(change=change, ds=ds, **fields)  # type: ignore[arg-type]


def _put(section: dict[str, object], path: list[str], value: object) -> None:
    for name in path[:-1]:
        inner = section.setdefault(name, {})
        assert isinstance(inner, dict)
        section = inner
    section[path[-1]] = value


def pairs_of(chosen: Mapping[str, object]) -> Iterator[tuple[Choice, Choice]]:
    """Yield every pair of settings with their values."""
    return combinations(chosen.items(), 2)


def legal_pairs() -> set[tuple[Choice, Choice]]:
    """Return the pairs of values that go together."""
    values = [(name, value) for name, values in SETTINGS.items() for value in values]
    return {(one, other) for one, other in combinations(values, 2) if one[0] != other[0] and _narrow([one, other])}


def _narrow(choices: Iterable[Choice]) -> dict[str, list[object]] | None:
    """Return the values of every setting that go together with the choices; None if these contradict each other."""
    left = {name: list(values) for name, values in SETTINGS.items()}
    for name, value in choices:
        if value not in left[name]:
            return None
        left[name] = [value]
    is_changed = True
    while is_changed:
        is_changed = False
        for (name, value), needs in NEEDS.items():
            if value not in left[name]:
                continue
            if any(not set(left[other]).intersection(wanted) for other, wanted in needs.items()):
                left[name].remove(value)
                is_changed = True
            elif len(left[name]) == 1:
                for other, wanted in needs.items():
                    legal = [one for one in left[other] if one in wanted]
                    is_changed |= legal != left[other]
                    left[other] = legal
            if not left[name]:
                return None
    return left


class Drawing:
    """A draw of cells in which every legal pair of values occurs about equally often."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._legal = sorted(legal_pairs(), key=repr)
        self.counts = Counter(dict.fromkeys(self._legal, 0))

    def draw(self) -> dict[str, object]:
        """Return a value of every setting: a rarest pair, and what is rarest beside it."""
        fewest = min(self.counts.values())
        pair = self._random.choice([pair for pair in self._legal if self.counts[pair] == fewest])
        choices = dict(pair)
        names = [name for name in SETTINGS if name not in choices]
        self._random.shuffle(names)
        for name in names:
            left = _narrow(choices.items())
            assert left is not None
            values = left[name]
            self._random.shuffle(values)
            choices[name] = min(values, key=lambda value: self._rarity(choices, (name, value)))
        chosen = {name: choices[name] for name in SETTINGS}
        self.counts.update(pairs_of(chosen))
        return chosen

    def _rarity(self, choices: Mapping[str, object], added: Choice) -> float:
        pairs = [(one, added) if (one, added) in self.counts else (added, one) for one in choices.items()]
        return sum(-(0.25 ** self.counts[pair]) for pair in pairs)


def read_pairs(path: Path) -> list[tuple[dict[str, object], dict[str, int]]]:
    """Read the settings and the bytes of each cell that `--write` has written."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [({name: row["settings"].get(name) for name in SETTINGS}, row["bytes"]) for row in rows]


def main() -> None:
    """Print how far estimates are from dry runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    drawing = Drawing(given.seed)
    errors: list[float] = []
    for number in range(given.cells):
        chosen = drawing.draw()
        try:
            counted = count_bytes(build_cell(chosen))
        except Exception as error:
            print(f"{number}: the dry run failed: {error!r} {_words_of(chosen)}", flush=True)
            continue
        error, of_phases = _compare(build_cell(chosen), counted)
        errors.append(abs(error))
        print(f"{number}: {error:+.3%} ({of_phases}) {_words_of(chosen)}", flush=True)
        if given.write:
            with given.write.open("a") as file:
                file.write(json.dumps({"settings": _without_defaults(chosen), "bytes": counted}) + "\n")
    print(
        f"{len(errors)} cells: median {statistics.median(errors):.3%}, "
        f"p90 {statistics.quantiles(errors, n=10)[-1]:.3%}, worst {max(errors):.2%}; "
        f"{sum(count >= 3 for count in drawing.counts.values())} of {len(drawing.counts)} pairs at least three times"
    )


def _without_defaults(chosen: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in chosen.items() if value is not None}


def _words_of(chosen: Mapping[str, object]) -> str:
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in _without_defaults(chosen).items())


def count_bytes(cell: Cell) -> dict[str, int]:
    """Return the dry run's bytes by phase, and on the host."""
    from llmscale.dry_run.engine import dry_run

    with contextlib.redirect_stdout(io.StringIO()):
        simulated = dry_run(cell.resolve())
    return {
        "forward": simulated.forward.total_bytes,
        "backward": simulated.backward.total_bytes,
        "step": simulated.step.total_bytes,
        "host": simulated.host_bytes,
    }


def _compare(cell: Cell, counted: Mapping[str, int]) -> tuple[float, str]:
    """Return the relative error of the peak, and that of each phase in words."""
    estimate = estimate_memory(cell.resolve())
    of_phases = [f"{phase} {estimate.phase(phase).total_bytes / counted[phase] - 1:+.2%}" for phase in PHASES]
    return estimate.allocated_bytes / max(counted[phase] for phase in PHASES) - 1, ", ".join(of_phases)


if __name__ == "__main__":
    main()
