"""Every key says how it behaves, and what of it leaves the machine; texts lose folders and secrets."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config.deepspeed.resolve import read_ds_config
from llmscale.config.resolve import SetFacts, resolve_run
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import CHANGES_THAT_BREAK, KEYS, RunConfig, build_run_config, key
from llmscale.config.run_flags import describe_keys, keys_asked_by, literal_words, model_keys
from llmscale.config.run_keys import (
    IDENTITY,
    keys_of_ladder,
    keys_with,
    last_part,
    needs,
    path_keys,
    place_of,
    publish_keys,
    publish_text,
    publish_texts,
    publish_words,
)
from llmscale.errors import ConfigError
from llmscale.keys import Breaks, Command, Condition, MayDiffer, Outside, Ranks, Resume, value_at
from llmscale.planning.compilation import EAGER

WORDS = {kind: {word for part in get_args(kind) for word in get_args(part)} for kind in (Resume, Ranks)}


def test_every_key_is_declared_with_its_behaviour() -> None:
    """A field of pydantic's alone, or one without `resume` or `ranks`, is none."""
    assert [key for key in RunConfig.model_fields if key not in KEYS] == []
    with pytest.raises(TypeError, match="ranks"):
        key(3, resume="free")
    for name, behaviour in KEYS.items():
        resume, ranks = behaviour.resume, behaviour.ranks
        assert len(resume.consequence) > 20 if isinstance(resume, Breaks) else resume in WORDS[Resume], name
        assert len(ranks.why) > 5 if isinstance(ranks, MayDiffer) else ranks in WORDS[Ranks], name


def test_the_help_knows_the_same_keys_in_the_same_order() -> None:
    assert [*describe_keys()] == [*RunConfig.model_fields]
    for name, documented in describe_keys().items():
        assert (documented.metavar, documented.asked_by) == (KEYS[name].metavar, KEYS[name].asked_by), name


def test_keys_of_the_model_are_the_fields_of_the_shape() -> None:
    from_data = {"vocab_size", "seq_len", "document_end"}
    assert {*SHAPE_KEYS} == {*GPTShape.__dataclass_fields__} - from_data
    assert {*model_keys()} == {"model", *SHAPE_KEYS, "document_mask", "seq_len", "vocab_size"}


@pytest.mark.parametrize("name", [name for name, behaviour in KEYS.items() if behaviour.needs])
def test_conditions_name_keys_and_legal_values(name: str) -> None:
    for condition in KEYS[name].needs:
        if isinstance(condition, Condition):
            continue
        other, _, value = condition.removeprefix("not ").partition("=")
        for one in other.split(" or "):
            assert (one in KEYS or hasattr(RunConfig, one)) and one != name
        if value:
            assert getattr(build_run_config({other: value}), other) == value
    for need in needs():
        assert re.fullmatch(r"(with )?--[a-z].*", need.other)


def test_pairs_of_units_and_names_of_changes_exist() -> None:
    for behaviour in KEYS.values():
        assert not behaviour.in_place_of or behaviour.in_place_of in KEYS
        assert not behaviour.needs_of_model or behaviour.needs_of_model in SHAPE_KEYS


def test_every_told_key_has_a_place_in_a_prepared_run() -> None:
    config = parse_run_config(["--steps=200"])
    resolved = resolve_run(config, read_ds_config(config.ds), SetFacts(1000, 64, 10**6, 0), 2)
    run = SimpleNamespace(config=config, resolved=resolved, compilation=EAGER)
    for name, behaviour in KEYS.items():
        if behaviour.resume in ("logged", "weights"):
            value_at(place_of(name), run)


@pytest.mark.parametrize("command", get_args(Command))
def test_commands_take_what_the_keys_say(command: str) -> None:
    from llmscale.cli.main import build_parser

    parser = build_parser([command])
    (inner,) = (action.choices[command] for action in parser._actions if isinstance(action.choices, dict))
    helps = {action.dest: action.help for action in inner._actions}
    for name in {*keys_asked_by(command), *model_keys()} - {"optimizer"}:
        assert helps[name] == describe_keys()[name].asked_text.replace("%", "%%")


def test_a_commands_own_default_takes_the_place_of_the_keys() -> None:
    documented = describe_keys()
    assert documented["micro_batch_size"].asked_text.endswith("forward pass; default: the largest that fits.")
    assert documented["vocab_size"].asked_text == "Token ids of the model; default: the published model's."
    assert documented["keep_last"].asked_text.endswith("validation loss; default: 2.")
    assert documented["freeze"].asked_text == documented["freeze"].text


def test_every_number_has_a_unit() -> None:
    """An upper bound that comes with the type, for a value beyond it is a typing error."""
    for name, documented in describe_keys().items():
        if documented.kind in (int, float):
            with pytest.raises(ConfigError, match=rf"{name} = .*less than"):
                build_run_config({name: 10**19 if documented.kind is int else 1e39})


