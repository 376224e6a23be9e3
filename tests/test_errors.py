"""What a user's mistake is answered with."""

from __future__ import annotations

import errno
import string
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES
from llmscale.config.hardware import GPUS, INTERCONNECTS
from llmscale.config.presets import PRESETS
from llmscale.config.run_config import RunConfig
from llmscale.errors import write_failure
from llmscale.suggestions import OTHER_NAMES, did_you_mean

CARDS = ("a100-80gb", "h100-80gb", "h100-80gb-pcie", "h200", "t4", "v100-16gb")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("h100", "h100-80gb"), ("t4-16gb", "t4"), ("a100-80", "a100-80gb"), ("h20", "h200"), ("v100-16bg", "v100-16gb")],
)
def test_the_closest_name_is_suggested(word: str, meant: str) -> None:
    assert did_you_mean(word, CARDS) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize("word", ["", "tpu", "zzzz"])
def test_nothing_is_suggested_when_nothing_is_close(word: str) -> None:
    assert did_you_mean(word, CARDS) == ""


#: Every kind of name that a user writes.
SHIPPED = (
    tuple(PRESETS),
    tuple(gpu.name for gpu in GPUS),
    tuple(network.name for network in INTERCONNECTS),
    tuple(DS_CONFIGS.names()),
    tuple(HOSTFILES.names()),
    tuple(RunConfig.model_fields),
)


@cache
def edits(word: str) -> set[str]:
    """All words that one letter more, less or another, or two neighbours that changed places, make of it."""
    places = range(len(word) + 1)
    letters = string.ascii_lowercase + string.digits
    return (
        {word[:at] + letter + word[at:] for at in places for letter in letters}
        | {word[:at] + letter + word[at + 1 :] for at in places for letter in letters}
        | {word[:at] + word[at + 1 :] for at in places}
        | {word[:at] + word[at : at + 2][::-1] + word[at + 2 :] for at in places}
    )


@given(st.data())
def test_one_edit_of_a_name_gives_a_name_back_that_is_one_edit_away(data: st.DataObject) -> None:
    """The name itself, wherever no other one is as near."""
    names = data.draw(st.sampled_from(SHIPPED))
    name = data.draw(st.sampled_from(names))
    word = data.draw(st.sampled_from(sorted(edits(name) - set(names))))
    plain = word.replace("-", "_")
    assume(len(word) > 1 and plain not in OTHER_NAMES and plain not in (n.replace("-", "_") for n in names))
    # h100 is an edit of h200, and means h100-80gb.
    assume(not any(other.replace("-", "_").startswith(f"{plain}_") for other in names))
    near = [other for other in names if word in edits(other) or plain in edits(other.replace("-", "_"))]
    assert did_you_mean(word, names) in {f" Did you mean '{other}'?" for other in near}


def test_a_name_that_the_word_begins_with_is_not_closer_than_one_edit() -> None:
    assert did_you_mean("zero2_ofload", DS_CONFIGS.names()) == " Did you mean 'zero2_offload'?"


def test_a_suggestion_is_never_the_word_itself() -> None:
    assert did_you_mean("zero2", ["zero2", "zero3"]) == ""
    assert did_you_mean("Zero2", ["zero2"]) == " Did you mean 'zero2'?"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, "Cannot write /data/out: "),
        ("/data/out/shard", "Cannot write /data/out: "),
        ("/data/.out.partial/shard", "Cannot write /data/out: "),
        ("/data", "Cannot write /data/out: "),
        ("/data2/crawl.jsonl", "/data2/crawl.jsonl: "),
        ("/dat", "/dat: "),
    ],
)
def test_a_failed_write_names_the_file_that_failed(named: str | None, message: str) -> None:
    assert str(write_failure(OSError(errno.EACCES, "Denied", named), Path("/data/out"))).startswith(message)
