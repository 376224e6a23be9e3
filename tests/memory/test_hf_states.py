"""Model states of transformers' models: those of ours where the models are the same, and what must hold elsewhere."""

from __future__ import annotations

import pytest

from llmscale.architecture.hf_config import HFModel, read_shape
from llmscale.architecture.shape import GPTShape, describe_gpt
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.resolve import resolve_step
from llmscale.memory.estimate import CONTEXT_BYTES, estimate_hf_states
from llmscale.memory.zero_setup import ZeroSetup, zero_setup
from llmscale.memory.zero_stages import zero_states

GIB = 2**30
#: GPT-2 of transformers and of ours: the vocabulary is a multiple of 128, so the table is not padded.
SHAPE = GPTShape(n_layer=4, n_head=4, n_embd=256, vocab_size=1024, seq_len=128)
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 1024, "n_positions": 128}
LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}


def model(config: dict[str, object]) -> HFModel:
    shape = read_shape(config, "test")
    return HFModel("test", str(config["model_type"]), describe_gpt(shape, shape.vocab_size))


def setup(stage: int, world_size: int, shape: GPTShape = SHAPE, sums: str | None = None, steps: int = 2) -> ZeroSetup:
    sections = {"data_types": {"grad_accum_dtype": sums}} if sums else {}
    ds = parse_ds_config({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **sections}, "test")
    plan = build_batch_plan(
        global_batch_size=steps * world_size, ranks=ParallelLayout(world_size), seq_len=1, micro_batch_size=1
    )
    return zero_setup(resolve_step(ds, shape, plan, "none"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 8])
def test_gpt2_is_our_gpt2(stage: int, world_size: int) -> None:
    theirs = estimate_hf_states(model(GPT2), setup(stage, world_size))
    ours = zero_states(SHAPE.tensors, setup(stage, world_size))
    assert theirs.estimate.moments == {
        "forward": ours.resident + ours.forward_peak.breakdown,
        "backward": ours.resident + ours.backward_peak(SHAPE.tensors).breakdown,
        "optimizer step": ours.resident + ours.step.breakdown,
    }


@pytest.mark.parametrize(
    ("stage", "gib"),
    # A dry run of DeepSpeed 0.19.8 around a Llama of this shape with bf16 gradients: after the optimizer step.
    [(1, 26.2), (2, 26.2)],
)
def test_llama_8b_after_a_step_is_as_a_dry_run_counted_it(stage: int, gib: float) -> None:
    states = estimate_hf_states(model(LLAMA_8B), setup(stage, 8, sums="bf16", steps=1))
    assert states.estimate.moments["forward"].total_bytes / GIB == pytest.approx(gib, rel=0.02)


def test_openrlhf_698() -> None:
    """Llama-3-8B at stage 2 on one GPU of 80 GB: about 46 GB after the start and 61 GB after the first backward pass,
    the CUDA context included, and out of memory in the step (github.com/OpenRLHF/OpenRLHF/issues/698)."""
    moments = estimate_hf_states(model(LLAMA_8B), setup(2, 1, sums="bf16")).estimate.moments
    # Adam's moments come with the first step; gradients that wait between micro-steps are those that wait for the step.
    after_backward = moments["forward"].total_bytes - 8 * model(LLAMA_8B).num_parameters
    after_start = after_backward - moments["forward"].gradients_bytes
    assert (after_start + CONTEXT_BYTES) / GIB == pytest.approx(46, rel=0.01)
    assert (after_backward + CONTEXT_BYTES) / GIB == pytest.approx(61, rel=0.01)
    assert moments["optimizer step"].total_bytes > 80 * GIB


def test_an_untied_head_is_counted_and_its_gradient_does_not_wait() -> None:
    tied = {**LLAMA_8B, "tie_word_embeddings": True}
    table_bytes = 2 * 128256 * 4096
    for stage in (0, 1, 2, 3):
        sizes = [
            estimate_hf_states(model(config), setup(stage, 8)).estimate.moments["optimizer step"].total_bytes
            for config in (LLAMA_8B, tied)
        ]
        assert sizes[0] > sizes[1]
    begin = [estimate_hf_states(model(config), setup(2, 8)) for config in (LLAMA_8B, tied)]
    resident = [s.estimate.moments["forward"].total_bytes for s in begin]
    assert begin[0].begin_of_backward_bytes - resident[0] < table_bytes
    assert begin[1].begin_of_backward_bytes - resident[1] >= table_bytes


def test_the_room_is_what_reserve_and_context_leave() -> None:
    states = estimate_hf_states(model(LLAMA_8B), setup(3, 8))
    assert states.room_bytes(80 * GIB) - states.room_bytes(40 * GIB) == pytest.approx(40 * GIB / 1.1, rel=1e-6)
    assert states.room_bytes(GIB) == -states.begin_of_backward_bytes
