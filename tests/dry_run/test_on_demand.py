"""Blocks that no table has are recorded when an estimate asks for them, once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.bundled_files import install_command
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.dry_run import gpt_recording
from llmscale.dry_run.on_demand import with_recordings
from llmscale.errors import ConfigError
from llmscale.memory.activations import recorded
from llmscale.memory.activations.activation_memory import ActivationMemory, assemble_activations
from llmscale.memory.activations.recorded import evaluate_segments, recorded_segments
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch, block_branch, ends_branch, shape_symbols

WORDS = "--model gpt2-124m --qk-norm head"
#: GPT-2's block with query-key norm, and with dropout under a mask: no family has either.
SHAPE = build_shape(
    {
        **{"n_layer": 2, "n_head": 4, "n_embd": 72, "head_dim": 24, "vocab_size": 300, "seq_len": 90},
        **{"qk_norm": "head", "dropout": 0.1, "document_end": 5},
    }
)

Ask = Callable[[], ActivationMemory]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's, empty; and of what is related to a branch only itself is recorded, which takes less time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recorded, "related_branches", lambda branch: iter((branch,)))
    return tmp_path / "cache"


@pytest.fixture
def ask() -> Ask:
    def answer() -> ActivationMemory:
        recorded_segments.cache_clear()
        return with_recordings(lambda: activations(SHAPE), WORDS)

    return answer


def activations(shape: GPTShape) -> ActivationMemory:
    """Of two sequences in bf16 at ZeRO stage 2."""
    segments = recorded_segments(block_branch(shape, "bf16", "none", 2), ends_branch(shape, 2, "bf16", CHUNK_TOKENS))
    micro_step = evaluate_segments(segments, shape_symbols(shape, 2, CHUNK_TOKENS), shape.n_layer)
    return assemble_activations(micro_step, 2 * 2 * shape.seq_len * shape.n_embd)


def files_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_block_of_no_family_is_recorded_once_and_kept(
    cache: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ask()
    assert first.peak_bytes > 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{WORDS}: blocks that are in no table" in said.err
    assert len(files_of(cache)) == 2
    with mock.patch.object(gpt_recording, "record_branch", side_effect=AssertionError("recorded again")):
        assert ask() == first
    assert capsys.readouterr().err == ""


def test_what_is_damaged_is_recorded_again(cache: Path, ask: Ask) -> None:
    known = {branch: recorded.find_segments(branch) for branch in known_branches()}

    def record(branch: BlockBranch | EndsBranch) -> object:
        return next(found for other, found in known.items() if type(other) is type(branch))

    with mock.patch.object(gpt_recording, "record_branch", side_effect=record) as recording:
        first = ask()
        assert recording.call_count == 2
        for path, damage in zip(files_of(cache), ("{", '{"branches": {}}'), strict=True):
            path.write_text(damage)
        assert ask() == first
        assert recording.call_count == 4


def known_branches() -> tuple[BlockBranch, EndsBranch]:
    shape = GPTShape(n_layer=2, n_head=3, n_embd=72, vocab_size=300, seq_len=90, document_end=5)
    return block_branch(shape, "bf16", "none", 2), ends_branch(shape, 2, "bf16", CHUNK_TOKENS)


def test_without_torch_the_error_names_the_flags_and_the_extra(
    cache: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError) as caught:
        ask()
    assert WORDS in str(caught.value)
    assert install_command("train") in str(caught.value)
    assert files_of(cache) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_one_clear_error(cache: Path, ask: Ask) -> None:
    cache.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="Set XDG_CACHE_HOME"):
        ask()
