"""Recorded activations against the model itself at other shapes, and against published figures."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.loss_settings import LossSettings
from llmscale.config.presets import PRESETS
from llmscale.dry_run.cuda_kernels import cuda_kernels, kernel_workspace
from llmscale.dry_run.fakes import fake_world
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.engine.activation_checkpointing import build_block_checkpoint
from llmscale.memory.activations.activation_memory import ActivationMemory, estimate_activations
from llmscale.model.gpt import GPT

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "autocast")
MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}


#: Nothing is a multiple of anything else; width and heads are not of one size.
ODD_SHAPE: dict[str, object] = {
    **{"n_layer": 3, "n_head": 6, "n_embd": 104, "head_dim": 24, "mlp_width": 200, "vocab_size": 300, "seq_len": 90}
}
LLAMA: dict[str, object] = {
    **{"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True},
    **{"n_kv_head": 2, "tied": False},
}
FAMILIES: dict[str, dict[str, object]] = {
    "opt": {"activation": "relu"},
    "opt-documents": {"activation": "relu", "document_end": 5},
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tied": True, "n_kv_head": 6},
    "mistral": {**LLAMA, "sliding_window": 17},
    "qwen2": {**LLAMA, "attention_bias": "qkv", "tied": True},
    "qwen3": {**LLAMA, "qk_norm": "head"},
    "qwen3-documents": {**LLAMA, "qk_norm": "head", "document_end": 5},
    "olmo2": {**LLAMA, "qk_norm": "width", "norm_placement": "post", "n_kv_head": 6},
    "gpt-modern": {**LLAMA, "qk_norm": "head", "n_kv_head": 6, "tied": True, "head_dim": 20},
    "llama-dropout": {**LLAMA, "dropout": 0.1},
    "qwen3-dropout": {**LLAMA, "qk_norm": "head", "dropout": 0.1, "tied": True},
    "llama-attention-bias": {**LLAMA, "attention_bias": "all"},
}


@dataclass(frozen=True)
class Case:
    """(n_layer, n_head, n_embd, vocab_size, seq_len), sequences, and how they run."""

    sizes: tuple[int, int, int, int, int]
    micro_batch_size: int
    precision: Precision
    mode: CheckpointingMode
    dropout: float = 0.0
    activation: str = "gelu"
    bias: bool = True
    zero_stage: int = 0
    family: str = "gpt2"
    capability: ComputeCapability | None = None
    loss_chunk_tokens: int = 600

    @property
    def shape(self) -> GPTShape:
        if self.family != "gpt2":
            return build_shape({**ODD_SHAPE, **FAMILIES[self.family]})
        return GPTShape(*self.sizes, activation=self.activation, dropout=self.dropout, bias=self.bias)

    def estimate(self) -> ActivationMemory:
        return estimate_activations(
            self.shape,
            micro_batch_size=self.micro_batch_size,
            precision=self.precision,
            checkpointing=self.mode,
            zero_stage=self.zero_stage,
            capability=self.capability,
            loss_chunk_tokens=self.loss_chunk_tokens,
        )


@pytest.fixture
def one_rank(libraries_are_frozen: None) -> Iterator[None]:
    """Give DeepSpeed's checkpointing a rank."""
    with fake_world(1):
        yield


