"""What is decided before torch is there. The refusals are in test_bad_input.py."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from llmscale.checkpoint.run_state import RunState
from llmscale.config import hf_model
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.run_arguments import parse_run_config
from llmscale.errors import ConfigError
from llmscale.training import inputs
from llmscale.training.inputs import _with_saved_batch, as_plain, with_prepared_text
from llmscale.training.start import Start, prepare_start
from tests.conftest import TINY_MODEL, TRAIN, Ranks, last_wins, read_losses, run_ranks


def prepare(tiny_set: Path, tmp_path: Path, *flags: str, ds: dict | None = None, world_size: int = 2) -> Start:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds or {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    argv = ["--data", str(tiny_set), "--run", str(tmp_path / "run"), "--model=tiny-1m", "--global-batch-size=8"]
    return prepare_start(parse_run_config(last_wins([*argv, "--ds", str(path), *flags])), world_size)


def test_everything_fits_together_and_nothing_is_written(tiny_set: Path, tmp_path: Path) -> None:
    run = prepare(tiny_set, tmp_path)
    assert (run.resolved.zero_stage, run.resolved.precision, run.resolved.checkpointing) == (2, "bf16", "none")
    assert (run.resolved.shape.vocab_size, run.resolved.shape.seq_len) == (257, 32)
    assert run.resolved.plan.ranks.world_size == 2
    assert not (tmp_path / "run").exists()


def test_a_run_is_identified_by_what_decides_its_samples_and_not_by_ranks_or_paths(
    tiny_set: Path, tmp_path: Path
) -> None:
    one = prepare(tiny_set, tmp_path, world_size=1).identity
    two = prepare(tiny_set, tmp_path, "--lr=1", "--micro-batch-size=1", world_size=2).identity
    assert one == two
    keys = {"global_batch_size", "seq_len", "data", "seed", "order", "vocab_size", "tokenizer_sha256"}
    assert set(one) == {*keys, "batches", "sets"}
    assert prepare(tiny_set, tmp_path, "--seed=2").identity["seed"] == 2


def test_a_folder_that_may_not_be_written_to(tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"--run {tmp_path}/run: {tmp_path} may not be written to; name a folder"):
        prepare(tiny_set, tmp_path)


def test_plain_values_are_json(tiny_set: Path, tmp_path: Path) -> None:
    plain = json.loads(json.dumps(as_plain(prepare(tiny_set, tmp_path).config)))
    assert plain["run"] == str(tmp_path / "run")


def test_text_becomes_the_data_of_every_rank(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """Under a launcher one rank prepares it, the other waits, and a resume without the model finds it again."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over a lazy dog. " * 500)
    command = [str(TRAIN), "--text", str(tmp_path / "text"), "--run", str(tmp_path / "run")]
    command += ["--data-cache", str(tmp_path / "cache"), "--val-every", "0", "--num-workers", "0", "--plain"]
    command += ["--global-batch-size", "4", "--log-every", "1", "--ds", "zero1", "--steps"]
    for steps, model, prepared in (("2", [*TINY_MODEL, "--seq-len", "32"], 1), ("4", [], 0)):
        job = ranks([*command, steps, *model], 2)
        output = "".join(job.wait())
        assert job.exit_codes == [0, 0], output
        assert output.count("preparing ") == prepared
    assert list(read_losses(tmp_path / "run")) == [1, 2, 3, 4]
    described = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert described["data"].startswith(str(tmp_path / "cache" / "text"))


#: train.py of a Python whose library is the folder in the first argument.
OWN_LIBRARY = "import sys, sysconfig\nsysconfig.get_path = lambda *_, library=sys.argv.pop(1): library\n"
OWN_LIBRARY += "from llmscale.train import main\nsys.exit(main(sys.argv[1:]))"


