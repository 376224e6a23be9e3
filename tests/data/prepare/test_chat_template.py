"""Templates as strangers write them: equal to transformers or refused, within limits of time and memory."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmscale.data.prepare import chat_template
from llmscale.data.prepare.chat import ChatEncoder, ChatSettings, Encoded, describe_template, find_template
from llmscale.data.prepare.chat_template import ChatTemplate
from llmscale.data.prepare.conversations import conversation_text
from llmscale.data.shards.token_shards import are_targets, ids_of
from llmscale.data.tokenizers.hugging_face import HuggingFaceTokenizer, load_huggingface
from llmscale.errors import DataError, MachineError
from llmscale.evaluate.transformers_package import import_transformers
from tests.conversations import write_tokenizer

Turn = dict[str, Any]

_HEAD = "{{- '<|im_start|>' + message.role + '\\n' }}"
_END = "{{- '<|im_end|>\\n' }}"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}"
    "{{- '<tool_call>' + call.name + ' ' + (call.arguments | tojson) + '</tool_call>' }}{%- endfor %}"
)


def chatml(content: str = "{{- message.content or '' }}", before: str = "", calls: str = _CALLS) -> str:
    """A template of ChatML with another way to write what a turn says."""
    loop = f"{{%- for message in messages %}}{_HEAD}{content}{calls}{_END}{{%- endfor %}}"
    return before + loop + _PROMPT


_THOUGHT = (
    "{%- set text = message.content or '' %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if message.role == 'assistant' and '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{%- set text = text.split('</think>')[-1].lstrip() %}{%- endif %}"
)
_LAST = (
    "{%- set last = namespace(user=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
)
_TOOLS = (
    "{%- macro show(tool) %}{{- tool.function.name }}({{- tool.function.parameters | tojson(sort_keys=true) }})"
    "{%- endmacro %}{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- show(tool) }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
)
#: Templates of our own with every trick of public ones.
TRICKS = {
    "plain": chatml(),
    "trims": chatml("{{- (message.content or '') | trim }}"),
    "escapes": chatml("{{- (message.content or '') | tojson }}", _TOOLS),
    "escapes for HTML": chatml("{{- (message.content or '') | e }}"),
    "upper case": chatml("{{- (message.content or '') | upper }}"),
    "parts alone": chatml(
        "{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}"
    ),
    "parts or text": chatml(
        "{%- if message.content is string %}{{- message.content }}{%- else %}"
        "{%- for part in message.content or [] %}{{- part.text }}{%- endfor %}{%- endif %}",
        _TOOLS,
    ),
    "thoughts cut": chatml(
        _THOUGHT + "{%- if message.role == 'assistant' and loop.index0 > last.user %}"
        "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + text }}{%- else %}{{- text }}{%- endif %}",
        _LAST + _TOOLS,
    ),
    "thoughts in the prompt": chatml(
        _THOUGHT + "{%- if thought %}{{- '<think>\\n' + thought + '</think>' }}{%- endif %}{{- text }}"
    ).replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"),
    "system in the first turn": (
        "{%- set first = '' %}{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\\n' %}"
        "{%- set messages = messages[1:] %}{%- endif %}{{- bos_token }}{%- for message in messages %}"
        "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}"
        "{%- endif %}{%- if message.role == 'user' %}{{- '[INST] ' + (first if loop.first else '') + message.content + "
        "' [/INST]' }}{%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "system of its own": chatml(
        before="{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
    ),
    "no developer": chatml("{%- if message.role != 'developer' %}{{- message.content or '' }}{%- endif %}"),
    "another end at the last turn": (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
        "{{- '</s>' if loop.last and not add_generation_prompt else '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "generation": (
        "{%- for message in messages %}" + _HEAD + "{%- if message.role == 'assistant' %}"
        "{%- generation %}{{- (message.content or '') }}"
        + _CALLS
        + "{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}"
        "{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}" + _PROMPT
    ),
    "generation with thoughts": (
        "{%- for message in messages %}" + _HEAD + "{%- if message.role == 'assistant' %}"
        "{%- if message.reasoning_content %}{% generation %}{{- '<think>' + message.reasoning_content + '</think>' }}"
        "{% endgeneration %}{%- endif %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}" + _PROMPT
    ),
}


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def says(text: str, **more: object) -> Turn:
    return {"role": "assistant", "content": text, **more}


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TWO = [user("Question <one>?"), says(" Answer alpha & more.\n"), user("Question two?"), says("Answer beta 🙂")]
CONVERSATIONS: dict[str, list[Turn]] = {
    "two": TWO,
    "system": [{"role": "system", "content": "Be terse."}, *TWO],
    "thoughts": [
        user("Question one?"),
        says("Answer alpha.", reasoning_content="Thought gamma."),
        user("Question two?"),
        says("Answer beta.", reasoning_content="Thought delta."),
    ],
    "thoughts within": [
        user("Question one?"),
        says("<think>\nThought gamma.\n</think>\n\nAnswer alpha."),
        user("Question two?"),
        says("<think>\nThought delta.\n</think>\n\nAnswer beta."),
    ],
    "tools": [
        user("Weather in Paris?"),
        says("", tool_calls=[CALL]),
        {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": "It is sunny."},
        says("The sun shines."),
        user("Question two?"),
        says("Answer beta."),
    ],
    "weights": [
        user("Question one?"),
        says("Bad one.", weight=0),
        user("Question two?"),
        says("Answer beta.", weight=1),
    ],
    "parts": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TWO],
    "developer": [{"role": "developer", "content": "Be terse."}, *TWO],
}
#: Each is a target where its conversation is taken, or never one.
SAID = ("Answer alpha", "Answer beta", "The sun shines.", "Paris")
HEARD = ("Question", "Be terse", "Be kind", "Bad one", "sunny", "user", "<|im_start|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, None, eos="</s>")
    return load_huggingface(folder, eot_token="<|endoftext|>", parse_special=True)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("theirs")
    write_tokenizer(folder, None, eos="</s>")
    return import_transformers().AutoTokenizer.from_pretrained(folder)


def encode(
    tokenizer: HuggingFaceTokenizer, template: ChatTemplate, messages: Sequence[Turn], **more: object
) -> Encoded:
    document = conversation_text({"messages": messages, **more}, "messages")
    chosen = ChatSettings(template, packs=False)
    [encoded] = ChatEncoder(tokenizer, chosen, 4000).encode_conversations([document])
    return encoded


def forms(messages: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield a conversation as it is, and with contents as texts and as parts."""
    yield [*messages]
    texts = ["".join(p["text"] for p in c) if isinstance(c := turn["content"], list) else c for turn in messages]
    yield [{**turn, "content": text} for turn, text in zip(messages, texts, strict=True)]
    yield [{**turn, "content": [{"type": "text", "text": text}]} for turn, text in zip(messages, texts, strict=True)]


