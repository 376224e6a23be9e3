"""A process that renders conversations by a chat template, and finds in their text what the assistant says.

A template comes with a model, so from strangers, and is a program: it runs in Jinja's sandbox, as in transformers, in a
process with little memory whose parent holds the clock. Little is imported, so that the process starts quickly. What
it reads and writes are lines of JSON.

The assistant's turns are what the template puts between `{% generation %}` and `{% endgeneration %}`. Without these,
every text of a conversation is put between two marks. If that changes nothing else, the marks are the places. Where it
does, and for calls of tools, the conversation is rendered up to the turn, which must be a beginning of the whole.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, cast

from jinja2 import Template, ext, nodes, parser
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmscale.data.prepare.conversations import Message, Rendered

#: Address space of the process.
_MOST_BYTES = 2 << 30
#: Characters of a conversation's text.
_MOST_CHARACTERS = 1 << 27
#: Marks, of noncharacters, which no text has: around a generation, before a text and after it, digits of its number.
_GENERATION = "\ufdd0", "\ufdd1"
_TEXT = "\ufdd2", "\ufdd3"
_DIGITS = str.maketrans("0123456789", "".join(map(chr, range(0xFDE0, 0xFDEA))))
_NUMBERS = {digit: number for number, digit in _DIGITS.items()}
_MARK = re.compile(f"([{''.join(_TEXT)}])([\ufde0-\ufde9]+)")
_HAS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Tags around thoughts within an answer. Templates split it there.
_THOUGHT_TAG = re.compile(r"(</?(?:think|thinking|thought|reasoning)>|\[/?THINK\])")
#: Keys of thoughts beside an answer.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
#: Characters between the header of a turn and its text, such as `<think>`.
_LEAD = re.compile(r"(?:\s|<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\]|\w{1,20}(?=<))*")
_MOST_LEAD = 200
_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|[^<\[]+|[<\[]")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_WITHOUT_TEXT = ("system", "developer", "tool")
#: Texts of the conversations by which a template is examined.
_QUESTION = "question 7f31"
_ANSWER = "answer 7f32"
_SYSTEM = "system 7f33"
#: Reason for a conversation whose turns are not found.
UNLOCATED = (
    "whose turns cannot be located, as their marks change the rendering ({% generation %} and {% endgeneration %} "
    "around what the assistant says in a copy of the template, given with --chat-template, locate them)"
)

Turns = list[tuple[int, int]]


class Place(NamedTuple):
    """A text of a conversation."""

    turn: int
    role: str
    is_thought: bool
    is_call: bool
    text: str


def find_problem(messages: Sequence[Message]) -> str:
    """Return what is wrong with the turns of a conversation, or an empty text."""
    roles = [message["role"] for message in messages]
    if unknown := [role for role in roles if role not in _ROLES]:
        if unknown[0]:
            return f"with a turn of the role {unknown[0][:40]!r}"
        return "with a turn without a role"
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "with a part other than text"
        if not (content is None or isinstance(content, (str, list))):
            return "with a content other than text"
        if not _joined(content).strip() and not message.get("tool_calls"):
            return "with an empty turn"
        if message.get("weight") not in (None, 0, 1):
            return "with a weight other than 0 and 1"
    spoken = [role for role in roles if role not in _WITHOUT_TEXT]
    if spoken[:1] != ["user"]:
        return "that no user begins"
    if any(role == after for role, after in pairwise(roles) if role != "tool"):
        return "with two turns of one role after another"
    return ""


def _joined(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _is_context(message: Message) -> bool:
    """Return whether an assistant's turn is context, by OpenAI's weight or axolotl's flags."""
    return message.get("weight") == 0 or message.get("train") is False or message.get("training") is False


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, with contents as texts, and with contents as lists of parts."""
    yield list(messages)
    contents = [message.get("content") for message in messages]
    if any(isinstance(content, list) for content in contents):
        yield [
            {**message, "content": _joined(content)} if isinstance(content, list) else message
            for message, content in zip(messages, contents, strict=True)
        ]
    if any(isinstance(content, str) for content in contents):
        yield [
            {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
            for message, content in zip(messages, contents, strict=True)
        ]


class _Marker:
    """Puts marks around the texts of a conversation."""

    def __init__(self, messages: Sequence[Message], roles: Sequence[str]) -> None:
        self.places: list[Place] = []
        self._roles = roles
        self.messages = [self._mark_message(number, message) for number, message in enumerate(messages)]

    def _mark_message(self, number: int, message: Message) -> Message:
        marked = dict(message)
        role = message["role"]
        for key in _THOUGHTS:
            if isinstance(message.get(key), str):
                marked[key] = self._mark(message[key], number, role, is_thought=True)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._mark_answer(content, number, role)
        elif isinstance(content, list):
            marked["content"] = [{**part, "text": self._mark_answer(part["text"], number, role)} for part in content]
        if isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = deepcopy(message["tool_calls"])
            for call in _functions(marked["tool_calls"]):
                call["name"] = self._mark(call["name"], number, role, is_call=True)
        return marked

    def _mark_answer(self, text: str, number: int, role: str) -> str:
        if role == "assistant":
            pieces = _THOUGHT_TAG.split(text)
        else:
            pieces = [text]
        for k in range(0, len(pieces), 2):
            is_thought = k + 1 < len(pieces) and pieces[k + 1][1] == "/"
            pieces[k] = self._mark(pieces[k], number, role, is_thought=is_thought)
        return "".join(pieces)

    def _mark(self, text: str, turn: int, role: str, *, is_thought: bool = False, is_call: bool = False) -> str:
        """Return a text with marks inside its outer white space, which templates may trim."""
        inner = text.strip()
        if not inner:
            return text
        digits = str(len(self.places)).translate(_DIGITS)
        self.places.append(Place(turn, role, is_thought, is_call, inner))
        if role not in self._roles:
            return text
        before, _, after = text.partition(inner)
        return f"{before}{_TEXT[0]}{digits}{inner}{_TEXT[1]}{digits}{after}"


def _functions(calls: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the name and arguments of calls."""
    for call in calls:
        if isinstance(call, dict):
            function = call.get("function", call)
        else:
            function = None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function