def test_a_start_without_data_trains_the_demo(tmp_path: Path) -> None:
    """In a fresh clone there is no dataset: the documentation of Python is prepared, and one line says so."""
    (tmp_path / "library").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "library" / name).write_text(f'"""{"The quick brown fox jumps over a lazy dog. " * 500}"""')
    command = ["-c", OWN_LIBRARY, str(tmp_path / "library"), "--run", str(tmp_path / "run"), "--model", "tiny-1m"]
    command += ["--data-cache", str(tmp_path / "cache"), "--val-every", "0", "--num-workers", "0", "--steps", "1"]
    output = run_ranks([*command, "--plain", "--verbose", "--global-batch-size", "2", "--ds", "zero2"], 1)
    assert output.count("preparing python-docs once") == 1
    assert re.search(r"this is the demo: tiny-1m .*--data FOLDER .*--text FOLDER", " ".join(output.split()))
    assert list(read_losses(tmp_path / "run")) == [1]


def test_a_start_that_names_data_or_weights_gets_no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--data", "data/python-stdlib"], ["--init-from", "runs/first"]):
        config = parse_run_config([*words, "--data-cache", "cache"])
        assert with_prepared_text(config).config is config
    (tmp_path / "data/python-stdlib").mkdir(parents=True)
    config = parse_run_config(["--data-cache", "cache"])
    assert with_prepared_text(config).config is config
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "there"], "--data there has no effect with --text. Drop one of them."),
        (["--cache-limit-gib", "1"], "--cache-limit-gib 1.0 has no effect with --text. Drop one of them."),
        (["--ds", "zero9"], "zero9"),
        (["--init-from", "runs/first"], "--init-from runs/first needs text with its own tokens"),
    ],
)
def test_text_is_not_read_before_flags_are_right(words: list[str], message: str, tmp_path: Path) -> None:
    cache = ["--data-cache", str(tmp_path / "cache")]
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_prepared_text(parse_run_config(["--text", str(tmp_path), *cache, *words]))
    assert not (tmp_path / "cache").exists()


def test_text_is_prepared_with_what_the_start_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ds_config and the published model are read once."""
    model = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "text.txt").write_text("a few words " * 100)
    calls: list[str] = []

    def read(function: Callable, *args: object) -> object:
        calls.append(function.__name__)
        return function(*args)

    for module, name in ((inputs, "read_ds_config"), (inputs, "read_published_model"), (hf_model, "find_config")):
        monkeypatch.setattr(module, name, partial(read, getattr(module, name)))
    flags = ["--model", f"hf:{tmp_path}", "--text", str(tmp_path / "text.txt"), "--tokenizer", "bytes"]
    flags += ["--run", str(tmp_path / "run"), "--data-cache", str(tmp_path / "cache"), "--global-batch-size", "2"]
    assert prepare_start(with_prepared_text(parse_run_config(flags)), 1).resolved.shape.n_embd == 16
    assert sorted(calls) == ["find_config", "read_ds_config", "read_published_model"]


def test_a_restart_continues_its_own_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "find_checkpoints", lambda run: SimpleNamespace(current=["step-2"]))
    flags = ["--run", str(tmp_path), "--lora-rank", "3", "--init-from", "hf:base", "--lora-from", "adapters"]
    config, left_out = inputs._without_used_flags(parse_run_config(flags))
    assert (config.lora_from, config.init_from, left_out) == (None, "hf:base", "--lora-from adapters")


@pytest.mark.parametrize(
    ("batch", "flags", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, [], 8),
        ({"train_micro_batch_size_per_gpu": 4}, [], 8),
        ({}, [], 8),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, [], None),
        ({"gradient_accumulation_steps": 2}, ["--global-batch-size", "4"], 4),
    ],
)
def test_a_resumed_run_keeps_its_batch_unless_one_is_given(
    batch: dict[str, object], flags: list[str], expected: int | None
) -> None:
    state = cast("RunState", SimpleNamespace(identity={"global_batch_size": 8}))
    config = _with_saved_batch(parse_run_config(flags), parse_ds_config(batch, "my.json"), state)
    assert config.global_batch_size == expected