def test_what_breaks_a_run_is_in_its_identity() -> None:
    config = parse_run_config(
        ["--steps=200", "--global-batch-size=8", "--batch-ramp-from=2", "--batch-ramp-tokens=999"]
    )
    resolved = resolve_run(config, read_ds_config(config.ds), SetFacts(1000, 64, 10**6, 0), 2)
    sets, stream = SimpleNamespace(fingerprint="f"), SimpleNamespace(identity={"order": "o"})
    start = SimpleNamespace(config=config, sets=sets, resolved=resolved, stream=stream)
    identity = {name: value_at(place, start) for name, place in IDENTITY.items()}
    ramp = "8, from 2 over 16 samples"
    assert identity == {"seed": 1337, "seq_len": 64, "data": "f", "order": "o", "global_batch_size": ramp}
    assert identity.keys() == CHANGES_THAT_BREAK.keys()


def test_the_ladder_decides_sizes_tokens_and_where_runs_begin() -> None:
    decided = {*keys_of_ladder()}
    assert {name for name, key in SHAPE_KEYS.items() if key.of_model == "size"} | {*keys_with(begins=True)} <= decided
    for name, behaviour in KEYS.items():
        assert not behaviour.in_place_of or (name in decided) == (behaviour.in_place_of in decided)
    assert not decided & {"seed", "lr", "num_experts", "micro_batch_size", "save_every", "keep_last"}


def test_nodes_may_differ_in_the_keys_that_the_page_lists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    table = page.partition("These may differ:")[2].partition("\n| the way a value is given")[0]
    listed = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)[^`]*`", table)}
    paths = {name for name in path_keys() if KEYS[name].ranks == "resolved"}
    assert listed == {name for name, key in KEYS.items() if isinstance(key.ranks, MayDiffer)} | paths


def may_hold_anything(annotation: object) -> bool:
    """Return whether a type admits text that is not one of a few words."""
    if isinstance(annotation, type):
        return not issubclass(annotation, (bool, int, float, type(None)))
    return not [*literal_words(annotation)] and any(map(may_hold_anything, get_args(annotation)))


def test_every_key_with_text_says_what_leaves_the_machine() -> None:
    for name, field in RunConfig.model_fields.items():
        outside = KEYS[name].outside
        assert outside in get_args(Outside) or not may_hold_anything(field.annotation), name
    assert {name for name in path_keys() if KEYS[name].outside == "value"} == set()


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].outside in ("name", "private")])
def test_no_key_carries_its_folder(name: str) -> None:
    is_list = "list" in str(RunConfig.model_fields[name].annotation)
    secret = "hellaswag=/home/me/secret/x.jsonl" if name == "eval_tasks" else "/home/me/secret/x.jsonl"
    published = str(publish_keys({name: [secret] if is_list else secret}).get(name))
    words = publish_words([f"--{name.replace('_', '-')}", secret, f"--{name}={secret}", "--plain"])
    assert words[-1] == "--plain"
    for text in (published, " ".join(words)):
        assert "home" not in text and "secret" not in text
        assert ("x.jsonl" in text) == (KEYS[name].outside == "name")


def test_a_key_of_another_version_is_published_if_it_is_a_number() -> None:
    assert publish_keys({"new": "/home/me", "newer": 3, "listed": ["/home/me"], "lr": 1e-3}) == {"newer": 3, "lr": 1e-3}
    assert publish_words(["--new", "/home/me", "--lr", "1e-3", "--no-shuffle"]) == ["--lr", "1e-3", "--no-shuffle"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/home/me/data/set/", "set"),
        ("s3://key:token@bucket/a/set?token=abc#x", "set"),
        ("https://token@host", "host"),
        ("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("hf:owner/set:sample-10BT", "hf:owner/set:sample-10BT"),
        ("hf:/home/me/q", "hf:q"),
        ("~/set@2", "set@2"),
        ("/", "/"),
        (".", "."),
    ],
)
def test_the_last_part_of_a_path_or_url(path: str, part: str) -> None:
    assert last_part(path) == part


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("cannot read /home/me/a b/x.txt: gone", "cannot read a b/x.txt: gone"),
        ("[Errno 2] '/home/me/x'", "[Errno 2] 'x'"),
        ("see https://me:pw@host/a/b?key=1, then ~/runs/x", "see b, then x"),
        ("10,205 tok/s and 3/4 in runs/x; a / b", "10,205 tok/s and 3/4 in runs/x; a / b"),
        ("--run=/home/me/x", "--run=x"),
        ("<b>no memory</b> in </home/me/x>", "<b>no memory</b> in <x>"),
    ],
)
def test_text_keeps_its_words_and_loses_folders(text: str, published: str) -> None:
    assert publish_text(text) == published
    assert publish_texts({"a": [text, 3], "b": None}) == {"a": [published, 3], "b": None}
