from __future__ import annotations

import pytest

from llmscale.config.command_line import FlagParser, Need
from llmscale.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "word"),
    [(["x", "w"], "w"), (["x", "--seed", "1", "w"], "w"), (["x", "--seed", "1", "--", "-w"], "-w"), (["x"], None)],
)
def test_a_word_that_may_be_absent_may_stand_behind_flags(argv: list[str], word: str | None) -> None:
    parser = FlagParser(prog="tool")
    parser.add_argument("first")
    parser.add_argument("word", nargs="?")
    parser.add_argument("--seed")
    assert parser.parse_args(argv).word == word
    with pytest.raises(ConfigError, match="unknown argument 'more'"):
        parser.parse_args(["x", "--seed", "1", "w", "more"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--force"], "--force needs --emit FILE. Without that it has no effect: add it, or drop --force."),
        (["--top-k", "50"], "--top-k 50 has no effect with --cold. Drop one of them."),
        (["--seed", "1", "--seed", "2"], "--seed is given twice: 1 and 2. Give it once."),
        (["--seed=1", "--seed=1"], "--seed is given twice: 1 and 1. Give it once."),
        (["--force", "--force"], "--force is given twice. Give it once."),
        (["--force=yes"], "--force takes no value, and 'yes' is given."),
        (["--stop", "3"], "unknown argument '--stop'. Flags of train.py follow a lone --: `tool ... -- --stop ...`."),
        (["stray"], "unknown argument 'stray'. Flags of train.py follow a lone --. `tool --help`"),
        (["stray", "--", "--steps", "3"], "unknown argument 'stray'."),
        (["--warm", "stray"], "unknown argument 'stray'."),
        (["--emit", "x", "--force"], None),
        (["--top-k", "50", "--warm"], None),
        (["--emit", "x", "--", "--force", "--force"], None),
    ],
)
def test_a_flag_without_effect_is_refused(argv: list[str], message: str | None) -> None:
    parser = FlagParser(prog="tool")
    for flag in ("--emit", "--top-k", "--seed"):
        parser.add_argument(flag, default=50 if flag == "--top-k" else None)
    for flag in ("--force", "--warm"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("rest", nargs="*")
    parser.needs = [Need("force", "--emit FILE"), Need("top_k", "with --cold", lambda args: args.warm)]
    parser.passes_on = "train.py"
    if message is None:
        parser.parse_args(argv)
        return
    with pytest.raises(ConfigError) as raised:
        parser.parse_args(argv)
    assert str(raised.value).startswith(message)