def compare(tokenizer: HuggingFaceTokenizer, theirs: Any, template: ChatTemplate, kind: str) -> str:
    """Compare a conversation with transformers; return why it is refused."""
    messages = CONVERSATIONS[kind]
    more: Mapping[str, Any] = {"tools": [TOOL]} if kind == "tools" else {}
    encoded = encode(tokenizer, template, messages, **more)
    source = template.source
    if encoded.refusal:
        return encoded.dropped or encoded.refusal
    ids, targets = ids_of(encoded.tokens).tolist()[:-1], are_targets(encoded.tokens)[:-1]
    marks = "generation %}" in source or "generation -%}" in source
    for messages_now in forms(messages):
        try:
            rendered = theirs.apply_chat_template(
                messages_now, chat_template=source, return_dict=True, return_assistant_tokens_mask=marks, **more
            )
        except Exception:
            continue
        if rendered["input_ids"] == ids:
            break
    else:
        raise AssertionError("other tokens than those of transformers")
    if marks and kind != "weights":
        # transformers leaves out a part of the last 🙂.
        is_other = ~np.isin(ids, theirs.encode("🙂", add_special_tokens=False))[1:]
        assert np.array_equal(targets[1:][is_other], np.array(rendered["assistant_masks"][1:], bool)[is_other])
    spoken = theirs.decode(np.array(ids)[targets])
    of_assistant = json.dumps([turn for turn in messages if turn["role"] == "assistant"])
    assert all(text.lower() in spoken.lower() for text in SAID if text in of_assistant), spoken
    if not marks and template.name == "the chat template":
        assert not any(text in spoken for text in HEARD), spoken
    if marks and template.stops:
        assert template.end_of_turn
        assert template.end_of_turn in spoken
    return ""


