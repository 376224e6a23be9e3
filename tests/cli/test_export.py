from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.inventory import record_history
from llmscale.checkpoint.manifest import History
from llmscale.cli.main import main
from llmscale.evaluate.model_source import open_model
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.files.folder_lock import lock_folder
from tests.conftest import REPOSITORY

pytest.importorskip("transformers")
WEIGHTS = "model.safetensors"
FILES = {"config.json", "generation_config.json", "README.md", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
TEXT = "the quick brown fox\n\n  été <日本>"


def test_transformers_loads_the_model_and_the_tokenizer(trained_run: Path, tmp_path: Path, llmscale: Callable) -> None:
    out = tmp_path / "made" / "exported"
    done = llmscale("export", str(trained_run), "--to", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Wrote {out}: ")
    assert " weights in fp32 of step 3, tokenizer and model card." in done.stdout
    assert {path.name for path in out.iterdir()} == FILES
    transformers = import_transformers()

    ours = open_model(trained_run / "checkpoints/step-00000003")
    model = ours.load_model()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer(TEXT).input_ids
    assert ids == ours.tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == ours.tokenizer.eot_token
    tokens = torch.tensor([ids[:32]])
    with torch.no_grad():
        # As users call it: whatever the tokenizer gives goes into the model.
        given = tokenizer(TEXT, return_tensors="pt")
        logits = theirs(**{name: value[:, :32] for name, value in given.items()}).logits
        assert (logits - model(tokens)).abs().max() < 1e-5
    assert logits.shape[-1] == theirs.transformer.wte.weight.shape[0] == 257, "no padding rows"


def test_the_weights_are_rounded_to_the_dtype(trained_run: Path, tmp_path: Path) -> None:
    checkpoint = trained_run / "checkpoints/step-00000002"
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    transformers = import_transformers()

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    ours = open_model(checkpoint).load_model()
    assert theirs.dtype == torch.float16
    assert torch.equal(theirs.transformer.wte.weight, ours.wte.weight[:257].half())
    assert torch.equal(theirs.transformer.h[0].mlp.c_fc.weight, ours.blocks[0].mlp.up.weight.t().half())


def test_an_earlier_export_is_replaced_only_when_that_is_asked_for(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["export", str(trained_run), "--to", str(out)]
    assert main(command) == 0
    assert main([*command, "--dtype", "bf16"]) == 2
    error = f"error: --to {out} exists already. Name another folder, or replace it with --overwrite.\n"
    assert capsys.readouterr().err == error
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert main([*command, "--dtype", "bf16", "--overwrite"]) == 0
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert list(tmp_path.iterdir()) == [out]


def test_folders_that_hold_something_else_are_refused(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file, link = tmp_path / "home", tmp_path / "file", tmp_path / "link"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    file.write_text("")
    link.symlink_to(home)
    checkpoints = trained_run / "checkpoints"
    for out, message in (
        (home, " holds 'thesis.tex', which no export wrote"),
        (trained_run, " holds '.lock', which no export wrote"),
        (file, f": {file} is a file; name a folder"),
        (link, " is a link"),
        (checkpoints / "hf", f" is inside {checkpoints}, where only training writes"),
        (checkpoints / "step-00000003" / "hf", f" is inside {checkpoints}, where only training writes"),
    ):
        assert main(["export", str(trained_run), "--to", str(out), "--overwrite"]) == 2
        stdout, err = capsys.readouterr()
        assert stdout == ""
        assert err.startswith(f"error: --to {out}{message}")
        assert len(err.splitlines()) == 1
    assert (home / "thesis.tex").read_text() == "years of work"


def test_damage_and_a_full_disk_leave_nothing(
    trained_run: Path, tmp_path: Path, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shard = next((run / "checkpoints/step-00000003").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    disk = small_disk(64 << 10)
    for source, out, message in ((run, tmp_path / "out", str(shard)), (trained_run, disk / "out", "Cannot write")):
        assert main(["export", str(source), "--to", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {message}")
        assert len(err.splitlines()) == 1
        assert not list(out.parent.glob("*out*"))
    assert "are needed and 0.00 GiB are free" in err


def test_a_step_is_chosen_and_a_wrong_one_is_answered_with_those_there_are(
    trained_run: Path, tmp_path: Path, llmscale: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained_run), "--to", str(tmp_path / "named"), "--step", "2"]) == 0
    assert "of step 2," in capsys.readouterr().out
    checkpoint = trained_run / "checkpoints/step-00000002"
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "given")]) == 0
    capsys.readouterr()
    named, given = tmp_path / "named", tmp_path / "given"
    assert {path.name: path.read_bytes() for path in named.iterdir()} == {
        path.name: path.read_bytes() for path in given.iterdir()
    }
    for run, message in (
        (trained_run, f"{trained_run} has no checkpoint of step 7. There are: 2, 3."),
        (checkpoint, f"{checkpoint} is one checkpoint, and --step 7 chooses among those of a run folder."),
    ):
        done = llmscale("export", str(run), "--to", str(tmp_path / "out"), "--step", "7", torch_free=True)
        assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "out").exists()


def test_abandoned_steps_are_not_exported_by_the_runs_name(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    record_history(run, History(2, ((1, 2),)), run / "checkpoints/step-00000002")
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    assert "of step 2," in capsys.readouterr().out
    abandoned = run / "checkpoints/step-00000003"
    assert main(["export", str(run), "--to", str(tmp_path / "other"), "--step", "3"]) == 2
    assert f"There are: 2. {abandoned} is of steps that the run went back from; name that" in capsys.readouterr().err
    assert main(["export", str(abandoned), "--to", str(tmp_path / "other")]) == 0
    card = (tmp_path / "other" / "README.md").read_text()
    assert "loss" not in card, "the log says the losses of the steps that count"


def test_large_weights_are_in_several_files(trained_run: Path, tmp_path: Path) -> None:
    single, parts = tmp_path / "single", tmp_path / "parts"
    assert main(["export", str(trained_run), "--to", str(single)]) == 0
    assert main(["export", str(trained_run), "--to", str(parts), "--shard-size", "40kB"]) == 0
    assert {path.name for path in parts.iterdir()} - FILES == {
        "model.safetensors.index.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
    }
    transformers = import_transformers()
    load = transformers.AutoModelForCausalLM.from_pretrained
    weights, same = load(single).state_dict(), load(parts).state_dict()
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert main(["export", str(trained_run), "--to", str(parts), "--overwrite"]) == 0
    assert {path.name for path in parts.iterdir()} == FILES


def test_an_export_needs_no_other_library_than_torch(trained_run: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from llmscale.cli.main import main
status = main(["export", {str(trained_run)!r}, "--to", {str(tmp_path / "out")!r}])
assert status == 0
print([name for name in ("deepspeed", "transformers", "safetensors", "streaming") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.endswith("\n[]\n"), done


def test_a_run_that_trains_is_exported_as_far_as_it_has_saved(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shutil.copytree(run / "checkpoints/step-00000003", run / "checkpoints/.step-00000004.partial")
    lock = lock_folder(run)
    try:
        assert main(["export", str(run), "--to", str(run / "hf")]) == 0
    finally:
        lock.close()
    assert "step 3" in (run / "hf" / "README.md").read_text()
