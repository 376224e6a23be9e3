"""Turn conversations into tokens by a chat template, and mark those that are targets.

A template comes with a model, so from strangers: it runs in Jinja's sandbox, as in transformers. Assistant turns are
what it puts between `{% generation %}` and `{% endgeneration %}`. Without these markers they are found by rendering the
conversation up to each turn, which must be a beginning of the whole.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmscale.data.shards.manifest import TrainOn
from llmscale.data.shards.token_shards import BEGIN, TARGET, Marked, ids_of
from llmscale.data.tokenizers.hugging_face import CONFIG_NAME, TEMPLATE_NAME, HuggingFaceTokenizer, token_text
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

#: Template of tokenizers without one. Its markers are text to them.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
#: Around a generation in rendered text: two of Unicode's noncharacters, which no text has.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_HAS_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
#: Reasons for which a conversation is left out.
TOO_LONG, NO_TARGET = "longer than a row", "without a target"

#: A conversation's turns, each with a role and a content.
Messages = Sequence[Mapping[str, str]]


def conversation_text(record: Mapping[str, object], field: str) -> str:
    """Return the conversation of a record as JSON: messages, a prompt and its completion, or ShareGPT's conversations.

    Raises KeyError for a record without one.
    """
    if field not in record and "prompt" in record and "completion" in record:
        messages = [*_turns(record["prompt"], "user"), *_turns(record["completion"], "assistant")]
    else:
        messages = _turns(record["conversations" if field not in record and "conversations" in record else field], "")
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    text = json.dumps({"messages": messages, **tools}, ensure_ascii=False)
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _turns(value: object, role: str) -> list[dict[str, str]]:
    """Return turns with a role and a content; a text is one of `role`. Anything else becomes a turn without a role."""
    turns = [{"role": role, "content": value}] if isinstance(value, str) else value
    return [_turn(turn if isinstance(turn, dict) else {}) for turn in (turns if isinstance(turns, list) else [])]


def _turn(turn: Mapping[str, object]) -> dict[str, str]:
    role, content = turn.get("role", turn.get("from", "")), turn.get("content", turn.get("value", ""))
    if isinstance(content, list):  # parts, as in OpenAI's records
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return {
        "role": _SHAREGPT_ROLES.get(str(role), str(role)),
        "content": content if isinstance(content, str) else "",
    }


def find_problem(messages: Messages) -> str:
    """Return what is wrong with the turns of a conversation, or an empty text."""
    roles = [message["role"] for message in messages]
    if unknown := [role for role in roles if role not in _ROLES]:
        return f"with a turn of the role {unknown[0][:40]!r}" if unknown[0] else "with a turn without a role"
    if not all(message["content"].strip() for message in messages):
        return "with an empty turn"
    spoken = [role for role in roles if role not in ("system", "developer", "tool")]
    if spoken[:1] != ["user"]:
        return "that no user begins"
    if any(role == after for role, after in pairwise(roles) if role != "tool"):
        return "with two turns of one role after another"
    return ""


class ChatTemplate:
    """A Jinja chat template."""

    def __init__(self, source: str, special: Mapping[str, str], name: str) -> None:
        """`special` are the texts of special tokens, such as `bos_token`. Raises DataError for invalid Jinja."""
        self.source, self.name, self._special = source, name, special
        self._has_markers = _HAS_MARKERS.search(source) is not None
        self._template = _compile(source, name)

    def render(self, messages: Messages, tools: object = None, *, prompts: bool = False) -> str:
        """Return the text of a conversation; with `prompts`, up to the assistant's next turn.

        Raises _Refused when the template raises.
        """
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=prompts, **self._special
            )
        except Exception as error:  # of any type: a stranger's program failed
            raise _Refused(self.name, error) from None
        return text

    def prompt(self, messages: Messages) -> str:
        """Return the text that the assistant's next turn continues. Raises _Refused when the template raises."""
        return self.render(messages, prompts=True).replace(_OPEN, "").replace(_CLOSE, "")

    def end_of_turn(self) -> str:
        """Return the text with which the assistant's turns end, empty if the template marks none. Raises DataError."""
        text, turns = self.find_turns(
            [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"}], None, ()
        )
        if not turns:
            return ""
        begin, end = turns[-1]
        return text[begin:end].partition("World")[2].strip() or text[end:].strip()

    def find_turns(
        self, messages: Messages, tools: object, special_texts: Sequence[str]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the places of assistant turns in it, with their ends.

        Raises _Refused; and DataError if a conversation's beginning is rendered in another way than the whole.
        """
        text = self.render(messages, tools)
        if self._has_markers:
            parts = re.split(f"[{_OPEN}{_CLOSE}]", text)
            ends = np.cumsum([len(part) for part in parts]).tolist()
            return "".join(parts), list(zip(ends[::2], ends[1::2], strict=False))
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], tools, prompts=True)
            through = self.render(messages[: number + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{self.name} renders the beginning of a conversation in another way than the whole, so turn "
                    f"{number + 1} cannot be located. Put {{% generation %}} and {{% endgeneration %}} around what the "
                    "assistant says in a copy of the template, and give it with --chat-template."
                )
            stripped = through.rstrip()
            # A line break after the token that ends a turn is never generated.
            has_end = stripped.endswith(tuple(special_texts)) and len(stripped) > len(before)
            turns.append((len(before), len(stripped if has_end else through)))
        return text, turns


class _Refused(DataError):
    """The template raised for a conversation."""

    def __init__(self, name: str, error: Exception) -> None:
        self.reason = " ".join((str(error) or type(error).__name__).split())[:100]
        super().__init__(f"{name} refuses the conversation: {self.reason}.")


def _compile(source: str, name: str) -> Template:
    from jinja2 import ext, nodes, parser
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The block `{% generation %}` of transformers, whose text is marked."""

        tags = {"generation"}  # noqa: RUF012  as in Jinja's own

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    # Without `strftime_now`, so that templates put no date of today into the data.
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"{name} is not a Jinja template: {' '.join(str(error).split())[:200]}.") from None


def find_template(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    """Return the template `source`, else the tokenizer's own, else the default. Raises DataError."""
    special: dict[str, str] = {}
    own = None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files = tokenizer.files
        special = {key: token_text(files, CONFIG_NAME, key) for key in ("bos_token", "eos_token", "pad_token")}
        named = files.record(CONFIG_NAME).get("chat_template")
        if isinstance(named, list):  # several by name
            by_name = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
            named = by_name.get("default")
        own = files.others[TEMPLATE_NAME].decode(errors="replace") if TEMPLATE_NAME in files.others else named
    if source is not None:
        return ChatTemplate(source, special, "the chat template")
    if isinstance(own, str) and own:
        return ChatTemplate(own, special, f"the chat template of {tokenizer.spec}")
    return ChatTemplate(DEFAULT_TEMPLATE, special, "the default chat template")


class ChatSettings(NamedTuple):
    """Choices of a dataset of conversations."""

    template: ChatTemplate
    train_on: TrainOn = "assistant"
    truncates: bool = False
    """True to cut a conversation that is longer than a row."""
    packs: bool = True
    """True if a row may hold several conversations."""


class ChatEncoder:
    """Encodes conversations; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings, seq_len: int) -> None:
        """The tokenizer parses special tokens. A row has seq_len + 1 tokens."""
        self._tokenizer, self._settings, self._length = tokenizer, settings, seq_len + 1

    def encode_conversation(self, conversation: str) -> tuple[Marked, str]:
        """Return the marked tokens of a conversation, given as JSON, with end-of-text; or why it is left out.

        Nothing precedes its first token, which does not count as a target. Raises DataError.
        """
        settings, nothing = self._settings, np.zeros(0, np.uint32)
        try:
            record = json.loads(conversation)
        except ValueError:
            raise DataError(
                f"--chat reads JSON lines with messages, or a hf: dataset of them, and found the text "
                f"{conversation[:60]!r}. Leave out --chat for text."
            ) from None
        if reason := find_problem(record["messages"]):
            return nothing, reason
        try:
            text, turns = settings.template.find_turns(record["messages"], record.get("tools"), self._special_texts)
        except _Refused as refused:
            return nothing, f"that the template refuses ({refused.reason})"
        tokens = self._encode(text, turns)
        if settings.train_on == "all":
            tokens |= TARGET
        end = np.uint32(self._tokenizer.eot_token)
        is_end = (tokens & ~TARGET) == end
        if settings.packs and is_end[:-1].any():
            raise DataError(
                f"{settings.template.name} uses the end-of-text token {self._tokenizer.decode([int(end)])!r} within "
                "conversations, so that they could not be told apart in a row. Name another token of the vocabulary "
                "with --eot-token, or give each a row of its own with --packing pad."
            )
        if not is_end[-1:].any():
            tokens = np.append(tokens, end | (TARGET if settings.train_on == "all" else np.uint32(0)))
        if len(tokens) > self._length and not settings.truncates:
            return nothing, TOO_LONG
        tokens = tokens[: self._length]
        tokens[0] = tokens[0] & ~TARGET | BEGIN
        return (tokens, "") if (tokens & TARGET).any() else (nothing, NO_TARGET)

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """Return the token ids that the assistant's next turn continues, encoded as in training. Raises DataError."""
        template = self._settings.template
        _, turns = template.find_turns(messages, None, self._special_texts)
        tokens: list[int] = ids_of(self._encode(template.prompt(messages), turns)).tolist()
        return tokens

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        if not isinstance(self._tokenizer, HuggingFaceTokenizer):
            return ()
        return self._tokenizer.special_texts()

    def _encode(self, text: str, turns: Sequence[tuple[int, int]]) -> Marked:
        """Return the tokens of a text with marks of those in `turns`."""
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            # By their ends: the begins leave out white space.
            ids, ends = self._tokenizer.encode_with_ends(text)
            borders = [place for turn in turns for place in turn]
            is_target = [bisect_left(borders, end) % 2 == 1 for end in ends]
            return np.array(ids, np.uint32) | np.where(is_target, TARGET, np.uint32(0)).astype(np.uint32)
        borders = [0, *(place for turn in turns for place in turn), len(text)]
        pieces = self._tokenizer.encode_batch([text[a:b] for a, b in pairwise(borders)])
        return np.concatenate([piece | (TARGET * np.uint32(number % 2)) for number, piece in enumerate(pieces)])