#: Conversations that a template refuses or drops a text of.
REFUSED = {
    "trims": {"thoughts"},
    "escapes": {"thoughts"},
    "escapes for HTML": {"thoughts"},
    "plain": {"thoughts"},
    "parts alone": {"thoughts"},
    "parts or text": {"thoughts"},
    "system in the first turn": {"thoughts", "tools", "developer"},
    "system of its own": {"thoughts"},
    "no developer": {"thoughts", "developer"},
    "another end at the last turn": {"thoughts", "tools"},
    "generation": {"thoughts"},
    "generation with thoughts": {"tools"},
    "upper case": {"thoughts"},
}


@pytest.mark.parametrize("trick", TRICKS)
def test_equal_to_transformers_or_refused(tokenizer: HuggingFaceTokenizer, theirs: Any, trick: str) -> None:
    template = find_template(tokenizer, TRICKS[trick])
    reasons = {kind: compare(tokenizer, theirs, template, kind) for kind in CONVERSATIONS}
    assert {kind for kind, reason in reasons.items() if reason} == REFUSED.get(trick, set()), reasons


@pytest.mark.slow
def test_public_templates_are_equal_to_transformers_or_refused(tokenizer: HuggingFaceTokenizer, theirs: Any) -> None:
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        pytest.skip("trl is not installed")
    files = sorted(Path(package.submodule_search_locations[0]).glob("chat_templates/*.jinja"))
    assert files
    num_taken = 0
    for file in files:
        source = file.read_text()
        if "strftime_now" not in source:  # a date of today on one side
            template = find_template(tokenizer, source)
            reasons = [compare(tokenizer, theirs, template, kind) for kind in CONVERSATIONS]
            num_taken += not reasons[0]
    assert num_taken >= 0.9 * len(files)


#: The end of a turn in a generation of its own.
END_APART = TRICKS["generation"].replace(
    "{{- '<|im_end|>' }}{%- endgeneration %}",
    "{%- endgeneration %}{%- generation %}{{- '<|im_end|>' }}{%- endgeneration %}",
)


@pytest.mark.parametrize(
    ("source", "messages", "targets"),
    [
        (
            TRICKS["thoughts cut"],
            TWO,
            [" Answer alpha & more.\n<|im_end|>", "<think>\n\n</think>\n\nAnswer beta 🙂<|im_end|>"],
        ),
        (TRICKS["plain"], CONVERSATIONS["weights"], ["Answer beta.<|im_end|>"]),
        (TRICKS["generation"], CONVERSATIONS["weights"], ["Answer beta.<|im_end|>"]),
        (END_APART, CONVERSATIONS["weights"], ["Answer beta.<|im_end|>"]),
        (END_APART, [user("a"), says("b"), user("c"), says("d", weight=0)], ["b<|im_end|>"]),
        (
            TRICKS["thoughts cut"],
            CONVERSATIONS["tools"],
            [
                '<tool_call>weather {"city": "Paris"}</tool_call><|im_end|>',
                "The sun shines.<|im_end|>",
                "<think>\n\n</think>\n\nAnswer beta.<|im_end|>",
            ],
        ),
        (TRICKS["another end at the last turn"], TWO, [" Answer alpha & more.\n<|im_end|>", "Answer beta 🙂</s>"]),
        (TRICKS["system in the first turn"], TWO[2:], ["Answer beta 🙂</s>"]),
        (TRICKS["trims"], [user("a"), says("b", train=False), user("c"), says(" d ")], ["d<|im_end|>"]),
    ],
)
def test_targets_by_hand(
    tokenizer: HuggingFaceTokenizer, source: str, messages: list[Turn], targets: list[str]
) -> None:
    encoded = encode(tokenizer, find_template(tokenizer, source), messages)
    assert not encoded.refusal
    is_target = are_targets(encoded.tokens)
    runs = np.split(ids_of(encoded.tokens), np.flatnonzero(np.diff(is_target)) + 1)[1::2]
    # A line break before an answer is in one token with its own.
    assert [tokenizer.decode(run.tolist()).lstrip() for run in runs] == [text.lstrip() for text in targets]


