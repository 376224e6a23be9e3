"""Public ds_configs are taken as they are, or all that is wrong with them is said at once."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path

import pytest

from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.foreign import read_foreign
from llmscale.config.deepspeed.resolve import fix_ds_config, parse_ds_config
from llmscale.config.deepspeed.rules import find_problems
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run, with_ds_keys
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError

#: Files with the keys of public ones, each with something that the others lack.
FILES = json.loads(Path(__file__).with_name("public_files.json").read_text())
TAKEN: dict[str, dict[str, object]] = FILES["taken"]
REFUSED: dict[str, dict[str, object]] = FILES["refused"]
FACTS = SetFacts(4096, 128, 100_000, 0)


def train(file: dict[str, object], *flags: str, ranks: int = 1) -> tuple[RunConfig, ResolvedRun]:
    ds = parse_ds_config(file, "my.json")
    config = with_ds_keys(parse_run_config(["--model", "tiny-1m", *flags]), ds)
    return config, resolve_run(config, ds, FACTS, ranks)


def plan(file: dict[str, object], *flags: str, ranks: int = 1) -> tuple[int, int, int]:
    batch: BatchPlan = train(file, *flags, ranks=ranks)[1].plan
    return batch.micro_batch_size, batch.gradient_accumulation_steps, batch.global_batch_size


@pytest.mark.parametrize("name", TAKEN)
def test_a_public_file_is_taken_at_once(name: str) -> None:
    before = copy.deepcopy(TAKEN[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = train(TAKEN[name], "--steps", "20000")[1]
        # What DeepSpeed gets has no "auto", and no key that it would not read.
        assert resolved.engine_config.train_batch_size == resolved.ds_config["train_batch_size"]
    assert '"auto"' not in repr(resolved.ds_config).replace("'", '"')
    assert before == TAKEN[name]


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_take_one_round(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_ds_config(REFUSED[name], "my.json")
    text = str(error.value)
    problems = find_problems(read_foreign(REFUSED[name]))
    assert all(problem.text in text for problem in problems)
    assert "\n" not in text
    assert len(problems) == 1 or "doctor --ds my.json --fixed OUT" in text
    fixed, changes = fix_ds_config(REFUSED[name])
    train(fixed, "--steps", "20000")
    assert {problem.text for problem in problems} <= {change.text for change in changes}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_the_fixed_file_says_the_same_and_needs_no_further_change(name: str) -> None:
    file = (TAKEN | REFUSED)[name]
    fixed, _ = fix_ds_config(file)
    assert fix_ds_config(fixed) == (fixed, [])
    if name in TAKEN:
        assert train(fixed, "--steps", "20000")[1].as_dict() == train(file, "--steps", "20000")[1].as_dict()
        assert parse_ds_config(fixed, "my.json").run_keys == parse_ds_config(file, "my.json").run_keys


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_no_key_is_ignored_without_a_word(name: str) -> None:
    """Every entry reaches DeepSpeed, or is named by a notice, a problem or what was left out as off."""
    reading = read_foreign((TAKEN | REFUSED)[name])
    edited = {path for change in (*reading.notices, *reading.silent, *reading.problems) for path in change.edits}
    text = " ".join(change.text for change in (*reading.notices, *reading.problems))
    for key in (TAKEN | REFUSED)[name]:
        assert key in reading.config or key in edited or key in text, key


@pytest.mark.parametrize(
    ("file", "flags", "ranks", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, (), 1, (4, 8, 32)),
        ({"gradient_accumulation_steps": 4}, (), 1, (8, 4, 32)),
        ({"train_batch_size": 64}, (), 2, (32, 1, 64)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (), 2, (8, 4, 64)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (), 2, (4, 3, 24)),
        ({"train_micro_batch_size_per_gpu": 6}, (), 1, (6, 5, 30)),
        ({"train_batch_size": 64}, ("--global-batch-size", "16"), 1, (16, 1, 16)),
        ({"train_batch_size": 64}, ("--global-batch-tokens", "2048"), 1, (16, 1, 16)),
        ({"train_micro_batch_size_per_gpu": 4}, ("--micro-batch-size", "2"), 1, (2, 16, 32)),
        ({"gradient_accumulation_steps": 4}, ("--micro-batch-size", "2"), 2, (2, 4, 16)),
        # DeepSpeed would refuse these on one rank; the accumulation gives way, with a notice.
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
            (),
            1,
            (1, 16, 16),
        ),
    ],
)
def test_batch_sizes_of_the_file_count_as_flags_do(
    file: dict[str, object], flags: tuple[str, ...], ranks: int, expected: tuple[int, int, int]
) -> None:
    assert plan(file, *flags, ranks=ranks) == expected


def test_a_batch_size_that_gives_way_is_named() -> None:
    file = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    resolved = train(file)[1]
    (notice,) = resolved.ds.batch_notices(resolved.plan)
    assert notice.startswith("gradient_accumulation_steps 1 of my.json gives way to 16: ")


def test_optimizer_and_scheduler_are_read_as_flags() -> None:
    file = TAKEN["cosine"]
    config, resolved = train(file, "--steps", "20000")
    assert (config.lr, config.beta1, config.beta2, config.weight_decay) == (1e-4, 0.9, 0.95, 0.1)
    assert (config.schedule, config.warmup_steps, config.decay_steps) == ("WarmupCosineLR", 500, 10_000)
    assert resolved.schedule.min_lr_frac == 0.1
    notices = parse_ds_config(file, "my.json").warnings
    assert any("optimizer is taken as --optimizer adamw --lr 0.0001 --eps 1e-08" in notice for notice in notices)


def test_flags_go_before_the_file() -> None:
    config, _ = train(TAKEN["cosine"], "--steps", "20000", "--lr", "1e-3", "--warmup-tokens", "1024")
    assert (config.lr, config.warmup_steps, config.beta2) == (1e-3, None, 0.95)
    # Numbers of the file's AdamW are not Muon's.
    config, _ = train(TAKEN["cosine"], "--steps", "20000", "--optimizer", "muon")
    assert config.lr is None
    # Without effect under another schedule.
    config, _ = train(TAKEN["cosine"], "--steps", "20000", "--schedule", "constant")
    assert (config.schedule, config.decay_steps) == ("constant", None)


def test_deepspeeds_scheduler_sets_the_learning_rate() -> None:
    config, _ = train(
        {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 10}},
        }
    )
    assert (config.lr, config.schedule, config.warmup_steps) == (2e-5, "WarmupLR", 10)


def test_an_optimizers_clipping_counts_beside_an_automatic_one() -> None:
    file = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.3}}}
    assert train(file)[1].ds_config["gradient_clipping"] == 0.3
    assert train({**file, "gradient_clipping": 0.5})[1].ds_config["gradient_clipping"] == 0.5


def test_an_automatic_type_is_that_of_hugging_faces_trainer() -> None:
    blocks = {
        "optimizer": {"type": "auto", "params": {"lr": 1e-3, "betas": "auto"}},
        "scheduler": {"type": "auto", "params": {"warmup_num_steps": 10}},
    }
    config, _ = train(blocks)
    assert (config.optimizer, config.lr, config.schedule, config.warmup_steps) == ("adamw", 1e-3, "WarmupLR", 10)


def test_a_refused_parameter_of_adam_is_told_deepspeeds_names() -> None:
    with pytest.raises(ConfigError, match="is not among lr, betas, eps, weight_decay, max_grad_norm"):
        parse_ds_config({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "my.json")
    written = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "beta2": 0.95}}}
    with pytest.raises(ConfigError, match=r"params\.beta2' is not a key that DeepSpeed reads.* betas, such as \[0\.9"):
        parse_ds_config(written, "my.json")
    assert fix_ds_config(written)[0]["optimizer"]["params"] == {"lr": 1e-4, "betas": [0.9, 0.95]}
    with pytest.raises(ConfigError, match="Delete it and give --schedule and --warmup-steps"):
        parse_ds_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "my.json")


def test_the_old_offload_keeps_memory_that_shall_not_be_pinned() -> None:
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    fixed, _ = fix_ds_config({"zero_optimization": old})
    assert fixed == {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}


@pytest.mark.parametrize("key", ["zero_optimization.stage", "foo.bar", "//a.b"])
@pytest.mark.parametrize("zero", [{"stage": 2}, {}])
def test_a_fix_deletes_a_key_with_dots_in_its_name(key: str, zero: dict[str, object]) -> None:
    fixed, _ = fix_ds_config({"zero_optimization": zero, key: 3})
    assert fixed == {"zero_optimization": {"stage": 0, **zero}}


def test_a_curriculum_names_the_flags_for_growing_sequences() -> None:
    with pytest.raises(ConfigError, match="with --seq-len-ramp-from N --seq-len-ramp-tokens N sequences grow"):
        parse_ds_config(REFUSED["curriculum_tutorial"], "my.json")


@pytest.mark.parametrize(
    ("file", "expected", "line"),
    [
        ({"fp16": {"enabled": True}}, ("fp16", 1), "stage 0 is read as 1"),
        ({"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 0}}, ("fp16", 1), "stage 0 is read as 1"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, ("bf16", 0), ""),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": "auto"}}, ("bf16", 2), 'stage "auto" is read as 2'),
    ],
)
def test_a_stage_that_cannot_be_meant_is_read_as_the_one_that_is(
    file: dict[str, object], expected: tuple[str, int], line: str
) -> None:
    ds = parse_ds_config(file, "my.json")
    assert (ds.precision, ds.zero_stage) == expected
    assert any(line in warning for warning in ds.warnings) or not line


def test_a_fix_keeps_quoted_numbers_and_bare_switches() -> None:
    """Deleting them would train another stage in another precision."""
    file = {"zero_optimization": {"stage": "2", "overlap_comm": "true"}, "bf16": True, "train_batch_size": "16"}
    fixed, _ = fix_ds_config(file)
    assert fixed == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "train_batch_size": 16,
    }
    fixed, _ = fix_ds_config({"zero_optimization": 3, "bf16": {"enabled": "true"}})
    assert fixed == {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match=r'stage = "2": must be 0, 1, 2 or 3\. Write 2\.'):
        parse_ds_config(file, "my.json")


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "SGD", "Adagrad"])
def test_another_optimizers_learning_rate_is_not_advised_for_adamw(kind: str) -> None:
    with pytest.raises(ConfigError, match="give --optimizer adamw, with --lr N") as error:
        parse_ds_config({"optimizer": {"type": kind, "params": {"lr": 0.011}}}, "my.json")
    assert "0.011" not in str(error.value)


def test_legal_keys_are_listed_once() -> None:
    file: dict[str, object] = {name: 1 for name in ("pipe_parallel_size", "model_parallel_size", "hidden_size")}
    with pytest.raises(ConfigError, match="3 problems") as error:
        parse_ds_config(file, "my.json")
    assert str(error.value).count("Legal top-level keys") == 1


@pytest.mark.parametrize("section", ["moe", "some_new_section"])
def test_a_section_that_is_off_is_nothing(section: str) -> None:
    assert parse_ds_config({section: {"enabled": False, "ep_size": 1}}, "my.json").warnings == ()
    with pytest.raises(ConfigError, match=section):
        parse_ds_config({section: {"enabled": True, "ep_size": 1}}, "my.json")


@pytest.mark.parametrize(
    ("file", "hint", "fixed"),
    [
        # A section is no misspelt number, and is not moved where it would be deleted.
        ({"log": {"level": "info"}}, "Delete it. Legal top-level keys", {}),
        ({"dump": {"folder": "x"}}, "Delete it. Legal", {}),
        ({"wall_clock": {"every": 3}}, "Delete it. Legal", {}),
        ({"zero_optimization": {"stage": 2, "reduce_bucket": {"size": 3}}}, "Delete it", {"stage": 2}),
        ({"grad_clip": "abc"}, "Did you mean 'gradient_clipping'?", {}),
        # One that several sections have is not put into the first of them.
        ({"enabled": True}, "It belongs in bf16 or fp16 or", {}),
        ({"log": "info"}, "Did you mean 'log_level'?", {"log_level": "info"}),
        ({"grad_clip": 0.5}, "Did you mean 'gradient_clipping'?", {"gradient_clipping": 0.5}),
        ({"zero": {"stage": 2}}, "Did you mean 'zero_optimization'?", {"zero_optimization": {"stage": 2}}),
        ({"zero": 3}, "Did you mean 'zero_optimization'?", {"zero_optimization": {"stage": 3}}),
        ({"flops_profile": {"enabled": False, "top_modules": 2}}, "", {}),
    ],
)
def test_a_value_moves_only_where_it_is_legal(file: dict[str, object], hint: str, fixed: dict[str, object]) -> None:
    if hint:
        with pytest.raises(ConfigError, match=re.escape(hint)):
            parse_ds_config(file, "my.json")
    got = fix_ds_config(file)[0]
    assert (got.get("zero_optimization") if "zero_optimization" in file else got) == fixed
