"""Recorded passes: a model that llmscale has no formula for, GPT's table against its code, and published figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.presets import PRESETS
from llmscale.dry_run.fakes import fake_world
from llmscale.dry_run.gpt_recording import all_block_branches, all_ends_branches, record_blocks, record_ends
from llmscale.dry_run.recording import factor_traces, trace_micro_step
from llmscale.memory.activations.recorded import (
    ENDS_TABLE,
    TABLES,
    MicroStep,
    NotRecorded,
    RecordedSegment,
    evaluate_segments,
    read_table,
    recorded_segments,
)
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch, block_branch, ends_branch
from llmscale.model.gpt import BlockCheckpoint
from tests.memory.activations.toy_decoder import LARGE, count_live_bytes, peak_bytes, record_toy, trace_toy

BLOCKS, ENDS = list(all_block_branches()), list(all_ends_branches())


@pytest.fixture(autouse=True)
def one_rank(libraries_are_frozen: None) -> Iterator[None]:
    """Give DeepSpeed's checkpointing a rank."""
    with fake_world(1):
        yield


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "full")), "selective"]
)
def test_a_decoder_that_llmscale_does_not_have_is_exact_at_any_shape(mode: CheckpointingMode) -> None:
    recorded = evaluate_segments(record_toy(mode), LARGE.symbols(3), LARGE.n_layer)
    direct = count_live_bytes(trace_toy(LARGE, 3, mode))
    assert recorded.starts["head_backward"].total_bytes == direct.saved
    assert peak_bytes(recorded, "forward") == direct.forward_peak
    assert peak_bytes(recorded, "backward") == direct.backward_peak
    assert gradients_of(recorded) == LARGE.num_parameters


def gradients_of(micro_step: MicroStep) -> int:
    """Return the parameters that have gradients in the end."""
    end = micro_step.segments["embed_backward"].net
    return micro_step.starts["embed_backward"].plus(end).gradient_parameters


#: A block's input that no layer saves, and rotary angles in 16 bit: both live as long as the model refers to them.
LIFETIMES = [
    next(b for b in BLOCKS if b.style.key.startswith("rmsnorm-behind") and b.key.startswith("autocast none")),
    next(b for b in ENDS if b.key.startswith("rmsnorm rotary False none 16bit")),
]
#: About a dozen of each, spread over all differences.
SOME = [*BLOCKS[::53], *ENDS[::29]]


@pytest.mark.parametrize("branch", SOME, ids=lambda branch: branch.key)
def test_the_table_is_what_the_model_does(branch: BlockBranch | EndsBranch) -> None:
    assert_recorded_again(branch)


@pytest.mark.parametrize("branch", LIFETIMES, ids=["input", "angles"])
def test_the_model_refers_to_no_tensor_that_it_no_longer_needs(branch: BlockBranch | EndsBranch) -> None:
    assert_recorded_again(branch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_the_whole_table_is_what_the_model_does(part: int) -> None:
    for branch in [*BLOCKS, *ENDS][part::16]:
        assert_recorded_again(branch)


def assert_recorded_again(branch: BlockBranch | EndsBranch) -> None:
    """`python scripts/record_memory.py` writes the table again after an intended change of the model."""
    if isinstance(branch, BlockBranch):
        again, stored = record_blocks(branch), read_table(branch.style.key).segments(branch.key)
    else:
        again, stored = record_ends(branch), read_table(ENDS_TABLE).segments(branch.key)
    assert stored.keys() == again.keys()
    for name in stored:
        assert stored[name] == again[name], f"{branch.key}: {name}"


def test_every_branch_is_in_the_table() -> None:
    wanted: dict[str, set[str]] = {ENDS_TABLE: {branch.key for branch in ENDS}}
    for branch in BLOCKS:
        wanted.setdefault(branch.style.key, set()).add(branch.key)
    assert {path.stem for path in TABLES.glob("*.json")} == set(wanted)
    for name, keys in wanted.items():
        assert read_table(name).keys == keys


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_recorded(name: str) -> None:
    shape = PRESETS[name].shape(50257)
    router_loss = True if shape.num_experts else None
    # Experts under autocast are recorded when first asked for.
    precisions = ("fp32", "bf16") if shape.num_experts else ("fp32", "bf16", "autocast")
    for precision, mode, stage in product(precisions, ("none", "selective", "full"), (0, 3)):
        block = block_branch(shape, precision, mode, stage, router_loss=router_loss)
        recorded_segments(block, ends_branch(shape, 1, precision, CHUNK_TOKENS))


def test_what_was_not_recorded_is_an_error_that_says_what_to_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names all missing branches of a table of strategies, and no recorded one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unknown = replace(BLOCKS[0], attention="paged")  # type: ignore[arg-type]
    with pytest.raises(NotRecorded) as caught:
        recorded_segments(unknown, ENDS[0])
    assert unknown in caught.value.branches
    assert {branch.checkpointing for branch in caught.value.branches} == {"none", "selective", "full"}
    style, ends = replace(BLOCKS[0].style, qk_norm="head"), replace(ENDS[0], positions="rotary")
    with pytest.raises(NotRecorded) as caught:
        recorded_segments(replace(BLOCKS[0], style=style), ends)
    assert {type(branch) for branch in caught.value.branches} == {BlockBranch, EndsBranch}


#: Sequences, tokens, heads, head_dim: multiples of 512 where it matters, so that rounding adds nothing.
B, T, A, D = 4, 1024, 16, 64


class EagerBlock(nn.Module):
    """GPT-2's block with attention in separate matrix products and dropout, as Korthikanti et al. count it."""

    def __init__(self, n_head: int, head_dim: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = n_head, head_dim
        h = n_head * head_dim
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.proj(self.attend(self.ln_1(x))), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), 0.1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, self.head_dim)).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.1)
        return (scores @ v).transpose(1, 2).flatten(2)


class EagerDecoder(nn.Module):
    def __init__(self, n_head: int, head_dim: int, run_block: BlockCheckpoint) -> None:
        super().__init__()
        self.run_block = run_block
        self.embedding = nn.Embedding(512, n_head * head_dim)
        self.blocks = nn.ModuleList(EagerBlock(n_head, head_dim) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return x.sum()


def record_eager() -> dict[str, RecordedSegment]:
    shapes = ((2, 37, 3, 13), (3, 150, 5, 40), (7, 290, 2, 136))
    traces = [
        trace_micro_step(
            lambda run_block, n_head=n_head, head_dim=head_dim: EagerDecoder(n_head, head_dim, run_block),
            lambda model, b=b, t=t: model(torch.zeros(b, t, dtype=torch.long)),
            n_layer=2,
            dtype=torch.bfloat16,
        )
        for b, t, n_head, head_dim in shapes
    ]
    return factor_traces(traces, [{"b": b, "t": t, "a": a, "d": d} for b, t, a, d in shapes])


def test_a_block_with_eager_attention_saves_what_korthikanti_count() -> None:
    """Equation 1 of Korthikanti et al. 2022: s b h (34 + 5 a s / h) bytes a layer in 16 bit, with dropout; beside it
    mean and 1/std of both layer norms, which they leave out as small."""
    recorded = evaluate_segments(record_eager(), {"b": B, "t": T, "a": A, "d": D}, n_layer=2)
    saved = recorded.segments["block_forward"].net.activations_bytes
    norm_statistics = 16 * B * T
    assert saved - norm_statistics == B * T * A * D * 34 + 5 * A * T * T * B
