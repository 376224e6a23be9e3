"""From conversations to a model that is talked with, and that transformers loads with its template."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.data.prepare.chat import DEFAULT_TEMPLATE
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.evaluate.conversation import Conversation
from llmscale.evaluate.generate import TextChunk
from scripts.bench.transformers_package import import_transformers
from tests import warm_start
from tests.cli.conftest import REPOSITORY
from tests.conversations import prepare_conversations, write_conversations


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
