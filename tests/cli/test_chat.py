"""From conversations to a model that is talked with, and that transformers loads with its template."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmscale.cli.main import main
from llmscale.data.mixture import open_training_sets
from llmscale.data.prepare.chat_template import DEFAULT_TEMPLATE
from llmscale.data.shards.cache import SetLocation, open_set
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import ConfigError
from llmscale.evaluate.conversation import Conversation
from llmscale.evaluate.generate import TextChunk
from llmscale.evaluate.model_source import find_model, open_model
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.report.history import load_history
from llmscale.report.run_facts import load_facts
from tests import warm_start
from tests.cli.conftest import REPOSITORY
from tests.conversations import conversations_in, prepare_conversations, write_conversations


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations, of a few steps."""
    folder = tmp_path_factory.mktemp("chat")
    write_conversations(folder / "chats.jsonl", 40)
    prepare_conversations(folder / "chats.jsonl", folder / "set")
    flags = ("--model=tiny-1m", "--n-layer=1", "--n-head=2", "--n-embd=32", "--global-batch-size=4", "--steps=2")
    command = ["llmscale/train.py", f"--data={folder / 'set'}", f"--run={folder / 'run'}", *flags, "--val-every=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    warm_start.run([sys.executable, *command], check=True, cwd=REPOSITORY, env=environment, capture_output=True)
    return folder / "run"


def test_lines_of_a_pipe_are_turns(
    chat_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[dict[str, str]]] = []
    ask = Conversation.ask

    def recorded(talk: Conversation, line: str) -> list[int]:
        tokens = ask(talk, line)
        asked.append([dict(turn) for turn in talk._turns])
        return tokens

    monkeypatch.setattr(Conversation, "ask", recorded)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\nho\n")))
    assert main(["sample", str(chat_run), "--chat", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("> hi\n")
    assert "> ho\n" in printed
    assert [turn["role"] for turn in asked[-1]] == ["user", "assistant", "user"]
    assert asked[-1][-1]["content"] == "ho"


def test_a_pipe_s_new_begins_another_conversation(
    chat_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n/new\nhi\n")))
    assert main(["sample", str(chat_run), "--chat", "--max-new-tokens", "8"]) == 0
    first, second = capsys.readouterr().out.split("> /new\n")
    assert first == second, "nothing is remembered, and the seed is the same"


def test_a_loss_is_of_conversations_alone_whoever_takes_it(
    chat_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training: the dataset says that its documents are masked, an exported model does not know it."""
    assert main(["export", str(chat_run), "--to", str(tmp_path / "exported")]) == 0
    data, found = str(chat_run.parent / "set"), {}
    for name, model in (("run", [str(chat_run)]), ("exported", [str(tmp_path / "exported"), "--data", data])):
        assert main(["eval", *model, "--json", str(tmp_path / "found.json")]) == 0
        found[name] = json.loads((tmp_path / "found.json").read_text())["validation"]
    assert "bits_per_byte" not in capsys.readouterr().out
    assert found["exported"]["loss"] == pytest.approx(found["run"]["loss"], rel=1e-6)
    shards = TokenShards(open_set(data), "val")
    model = open_model(find_model(chat_run, print)).load_model()
    alone = [pair for row in shards.read(np.arange(len(shards))).tolist() for pair in conversations_in(row)]
    nats = targets = 0.0
    for tokens, is_target in alone:
        chosen = is_target[1:]
        with torch.inference_mode():
            shares = torch.log_softmax(model(tokens[None, :-1].long())[0], -1)
        nats -= float(shares.gather(1, tokens[1:, None].long())[chosen].sum())
        targets += int(chosen.sum())
    assert found["run"]["loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert model.shape.has_document_mask
    assert main(["prune", str(chat_run), "--to", str(tmp_path / "pruned")]) == 0
    assert "bits" not in capsys.readouterr().out


def test_the_unigram_entropy_is_that_of_the_targets(chat_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(chat_run.parent / "set")
    location = open_set(data)
    for split in ("train", "val"):
        shards = TokenShards(location, split)
        rows = shards.read(np.arange(len(shards))).tolist()
        targets = [tokens[is_target] for row in rows for tokens, is_target in conversations_in(row)]
        counts = torch.bincount(torch.cat(targets).long()).double()
        shares = counts[counts > 0] / counts.sum()
        assert location.manifest.unigram_entropy(split) == pytest.approx(float(-(shares * shares.log()).sum()))
    assert main(["report", str(chat_run)]) == 0
    assert f"the unigram entropy, {location.manifest.unigram_entropy('train'):.3f}" in capsys.readouterr().out
    # Older datasets have that of all tokens.
    chat = replace(location.manifest.chat, entropy_of_targets=False)
    assert replace(location.manifest, chat=chat).unigram_entropy("train") is None
    facts = load_facts(chat_run, load_history(chat_run))
    assert (facts.bytes_per_token, facts.validation_bytes_per_token) == (None, None)
    assert "conversations" in facts.why_no_bytes


def test_datasets_say_whether_documents_are_masked(chat_run: Path) -> None:
    packed = open_training_sets(str(chat_run.parent / "set"))
    location = packed.first
    padded = replace(
        location, manifest=replace(location.manifest, chat=replace(location.manifest.chat, masks_documents=False))
    )
    text = replace(location, manifest=replace(location.manifest, chat=None))

    def masks(*locations: SetLocation, wanted: bool) -> bool:
        return replace(packed, locations=locations).masks_documents(wanted)

    assert [masks(text, wanted=wanted) for wanted in (False, True)] == [False, True]
    assert [masks(text, location, wanted=wanted) for wanted in (False, True)] == [True, True]
    assert [masks(text, padded, wanted=wanted) for wanted in (False, True)] == [False, False]
    with pytest.raises(ConfigError, match="In a mixture prepare all conversations with --packing pad"):
        masks(location, padded, wanted=False)


def test_a_turn_ends_where_training_ended_it() -> None:
    talk = Conversation(ByteTokenizer(), None, 400)
    assert bytes(talk.ask("hi")).decode() == "<|user|>\nhi<|end|>\n<|assistant|>\n"
    chunks = (TextChunk(0, text) for text in ("Go", "od<", "|en", "d|", ">\n<|user|>never"))
    assert "".join(talk.answer(chunks)) == "Good"
    history = "<|user|>\nhi<|end|>\n<|assistant|>\nGood<|end|>\n<|user|>\nho<|end|>\n<|assistant|>\n"
    assert bytes(talk.ask("ho")).decode() == history
    assert bytes(talk.ask("ho")).decode() == history, "a line without an answer is forgotten"
    talk.forget()
    assert bytes(talk.ask("ho")).decode() == "<|user|>\nho<|end|>\n<|assistant|>\n"


def test_a_line_without_an_answer_is_forgotten() -> None:
    talk = Conversation(ByteTokenizer(), None, 400)
    talk.ask("refused, or interrupted")
    assert bytes(talk.ask("hi")).decode() == "<|user|>\nhi<|end|>\n<|assistant|>\n"


def test_a_full_context_forgets_the_oldest_turns() -> None:
    talk = Conversation(ByteTokenizer(), None, 120)
    for number in range(5):
        tokens = talk.ask(f"question {number}")
        assert len(tokens) <= 120
        list(talk.answer([TextChunk(0, "answer<|end|>")]))
    assert b"question 4" in bytes(tokens)
    assert b"question 0" not in bytes(tokens)


def test_an_export_has_the_template(chat_run: Path, tmp_path: Path) -> None:
    assert main(["export", str(chat_run), "--to", str(tmp_path / "exported")]) == 0
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    messages = [{"role": "user", "content": "hi"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert theirs == Conversation(ByteTokenizer(), None, 400).ask("hi")
