"""Conversations: their text is that of transformers, targets are the assistant's turns, and none is cut."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.cli.main import main
from llmscale.data.prepare import packing
from llmscale.data.prepare.chat import TOO_LONG, ChatEncoder, ChatSettings, find_template
from llmscale.data.prepare.chat_template import DEFAULT_TEMPLATE, end_turns
from llmscale.data.prepare.conversations import conversation_text
from llmscale.data.prepare.packing import ConversationPacking, PackingState
from llmscale.data.shards.cache import open_set
from llmscale.data.shards.manifest import load_manifest
from llmscale.data.shards.token_shards import BEGIN, TARGET, TokenShards, are_targets, ids_of
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from llmscale.evaluate.conversation import Conversation
from llmscale.evaluate.export import describe_export, write_model
from llmscale.evaluate.generate import TextChunk
from llmscale.evaluate.prune import ModelWeights
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.model.gpt import GPT
from tests.conversations import write_conversations, write_tokenizer

#: As Qwen2.5's, which renders a system turn of its own, without and with markers of what is generated.
CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
MARKED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
)
#: As Mistral's: the end-of-text token ends every turn, and roles must alternate.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}{% endfor %}"
)
#: Ends turns with nothing, and with the token that is asked for.
ENDED = end_turns(CHATML.replace("<|im_end|>", ""), "<|im_end|>")
DIALOGUE = [
    {"role": "user", "content": "What is  2+2?\n\n"},
    {"role": "assistant", "content": "\n\nIt is 4, naïve 🙂 one."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """`model(template)`: a folder with a byte-level tokenizer and the template."""

    def make(template: str | None, eos: str = "<|endoftext|>") -> Path:
        write_tokenizer(tmp_path / "model", template, eos)
        return tmp_path / "model"

    return make


def encode(
    folder: Path | str, messages: Sequence[Mapping[str, str]], seq_len: int = 400, **settings: Any
) -> tuple[list[int], list[bool], str]:
    """Return ids, which are targets, and why the conversation is left out."""
    tokenizer = load_tokenizer(str(folder), parse_special=True)
    chosen = ChatSettings(find_template(tokenizer), **settings)
    document = conversation_text({"messages": messages}, "messages")
    [encoded] = ChatEncoder(tokenizer, chosen, seq_len).encode_conversations([document])
    reason = encoded.dropped or encoded.refusal
    return ids_of(encoded.tokens).tolist(), are_targets(encoded.tokens).tolist(), reason


def test_tokens_and_mask_are_those_of_transformers(model: Any) -> None:
    folder = model(MARKED)
    theirs = (
        import_transformers()
        .AutoTokenizer.from_pretrained(folder)
        .apply_chat_template(DIALOGUE, return_assistant_tokens_mask=True, return_dict=True)
    )
    ids, targets, _ = encode(folder, DIALOGUE)
    assert ids == [*theirs["input_ids"], 0], "and end-of-text"
    assert targets == [*map(bool, theirs["assistant_masks"]), False]


def test_turns_are_found_without_markers(model: Any) -> None:
    folder = model(CHATML)
    theirs = import_transformers().AutoTokenizer.from_pretrained(folder)
    ids, targets, _ = encode(folder, DIALOGUE)
    assert ids == [*theirs.apply_chat_template(DIALOGUE), 0]
    texts, before = [], False
    for token, is_target in zip(ids, targets, strict=True):
        if is_target:
            texts = [*texts, []] if not before else texts
            texts[-1].append(token)
        before = is_target
    # The line break before the answer is in one token with its first.
    answers = ["\n\n\nIt is 4, naïve 🙂 one.<|im_end|>", "Welcome<|im_end|>"]
    assert [theirs.decode(text) for text in texts] == answers


def test_a_template_that_drops_earlier_turns_is_refused(model: Any) -> None:
    only_last = CHATML.replace("message.content +", "(message.content if loop.last else '') +")
    assert "drops a text of user, 'What is  2+2?'" in encode(model(only_last), DIALOGUE)[2]


def test_a_template_runs_in_a_sandbox(model: Any) -> None:
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}" + CHATML
    assert "refuses" in encode(model(attack), DIALOGUE)[2]


@pytest.mark.parametrize(
    "fault",
    ["{{ 1 / 0 }}", "{{ 'a'.encode('none') }}", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"],
)
def test_a_template_that_fails_refuses_the_conversation(model: Any, fault: str) -> None:
    folder = model(CHATML + fault)
    assert "refuses" in encode(folder, DIALOGUE)[2]
    with pytest.raises(DataError, match="refuses the conversation"):
        Conversation(load_tokenizer(str(folder)), None, 64)


def test_end_of_text_within_a_conversation_needs_a_row_of_its_own(model: Any) -> None:
    folder = model(MISTRAL, eos="</s>")
    with pytest.raises(DataError, match="--packing pad"):
        encode(folder, DIALOGUE)
    ids, targets, _ = encode(folder, DIALOGUE, packs=False)
    ends = [place for place, token in enumerate(ids) if token == 4]
    assert len(ends) == 2, "none is appended where the template ends with one"
    assert all(targets[end] for end in ends)
    assert "Only user and assistant" in encode(folder, [{"role": "system", "content": "x"}, *DIALOGUE], packs=False)[2]


def test_default_template_by_hand() -> None:
    ids, targets, _ = encode("bytes", DIALOGUE[2:])
    assert bytes(ids[:-1]).decode() == "<|user|>\nThanks<|end|>\n<|assistant|>\nWelcome<|end|>\n"
    assert ids[-1] == 256
    assert bytes(t for t, is_target in zip(ids, targets, strict=True) if is_target).decode() == "Welcome<|end|>"
    template = find_template(load_tokenizer("bytes"))
    assert template.render(DIALOGUE[2:3], prompts=True) == "<|user|>\nThanks<|end|>\n<|assistant|>\n"
    assert template.end_of_turn == "<|end|>"
    all_targets = encode("bytes", DIALOGUE[2:], train_on="all")[1]
    assert all_targets == [False] + [True] * (len(ids) - 1), "nothing precedes the first"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "that no user begins"),
        (DIALOGUE[1:], "that no user begins"),
        ([*DIALOGUE, {"role": "narrator", "content": "x"}], "with a turn of the role 'narrator'"),
        ([*DIALOGUE, {"content": "x"}], "with a turn without a role"),
        ([DIALOGUE[0], {"role": "assistant", "content": " \n"}], "with an empty turn"),
        ([DIALOGUE[0], *DIALOGUE], "with two turns of one role after another"),
        (DIALOGUE[:1], "without a target"),
        ([DIALOGUE[0], {"role": "assistant", "content": "x" * 500}], "longer than a row"),
    ],
)
def test_conversations_that_are_left_out(messages: list[dict[str, str]], reason: str) -> None:
    record = json.loads(conversation_text({"messages": messages}, "messages"))
    assert encode("bytes", record["messages"]) == ([], [], reason)


def test_truncation_keeps_the_beginning() -> None:
    ids, targets, reason = encode("bytes", [DIALOGUE[2], {"role": "assistant", "content": "x" * 500}], truncates=True)
    assert (len(ids), reason) == (401, "")
    assert targets[-1]


@pytest.mark.parametrize("alone", [False, True])
def test_rows_hold_complete_conversations(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    monkeypatch.setattr(packing, "_MOST_WAITING", 10)
    draw = np.random.default_rng(0)
    made = [np.full(draw.integers(2, 33), 1000 + number, np.uint32) for number in range(200)]
    for tokens in made:
        tokens[0] |= BEGIN
        tokens[1:] |= TARGET
    rows = []
    for group in (1, 7):
        packed = ConversationPacking(32, 9, PackingState(np.zeros(0, np.uint32)), alone=alone)
        parts = []
        for begin in range(0, len(made), group):
            parts.append(packed.cut(np.concatenate(made[begin : begin + group])))
            packed = ConversationPacking(32, 9, packed.state(), alone=alone)
        rows.append(np.concatenate([*parts, packed.finish()]))
    assert np.array_equal(rows[0], rows[1]), "whatever the groups"
    tokens_in_rows = rows[0][rows[0] != 9]
    assert sorted(tokens_in_rows.tolist()) == sorted(np.concatenate(made).tolist())
    for row in rows[0]:
        conversations = np.unique(ids_of(row[row != 9]))
        assert all((ids_of(row) == number).sum() == len(made[number - 1000]) for number in conversations)
        assert len(conversations) == 1 or not alone
    assert alone or (rows[0] == 9).mean() < 0.1


def test_a_dataset_and_its_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_conversations(tmp_path / "chats.jsonl", 60)
    with (tmp_path / "chats.jsonl").open("a") as file:
        for number in range(3):
            file.write("\n" + json.dumps({"prompt": f"long {number}", "completion": "x" * 500}))
        file.write("\n" + json.dumps({"prompt": "", "completion": "x"}))
        for number in range(30):
            file.write("\n" + json.dumps({"messages": [{"role": f"person {number}", "content": "x"}]}))
    command = ["data", "prepare", "--chat", "--input", str(tmp_path / "chats.jsonl"), "--tokenizer", "bytes"]
    command += ["--seq-len", "95", "--val-fraction", "0.2", "--out", str(tmp_path / "set")]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "conversations longer than a row (--seq-len gives longer rows, --truncate cuts them)" in printed
    assert "Left out 1 conversation with an empty turn" in printed
    assert "Left out 12 conversations for other reasons" in printed
    manifest = load_manifest(tmp_path / "set")
    assert manifest.chat is not None
    assert manifest.chat.template == DEFAULT_TEMPLATE
    too_long = manifest.chat.left_out[TOO_LONG]
    assert too_long >= 3
    assert sum(split.num_documents for split in manifest.splits.values()) == 63 - too_long
    for name, split in manifest.splits.items():
        shards = TokenShards(open_set(str(tmp_path / "set")), name)
        marked = shards.read_marked(np.arange(len(shards)))
        assert are_targets(marked).sum() == manifest.chat.num_targets[name] > 0
        assert (ids_of(marked) != 256).sum() + split.num_documents == split.num_tokens
        assert np.array_equal(shards.read(np.arange(len(shards))), ids_of(marked))
    assert main(["data", "verify", str(tmp_path / "set")]) == 0
    assert main(["data", "inspect", str(tmp_path / "set")]) == 0
    printed = capsys.readouterr().out
    assert "<|assistant|>\n>>" in printed
    assert "<|end|><<" in printed


def test_what_a_template_drops_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_conversations(tmp_path / "chats.jsonl", 30)
    with (tmp_path / "chats.jsonl").open("a") as file:
        for text in ("Be terse.", "Be kind."):
            turns = [{"role": "developer", "content": text}, *DIALOGUE[2:]]
            file.write("\n" + json.dumps({"messages": turns}))
    deaf = DEFAULT_TEMPLATE.replace(
        "{% else %}{{ message['content']", "{% elif message['role'] == 'user' %}{{ message['content']"
    )
    (tmp_path / "deaf.jinja").write_text(deaf)
    command = ["data", "prepare", "--chat", "--input", str(tmp_path / "chats.jsonl"), "--tokenizer", "bytes"]
    command += ["--seq-len", "95", "--out", str(tmp_path / "set"), "--chat-template", str(tmp_path / "deaf.jinja")]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert (
        "the chat template drops a text of developer, 'Be terse.'. To skip such records, give --max-rejected" in printed
    )
    assert main([*command, "--max-rejected", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Left out 2 conversations with a text of developer that the template drops" in printed
    rejected = (tmp_path / "set.rejected.jsonl").read_text().splitlines()
    assert ["Be kind." in line for line in rejected] == [False, True]


def test_shards_are_read_by_streaming(tmp_path: Path) -> None:
    from llmscale.data.prepare.sources.tokens import streaming_module

    write_conversations(tmp_path / "chats.jsonl", 30)
    command = ["data", "prepare", "--chat", "--input", str(tmp_path / "chats.jsonl"), "--tokenizer", "bytes"]
    assert main([*command, "--seq-len", "95", "--val-fraction", "0", "--out", str(tmp_path / "set")]) == 0
    index = json.loads((tmp_path / "set" / "train" / "index.json").read_text())
    reader = streaming_module("format").reader_from_json(str(tmp_path / "set"), "train", index["shards"][0])
    shards = TokenShards(open_set(str(tmp_path / "set")), "train")
    marked = shards.read_marked(np.arange(len(shards)))
    for number in range(len(shards)):
        sample = reader[number]
        assert np.array_equal(sample["tokens"], ids_of(marked[number]))
        assert np.array_equal(sample["mask"] > 0, are_targets(marked[number]))


@pytest.mark.parametrize(
    ("template", "ends"),
    [(CHATML, [0, 2]), (MARKED, [0, 2]), (MISTRAL, [0, 4]), (DEFAULT_TEMPLATE, 0), (ENDED, [0, 2])],
)
def test_generation_of_an_export_stops_at_the_end_of_a_turn(
    model: Any, tmp_path: Path, template: str, ends: int | list[int]
) -> None:
    tokenizer = load_tokenizer(str(model(None, eos="</s>")), eot_token="<|endoftext|>")
    shape = GPTShape(1, 2, 16, tokenizer.vocab_size, 8)
    exported = describe_export(shape, None, "fp32", 10**9)
    out = tmp_path / "out"
    weights = ModelWeights(GPT(shape, seed=0))
    write_model(weights, exported, tokenizer, out, card="", overwrite=False, chat_template=template)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == ends


def test_a_conversation_ends_turns_with_the_token_that_is_asked_for(model: Any) -> None:
    tokenizer = load_tokenizer(str(model(None)))
    talk = Conversation(tokenizer, ENDED, 400)
    talk.ask("hi")
    assert "".join(talk.answer([TextChunk(0, "Good<|im_end|>never")])) == "Good"
    assert tokenizer.decode(talk.ask("ho")).endswith(
        "assistant\nGood<|im_end|>\n<|im_start|>user\nho\n<|im_start|>assistant\n"
    )
