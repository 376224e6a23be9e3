from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale import __version__
from llmscale.cli import main as cli
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import KEYS, RunConfig


def test_alone_it_shows_what_it_can_do_with_an_example_each(llmscale: Callable) -> None:
    done = llmscale(torch_free=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name}\b", done.stdout, re.MULTILINE)
        assert f"llmscale {command.example}\n" in done.stdout


def commands_and_actions() -> Iterator[argparse.ArgumentParser]:
    """The parser of every command line that has a help text."""
    parsers: list[argparse.ArgumentParser] = [cli.build_parser([name]) for name in cli.COMMANDS]
    while parsers:
        parser = parsers.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()


def test_every_command_and_action_explains_itself() -> None:
    for parser in commands_and_actions():
        assert parser.description, parser.prog


def test_every_help_begins_with_an_example_that_the_parser_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in sorted({parser.prog for parser in commands_and_actions()}):
        with pytest.raises(SystemExit):
            cli.main([*command.split()[1:], "--help"])
        first = capsys.readouterr().out.replace("\\\n", " ").splitlines()[0]
        given = shlex.split(first.removeprefix("example: "))
        assert given[: len(command.split())] == command.split(), first
        words = given[1:]
        if words[0] == "train":
            assert parse_run_config(words[1:]).model == "gpt2-124m"
        else:
            assert cli.build_parser(words).parse_args(words).handler


def test_the_short_help_of_train_has_the_usual_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 48
    flags = {word for line in lines for word in re.findall(r"^  (--[\w-]+)", line)}
    assert flags == {"--nproc-per-node"} | {f"--{name.replace('_', '-')}" for name, key in KEYS.items() if key.usual}


def test_the_help_of_train_has_every_key_once_in_few_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help", "all"])
    text = capsys.readouterr().out
    assert re.findall(r"^([a-z].*):$", text, re.MULTILINE) == [
        "options",
        "run",
        "model",
        "data",
        "batch and schedule",
        "optimizer",
        "precision and ZeRO",
        "checkpoints",
        "evaluation",
        "watching",
    ]
    flags = re.findall(r"^  --([a-z][\w-]*)", text, re.MULTILINE)
    assert {*flags} - {"nproc-per-node", "version"} == {key.replace("_", "-") for key in RunConfig.model_fields}
    assert len(flags) == len({*flags})
    assert not re.search(r"\(default|null|None|<", text)


@pytest.mark.parametrize("width", ["60", "80"])
def test_help_fits_the_terminal(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line about a command is so long that the terminal would break it."""
    monkeypatch.setenv("COLUMNS", width)
    for command in sorted({parser.prog for parser in commands_and_actions()}):
        with pytest.raises(SystemExit):
            cli.main([*command.split()[1:], "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert lines and max(map(len, lines)) <= int(width), command


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"llmscale {__version__}\n"


def test_mistakes_are_answered_without_torch(llmscale: Callable) -> None:
    for words in (("smple",), ("sample", "nowhere", "p"), ("checkpoint", "list", "nowhere")):
        done = llmscale(*words, torch_free=True)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: ")


def run_with_handler(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def handler(_: argparse.Namespace) -> int:
        raise error

    class Parser:
        def __init__(self, _: object) -> None:
            pass

        def parse_args(self, _: object) -> argparse.Namespace:
            return argparse.Namespace(handler=handler)

    monkeypatch.setattr(cli, "build_parser", Parser)
    return cli.main(["anything"])


def test_ctrl_c_has_the_shell_s_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_handler(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_closed_pipe_is_no_error(trained_run: Path) -> None:
    """`llmscale ... | head`: the reader goes away before the writer is done."""
    show = f"'{sys.executable}' -m llmscale.cli.main checkpoint show '{trained_run}'"
    script = f"{{ {show}; echo status $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", script], cwd=Path(cli.__file__).parents[2], capture_output=True, text=True)
    assert done.stderr == "status 0\n"


def test_a_fast_start_restores_collector_and_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    with pytest.raises(ValueError, match="its own"), cli.fast_start():
        assert not gc.isenabled()
        assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
        raise ValueError("its own")
    assert gc.isenabled()
    assert "PYDANTIC_DISABLE_PLUGINS" not in os.environ


def test_a_fast_start_spares_the_last_collection() -> None:
    before = gc.get_freeze_count()
    with cli.fast_start():
        pass
    assert gc.get_freeze_count() > before


def test_an_estimate_imports_nothing_slow_that_it_does_not_need() -> None:
    """Each takes as long as the whole answer."""
    program = (
        "import sys\nfrom llmscale.cli.main import main\n"
        "main(['estimate', '--model', 'gpt2-124m', '--gpu', 'h100-80gb', '--num-gpus', '8'])\n"
        "print(*sorted({'pydantic_settings', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(("command", "extra"), [("data inspect x", "data"), ("eval x", "eval"), ("train", "train")])
def test_a_missing_package_is_one_line_that_names_its_extra(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    for handler in ("llmscale.cli.data._inspect", "llmscale.cli.eval._run", "llmscale.cli.train._train"):
        monkeypatch.setattr(handler, fail)
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err.strip()
    assert f"this needs torch, which comes with the extra {extra}: `pip install" in error and "\n" not in error
