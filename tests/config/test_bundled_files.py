from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmscale.config import bundled_files
from llmscale.config.bundled_files import DS_CONFIGS, HOSTFILES


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("given", ["zero2", "zero2.json", "ds_configs/zero2.json", "./zero2", "ds_configs/zero2"])
def test_a_name_is_found_anywhere(given: str) -> None:
    actual = DS_CONFIGS.find(Path(given))
    assert actual.name == "zero2.json"
    assert json.loads(actual.read_text())["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("given", ["zero4", "other/zero2.json", "../zero2", "/zero2", "zero2.json.json", "README.md"])
def test_what_is_no_name_stays_a_path(given: str) -> None:
    assert DS_CONFIGS.find(Path(given)) == Path(given)


def test_what_lies_there_goes_first_also_when_it_leads_nowhere() -> None:
    for name in ("zero2", "zero3.json"):
        Path(name).symlink_to("nowhere")
        assert DS_CONFIGS.find(Path(name)) == Path(name)


def test_a_folder_of_that_name_hides_nothing() -> None:
    for files, name in ((DS_CONFIGS, "zero2"), (HOSTFILES, "8xa100")):
        Path(name).mkdir()
        assert files.find(Path(name)).parent == files.folder


def test_hostfiles_have_names_too() -> None:
    assert HOSTFILES.find(Path("8xa100")).read_text().strip().endswith("slots=8")
    assert HOSTFILES.find(Path("README.md")) == Path("README.md")
    assert "README.md" not in HOSTFILES.names()


def test_a_missing_file_is_answered_with_what_is_beside_it_or_with_all_names(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    assert "Did you mean 'mine.json'?" in DS_CONFIGS.why_missing(tmp_path / "mne.json")
    assert "Did you mean 'zero3'?" in DS_CONFIGS.why_missing(Path("zeroo3"))
    assert "1x1, 2x8xa100" in HOSTFILES.why_missing(Path("x"))


def test_the_advice_to_install_something_works_where_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(bundled_files.__file__).parents[2]
    monkeypatch.chdir(root)
    assert bundled_files.install_command("eval") == "pip install -e '.[eval]'"
    monkeypatch.chdir(tmp_path)
    assert bundled_files.install_command("train,data") == f"pip install -e {shlex.quote(f'{root}[train,data]')}"
    # The name llmscale is on no index: a wheel's user installs what the extra consists of.
    monkeypatch.setattr(bundled_files, "is_checkout", lambda: False)
    assert bundled_files.install_command("plot") == "pip install 'matplotlib>=3.8'  # extra plot"
    needs = ["numpy", 'torch>=2.6; extra == "train"', "no-such>=1; python_version >= '3' and extra == 'train'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    assert bundled_files.install_command("train,data") == "pip install 'no-such>=1'  # extra train,data"


@pytest.mark.parametrize(
    ("module", "wanted", "extra"),
    [
        ("torch._C", "eval", "eval"),
        ("pyarrow.parquet", "train", "data"),
        ("lm_eval", "train", "eval"),
        ("pynvml", "train", "nvml"),
        ("botocore", "remote", "remote"),
    ],
)
def test_a_module_of_an_extra_that_is_missing_names_it(module: str, wanted: str, extra: str) -> None:
    error = bundled_files.explain_missing(ModuleNotFoundError(f"No module named '{module}'", name=module), wanted)
    assert error is not None
    assert f"needs {module.partition('.')[0]}, which comes with the extra {extra}: `pip install" in str(error)


def test_errors_that_no_extra_explains_stay() -> None:
    for error in (ModuleNotFoundError("no", name="nowhere"), ImportError("cannot import x", name="torch"), OSError()):
        assert bundled_files.explain_missing(error, "train") is None
