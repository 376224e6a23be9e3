"""Flags override the run file, the file overrides defaults; tests/bad_input has what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmscale.config.run_arguments import load_run_file, parse_run_config
from llmscale.config.run_config import CHANGES_THAT_BREAK, EXCLUSIVE_KEYS, build_run_config
from llmscale.config.run_flags import describe_keys
from llmscale.errors import ConfigError

YAML = "lr: 3e-4\nglobal_batch_size: 64\nmodel: gpt2-124m\nsteps: 100\nshuffle: false\nallow_changed: [data]\n"
TOML = YAML.replace(": ", " = ").replace("gpt2-124m", '"gpt2-124m"').replace("data", '"data"')


@pytest.fixture(params=["yaml", "yml", "toml"])
def run_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"run.{request.param}"
    path.write_text(TOML if request.param == "toml" else YAML)
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(run_file: Path) -> None:
    default = parse_run_config([])
    from_file = parse_run_config(["--config", str(run_file)])
    from_flags = parse_run_config(["--config", str(run_file), "--lr", "1e-3", "--model=tiny-1m", "--shuffle"])
    assert (default.lr, default.model, default.shuffle, default.seed) == (None, "tiny-10m", True, 1337)
    assert (from_file.lr, from_file.model, from_file.shuffle, from_file.seed) == (3e-4, "gpt2-124m", False, 1337)
    assert from_file.allow_changed == ["data"]
    assert (from_flags.lr, from_flags.model, from_flags.shuffle) == (1e-3, "tiny-1m", True)
    assert (from_flags.global_batch_size, from_flags.steps) == (64, 100), "what no flag names stays the file's"


#: Values of two units of a quantity that both may have, and what gives them an effect.
PAIRS = [
    (key, twin, *(("0.5", "0.25", "WarmupLR") if key.startswith("warmup_min") else ("8", "4096", "cosine")))
    for key, twin in EXCLUSIVE_KEYS
]


@pytest.mark.parametrize(("key", "twin", "one", "other", "schedule"), PAIRS)
def test_a_flag_overrides_the_file_s_entry_in_the_other_unit(
    key: str, twin: str, one: str, other: str, schedule: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    for in_file, as_flag in ((key, twin), (twin, key)):
        path.write_text(f"{in_file}: {one}\nschedule: {schedule}\n")
        config = parse_run_config(["--config", str(path), f"--{as_flag.replace('_', '-')}", other])
        assert getattr(config, as_flag) == float(other)
        assert getattr(config, in_file) is None


@pytest.mark.parametrize(("key", "twin", "one", "other", "schedule"), PAIRS)
def test_both_units_at_once_are_refused(
    key: str, twin: str, one: str, other: str, schedule: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{key} = {one}\n{twin} = {one}\nschedule = "{schedule}"\n')
    message = f"{key} and {twin} say the same thing in other units. Give one of them."
    for argv in ([f"--{key}={one}", f"--{twin}={one}", f"--schedule={schedule}"], ["--config", str(path)]):
        with pytest.raises(ConfigError, match=message):
            parse_run_config(argv)


@pytest.mark.parametrize(
    "line", ["steps: -1", "steps: true", "stepz: 1", "allow_changed: [x]", "steps: 1\ntokens: 1", "precision: fp33"]
)
def test_a_refused_value_of_a_file_names_the_file(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(line)
    with pytest.raises(ConfigError, match=re.escape(f"--config {path}: ")):
        parse_run_config(["--config", str(path)])
    path.write_text("steps: -1")
    with pytest.raises(ConfigError, match=r"^steps = '-2': "):
        parse_run_config(["--config", str(path), "--steps", "-2"])


def test_both_spellings_and_both_ways_to_give_a_value() -> None:
    for argv in (
        ["--global-batch-size", "8", "--weight-decay=0.2", "--no-shuffle"],
        ["--global_batch_size=8", "--weight_decay", "0.2", "--no_shuffle"],
    ):
        config = parse_run_config(argv)
        assert (config.global_batch_size, config.weight_decay, config.shuffle) == (8, 0.2, False)


@pytest.mark.parametrize(
    ("text", "mode"), [("on", "on"), ("off", "off"), ("true", "on"), ("'on'", "on"), ("auto", "auto")]
)
def test_on_and_off_in_yaml_are_words(text: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"compile: {text}\n")
    assert parse_run_config(["--config", str(tmp_path / "run.yaml")]).compile == mode


def test_numbers_have_commas_and_suffixes_on_the_command_line_and_in_every_file(tmp_path: Path) -> None:
    yaml, toml = tmp_path / "run.yaml", tmp_path / "run.toml"
    yaml.write_text("tokens: 10M\nwarmup-steps: 1,000\nglobal_batch_tokens: 0.5M\nhang_timeout_s: 1,800\n")
    toml.write_text('tokens = "10M"\nwarmup-steps = "1,000"\nglobal_batch_tokens = "0.5M"\nhang_timeout_s = "1,800"\n')
    flags = "--tokens 10M --warmup-steps 1,000 --global-batch-tokens 5e5 --hang-timeout-s 1,800"
    for argv in (flags.split(), ["--config", str(yaml)], ["--config", str(toml)]):
        config = parse_run_config(argv)
        assert (config.tokens, config.warmup_steps, config.global_batch_tokens) == (10_000_000, 1000, 500_000)
        assert config.hang_timeout_s == 1800


@pytest.mark.parametrize("text", ["1.5", "1,5", "10X", "ten", "٣"])
def test_what_is_no_whole_number_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tokens = '{text}': must be a whole number such as 811,008 or 10M\.$"):
        parse_run_config(["--tokens", text])


def test_a_letter_that_may_be_a_unit_of_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="hang_timeout_s = '30m': must be a finite number without a unit"):
        parse_run_config(["--hang-timeout-s", "30m"])


def test_the_launcher_s_local_rank_is_accepted_in_both_spellings() -> None:
    for word in ("--local_rank=3", "--local-rank=3"):
        assert parse_run_config([word, "--steps=5"]).steps == 5


def test_values_that_look_like_flags_or_hold_underscores_stay_as_they_are() -> None:
    config = parse_run_config(
        ["--run", "runs/my_run", "--sample_prompt=a_b-c", "--sample-every=5", "--data=my_data/a_set"]
    )
    assert (config.run, config.sample_prompt, config.data) == (Path("runs/my_run"), "a_b-c", "my_data/a_set")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "[train]\nlr = 1\n", "unknown key 'train'."),
        ("run.yaml", "lr: {peak: 1}\n", "lr = {'peak': 1}: must be a valid number"),
        ("run.yaml", b"lr: \xff\xfe\n", "run.yaml is not valid yaml: "),
    ],
)
def test_wrong_run_files(name: str, text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as raised:
        parse_run_config(["--config", str(path)])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_run_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert load_run_file(path) == {}
    assert parse_run_config(["--config", str(path)]).model_dump(exclude={"config"}) == parse_run_config([]).model_dump(
        exclude={"config"}
    )


def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEED", "LR", "seed", "RUN"):
        monkeypatch.setenv(name, "7")
    config = parse_run_config([])
    assert (config.seed, config.lr, str(config.run)) == (1337, None, "runs/default")


def test_a_saved_config_can_be_read_back() -> None:
    config = parse_run_config(["--steps=5", "--run=r", "--allow-changed=data", "--lr=1e-4"])
    assert build_run_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("flags", "file", "message"),
    [
        (["--eval-tasks", "text=a"], "", "--eval-tasks needs --eval-every N"),
        (["--val-every", "0", "--val-samples", "5"], "", "--val-samples needs --val-every N"),
        (["--wandb-name", "x"], "", "--wandb-name needs --wandb"),
        (
            ["--schedule", "constant", "--min-lr-frac", "0"],
            "",
            "--min-lr-frac 0.0 has no effect with --schedule constant",
        ),
        (["--no-shuffle", "--shuffle-block-size", "8"], "", "has no effect with --no-shuffle"),
        (["--cache-limit-gib", "1"], "", "--cache-limit-gib needs --data-cache FOLDER or a remote --data"),
        ([], "eval_tasks: [text=a]", r"--config .*run.yaml: --eval-tasks needs --eval-every N"),
        (["--steps", "3"], "wandb_name: x", "--wandb-name needs --wandb"),
        # A file's key may equal its default, and a flag may switch off what the file sets up.
        ([], "wandb_project: llmscale\nval_samples: 256\nval_every: 0", None),
        (["--no-wandb", "--eval-every", "0"], "wandb: true\nwandb_name: x\neval_every: 5\neval_tasks: [text=a]", None),
        (["--eval-every", "3"], "eval_tasks: [text=a]", None),
        (["--keep-every", "0", "--save-every", "0"], "", None),
        (["--keep-every", "5", "--save-every", "0"], "", "--keep-every needs --save-every N"),
        (["--keep-every", "5", "--save-every", "0", "--save-every-minutes", "1"], "", None),
    ],
)
def test_a_key_without_effect_is_refused(tmp_path: Path, flags: list[str], file: str, message: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(file or "steps: 3")
    argv = [*flags, "--config", str(path)]
    if message is None:
        parse_run_config(argv)
        return
    with pytest.raises(ConfigError, match=message):
        parse_run_config(argv)


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [("", 10), ("--save-every 0", 0), ("--save-every 0 --save-every-minutes 3", 3), ("--save-every-minutes 0", 0)],
)
def test_the_clock_saves_unless_only_the_last_step_is_wanted(flags: str, minutes: float) -> None:
    assert parse_run_config(flags.split()).minutes_between_saves == minutes


def test_help_of_allow_changed_names_what_can_be_allowed() -> None:
    assert all(key in describe_keys()["allow_changed"].text for key in CHANGES_THAT_BREAK)
