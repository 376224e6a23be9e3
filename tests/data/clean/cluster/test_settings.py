"""What a cluster must be told: legal values arrive, and others are one error that names them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from llmscale.cli import data
from llmscale.config.command_line import FlagParser
from llmscale.data.clean.cluster.settings import RaySettings, SlurmSettings, read_settings
from llmscale.errors import DataError, LlmscaleError


def test_what_is_given_arrives(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("partition: cpu\ntime_hours: 1.5\nmemory_gb: 8\nsetup: module load x\nsbatch: {constraint: a|b}\n")
    expected = SlurmSettings("cpu", 1.5, 8, setup="module load x", sbatch={"constraint": "a|b"})
    assert read_settings("slurm", path) == expected
    path.write_text("time_hours: 2\n")
    assert read_settings("slurm", path) == SlurmSettings(time_hours=2)
    path.write_text("address: head:6379\n")
    assert read_settings("ray", path) == RaySettings("head:6379")
    assert read_settings("slurm", None) == SlurmSettings()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("partitions: cpu", r"has no option 'partitions'\. Did you mean 'partition'\?"),
        ("address: head:6379", "has no option 'address'.* Legal: partition, time_hours"),
        ("partition: 'cpu\n\n  #SBATCH --wrap=rm'", "must be a word"),
        ("partition: 7", "must be a word"),
        ("time_hours: 12:00:00", "must be a number above 0 and at most 1,000"),
        ("memory_gb: 0", "must be a whole number above 0"),
        ("memory_gb: 1.5", "must be a whole number above 0"),
        ("memory_gb: true", "must be a whole number above 0"),
        ("sbatch: constraint", "must be flags of sbatch"),
        ("sbatch: {--constraint: cpu}", "must be flags of sbatch"),
        ('sbatch: {constraint: "a b"}', "must be flags of sbatch"),
    ],
)
def test_what_is_wrong_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match=f"(?s)--executor-options .*{message}"):
        read_settings("slurm", path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_settings("ray", tmp_path / "none.yaml")


def _call(*words: str) -> None:
    parser = FlagParser(prog="llmscale")
    data.add_parser(parser.add_subparsers())
    args: argparse.Namespace = parser.parse_args(["data", "clean", *words])
    args.handler(args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "3"), "--tasks needs --executor slurm or ray"),
        (("--executor-options", "x.yaml"), "--executor-options needs --executor slurm or ray"),
        (("--executor", "ray", "--input", "-"), "no other machine can read this one's standard input"),
        (("--eot-token", "<end>"), "--eot-token needs --tokenizer NAME"),
        (("--tokenizer", "byte"), "Tokenizer 'byte' is neither .* Did you mean 'bytes'"),
    ],
)
def test_flags_that_do_not_fit_together(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words.")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(LlmscaleError, match=message):
        _call("--input", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--steps", "exact", *words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("package", ["datatrove", "ray"])
def test_a_missing_package_is_one_error(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("blocks", "on_ray"):
        monkeypatch.delitem(sys.modules, f"llmscale.data.clean.cluster.{name}", raising=False)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "text.txt").write_text("Some words.")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"pip install -e .*\[data,clean,clean-cluster\]"):
        _call(
            *("--input", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--steps", "exact"),
            *("--executor", "ray"),
        )
    assert sorted(tmp_path.iterdir()) == before


def test_no_slurm_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datatrove")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "text.txt").write_text("Some words.")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="there is no `sbatch` on this machine"):
        _call(
            *("--input", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--steps", "exact"),
            *("--executor", "slurm"),
        )
    assert sorted(tmp_path.iterdir()) == before
