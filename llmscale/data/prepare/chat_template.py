"""A chat template, which is a stranger's program: it runs in processes that this one limits and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

from llmscale.data.prepare.conversations import Message, Rendered
from llmscale.errors import DataError, MachineError
from llmscale.untrusted.interpreter import module_command

#: Template of tokenizers without one. Its markers are text to them.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
#: Template that ends the assistant's turns with a token, before a template that does not. Calls of tools end without.
_ENDING = (
    "{%- set ending = namespace(turns=[]) %}{%- for turn in messages %}"
    "{%- if turn.role == 'assistant' and turn.content and not turn.tool_calls %}"
    "{%- set end = TOKEN if turn.content is string else [{'type': 'text', 'text': TOKEN}] %}"
    "{%- set ending.turns = ending.turns + [dict(turn, content=turn.content + end)] %}"
    "{%- else %}{%- set ending.turns = ending.turns + [turn] %}{%- endif %}{%- endfor %}"
    "{%- set messages = ending.turns %}\n"
)
#: Seconds for a request. A process whose parent is gone ends itself after twice as many.
_MOST_SECONDS = 20
#: Conversations and characters of a request.
_MOST_DOCUMENTS = 64
_MOST_CHARACTERS = 1 << 20


def end_turns(source: str, token: str) -> str:
    """Return a template that ends what the assistant says with a token, in place of one that does not."""
    return _ENDING.replace("TOKEN", json.dumps(token)) + source


class _Process:
    """A process with the template, for one request at a time."""

    def __init__(self, name: str, source: str, special: Mapping[str, object]) -> None:
        """Raises DataError for a template that does not compile."""
        self._name = name
        command = module_command("llmscale.data.prepare.template_process", str(2 * _MOST_SECONDS))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, self._process)
        self.facts = cast("dict[str, Any]", self.ask({"source": source, "special": special}))
        if "invalid" in self.facts:
            raise DataError(f"{name} is not a Jinja template that Python compiles: {self.facts['invalid']}.")

    def ask(self, request: Mapping[str, object]) -> Any:
        """Return the answer to a request. Raises DataError beyond a limit, MachineError when the process is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        clock = threading.Timer(_MOST_SECONDS, end)
        clock.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            clock.cancel()
        if not line.endswith(b"\n"):
            raise self._explain_end(is_late=is_late.is_set())
        answer = json.loads(line)
        if isinstance(answer, dict) and "memory" in answer:
            raise DataError(f"{self._name} needs more than {answer['memory']} of memory for a conversation.")
        return answer

    def _explain_end(self, *, is_late: bool) -> DataError | MachineError:
        status = self._process.wait()
        if is_late:
            return DataError(f"{self._name} takes more than {_MOST_SECONDS} s for a conversation. Does it loop?")
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            return MachineError("The process that renders the chat template was killed, perhaps for want of memory.")
        return DataError(f"{self._name} cannot be rendered: it ended its process with status {status}.")


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # the process is gone
                stream.close()
    process.kill()
    process.wait()


class ChatTemplate:
    """A Jinja chat template; thread-safe."""

    def __init__(self, source: str, special: Mapping[str, object], name: str) -> None:
        """`special` are the texts of special tokens, such as `bos_token`. Raises DataError for invalid Jinja."""
        self.source = source
        self.name = name
        self._special = special
        #: Processes that wait for a request: each thread takes one.
        self._idle = [_Process(name, source, special)]
        self._facts = self._idle[0].facts

    def _ask(self, **request: object) -> Any:
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self.name, self.source, self._special)
        answer = process.ask(request)
        self._idle.append(process)
        return answer

    def render(self, messages: Sequence[Message], *, prompts: bool = False) -> str:
        """Return the text of a conversation; with `prompts`, up to the assistant's next turn.

        Raises DataError when the template raises.
        """
        answer = self._ask(messages=messages, prompts=prompts)
        if "refusal" in answer:
            raise DataError(f"{self.name} refuses the conversation: {answer['refusal']}.")
        text: str = answer["text"]
        return text

    def render_documents(self, documents: Sequence[str]) -> Iterator[Rendered]:
        """Yield the text of each conversation, given as `conversation_text` returns it, and the places of targets.

        Raises DataError beyond a limit.
        """
        part: list[str] = []
        size = 0
        for document in documents:
            part.append(document)
            size += len(document)
            if len(part) == _MOST_DOCUMENTS or size > _MOST_CHARACTERS:
                yield from (Rendered(*one) for one in self._ask(documents=part))
                part = []
                size = 0
        if part:
            yield from (Rendered(*one) for one in self._ask(documents=part))

    @cached_property
    def end_of_turn(self) -> str:
        """The text with which the assistant's turns end, empty if nothing does. Raises DataError."""
        if "error" in self._facts:
            raise DataError(f"{self.name} refuses the conversation: {self._facts['error']}.")
        end: str = self._facts["end"]
        return end

    @property
    def stops(self) -> bool:
        """True if an end is the last of every turn's targets."""
        return bool(self._facts.get("stops", True))

    @property
    def default_system(self) -> str:
        """The system text that the template gives to conversations without one."""
        return str(self._facts.get("system", ""))
