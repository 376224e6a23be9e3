"""Compare the estimate of models with experts with the dry run: bytes at the peak of each part of a step.

python -m scripts.bench.memory.experts_grid

A cell takes 10 s to 2 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import LossSettings
from llmscale.config.resolve import ResolvedStep, default_balance_loss, resolve_step
from llmscale.dry_run.engine import dry_run
from llmscale.memory.estimate import PHASES, estimate_memory
from llmscale.planning.search import Strategy, build_strategy

_LLAMA = {
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "tied": False,
}
_SMALL = {"n_layer": 4, "n_head": 8, "n_embd": 512, "mlp_width": 1536, "vocab_size": 8000, "seq_len": 512, **_LLAMA}
SHAPES: dict[str, GPTShape] = {
    name: build_shape(values)
    for name, values in {
        "small": {**_SMALL, "n_kv_head": 2, "num_experts": 8, "expert_width": 512},
        "dots.llm1, small": {
            **_SMALL,
            "qk_norm": "head",
            "num_experts": 16,
            "experts_per_token": 4,
            "expert_width": 256,
            "dense_layers": 1,
            "shared_expert_width": 512,
            "router_score": "sigmoid",
            "router_scale": 2.5,
            "router_bias": True,
        },
        "OLMoE 1B-7B": {
            "n_layer": 16,
            "n_head": 16,
            "n_embd": 2048,
            "mlp_width": 1024,
            "vocab_size": 50_304,
            "seq_len": 4096,
            **_LLAMA,
            "qk_norm": "width",
            "num_experts": 64,
            "experts_per_token": 8,
            "normalize_router": False,
        },
    }.items()
}


@dataclass(frozen=True)
class Cell:
    """A model, and how it is trained."""

    model: str
    stage: int
    ranks: int
    checkpointing: CheckpointingMode = "none"
    precision: Precision = "bf16"
    divided: int = 1
    """Ranks that divide the experts."""

    def resolve(self) -> ResolvedStep:
        """Return the step: two micro-steps of one sequence."""
        shape, ranks = SHAPES[self.model], ParallelLayout(self.ranks, 1, self.divided)
        ds = build_strategy(Strategy(self.stage, "none", "none", self.checkpointing), self.precision)
        assert ds is not None
        plan = build_batch_plan(
            global_batch_size=2 * self.ranks, ranks=ranks, seq_len=shape.seq_len, micro_batch_size=1
        )
        loss = LossSettings(balance_loss=default_balance_loss(shape))
        return resolve_step(ds, shape, plan, self.checkpointing, loss=loss)


CELLS = [
    *(Cell("small", stage, 8) for stage in (0, 1, 2, 3)),
    Cell("small", 3, 8, "full", "fp32"),
    *(Cell("small", stage, 8, divided=4) for stage in (1, 2, 3)),
    Cell("dots.llm1, small", 2, 8, "selective"),
    Cell("dots.llm1, small", 3, 8),
    Cell("OLMoE 1B-7B", 1, 16, "full"),
    Cell("OLMoE 1B-7B", 2, 16),
    Cell("OLMoE 1B-7B", 3, 16, "full"),
]


def main() -> None:
    """Print a row for each cell, and the errors of all phases."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print_grid([(cell.model, cell.divided, cell.resolve()) for cell in CELLS])


def print_grid(cells: list[tuple[str, int, ResolvedStep]]) -> None:
    """Print a row for each model, ranks of a group, and step; and the errors of all phases."""
    warnings.simplefilter("ignore")
    print("GiB by dry run, and the estimate's difference, at the peak of each part of a step")
    print(f"{'model':18} ZeRO ranks divided {'checkpt':9} precision " + "".join(f"{phase:>20}" for phase in PHASES))
    errors = []
    for model, divided, step in cells:
        estimate = estimate_memory(step)
        simulated = dry_run(step)
        counted = {phase: getattr(simulated, phase).total_bytes for phase in PHASES}
        errors_of = {phase: estimate.phase(phase).total_bytes / num_bytes - 1 for phase, num_bytes in counted.items()}
        errors += map(abs, errors_of.values())
        cells = "".join(f"{counted[phase] / 2**30:11.3f} {errors_of[phase]:+8.3%}" for phase in PHASES)
        row = f"{model:18} {step.zero_stage:4} {step.plan.ranks.world_size:5} {divided:7} "
        row += f"{step.checkpointing:9} {step.precision:9} "
        print(f"{row}{cells}", flush=True)
    print(f"median {statistics.median(errors):.3%}, largest {max(errors):.3%} of {len(errors)} phases")


if __name__ == "__main__":
    main()
