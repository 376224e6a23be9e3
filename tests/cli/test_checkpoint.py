from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints, record_history
from llmscale.checkpoint.manifest import History
from llmscale.cli.main import main


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that may be damaged."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_list_has_one_line_each_the_newest_first(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "list", str(trained_run))
    assert (status, err) == (0, "")
    heading, newest, older = out.splitlines()
    assert heading.split() == ["checkpoint", "step", "tokens", "ranks", "stage", "precision", "GiB", "created"]
    assert newest.split()[:6] == ["step-00000003", "3", str(3 * 4 * 32), "1", "2", "bf16"]
    assert newest.endswith("<- latest")
    assert older.startswith("step-00000002")
    assert "latest" not in older


def test_list_shows_a_damaged_manifest_and_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step-00000003/manifest.json").write_text("{}")
    status, out, _ = call(capsys, "list", str(run))
    assert status == 0
    head, intact, damaged = out.splitlines()
    assert head.startswith("checkpoint ") and intact.startswith("step-00000002 ")
    assert damaged.startswith("step-00000003  DAMAGED: ")


def test_show_prints_files_and_state(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "show", str(trained_run / "checkpoints/step-00000002"))
    assert status == 0
    assert "  tokens_seen: 256\n" in out
    assert "state.json  xxh3_128 " in out
    state = json.loads(out[out.index("\n{\n") :])
    assert (state["step"], state["samples_seen"], state["config"]["model"]) == (2, 8, "tiny-1m")


def test_verify_says_intact_and_needs_no_torch(trained_run: Path, llmscale: Callable) -> None:
    done = llmscale("checkpoint", "verify", str(trained_run), torch_free=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step-00000003: intact\nstep-00000002: intact\n", "")


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_verify_names_the_damaged_file_and_ends_with_1(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    shard = next((run / "checkpoints/step-00000003").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[1000] ^= 1
    shard.write_bytes(content)
    if damage == "delete":
        shard.unlink()
    status, out, _ = call(capsys, "verify", str(run))
    assert status == 1
    newest, older = out.splitlines()
    assert newest.startswith(f"step-00000003: DAMAGED: {shard} ")
    assert older == "step-00000002: intact"
    assert call(capsys, "verify", str(run / "checkpoints/step-00000002"))[0] == 0


def test_diff_shows_what_differs_and_only_that(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer, older = (str(trained_run / "checkpoints" / f"step-0000000{step}") for step in (3, 2))
    status, out, _ = call(capsys, "diff", older, newer)
    assert status == 0
    assert out.startswith(f"- {older}\n+ {newer}\n")
    assert "\nstep\n  - 2\n  + 3\n" in out
    assert "\nsamples_seen\n  - 8\n  + 12\n" in out
    assert "seed" not in out
    assert call(capsys, "diff", newer, newer)[1] == f"- {newer}\n+ {newer}\n"


def go_back(run: Path, step: int) -> None:
    record_history(run, History(2, ((1, step),)), run / "checkpoints" / f"step-{step:08d}")


def test_what_is_abandoned_is_listed_as_such_and_pruned_by_word_only(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_back(run, 2)
    status, out, err = call(capsys, "list", str(run))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].startswith("step-00000003")
    assert lines[1].endswith("  abandoned (history 1)")
    assert lines[2].endswith("  <- latest")
    assert f"llmscale checkpoint prune {run}" in lines[-1]
    assert call(capsys, "show", str(run))[1].startswith(str(run / "checkpoints" / "step-00000002"))
    assert call(capsys, "verify", str(run))[1] == "step-00000002: intact\nstep-00000003 (abandoned): intact\n"
    assert call(capsys, "prune", str(run)) == (0, "deleted step-00000003\n", "")
    assert call(capsys, "prune", str(run))[1].startswith("no abandoned checkpoints")
    assert [path.name for path in list_checkpoints(run)] == ["step-00000002"]


def test_report_names_the_checkpoint_that_comes_next(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_back(run, 2)
    assert main(["report", str(run)]) == 0
    assert f"checkpoint       {run / 'checkpoints' / 'step-00000002'}\n" in capsys.readouterr().out


def test_names_that_are_not_ours_are_one_line_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-old").mkdir()
    (run / "checkpoints" / "step-00000009").symlink_to(run / "checkpoints" / "step-00000003")
    for action in ("list", "verify", "show", "prune"):
        status, _, err = call(capsys, action, str(run))
        assert status == 0
        ignored = [str(run / "checkpoints" / name) for name in ("step-00000009", "step-old")]
        assert [line.split()[1] for line in err.splitlines()] == ignored