def trace(case: Case) -> tuple[int, int, int]:
    """Return bytes saved at the end of the forward pass, and the peaks of both passes.

    Parameters and their gradients are left out, except for the token table's gradients, which are summed.
    """
    checkpoint = build_block_checkpoint(case.mode, {})
    kernels = cuda_kernels(case.capability)
    with FakeTensorMode(), kernels, MemoryTracker(workspace=kernel_workspace, keep_events=True) as tracker:
        with tracker.phase("build", Category.PARAMETERS):
            model = GPT(case.shape, seed=0, checkpoint=checkpoint, loss=LossSettings(case.loss_chunk_tokens))
            for parameter in model.parameters():
                parameter.data = parameter.data.to(DTYPES[case.precision])
        gc.collect()
        parameters_bytes = tracker.live.total_bytes
        handed_over: dict[int, int] = {}
        for parameter in model.parameters():
            if parameter is not model.wte.weight or not case.shape.tied:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: handed_over.update({tracker.number_of(parameter.grad): len(tracker.events)})
                )
        with linear_layers_of(case.zero_stage), tracker.phase("forward", Category.ACTIVATIONS):
            tokens = torch.zeros(case.micro_batch_size, case.shape.seq_len + 1, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            saved = tracker.live.total_bytes - parameters_bytes
        with linear_layers_of(case.zero_stage), tracker.phase("backward", Category.TEMPORARIES):
            loss.backward()
        peaks = peaks_without_states(tracker, handed_over)
        del loss, model, parameter
    gc.collect()
    return saved, peaks["forward"], peaks["backward"]


def linear_layers_of(zero_stage: int) -> AbstractContextManager:
    """`F.linear` as `deepspeed.zero.Init` replaces it at stage 3."""
    if zero_stage < 3:
        return nullcontext()
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return mock.patch.object(F, "linear", zero3_linear_wrap)


def peaks_without_states(tracker: MemoryTracker, handed_over: dict[int, int]) -> dict[str, int]:
    """Return peaks by phase. A gradient counts until its parameter has it, after `handed_over` events."""
    num_bytes = {event.storage: event.num_bytes for event in tracker.events if event.num_bytes > 0}
    given: dict[int, int] = {}
    for storage, position in handed_over.items():
        given[position] = given.get(position, 0) + num_bytes[storage]
    peaks: dict[str, int] = {}
    total = 0
    for position, event in enumerate(tracker.events):
        total -= given.get(position, 0)
        if tracker.category_of[event.storage] is not Category.PARAMETERS:
            total += event.num_bytes
            peaks[event.phase] = max(peaks.get(event.phase, 0), total)
    return peaks


def saved_bytes(estimate: ActivationMemory) -> int:
    """Return the bytes saved at the end of the forward pass."""
    outside = estimate.saved_final_norm_bytes + estimate.logits_saved_bytes + estimate.head_cast_bytes
    return estimate.before_block_bytes(estimate.n_layer) + outside


def assert_the_count_is_the_models(case: Case) -> None:
    estimate = case.estimate()
    counted = (saved_bytes(estimate), estimate.forward_peak_bytes, estimate.backward_peak_bytes)
    assert counted == trace(case), case


#: Sizes that make another moment the peak: long sequences, a large vocabulary, one that needs no padding, one layer,
#: few tokens in wide blocks, heads that FlashAttention pads.
LONG, WORDY, EVEN, FLAT, WIDE, ODD = (
    (3, 6, 384, 300, 1024),
    (2, 2, 128, 50257, 64),
    (4, 4, 80, 384, 128),
    (1, 2, 512, 512, 512),
    (2, 8, 1024, 300, 64),
    (2, 3, 36, 200, 100),
)

QUICK = [
    *(Case(LONG, 2, *how) for how in product(PRECISIONS, MODES, (0.0, 0.1))),
    *(Case(sizes, 1, "bf16", mode) for sizes in (WORDY, EVEN, FLAT, WIDE, ODD) for mode in MODES),
    *(Case(EVEN, 3, "bf16", mode, 0.0, activation, False) for mode in MODES for activation in ("relu", "gelu_tanh")),
    Case((2, 2, 640, 300, 128), 2, "bf16", "none"),  # heads of 320, too wide for FlashAttention
    *(Case(LONG, 2, precision, mode, 0.1, zero_stage=3) for precision in ("bf16", "autocast") for mode in MODES),
    Case(WORDY, 2, "autocast", "full", zero_stage=3),
    *(Case(WORDY, 2, precision, "none", loss_chunk_tokens=chunk) for precision in PRECISIONS for chunk in (31, 64)),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_count_is_the_models(one_rank: None, case: Case) -> None:
    assert_the_count_is_the_models(case)


#: With dropout autocast is recorded only where somebody asks for it.
DROPPING = ("llama-dropout", "qwen3-dropout")


def of_families(hows: Iterable[tuple[Precision, CheckpointingMode, int]]) -> list[Case]:
    found = product(FAMILIES, hows)
    return [
        Case(LONG, 2, precision, mode, zero_stage=stage, family=name)
        for name, (precision, mode, stage) in found
        if name not in DROPPING or precision != "autocast"
    ]


@pytest.mark.parametrize(
    "case", of_families([("bf16", "none", 0), ("fp32", "selective", 0), ("autocast", "full", 3)]), ids=str
)
def test_the_count_is_the_models_in_every_family(one_rank: None, case: Case) -> None:
    assert_the_count_is_the_models(case)


#: A GPU before Ampere: no FlashAttention, so that shared keys are repeated, and other heads in fp32.
OLD = [
    *(Case(LONG, 2, "fp16", mode, family=name, capability=(7, 5)) for name, mode in
      (("llama", "none"), ("qwen3", "selective"), ("qwen2", "full"), ("mistral", "none"))),
    Case(LONG, 2, "fp16", "none", 0.1, capability=(7, 5)),
    Case(ODD, 1, "fp32", "none", capability=(7, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", OLD, ids=str)
def test_the_count_is_the_models_on_a_gpu_before_ampere(one_rank: None, case: Case) -> None:
    assert_the_count_is_the_models(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", of_families(product(PRECISIONS, MODES, (0, 3))), ids=str)
def test_the_count_is_the_models_in_every_family_everywhere(one_rank: None, case: Case) -> None:
    for micro_batch_size in (1, 5):
        assert_the_count_is_the_models(replace(case, micro_batch_size=micro_batch_size))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [LONG, WORDY, EVEN, FLAT, WIDE, ODD, (2, 25, 1600, 50257, 1024)], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_count_is_the_models_everywhere(
    one_rank: None, sizes: tuple[int, int, int, int, int], precision: Precision
) -> None:
    blocks = ((0.0, "gelu", True, 0), (0.1, "gelu", True, 0), (0.1, "relu", False, 0), (0.0, "gelu_tanh", True, 3))
    for how in product((1, 4), (precision,), MODES):
        for block in blocks:
            assert_the_count_is_the_models(Case(sizes, *how, *block))


#: b, t, h, a that are multiples of 512 where it matters, so that rounding adds nothing.
PAPER = GPTShape(n_layer=4, n_head=16, n_embd=1024, vocab_size=512, seq_len=1024, dropout=0.1)
B, T, H, A = 4, 1024, 1024, 16
#: Mean and 1/std in fp32 of both layer norms, which the paper leaves out as small.
NORM_STATISTICS = 16 * B * T


def saved_per_block(shape: GPTShape, precision: Precision = "bf16", **options) -> int:
    options = {"micro_batch_size": B, "checkpointing": "none", **options}
    return estimate_activations(shape, precision=precision, **options).blocks[0].saved_bytes


def test_a_block_that_recomputes_attention_holds_what_korthikanti_count() -> None:
    """A fused kernel does their selective recomputation, 34 s b h.

    It also saves the rows' log-sum-exp and the state of its random numbers.
    """
    log_sum_exp, random_state = 4 * B * A * T, 1024
    counted = saved_per_block(PAPER) - NORM_STATISTICS - log_sum_exp - random_state
    assert counted == 34 * B * T * H


def test_a_block_that_recomputes_everything_holds_what_korthikanti_count() -> None:
    assert saved_per_block(PAPER, checkpointing="full") == 2 * B * T * H


def test_dropout_is_a_byte_for_each_mask_and_nothing_without() -> None:
    without = dataclasses.replace(PAPER, dropout=0.0)
    assert saved_per_block(PAPER) - saved_per_block(without) == 2 * B * T * H


def test_checkpointing_keeps_16_11_or_1_elements_a_channel() -> None:
    without = dataclasses.replace(PAPER, dropout=0.0)
    attention = 4 * B * A * T + 1024
    kept = {mode: saved_per_block(without, checkpointing=mode) for mode in MODES}
    assert kept["none"] - NORM_STATISTICS - attention == 16 * 2 * B * T * H
    assert kept["selective"] - attention == 11 * 2 * B * T * H
    assert kept["full"] == 2 * B * T * H


def test_autocast_keeps_weights_in_16_bit_and_to_the_end_of_the_forward_pass_in_every_mode() -> None:
    none, full = (Case(LONG, 2, "autocast", mode).estimate() for mode in ("none", "full"))
    matrices = 2 * 12 * 384**2
    assert none.blocks[0].saved_casts_bytes == matrices  # without biases
    assert full.blocks[0].saved_casts_bytes == 0
    assert none.blocks[0].forward_casts_bytes == full.blocks[0].forward_casts_bytes > matrices
    assert Case(LONG, 2, "bf16", "none").estimate().blocks[0].forward_casts_bytes == 0


@pytest.mark.parametrize("n_layer", [1, 2, 3, 12])
def test_cpu_checkpointing_leaves_two_inputs_on_the_gpu(n_layer: int) -> None:
    shape = dataclasses.replace(PAPER, n_layer=n_layer)
    on_gpu, on_host = (
        estimate_activations(
            shape, micro_batch_size=B, precision="bf16", checkpointing="full", cpu_checkpointing=cpu_checkpointing
        )
        for cpu_checkpointing in (False, True)
    )
    block_input = 2 * B * T * H
    assert on_gpu.host_bytes == 0
    assert on_host.host_bytes == (n_layer - 1) * block_input
    saved = on_host.before_block_bytes(n_layer) - on_host.saved_embedding_bytes
    assert saved == min(n_layer, 2) * block_input + n_layer * 512
    assert on_host.blocks[0].backward == on_gpu.blocks[0].backward


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_block_hands_over_all_its_gradients(mode: CheckpointingMode, precision: Precision) -> None:
    case = Case(LONG, 2, precision, mode)
    estimate = case.estimate()
    moments = estimate.blocks[0].backward
    assert estimate.blocks[0].handovers[-1].gradient_parameters == case.shape.block_parameters
    for found in (moments, estimate.blocks[0].handovers):
        done = [moment.gradient_parameters for moment in found]
        assert done == sorted(done)
    # One handover of each layer's gradients, four matrices and two norms; autocast's biases come later than weights.
    assert len(set(done)) == len(done) == (10 if precision == "autocast" else 6)
    sizes = [moment.total_bytes for moment in moments]
    assert sizes == sorted(sizes, reverse=True)


def test_the_parts_are_in_order() -> None:
    for mode, precision in product(MODES, PRECISIONS):
        estimate = Case(LONG, 2, precision, mode, 0.1).estimate()
        assert estimate.peak_bytes >= estimate.forward_peak_bytes >= saved_bytes(estimate)


def test_the_largest_preset_takes_no_time() -> None:
    preset = PRESETS["gpt3-175b"]
    shape = preset.shape(50257)
    start = time.process_time()
    estimate_activations(shape, micro_batch_size=1, precision="bf16", checkpointing="selective")
    assert time.process_time() - start < 0.05
