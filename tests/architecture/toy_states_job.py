"""States of a toy model at given stages: DeepSpeed's engine on fake tensors, and the closed form over its description.

Not a test module: test_toy_variant.py runs it in a process of its own.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from llmscale.architecture.layers import ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.resolve import resolve_step
from llmscale.dry_run.engine import dry_run
from llmscale.memory.estimate import estimate_states
from llmscale.memory.states.state_memory import zero_setup
from tests.architecture.test_toy_variant import describe_toy
from tests.memory.activations.toy_decoder import ToyDecoder, ToyShape

#: Activations hardly exist.
TOY = ToyShape(n_layer=3, n_head=6, n_kv_head=2, head_dim=64, mlp_width=1024, vocab_size=1280, seq_len=8)
#: Tells the dry run how long sequences are, and what an embedding's gradient and logits look like.
STAND_IN = GPTShape(n_layer=3, n_head=6, n_embd=384, vocab_size=1280, seq_len=8)
RANKS = 4


def compare(stage: int) -> dict[str, dict[str, int]]:
    """Bytes between steps, and what each part of a step adds."""
    toy = describe_toy(TOY)
    plan = BatchPlan(RANKS, 1, 1, ParallelLayout(RANKS), TOY.seq_len)
    ds = parse_ds_config({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}, "toy")

    def build(shape: GPTShape, **_: object) -> ToyDecoder:
        return ToyDecoder(TOY, lambda block, x: block(x))

    described = mock.patch.object(GPTShape, "architecture", toy)
    with described, mock.patch("llmscale.engine.deepspeed_engine.GPT", build):
        resolved = resolve_step(ds, STAND_IN, plan, "none")
        simulated = dry_run(resolved)
    resident = simulated.resident.total_bytes
    states = estimate_states(ParameterTensors(toy), zero_setup(resolved))
    return {
        "dry_run": {
            "resident": resident,
            **{moment: peak.total_bytes - resident for moment, peak in simulated.states.items()},
        },
        "closed_form": {
            "resident": states.resident.total_bytes,
            "forward": states.forward_peak.total_bytes,
            "backward": states.backward_peak.total_bytes,
            "step": states.step.total_bytes,
        },
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({stage: compare(int(stage)) for stage in sys.argv[1:]}))
