"""Command lines whose mistakes are one clear line. No torch."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean
from llmscale.terminal.colour import paint

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: Of a section of a help text, and the word that every help text begins with.
_HEADING = re.compile(r"^usage:|^[a-z][^\n]*:$", re.MULTILINE)
#: Of a usage, what belongs together: a flag with its values.
_USAGE_PART = re.compile(r"\[[^][]*(?:\[[^][]*\][^][]*)*\](?=\s|$)|--?[a-z][\w-]* [A-Z]\S*")
_USAGE_INDENT = " " * 4
#: As argparse: narrower than this, help is as it is.
_LEAST_WIDTH = 11
NamespaceT = TypeVar("NamespaceT")


class Need(NamedTuple):
    """Settings that have no effect unless another setting allows it."""

    keys: str
    """The settings, separated by spaces."""
    other: str
    """The flag that they need (`--eval-every N`), or `with` and what excludes them (`with --temperature 0`)."""
    is_met: Callable[[Any], object] | None = None
    """Condition on all settings; default: the first flag of `other` is set."""

    def others(self) -> set[str]:
        """Return the keys of the flags that `other` names."""
        return {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]*)", self.other)}

    def check(self, given: Collection[str], settings: object, where: str = "") -> None:
        """Raise ConfigError for the first of the `given` settings that has no effect; `where` begins the message."""
        for key in self.keys.split():
            if key in given and not (self.is_met(settings) if self.is_met else getattr(settings, *self.others())):
                value, flag = getattr(settings, key), f"--{key.replace('_', '-')}"
                shown = " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else value
                if self.other.startswith("with "):
                    raise ConfigError(f"{where}{flag} {shown} has no effect {self.other}. Drop one of them.")
                shown = f"{shown or 'it'} has no effect: add it, or drop {flag}"
                raise ConfigError(f"{where}{flag} needs {self.other}. Without that {shown}.")


class FittingHelp(argparse.HelpFormatter):
    """Help whose usage, too, fits the terminal: argparse sets what follows a long command's name so far to the right
    that a long flag stands out of the screen."""

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        # Without a prefix it is what the names of subcommands begin with.
        width = max(self._width, _LEAST_WIDTH)
        if prefix == "" or max(map(len, text.splitlines())) <= width:
            return text
        import textwrap  # as argparse does: only help needs it

        def keep_together(part: re.Match[str]) -> str:
            fits = len(_USAGE_INDENT + part.group()) <= width
            return part.group().replace(" ", "\0") if fits else part.group()

        whole = _USAGE_PART.sub(keep_together, " ".join(text.split()))
        lines = textwrap.wrap(
            whole, width, subsequent_indent=_USAGE_INDENT, break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(lines).replace("\0", " ") + "\n\n"


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError and knows the closest legal flag or subcommand."""

    needs: Sequence[Need] = ()
    """Conditions on the flags that are given."""
    passes_on: str = ""
    """Program whose flags follow `--`."""

    def __init__(self, **settings: object) -> None:
        """As argparse, but no flag may be abbreviated, in subcommands neither: `--se` must not come to mean
        `--seed`."""
        settings = {"formatter_class": FittingHelp, **settings}
        super().__init__(**settings)  # type: ignore[arg-type]  # argparse's own keywords
        self.allow_abbrev = False

    def parse_known_args(  # type: ignore[override]  # argparse overloads on the namespace
        self, args: Sequence[str] | None = None, namespace: NamespaceT | None = None
    ) -> tuple[NamespaceT, list[str]]:
        """Parse as argparse does, but refuse unknown flags, flags given twice and flags without effect.

        The legal flags of a subcommand are known here only."""
        words = list(itertools.takewhile(lambda word: word != "--", sys.argv[1:] if args is None else args))
        if self._subparsers is not None:
            # The rest belongs to the subcommand.
            words = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        given = self._refuse_repeated(words)
        # Before argparse says that the flag it was mistaken for is missing.
        self._refuse_unknown([word for word in words if word.startswith("--")])
        known, unknown = super().parse_known_args(args, namespace)
        self._fill_optional_positional(known, unknown)
        self._refuse_unknown(unknown)
        for need in self.needs:
            need.check(given, known)
        return known, unknown  # type: ignore[return-value]

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        unknown = [flag for flag in (word.split("=")[0] for word in words) if flag not in self._option_string_actions]
        if unknown:
            hint = did_you_mean(unknown[0], self._option_string_actions)
            if self.passes_on:
                hint += f" Flags of {self.passes_on} follow a lone --: `{self.prog} ... -- {unknown[0]} ...`."
            raise ConfigError(f"unknown argument '{unknown[0]}'.{hint} `{self.prog} --help` lists all.")

    def _fill_optional_positional(self, known: object, unknown: list[str]) -> None:
        """argparse takes a positional argument that may be absent for absent as soon as a flag comes before it."""
        for action in self._get_positional_actions():
            is_absent = action.nargs == argparse.OPTIONAL and getattr(known, action.dest) is action.default
            is_word = bool(unknown) and (" " in unknown[0] or not unknown[0].startswith("-"))
            if is_absent and (is_word or unknown[:1] == ["--"]):
                word = unknown.pop(0) if is_word else unknown.pop(1)
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
            value = value if equals else following if action.nargs != 0 else ""
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
        """As argparse, which keeps silent about help that cannot be written; on a terminal its headings stand out."""
        file = file or sys.stderr
        file.write(_HEADING.sub(lambda match: paint(match.group(), "bold", file), message))

    def error(self, message: str) -> NoReturn:
        if valueless := re.search(r"argument (?:-\w/)?(\S+): ignored explicit argument (.*)", message):
            message = f"{valueless[1]} takes no value, and {valueless[2]} is given"
        choice = re.search(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            name, given, words = choice.groups()
            legal = [word.strip(" '\"") for word in words.split(",")]
            flag = f"{name.rpartition('/')[2]} " if name.startswith("-") else ""
            raise ConfigError(f"{flag}'{given}' is not known.{did_you_mean(given, legal)} Legal: {', '.join(legal)}.")
        raise ConfigError(f"{message}. `{self.prog} --help` lists all flags.")