def test_what_is_dropped_is_that_of_the_form_that_shows_most(tokenizer: HuggingFaceTokenizer) -> None:
    """A template that shows nothing of parts is not said to drop the user's text."""
    source = TRICKS["plain"].replace("message.content", "(message.content if message.content is string else '')")
    assert source != TRICKS["plain"]
    encoded = encode(tokenizer, find_template(tokenizer, source), CONVERSATIONS["thoughts"])
    assert "a text of assistant (thoughts), 'Thought delta.'" in encoded.dropped


def test_what_a_template_does_unasked_is_said(tokenizer: HuggingFaceTokenizer) -> None:
    def notes(source: str) -> str:
        return " ".join(describe_template(tokenizer, find_template(tokenizer, source)))

    assert not notes(TRICKS["plain"])
    assert "'Be kind.'" in notes(TRICKS["system of its own"])
    endless = TRICKS["plain"].replace("<|im_end|>", "")
    assert "--end-of-turn TOKEN adds one" in notes(endless)
    assert "It has '<|im_end|>'" in notes(endless), "the one that would serve comes first"
    assert "date of today" in notes(TRICKS["plain"] + "{{ strftime_now('%Y') if strftime_now is defined }}")


def test_a_token_ends_turns_that_have_no_end(tokenizer: HuggingFaceTokenizer, theirs: Any) -> None:
    endless = TRICKS["thoughts cut"].replace("<|im_end|>", "")
    template = find_template(tokenizer, endless, "<|im_end|>")
    assert template.end_of_turn == "<|im_end|>"
    assert template.stops
    for kind in ("two", "thoughts within", "tools"):
        assert not compare(tokenizer, theirs, template, kind)
    encoded = encode(tokenizer, template, TWO)
    ends = ids_of(encoded.tokens) == 2
    assert ends.sum() == 2
    assert are_targets(encoded.tokens)[ends].all()
    for token, message in (("<|im_", "is not one token"), ("no", "is not one token")):
        with pytest.raises(DataError, match=message):
            find_template(tokenizer, endless, token)
    with pytest.raises(DataError, match="Drop the flag"):
        find_template(tokenizer, TRICKS["plain"], "<|im_end|>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("".join(f"{{% for a{k} in [1] %}}" for k in range(40)) + "x" + "{% endfor %}" * 40, "is not a Jinja template"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "is not a Jinja template"),
        ("{{ 1", "is not a Jinja template"),
        ("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "one .* within another"),
        ("{{ '\\ud800' }}" + TRICKS["plain"], "half a surrogate pair"),
        ("{{ strftime_now('%Y') }}" + TRICKS["plain"], "the date of today, strftime_now"),
        ("{{ messages[0].content * 10000000000 }}" + TRICKS["plain"], "GiB of memory"),
        ("{{ 'a' * 10000000000 }}" + TRICKS["plain"], "GiB of memory"),
    ],
)
def test_a_strangers_template_is_refused_in_one_line(
    tokenizer: HuggingFaceTokenizer, source: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as error:
        encoded = encode(tokenizer, find_template(tokenizer, source), TWO)
        raise DataError(encoded.refusal)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "loop", ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"]
)
def test_a_template_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 0.5)
    with pytest.raises(DataError, match="takes more than"):
        ChatTemplate(loop, {}, "it")


def test_a_killed_process_is_an_error_of_the_machine() -> None:
    template = ChatTemplate(TRICKS["plain"], {}, "it")
    os.kill(template._idle[0]._process.pid, signal.SIGKILL)
    with pytest.raises(MachineError, match="was killed"):
        template.render(TWO)
    assert "Answer beta" in template.render(TWO), "by another process"


def test_no_process_is_left() -> None:
    template = ChatTemplate(TRICKS["plain"], {}, "it")
    process: subprocess.Popen[bytes] = template._idle[0]._process
    del template
    assert process.wait(60) is not None
