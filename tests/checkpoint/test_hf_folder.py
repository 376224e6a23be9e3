from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.checkpoint.hf_write import check_hf_folder
from llmscale.errors import ConfigError


@pytest.mark.parametrize("checkpoint", ["run/checkpoints/step-00000003", "copied/step-00000003"])
def test_nothing_is_written_where_checkpoints_lie(checkpoint: str, tmp_path: Path) -> None:
    folder = tmp_path / checkpoint
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / "hf", tmp_path / "link" / "hf", tmp_path / "none" / ".." / checkpoint / "hf"):
        with pytest.raises(ConfigError, match="where only training writes"):
            check_hf_folder(out, folder, overwrite=True)
    check_hf_folder(tmp_path / "run" / "hf", folder, overwrite=False)


def test_an_empty_folder_is_as_good_as_none_and_a_stranger_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=False)
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model that no export wrote"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    (out / "README.md").write_text("---\ntags:\n- llmscale\n---\n")
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    with pytest.raises(ConfigError, match="exists already"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=False)
    for name in ("generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json"):
        (out / name).write_text("")
    check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)
    (out / "pytorch_model.bin").write_text("")
    with pytest.raises(ConfigError, match=r"holds 'pytorch_model.bin', which no export wrote"):
        check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)


def test_links_that_lead_to_each_other_and_the_current_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="is a symbolic link to nothing"):
        check_hf_folder(tmp_path / "loop", tmp_path / "checkpoint", overwrite=True)
    with pytest.raises(ConfigError, match="loop is a symbolic link to nothing; name a folder"):
        check_hf_folder(tmp_path / "loop" / "out", tmp_path / "checkpoint", overwrite=True)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for out in (Path("."), Path("..")):
        with pytest.raises(ConfigError, match=r"where only training writes|the folder that this runs in|holds 'below'"):
            check_hf_folder(out, tmp_path / "checkpoint", overwrite=True)


def test_a_readme_alone_is_somebodys_project(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds 'README.md', which no export wrote"):
        check_hf_folder(tmp_path, tmp_path / "run" / "checkpoint", overwrite=True)
