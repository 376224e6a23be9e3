"""Command lines whose mistakes are one clear line: the parser, the types of flags, conditions on flags. No torch."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from llmscale.config.user_paths import check_other_run, check_path, check_path_or_url, check_text
from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean
from llmscale.terminal.colour import paint
from llmscale.terminal.human_numbers import parse_bytes, parse_number, parse_quantity, parse_whole

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: Headings of a help text, and the words that its first paragraphs begin with.
_HEADING = re.compile(r"^(?:example|usage):|^[a-z][^\n]*:$", re.MULTILINE)
_NEXT_LINE = " \\"
#: Smallest width of help, as in argparse.
_LEAST_WIDTH = 11
_STEPS = re.compile(r"([0-9]{1,12}):([0-9]{1,12})")

FlagContainer = argparse._ActionsContainer
"""A parser or an argument group."""
NamespaceT = TypeVar("NamespaceT")
_T = TypeVar("_T")


class Need(NamedTuple):
    """Settings that have no effect unless another setting allows it."""

    keys: str
    """The settings, separated by spaces."""
    other: str
    """The flag that they need (`--eval-every N`), or `with` and the flag that excludes them (`with --no-shuffle`)."""
    is_met: Callable[[Any], object] | None = None
    """Condition on all settings; default: the first flag of `other` is set."""

    def others(self) -> set[str]:
        """Return the keys of the flags that `other` names."""
        return {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]*)", self.other)}

    def check(self, given: Collection[str], settings: object, where: str = "") -> None:
        """Raise ConfigError for the first of the `given` settings that has no effect; `where` begins the message."""
        for key in self.keys.split():
            if key in given and not (self.is_met(settings) if self.is_met else getattr(settings, *self.others())):
                value = getattr(settings, key)
                flag = f"--{key.replace('_', '-')}"
                if isinstance(value, list):
                    words = " ".join(map(str, value))
                elif value is True:
                    words = ""
                else:
                    words = value
                if self.other.startswith("with "):
                    given_flag = flag if value is True else f"{flag} {words}"
                    raise ConfigError(f"{where}{given_flag} has no effect {self.other}. Drop one of them.")
                words = f"{words or 'it'} has no effect: add it, or drop {flag}"
                raise ConfigError(f"{where}{flag} needs {self.other}. Without that {words}.")


class FittingHelp(argparse.HelpFormatter):
    """Help whose usage and example fit the terminal, too."""

    def fit_example(self, command: str) -> str:
        """Return the paragraph of an example, on several lines of a shell if the terminal is narrow."""
        parts: list[str] = []
        for word in shlex.split(command):
            if parts and re.fullmatch(r"-\S+", parts[-1]) and not word.startswith("-"):
                parts[-1] += f" {shlex.quote(word)}"  # a flag and its value stay on one line
            else:
                parts.append(shlex.quote(word))
        lines = ["example:"]
        for part in parts:
            if len(lines[-1]) + len(part) + len(" " + _NEXT_LINE) > max(self._width, _LEAST_WIDTH):
                lines[-1] += _NEXT_LINE
                lines.append("   ")
            lines[-1] += f" {part}"
        return "\n".join(lines) + "\n\n"

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        """Return the usage with required flags alone: the help lists all."""
        required = [action for action in actions if action.required or not action.option_strings]
        text = super()._format_usage(usage, required, (), prefix)
        # argparse passes an empty prefix when it computes the names of subcommands.
        if prefix == "" or usage:
            return text
        import textwrap  # as in argparse: only help needs it

        words = " ".join(text.replace(self._prog, f"{self._prog} [FLAGS]", 1).split())
        width = max(self._width, _LEAST_WIDTH)
        lines = textwrap.wrap(words, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines) + "\n\n"


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError and knows the closest legal flag or subcommand."""

    example: str
    """Command that the help begins with; its words are quoted for a shell."""
    needs: Sequence[Need] = ()
    """Conditions on the flags that are given."""
    passes_on: str = ""
    """Program whose flags follow `--`."""
    lists_all: str = "--help"
    """Flag with its value that lists all flags."""

    def __init__(self, *, example: str = "", **settings: object) -> None:
        """Take argparse's settings. Flags cannot be abbreviated, since `--se` must not come to mean `--seed`."""
        settings = {"formatter_class": FittingHelp, **settings}
        super().__init__(**settings)  # type: ignore[arg-type]  # argparse's own keywords
        self.allow_abbrev = False
        self.example = example

    def format_help(self) -> str:
        """Return the help, with the example first."""
        formatter = self._get_formatter()
        assert isinstance(formatter, FittingHelp)
        return (formatter.fit_example(self.example) if self.example else "") + super().format_help()

    def parse_known_args(  # type: ignore[override]  # argparse overloads on the namespace
        self, args: Sequence[str] | None = None, namespace: NamespaceT | None = None
    ) -> tuple[NamespaceT, list[str]]:
        """Parse as argparse does, but refuse unknown flags, flags given twice and flags without effect."""
        words = list(itertools.takewhile(lambda word: word != "--", sys.argv[1:] if args is None else args))
        if self._subparsers is not None:
            # The other words belong to the subcommand, whose parser checks them.
            words = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        given = self._refuse_repeated(words)
        # Before argparse reports that a required flag is missing, when it is only misspelt.
        self._refuse_unknown([word for word in words if word.startswith("--")])
        known, unknown = super().parse_known_args(args, namespace)
        self._fill_optional_positional(known, unknown)
        self._refuse_unknown([*unknown, *self._stray_words(known, args)])
        for need in self.needs:
            need.check(given, known)
        return known, unknown  # type: ignore[return-value]

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        unknown = [word for word in (word.split("=")[0] for word in words) if word not in self._option_string_actions]
        if unknown:
            hint = did_you_mean(unknown[0], self._option_string_actions)
            if self.passes_on:
                if unknown[0].startswith("-"):
                    example = f": `{self.prog} ... -- {unknown[0]} ...`"
                else:
                    example = ""
                hint += f" Flags of {self.passes_on} follow a lone --{example}."
            raise ConfigError(f"unknown argument '{unknown[0]}'.{hint} `{self.prog} {self.lists_all}` lists all.")

    def _stray_words(self, known: object, args: Sequence[str] | None) -> list[str]:
        """Return the words for the program that `passes_on` names that do not follow `--`."""
        if not self.passes_on:
            return []
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words:
            num_passed_on = len(words) - words.index("--") - 1
        else:
            num_passed_on = 0
        rest = next(action.dest for action in self._get_positional_actions() if action.nargs == argparse.ZERO_OR_MORE)
        given: list[str] = getattr(known, rest)
        return given[: max(0, len(given) - num_passed_on)]

    def _fill_optional_positional(self, known: object, unknown: list[str]) -> None:
        """Set an optional positional argument that follows a flag, which argparse leaves among the unknown words."""
        for action in self._get_positional_actions():
            if action.nargs == argparse.ZERO_OR_MORE and not getattr(known, action.dest) and unknown[:1] == ["--"]:
                setattr(known, action.dest, unknown[1:])
                unknown.clear()
            is_absent = action.nargs == argparse.OPTIONAL and getattr(known, action.dest) is action.default
            is_word = bool(unknown) and (" " in unknown[0] or not unknown[0].startswith("-"))
            if is_absent and (is_word or unknown[:1] == ["--"]):
                if is_word:
                    word = unknown.pop(0)
                else:
                    word = unknown.pop(1)
                setattr(known, action.dest, self._get_value(action, word))
                del unknown[: unknown[:1] == ["--"]]

    def _refuse_repeated(self, words: Sequence[str]) -> Collection[str]:
        """Return the settings that `words` give. Raises ConfigError for one that is given twice."""
        given: dict[str, tuple[str, str]] = {}
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                continue
            if not equals and action.nargs != 0:
                value = following
            if action.dest in given and not isinstance(action, argparse._AppendAction):
                first, before = given[action.dest]
                if first != name:
                    raise ConfigError(f"{first} and {name} are the same setting twice. Give it once.")
                values = f": {before} and {value}" if value else ""
                every = ", with all its values" if action.nargs in ("+", "*") else ""
                raise ConfigError(f"{name} is given twice{values}. Give it once{every}.")
            given[action.dest] = name, value
        return given

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print with bold headings on a terminal. Raises OSError if the help cannot be written; argparse ignores it."""
        file = file or sys.stderr
        file.write(_HEADING.sub(lambda match: paint(match.group(), "bold", file), message))

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        # The first of a flag's names is enough.
        message = re.sub(r"^argument (--[^\s/]+)/\S+:", r"argument \1:", message)
        if valueless := re.search(r"argument (?:-\w/)?(\S+): ignored explicit argument (.*)", message):
            message = f"{valueless[1]} takes no value, and {valueless[2]} is given"
        choice = re.search(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            name, given, words = choice.groups()
            legal = [word.strip(" '\"") for word in words.split(",")]
            if name.startswith("-"):
                prefix = f"{name.rpartition('/')[2]} "
            else:
                prefix = ""
            raise ConfigError(f"{prefix}'{given}' is not known.{did_you_mean(given, legal)} Legal: {', '.join(legal)}.")
        raise ConfigError(f"{message}. `{self.prog} {self.lists_all}` lists all flags.")


def flag(
    parser: FlagContainer,
    name: str,
    help: str,
    kind: Callable[[str], object] | None = None,
    default: object = None,
    **settings: Any,
) -> None:
    """Add a flag whose `name` includes the metavar, such as `--seq-len T`, or `--long|--short T` for one of two names.
    The help ends with the default.

    A name without metavar and choices gives a switch. Further `settings` go to `add_argument`.
    """
    names, _, metavar = name.partition(" ")
    options = names.split("|")
    if default not in (None, "", []):
        help += f"; default: {f'{default:g}' if isinstance(default, float) else default}"
    if metavar:
        settings["metavar"] = metavar
    elif "choices" in settings:
        settings["metavar"] = "|".join(settings["choices"])
    if kind:
        settings["type"] = kind
    if "metavar" not in settings:
        parser.add_argument(*options, action="store_true", help=help, **settings)
    else:
        parser.add_argument(*options, default=default, help=help, **settings)


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `lowest` to `highest`, such as 1,000 and 10M."""

    def parse(text: str) -> int:
        value = None
        with suppress(ValueError):
            value = parse_whole(text)
        if value is None or not lowest <= value <= highest:
            if value is not None and value > highest:
                most = f" and at most {highest:,}"
            else:
                most = ""
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {lowest}{most}, not '{text}'")
        return value

    return parse


