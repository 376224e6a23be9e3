from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmscale import __version__
from llmscale.architecture.hf_config import family_of
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.manifest import CheckpointManifest, save_manifest
from llmscale.checkpoint.run_state import RunState
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import KEYS, build_run_config
from llmscale.data.mixture import TrainingSets, open_training_sets
from llmscale.data.shards.manifest import ChatFacts
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.evaluate.export import ExportedModel
from llmscale.evaluate.model_source import TrainedCheckpoint
from llmscale.report.model_card import build_adapter_card, build_model_card

MANIFEST = CheckpointManifest(30, 9_600, 2, 3, "bf16", "2026-05-01T12:00:00+00:00", ())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of step 30 in a run folder whose log goes on to step 40, and which was started twice."""
    folder = tmp_path / "runs" / "my-run" / "checkpoints" / "step-00000030"
    folder.mkdir(parents=True)
    save_manifest(folder, MANIFEST)
    records: list[dict[str, object]] = []
    for step in (10, 20, 30, 40):
        records.append(
            {"kind": "train", "step": step, "loss": 5 - step / 10, "tokens_seen": 320 * step, "tokens_per_second": 9.0}
        )
    records.append({"kind": "validation", "step": 25, "loss": 2.75})
    run = folder.parents[1]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(record) for record in sorted(records, key=str)) + "\n")
    starts = [
        {"started": f"2026-05-0{day}T00:00:00+00:00", "llmscale": f"0.{day}", "versions": {"torch": f"2.{day}"}}
        for day in (1, 2)
    ]
    (run / "starts.jsonl").write_text("\n".join(json.dumps(start) for start in starts) + "\n")
    return folder


@pytest.fixture
def trained(tiny_set: Path, checkpoint: Path) -> TrainedCheckpoint:
    config = build_run_config({"model": "tiny-1m", "data": str(tiny_set), "run": "/home/me/runs/my-run", "lr": 1e-3})
    state, shape = RunState(30, 300, 9_600, 0, {}, "bf16", {}), GPTShape(2, 4, 48, 257, 32)
    sets = open_training_sets(str(tiny_set))
    return TrainedCheckpoint(checkpoint, MANIFEST, state, config, shape, sets, ByteTokenizer(), None)


def export(trained: TrainedCheckpoint) -> ExportedModel:
    return ExportedModel(trained.shape, family_of(trained.shape), "bf16", 10**9)


def card_of(trained: TrainedCheckpoint) -> str:
    return build_model_card(export(trained), trained)


def test_the_card_says_what_its_run_says(trained: TrainedCheckpoint) -> None:
    card = card_of(trained)
    for words in (
        "# my-run, step 30",
        f"A `GPT2LMHeadModel` of {export(trained).num_parameters:,} parameters",
        "2 layers, width 48, 4 heads",
        "tokenizer `bytes`",
        trained.sets.fingerprint,
        "9,600 tokens in 30 steps",
        "`bf16` on 2 ranks, ZeRO stage 3",
        "training loss | 2.0000 nats per token at step 30",
        "validation loss | 2.7500 nats per token at step 25",
        "trained with | llmscale 0.1, torch 2.1 |",
        f"exported with | llmscale {__version__}",
        "llmscale train --model tiny-1m --data set --lr 0.001\n",
    ):
        assert words in card


def test_no_path_of_the_machine_is_in_it(trained: TrainedCheckpoint, checkpoint: Path, tiny_set: Path) -> None:
    card = card_of(trained)
    for path in (tiny_set.parent, checkpoint.parents[3], "/home/me"):
        assert str(path) not in card


#: Runs whose command once was refused, or named what concerns their machine.
RUNS: list[dict[str, object]] = [
    {"text": "/home/me/texts", "tokenizer": "/home/me/tokenizer.json", "seq_len": 64},
    {"text": "s3://key:secret@bucket/texts?token=secret", "data": "/home/me/.cache/llmscale/text/0123"},
    {"notify": "curl -H 'Authorization: secret' -d @- https://host", "sample_prompts": "/home/me/p.txt"},
    {"param_group": ["wte*:lr=0.1x", "-x*:decay=0"], "freeze": ["blocks.0.*", "wpe*"], "skip_steps": ["3:5", "1:2"]},
    {"data": "/home/me/-set", "ds": "/home/me/own.json", "init_from": "/home/me/runs/first"},
    {"eval_every": 5, "eval_tasks": ["hellaswag=/home/me/h.jsonl"], "data_cache": "/home/me/cache"},
    {"model": "hf:/home/me/q", "n_layer": 2, "bias": False, "shuffle": False, "global_batch_tokens": 4096},
    {"optimizer": "muon", "muon_lr_factor": 2.0, "schedule": "constant", "batch_ramp_from": 2, "batch_ramp_tokens": 99},
    {"num_experts": 4, "experts_per_token": 2, "expert_width": 64, "router_bias": True, "router_bias_speed": 0.01},
    {"data": "/", "wandb": True, "wandb_name": "mine", "profile": "3:5", "config": "/home/me/run.yaml"},
]


@pytest.mark.parametrize("keys", RUNS, ids=lambda keys: ",".join(keys))
def test_the_command_is_accepted_and_names_nothing_of_the_machine(
    keys: dict[str, object], trained: TrainedCheckpoint
) -> None:
    config = trained.config.model_copy(update=build_run_config(keys).model_dump(include={*keys}))
    card = card_of(replace(trained, config=config))
    for secret in ("/home", "secret", "curl", "cache", "bucket"):
        assert secret not in card
    (command,) = [line for line in card.splitlines() if line.startswith("llmscale train")]
    again = parse_run_config(shlex.split(command)[2:])
    for key in ("param_group", "freeze", "skip_steps", "n_layer", "shuffle", "optimizer", "num_experts", "lr"):
        assert getattr(again, key) == getattr(config, key)
    assert str(again.text or "").endswith("texts" if config.text else "")
    assert command.startswith("llmscale train --model") and ("--data" in command) != ("--text" in command)


def test_the_lines_at_the_top_are_what_the_hub_reads_and_name_no_license(trained: TrainedCheckpoint) -> None:
    _, top, _ = card_of(trained).split("---\n", 2)
    assert yaml.safe_load(top) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmscale", "gpt2"],
    }


def test_a_checkpoint_without_its_run_says_less(trained: TrainedCheckpoint, checkpoint: Path, tmp_path: Path) -> None:
    alone = tmp_path / "copied" / "step-00000030"
    alone.parent.mkdir()
    checkpoint.rename(alone)
    card = card_of(replace(trained, folder=alone))
    assert "# my-run, step 30" in card
    assert "loss" not in card
    assert "| trained with |" not in card


@pytest.mark.parametrize(
    ("model", "name"),
    [("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"), ("hf:/home/me/models/q", "hf:q"), ("hf:../q/", "hf:q")],
)
def test_a_published_model_is_named_as_the_hub_names_it(model: str, name: str, trained: TrainedCheckpoint) -> None:
    config = trained.config.model_copy(update={"model": model, "init_from": model})
    card = card_of(replace(trained, config=config))
    assert f"| `{name}`: 2 layers" in card
    assert "--model" not in card, "the weights name it"
    assert f"--init-from {name}\n" in card
    assert "/home/me" not in card


def test_names_that_others_chose_stay_text(trained: TrainedCheckpoint) -> None:
    hostile = "x`|\x1b[2J<script>\n---\nlicense: mit"
    first = replace(trained.sets.first, manifest=replace(trained.sets.manifest, tokenizer=hostile))
    card = card_of(replace(trained, sets=replace(trained.sets, locations=(first,))))
    (line,) = [line for line in card.splitlines() if line.startswith("| vocabulary")]
    assert line == "| vocabulary | 257 tokens, tokenizer `xx1b2Jscriptn---nlicense: mit` |"
    assert card.count("---\n") == 2


def test_a_template_of_conversations_stays_within_its_block(trained: TrainedCheckpoint) -> None:
    chat = ChatFacts("{{ messages }}\n```\n# Not a heading", "assistant", True, {"train": 3}, {})
    location = replace(trained.sets.first, manifest=replace(trained.sets.manifest, chat=chat))
    card = card_of(replace(trained, sets=TrainingSets("set", (location,))))
    assert "\n    {{ messages }}\n    ```\n    # Not a heading\n" in card
    assert "## Conversations" not in card_of(trained)


GIVEN = ["--init-from", "hf:Qwen/Qwen3-0.6B", "--data", "/home/me/chats", "--lr=0.003", "--no-shuffle"]


@pytest.fixture
def tuned(trained: TrainedCheckpoint, checkpoint: Path) -> TrainedCheckpoint:
    """Of a run that began with a published model, whose second start left --init-from out."""
    later = [*GIVEN[2:], "--steps", "300"]
    starts = [
        {"started": f"2026-05-01T0{hour}:00:00+00:00", "arguments": words} for hour, words in enumerate((GIVEN, later))
    ]
    (checkpoint.parents[1] / "starts.jsonl").write_text("\n".join(json.dumps(start) for start in starts) + "\n")
    shape = {key: value for key, value in vars(trained.shape).items() if key in KEYS and value not in (None, "")}
    keys = {**shape, "model": "hf:Qwen/Qwen3-0.6B", "data": "/home/me/chats", "lr": 3e-3, "shuffle": False}
    chat = ChatFacts("{{ messages }}", "assistant", True, {"train": 42}, {})
    manifest = replace(trained.sets.manifest, chat=chat, source="hf:org/talks:en")
    sets = TrainingSets("set", (replace(trained.sets.first, manifest=manifest),))
    config = build_run_config({**keys, "steps": 300, "global_batch_size": 8})
    state = replace(trained.state, base={"place": "hf:Qwen/Qwen3-0.6B@1234567", "checksum": "abc"})
    return replace(trained, config=config, sets=sets, state=state)


def test_a_fine_tuned_model_names_its_base_its_data_and_the_flags_that_were_given(tuned: TrainedCheckpoint) -> None:
    card = card_of(tuned)
    _, top, text = card.split("---\n", 2)
    assert yaml.safe_load(top)["base_model"] == "Qwen/Qwen3-0.6B"
    assert yaml.safe_load(top)["datasets"] == ["org/talks"]
    assert "fine-tuned with llmscale from `Qwen/Qwen3-0.6B`" in text and "pre-trained" not in text
    assert "of which 42 are targets" in text and "validation loss | 2.7500 nats per target token" in text
    assert "llmscale train --data chats --no-shuffle --steps 300 --lr 0.003 --init-from hf:Qwen/Qwen3-0.6B\n" in text


def test_adapters_have_the_same_card(tuned: TrainedCheckpoint) -> None:
    card = build_adapter_card(export(tuned), tuned)
    _, top, text = card.split("---\n", 2)
    values = yaml.safe_load(top)
    assert (values["library_name"], values["base_model"]) == ("peft", "Qwen/Qwen3-0.6B")
    for words in ("`Qwen/Qwen3-0.6B@1234567` (checksum of its files: abc)", "42 are targets", "--lr 0.003", "chats"):
        assert words in text
    assert "/home/me" not in card


def test_a_run_that_began_with_another_run_names_no_model_of_the_hub(
    trained: TrainedCheckpoint, checkpoint: Path
) -> None:
    config = trained.config.model_copy(update={"init_from": "/home/me/runs/first/checkpoints/step-00000010"})
    card = card_of(replace(trained, config=config))
    assert "fine-tuned with llmscale from `first`" in card
    assert "base_model" not in card


def test_a_run_file_leaves_what_follows_from_the_weights_out(tuned: TrainedCheckpoint, checkpoint: Path) -> None:
    start = {"started": "2026-05-01T00:00:00+00:00", "arguments": ["--config", "run.yaml", "--init-from", "hf:q"]}
    (checkpoint.parents[1] / "starts.jsonl").write_text(json.dumps(start) + "\n")
    (command,) = [line for line in card_of(tuned).splitlines() if line.startswith("llmscale train")]
    assert "--init-from hf:q" in command and "--config" not in command and "--model" not in command