def _split(rendering: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """Return a rendering without marks, and the begin and end of each text by its number."""
    begins: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    pieces = []
    done = place = 0
    for mark in _MARK.finditer(rendering):
        pieces.append(rendering[done : mark.start()])
        place += mark.start() - done
        done = mark.end()
        number = int(mark[2].translate(_NUMBERS))
        if mark[1] == _TEXT[0]:
            begins.setdefault(number, place)
        elif number in begins:
            spans.setdefault(number, (begins[number], place))
    return "".join(pieces) + rendering[done:], spans


def _generations(rendering: str) -> tuple[str, Turns]:
    """Return a rendering without the marks of generations, and their places."""
    if _GENERATION[0] not in rendering:
        return rendering, []
    parts = re.split(f"[{''.join(_GENERATION)}]", rendering)
    borders = [0]
    for part in parts:
        borders.append(borders[-1] + len(part))
    return "".join(parts), list(zip(borders[1::2], borders[2::2], strict=False))


def _is_shown(text: str, rendering: str, number: int = 1) -> bool:
    """Return whether a rendering has a text `number` times, perhaps escaped or with other white space."""
    if rendering.count(text) >= number:
        return True
    escaped = (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    if any(rendering.count(one) >= number for one in escaped):
        return True
    return " ".join(rendering.split()).count(" ".join(text.split())) >= number


def _shared(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return what two texts or lists begin with alike."""
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def _shared_end(text: str, next_turn: str, header: str) -> str:
    """Return how a turn ends by what follows it in two conversations, without the beginning of a turn's header."""
    tokens = _TOKEN.findall(text)
    shared = _shared(tokens, _TOKEN.findall(next_turn))
    following = "".join(tokens[len(shared) : len(shared) + 1])
    is_header = bool(shared and following) and shared[-1] + following in header
    return "".join(shared[:-1] if is_header else shared).strip()


class Renderer:
    """A compiled template, and what was found out about it."""

    def __init__(self, source: str, special: Mapping[str, object]) -> None:
        """`special` are the texts of special tokens, such as `bos_token`. Raises whatever Jinja and Python raise."""
        self._template = _compile(source)
        self._special = special
        self._has_generation = _HAS_GENERATION.search(source) is not None
        #: Beginnings of an assistant's turn, and what ends one, the longest first.
        self._headers: list[str] = []
        self._tails: list[str] = []

    def render(self, messages: Sequence[Message], more: Mapping[str, object], *, prompts: bool = False) -> str:
        """Return the text of a conversation; with `prompts`, up to the assistant's next turn.

        `more` are further values, which `tools` are among. Raises whatever the template raises.
        """
        values = {"tools": None, "documents": None, **self._special, **more}
        text = self._template.render(values, messages=messages, add_generation_prompt=prompts)
        if len(text) > _MOST_CHARACTERS:
            raise TemplateError(f"{len(text):,} characters")
        text.encode()
        return text

    def examine(self) -> dict[str, object]:
        """Return what the template does to conversations: the ends of turns, and the system text that it adds."""
        question = {"role": "user", "content": _QUESTION}
        answer = {"role": "assistant", "content": _ANSWER}
        errors = []
        for form in _forms([question, answer]):
            try:
                marked = self.render(form, {})
            except Exception as error:
                errors.append(_describe(error))
                continue
            if _ANSWER in marked:
                return self._examine(form, marked)
        return {"error": errors[0] if errors else "it shows no answer"}

    def _examine(self, form: Sequence[Message], marked: str) -> dict[str, object]:
        text, generations = _generations(marked)
        asked = self._try(form[:1])
        prompt = self._try(form[:1], prompts=True)
        of_question = asked.partition(_QUESTION)[2]
        if prompt.startswith(asked):
            header = prompt[len(asked) :]
        else:
            header = prompt.partition(_QUESTION)[2]
        inner, _, rest = self._try([*form, *form]).partition(_ANSWER)
        inner = inner.partition(_QUESTION)[2].removeprefix(of_question)
        # Earlier turns may lack the end of a prompt, such as `<think>`.
        headers = [header or of_question, "".join(_shared(header, inner))]
        self._headers = [one for one in headers if one.strip() and (one not in asked or not header)]
        next_turn = rest.partition(_QUESTION)[0]
        tail = text.partition(_ANSWER)[2].strip()
        # Some add a prompt unasked.
        tail = _shared_end(tail, next_turn, headers[0]) or tail
        # Some end the last turn in another way.
        prompted = self._try(form, prompts=True).partition(_ANSWER)[2].rstrip()
        before_next = _shared_end(prompted, next_turn, headers[0])
        stops = [tail, before_next if header else tail]
        self._tails = sorted({*stops} - {""}, key=len, reverse=True)
        end = tail
        if generations:
            stops = [text[: generations[-1][1]].rpartition(_ANSWER)[2].strip()]
            end = stops[0] or tail
        return {"end": end, "stops": all(stops), "system": self._default_system(form, asked)}

    def _default_system(self, form: Sequence[Message], asked: str) -> str:
        with_system = self._try([{**form[0], "role": "system", "content": _SYSTEM}, form[0]])
        before, is_found, after = with_system.partition(_SYSTEM)
        if is_found and asked.startswith(before) and asked[len(before) :].endswith(after):
            return asked[len(before) : len(asked) - len(after)].strip()
        return ""

    def _try(self, messages: Sequence[Message], *, prompts: bool = False) -> str:
        with suppress(Exception):
            return _generations(self.render(messages, {}, prompts=prompts))[0]
        return ""

    def render_document(self, document: str) -> Rendered:
        """Return the text and the targets of a conversation, given as two lines of JSON."""
        head, _, rest = document.partition("\n")
        record = json.loads(head)
        if problem := find_problem(record["messages"]):
            return Rendered(refusal=problem)
        more = {**record, **json.loads(rest or "{}")}
        del more["messages"]
        failed = []
        for messages in _forms(record["messages"]):
            rendered = self._render_form(messages, more)
            if not rendered.refusal and not rendered.dropped:
                return rendered
            failed.append(rendered)
        # The form that shows most is the one that the template takes.
        return max(failed, key=lambda rendered: (bool(rendered.dropped), len(rendered.text)))

    def _render_form(self, messages: Sequence[Message], more: Mapping[str, object]) -> Rendered:
        try:
            text, generations = _generations(self.render(messages, more))
        except MemoryError:
            raise
        except Exception as error:
            return Rendered(refusal=f"that the template refuses ({_describe(error)})")
        lists = [message["content"][0] for message in messages if isinstance(message.get("content"), list)]
        if any(str(part) in text or json.dumps(part, ensure_ascii=False) in text for part in lists[:1]):
            return Rendered(refusal="that the template writes as a list of parts")
        finder = _Finder(self, messages, more, text)
        if not self._has_generation or any(message.get("tool_calls") for message in messages):
            finder.find_texts()
        if dropped := finder.find_dropped():
            return Rendered(text, dropped=dropped[0], example=dropped[1])
        if self._has_generation:
            turns = finder.without_context(generations)
        else:
            turns = finder.find_turns(self._headers, self._tails)
        if turns is None:
            return Rendered(refusal=UNLOCATED)
        return Rendered(text, turns)


class _Finder:
    """Finds the assistant's turns in the text of one conversation."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], more: Mapping[str, object], text: str) -> None:
        self._render = renderer.render
        self._messages = messages
        self._more = more
        self._text = text
        self._answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self._marker = _Marker(messages, _ROLES)
        #: Texts that marks found, and the roles whose texts they find.
        self._spans: dict[int, tuple[int, int]] = {}
        self._roles: Sequence[str] = ()

    def find_texts(self) -> None:
        """Find all texts by their marks, or else the assistant's, where marks change nothing else."""
        for roles in (_ROLES, ("assistant",)):
            if roles is _ROLES:
                marker = self._marker
            else:
                marker = _Marker(self._messages, roles)
            with suppress(Exception):
                without, spans = _split(_generations(self._render(marker.messages, self._more))[0])
                if without == self._text:
                    self._marker = marker
                    self._spans = spans
                    self._roles = roles
                    return

    def find_dropped(self) -> tuple[str, str] | None:
        """Return the role and the text of a turn that the template drops; thoughts but the last may go."""
        counts: Counter[str] = Counter()
        done = 0
        for number, place in enumerate(self._marker.places):
            if place.is_thought and place.turn != self._answers[-1]:
                continue
            counts[place.text] += 1
            is_shown = number in self._spans
            if place.role not in self._roles:
                # Most are in the order of the turns.
                begin = self._text.find(place.text, done)
                if begin >= 0:
                    done = begin + len(place.text)
                is_shown = begin >= 0 or _is_shown(place.text, self._text, counts[place.text])
            if not is_shown:
                if place.is_thought:
                    kind = " (thoughts)"
                elif place.is_call:
                    kind = " (a call of a tool)"
                else:
                    kind = ""
                return place.role + kind, place.text
        return next((one for one in self._values() if not _is_shown(one[1], self._text)), None)

    def _values(self) -> Iterator[tuple[str, str]]:
        """Yield the texts in arguments of calls, and the names of tools."""
        for number in self._answers:
            for function in _functions(self._messages[number].get("tool_calls") or ()):
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    with suppress(ValueError):
                        arguments = json.loads(arguments)
                values = arguments.values() if isinstance(arguments, dict) else [arguments]
                for value in values:
                    if isinstance(value, str):
                        yield "assistant (a call of a tool)", value.strip()
        tools = self._more.get("tools")
        for function in _functions(tools if isinstance(tools, list) else ()):
            yield "tools", function["name"]

    def find_turns(self, headers: Sequence[str], tails: Sequence[str]) -> Turns | None:
        """Return the places of turns that are targets, None if one of them is not found."""
        turns = []
        done = 0
        by_turn = self._spans_by_turn()
        for number in self._answers:
            own = by_turn.get(number, [])
            turn = None
            if not own or self._messages[number].get("tool_calls"):
                turn = self._find_by_prefix(number)
            if turn is None and own:
                turn = self._find_by_marks(number, own, done, headers, tails)
            if turn is None or turn[0] < done:
                return None
            done = turn[1]
            if not _is_context(self._messages[number]):
                turns.append(turn)
        return turns

    def _spans_by_turn(self) -> dict[int, list[tuple[int, int]]]:
        by_turn: dict[int, list[tuple[int, int]]] = {}
        for number, span in self._spans.items():
            by_turn.setdefault(self._marker.places[number].turn, []).append(span)
        return by_turn

    def _find_by_prefix(self, number: int) -> tuple[int, int] | None:
        with suppress(Exception):
            before, _ = _generations(self._render(self._messages[:number], self._more, prompts=True))
            through, _ = _generations(self._render(self._messages[: number + 1], self._more))
            if self._text.startswith(through) and through.startswith(before):
                # A line break after the token that ends a turn is never generated.
                return len(before), max(len(before), len(through.rstrip()))
        return None

    def _find_by_marks(
        self, number: int, own: Sequence[tuple[int, int]], done: int, headers: Sequence[str], tails: Sequence[str]
    ) -> tuple[int, int] | None:
        text = self._text
        first = min(begin for begin, _ in own)
        last = max(end for _, end in own)
        is_call = bool(self._messages[number].get("tool_calls"))
        begins = [place + len(one) for one in headers if (place := text.rfind(one, done, first)) >= 0]
        if not is_call:
            begins = [end for end in begins if first - end <= _MOST_LEAD and _LEAD.fullmatch(text, end, first)]
        elif not begins:
            return None
        else:
            with suppress(Exception):
                through, spans = _split(self._render(self._marker.messages[: number + 1], self._more))
                tails = [through[max(end for _, end in spans.values()) :].strip(), *tails]
        end = cast("re.Match[str]", _SPACE.match(text, last)).end()
        tail = next((one for one in tails if one and text.startswith(one, end)), "")
        if is_call and not tail:
            return None
        return (begins[0] if begins else first), (end + len(tail) if tail else last)

    def without_context(self, generations: Turns) -> Turns | None:
        """Return the generations without those of turns that are context, None if they cannot be told apart."""
        if not any(_is_context(self._messages[number]) for number in self._answers):
            return generations
        if len(generations) == len(self._answers):
            pairs = zip(self._answers, generations, strict=True)
            return [span for number, span in pairs if not _is_context(self._messages[number])]
        self.find_texts()
        texts = [(self._marker.places[number].turn, span) for number, span in sorted(self._spans.items())]
        turns = []
        for generation in generations:
            owners = self._owners(generation, texts)
            are_context = {_is_context(self._messages[number]) for number in owners}
            if len(are_context) != 1:
                return None
            if are_context == {False}:
                turns.append(generation)
        return turns

    def _owners(self, generation: tuple[int, int], texts: Sequence[tuple[int, tuple[int, int]]]) -> set[int]:
        """Return the assistant's turns whose texts a generation shows, or else the one that it ends or begins."""
        begin, end = generation
        within = {turn for turn, span in texts if span[0] < end and span[1] > begin}
        if within or self._roles is not _ROLES:
            return within & {*self._answers}
        last = max((turn for turn, span in texts if span[1] <= begin), default=-1)
        return {next((number for number in self._answers if number >= last), -1)} - {-1}


def _describe(error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split())
    if "'strftime_now' is undefined" in text:
        return "it asks for the date of today, strftime_now, and no date enters the data: write one into a copy"
    if isinstance(error, UnicodeEncodeError):
        return "its text has half a surrogate pair"
    return text[:100]


def _compile(source: str) -> Template:
    """Compile a template as transformers does, without `strftime_now`: no date of today enters the data."""

    class Generation(ext.Extension):
        """The block `{% generation %}` of transformers, whose text is marked."""

        tags = {"generation"}  # noqa: RUF012  as in Jinja's own

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            text = caller()
            if _GENERATION[0] in text:
                raise TemplateError("one {% generation %} within another")
            return f"{_GENERATION[0]}{text}{_GENERATION[1]}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


class _Server:
    """Answers the requests of the parent."""

    def __init__(self) -> None:
        self._renderer: Renderer | None = None

    def answer(self, request: Mapping[str, Any]) -> object:
        if self._renderer is None:
            try:
                self._renderer = Renderer(request["source"], request["special"])
            except MemoryError:
                raise
            except Exception as error:
                return {"invalid": " ".join((str(error) or type(error).__name__).split())[:200]}
            return self._renderer.examine()
        if "documents" in request:
            return [self._renderer.render_document(document) for document in request["documents"]]
        try:
            messages = next(iter(_forms(request["messages"])))
            text, _ = _generations(self._renderer.render(messages, {}, prompts=request["prompts"]))
        except Exception as error:
            return {"refusal": _describe(error)}
        return {"text": text}


def main() -> None:
    """Answer each line of stdin by one on stdout, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    server = _Server()
    seconds = float(sys.argv[1])
    for line in sys.stdin.buffer:
        # For a parent that was killed: its clock is gone, too.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = server.answer(json.loads(line))
        except MemoryError:
            answer = {"memory": f"{_MOST_BYTES >> 30} GiB"}
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