def number(lowest: float, highest: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a type for numbers from `lowest`, or only `above` it, to `highest`: without suffix, such as 1,000."""

    def parse(text: str) -> float:
        value = math.nan
        with suppress(ValueError):
            value = float(parse_number(text, with_suffix=False))
        is_enough = lowest < value if above else lowest <= value
        if not is_enough or not value <= highest:
            bound = f"above {lowest:g}" if above else f"of at least {lowest:g}"
            most = f" and at most {highest:g}" if highest <= 1 or value > highest else ""
            raise argparse.ArgumentTypeError(f"must be a number {bound}{most}, not '{text}'")
        return value

    return parse


def quantity(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a type for numbers with or without a suffix, such as 70B."""

    def parse(text: str) -> float:
        try:
            value = parse_quantity(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise argparse.ArgumentTypeError(f"must be a number above 0 such as 5.76e23, 70B or 1.4T, not '{text}'")
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be from {lowest:g} to {highest:g}, not '{text}'")
        return value

    return parse


def byte_size(text: str) -> int:
    """Parse a number of bytes with its unit, such as 5GB or 512MiB."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a size with its unit such as 5GB (10^9 bytes each) or 512MiB (2^20 bytes each), not '{text}'"
        ) from None


def _type_of(check: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return the type of a flag whose text passes one of user_paths' checks."""

    def parse(text: str) -> _T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, not '{text}'") from None

    return parse


local_path = _type_of(check_path)
"""Type of a path on this machine."""
run_place = _type_of(check_other_run)
"""Type of a run folder or a run's URL, for which the folder of its copy is returned."""
nonblank = _type_of(check_text)
"""Type of a text that is not blank."""
path_or_url = _type_of(check_path_or_url)
"""Type of a path, or of text that begins with a scheme (s3://, hf:)."""


def parse_step_range(flag: str, text: str, meaning: str, most: int | None = None) -> tuple[int, int]:
    """Parse steps A to B-1, given as A:B and counted from 1, as (A, B).

    `meaning` tells in an error what happens with the steps. Raises ConfigError, also for more than `most` steps.
    """
    matched = _STEPS.fullmatch(text.strip())
    first, end = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 1 <= first < end:
        raise ConfigError(
            f"{flag} {text[:80]!r} is not a range of steps. Give A:B with 1 <= A < B: of steps A to B-1, as they are "
            f"printed, {meaning}, such as 1000:1010."
        )
    if most is not None and end - first > most:
        raise ConfigError(f"{flag} {text[:80]}: {end - first:,} steps are too many. Give at most {most}.")
    return first, end
