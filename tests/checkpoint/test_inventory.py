"""Which checkpoints count: by histories, by names, and by what can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import (
    MAX_PINNED,
    PINNED_NAME,
    FoundCheckpoints,
    apply_retention,
    find_any_checkpoint,
    find_best,
    find_checkpoint,
    find_checkpoints,
    history_after,
    list_checkpoints,
    open_checkpoint,
    pin_checkpoint,
    pinned_checkpoints,
    point_best,
    point_latest,
    record_history,
    remove_leftovers,
    use_checkpoint,
)
from llmscale.checkpoint.manifest import (
    CheckpointManifest,
    History,
    Validation,
    checkpoint_name,
    checkpoints_folder,
    find_damage,
    hash_json,
    load_manifest,
    save_manifest,
    step_of,
)
from llmscale.errors import CheckpointError


def write(
    run: Path, step: int, history: History | None = None, name: str | None = None, loss: float | None = None
) -> Path:
    """A checkpoint without tensors."""
    folder = checkpoints_folder(run) / (name or checkpoint_name(step))
    folder.mkdir(parents=True)
    save_manifest(folder, CheckpointManifest(step, 0, 1, 0, "fp32", "now", (), history or History(), measured(loss)))
    return folder


def measured(loss: float | None, samples: str = "8 of a set") -> Validation | None:
    return None if loss is None else Validation(loss, samples)


def steps(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run)]


def names(checkpoints: FoundCheckpoints) -> tuple[list[str], list[str]]:
    return [saved.path.name for saved in checkpoints.current], [saved.path.name for saved in checkpoints.abandoned]


def test_a_history_counts_each_line_it_comes_from_up_to_its_branch() -> None:
    history = History(4, ((1, 20), (3, 30)))
    assert [
        history.includes(number, step) for number, step in ((1, 20), (1, 21), (2, 5), (3, 30), (3, 31), (4, 99))
    ] == [True, False, False, True, False, True]


def test_going_back_leaves_the_later_steps_behind_at_once(tmp_path: Path) -> None:
    folders = {step: write(tmp_path, step) for step in (10, 20, 30, 40)}
    history = history_after(find_checkpoints(tmp_path), folders[20], tmp_path)
    assert history == History(2, ((1, 20),))
    assert steps(tmp_path) == [40, 30, 20, 10], "nothing is left before it is recorded"
    record_history(tmp_path, history, folders[20])
    assert steps(tmp_path) == [20, 10]
    assert [saved.step for saved in find_checkpoints(tmp_path).abandoned] == [40, 30]
    assert history_after(find_checkpoints(tmp_path), folders[20], tmp_path) == history, (
        "the next start is no going back"
    )


def test_an_abandoned_checkpoint_that_is_named_makes_its_history_count_again(tmp_path: Path) -> None:
    folders = {step: write(tmp_path, step) for step in (10, 20, 30, 40)}
    second = history_after(find_checkpoints(tmp_path), folders[10], tmp_path)
    record_history(tmp_path, second, folders[10])
    write(tmp_path, 25, second)
    third = history_after(find_checkpoints(tmp_path), folders[30], tmp_path)
    record_history(tmp_path, third, folders[30])
    assert steps(tmp_path) == [30, 20, 10]
    assert [saved.step for saved in find_checkpoints(tmp_path).abandoned] == [40, 25]


def test_a_new_history_has_a_number_above_every_abandoned_checkpoint_s(tmp_path: Path) -> None:
    """Also above one that is newer than history.json, as after a copy of an older run folder."""
    first, second = write(tmp_path, 10), write(tmp_path, 20)
    record_history(tmp_path, History(2, ((1, 10),)), first)
    write(tmp_path, 25, History(7, ((1, 10),)))
    checkpoints = find_checkpoints(tmp_path)
    assert [saved.step for saved in checkpoints.abandoned] == [25, 20]
    assert history_after(checkpoints, second, tmp_path) == History(8, ((1, 20),))


def test_the_newest_of_the_history_goes_on_in_it(tmp_path: Path) -> None:
    newest = [write(tmp_path, step) for step in (10, 20)][1]
    assert history_after(find_checkpoints(tmp_path), newest, tmp_path) == History()


def test_a_later_one_that_cannot_be_read_is_left_behind_too(tmp_path: Path) -> None:
    """Its disk may answer again tomorrow."""
    good, torn = write(tmp_path, 10), write(tmp_path, 20)
    manifest = (torn / "manifest.json").read_text()
    (torn / "manifest.json").write_text("{")
    history = history_after(find_checkpoints(tmp_path), good, tmp_path)
    assert history == History(2, ((1, 10),))
    record_history(tmp_path, history, good)
    assert history_after(find_checkpoints(tmp_path), good, tmp_path) == history
    (torn / "manifest.json").write_text(manifest)
    assert steps(tmp_path) == [10]


def test_another_runs_checkpoint_begins_a_line_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, 10)
    other = write(tmp_path / "other", 20)
    history = history_after(find_checkpoints(tmp_path), other, tmp_path)
    assert history == History(2)
    record_history(tmp_path, history, other)
    assert steps(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"the history that began from .*step-00000020 has no checkpoints"):
        find_checkpoint(tmp_path)


def test_latest_names_a_checkpoint_of_this_run_alone(tmp_path: Path) -> None:
    run, other = (tmp_path / name / "checkpoints" for name in ("run", "other"))
    for folder in (run, other):
        (folder / "step-00000010").mkdir(parents=True)
    point_latest(run.parent, run / "step-00000010")
    assert (run / "latest").read_text() == "step-00000010\n"
    point_latest(run.parent, other / "step-00000010")
    assert not (run / "latest").exists()


def test_checkpoints_from_before_there_were_histories(tmp_path: Path) -> None:
    folder = write(tmp_path, 10)
    stored = json.loads((folder / "manifest.json").read_text())["manifest"]
    del stored["history"], stored["branches"]
    (folder / "manifest.json").write_text(json.dumps({"manifest": stored, "xxh3_128": hash_json(stored)}))
    assert load_manifest(folder).history == History()
    assert steps(tmp_path) == [10]


@pytest.mark.parametrize("damage", [None, b"", b"\xff\xfe", b"[]", b"{}", b'{"current": {"history": 1}}', b"[" * 5000])
def test_without_its_record_the_newest_history_that_saved_is_the_current_one(
    tmp_path: Path, damage: bytes | None
) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    history = History(2, ((1, 10),))
    write(tmp_path, 15, history)
    record_history(tmp_path, history, tmp_path)
    path = checkpoints_folder(tmp_path) / "history.json"
    path.unlink() if damage is None else path.write_bytes(damage)
    checkpoints = find_checkpoints(tmp_path)
    assert names(checkpoints)[0] == ["step-00000015", "step-00000010"]
    assert len(checkpoints.notes) == (damage is not None)


def test_a_flipped_digit_in_the_record_is_noticed(tmp_path: Path) -> None:
    record_history(tmp_path, History(2, ((1, 10),)), write(tmp_path, 10))
    path = checkpoints_folder(tmp_path) / "history.json"
    path.write_text(path.read_text().replace("10", "60", 1))
    assert "does not match its hash" in find_checkpoints(tmp_path).notes[0]


def test_names_that_are_not_ours_are_passed_over_and_never_touched(tmp_path: Path) -> None:
    write(tmp_path, 60)
    folder = checkpoints_folder(tmp_path)
    for name in ("step-00000060-backup", "step-old", "step-60", "step-0000000070", "step-00000099.old-0"):
        write(tmp_path, 60, name=name)
    (folder / "step-00000070").write_text("a file")
    (folder / "step-00000080").symlink_to(folder / "step-00000060")
    (folder / "step-00000090").symlink_to(tmp_path / "nowhere")
    (folder / ".step-00000061.partial").write_text("a file")
    (folder / ".step-00000062.partial").symlink_to(folder / "step-00000060")
    (folder / ".step-00000063.partial").mkdir()
    (folder / ".nfs0001").write_text("")
    (folder / "notes").mkdir()
    checkpoints = find_checkpoints(tmp_path)
    assert names(checkpoints) == (["step-00000060"], [])
    assert sorted(path.name for path, _ in checkpoints.passed_over) == [
        ".step-00000061.partial",
        ".step-00000062.partial",
        "step-0000000070",
        "step-00000060-backup",
        "step-00000070",
        "step-00000080",
        "step-00000090",
        "step-00000099.old-0",
        "step-60",
        "step-old",
    ]
    lines: list[str] = []
    assert find_checkpoint(tmp_path, lines.append) == folder / "step-00000060"
    assert len(lines) == len(checkpoints.passed_over)


def test_a_name_must_agree_with_what_is_in_it(tmp_path: Path) -> None:
    write(tmp_path, 50)
    renamed = write(tmp_path, 40, name="step-00000060")
    checkpoints = find_checkpoints(tmp_path)
    assert names(checkpoints) == (["step-00000050"], [])
    assert "says that this is the checkpoint of step 40" in checkpoints.damaged[0][1]
    assert "says that this is the checkpoint of step 40" in str(find_damage(renamed))


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    checkpoints_folder(tmp_path).write_text("")
    for look in (find_checkpoints, find_any_checkpoint, list_checkpoints):
        with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
            look(tmp_path)


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("{}")
    for look in (find_checkpoints, find_any_checkpoint, list_checkpoints):
        with pytest.raises(CheckpointError, match=r"texts\.jsonl is a file\. Name a run folder"):
            look(file)


def test_a_path_that_is_gone_names_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, 50)
    with pytest.raises(CheckpointError, match=r"does not exist: .* The newest of its run is step-00000050"):
        find_checkpoint(checkpoints_folder(tmp_path) / "step-00000020")


def test_what_took_the_place_of_a_checkpoint_is_counted_once(tmp_path: Path) -> None:
    write(tmp_path, 60)
    write(tmp_path, 60, name="step-00000060.old-1")
    write(tmp_path, 50, History(7), name="step-00000050.old-2")
    assert names(find_checkpoints(tmp_path)) == (["step-00000050.old-2"], ["step-00000060", "step-00000060.old-1"])


def test_a_run_may_keep_its_checkpoints_on_another_disk(tmp_path: Path, save_steps: Callable) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    assert save_steps(3, 4, keep_last=1)[-1].startswith("saved ")
    (only,) = find_checkpoints(tmp_path / "run").current
    assert history_after(find_checkpoints(tmp_path / "run"), tmp_path / "disk" / only.path.name, tmp_path / "run") == (
        History()
    )
    assert only.step == 4


def test_the_best_is_the_lowest_loss_over_the_newest_samples_in_the_current_history(tmp_path: Path) -> None:
    for step, loss in ((10, 2.0), (20, 1.5), (30, None), (40, 1.9)):
        write(tmp_path, step, loss=loss)
    folder, best = checkpoints_folder(tmp_path), checkpoints_folder(tmp_path) / "best"
    assert find_checkpoint(best) == folder / "step-00000020", "before anything points to it"
    point_best(tmp_path, find_checkpoints(tmp_path, History()).current)
    assert best.read_text() == "step-00000020\n"
    assert find_checkpoint(folder / "latest") == folder / "step-00000040"
    record_history(tmp_path, History(2, ((1, 10),)), folder / "step-00000010")
    assert find_checkpoint(best) == folder / "step-00000010", "a file that a kill left behind decides nothing"
    write(tmp_path, 25, History(2, ((1, 10),)), loss=2.5)
    assert find_best(find_checkpoints(tmp_path).current).step == 10  # type: ignore[union-attr]
    # Another set: its losses are not compared with those of before.
    manifest = load_manifest(folder / "step-00000025")
    save_manifest(folder / "step-00000025", replace(manifest, validation=measured(2.5, "9 of a set")))
    assert find_best(find_checkpoints(tmp_path).current).step == 25  # type: ignore[union-attr]


def test_the_best_outlives_retention(tmp_path: Path) -> None:
    for step, loss in ((10, 1.5), (20, 2.0), (30, 1.9)):
        write(tmp_path, step, loss=loss)
    apply_retention(tmp_path, find_checkpoints(tmp_path).current, 1, 0)
    assert steps(tmp_path) == [30, 10]


def test_without_a_validation_there_is_no_best(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (checkpoints_folder(tmp_path) / "best").write_text("step-00000010\n")
    with pytest.raises(CheckpointError, match=r"no best checkpoint: none was saved at a step with a validation"):
        find_checkpoint(checkpoints_folder(tmp_path) / "best")
    point_best(tmp_path, find_checkpoints(tmp_path, History()).current)
    assert not (checkpoints_folder(tmp_path) / "best").exists()


def test_what_is_kept_outlives_retention(save_steps: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(10, keep_last=1, keep_every=0)
    pin_checkpoint(checkpoints_folder(run) / checkpoint_name(10), "because")
    save_steps(20, 30, keep_last=1, keep_every=0)
    assert [step_of(path) for path in list_checkpoints(run)] == [30, 10]
    assert pinned_checkpoints(run) == {checkpoint_name(10): "because"}


def test_the_oldest_goes_first_and_what_is_gone_does_not_count(tmp_path: Path) -> None:
    folder = checkpoints_folder(tmp_path)
    for step in range(1, MAX_PINNED + 3):
        (folder / checkpoint_name(step)).mkdir(parents=True)
        pin_checkpoint(folder / checkpoint_name(step), f"number {step}")
    assert list(pinned_checkpoints(tmp_path)) == [checkpoint_name(step) for step in range(3, MAX_PINNED + 3)]
    (folder / checkpoint_name(3)).rmdir()
    pin_checkpoint(folder / checkpoint_name(1), "again")
    assert list(pinned_checkpoints(tmp_path))[-1] == checkpoint_name(1)
    assert len(pinned_checkpoints(tmp_path)) == MAX_PINNED


@pytest.mark.parametrize("content", ["{", "[]", '{"../x": "y"}', '{"step-00000001": 3}'])
def test_a_list_that_cannot_be_read_is_an_error(content: str, tmp_path: Path) -> None:
    checkpoints_folder(tmp_path).mkdir()
    (checkpoints_folder(tmp_path) / PINNED_NAME).write_text(content)
    with pytest.raises(CheckpointError):
        pinned_checkpoints(tmp_path)


def test_saves_delete_what_expired(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10, 20, 25, 30, keep_last=1, keep_every=10)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [30, 20, 10]
    assert not list(checkpoints_folder(tmp_path / "run").glob(".*"))


def test_removes_what_an_interrupted_save_left(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10)
    folder = checkpoints_folder(tmp_path / "run")
    for name in (".step-00000020.partial", ".step-00000005.deleted", ".step-00000030.partial-2", "notes"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / ".step-00000006.partial").write_text("not ours")
    (folder / ".step-00000007.partial").symlink_to(folder / "notes")
    lines = remove_leftovers(tmp_path / "run")
    assert [line.split()[1] for line in lines] == [
        ".step-00000005.deleted,",
        ".step-00000020.partial,",
        ".step-00000030.partial-2,",
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".step-00000006.partial",
        ".step-00000007.partial",
        "latest",
        "notes",
        "step-00000010",
    ]
    assert (folder / "notes" / "file").read_text() == "x"


def test_what_cannot_be_deleted_is_tried_again(save_steps: Callable, tmp_path: Path) -> None:
    """A delete that was interrupted left its folder under the name that the next one wants."""
    save_steps(10)
    folder = checkpoints_folder(tmp_path / "run")
    (folder / ".step-00000010.deleted").write_text("not ours")
    assert save_steps(20, keep_last=1)[-1].startswith("saved ")
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [20]
    assert (folder / ".step-00000010.deleted").read_text() == "not ours"


def test_a_checkpoint_that_training_removed_meanwhile_is_replaced_by_the_newest(
    save_steps: Callable, tmp_path: Path
) -> None:
    """As `sample` and `export` meet them beside a training that saves each second."""
    save_steps(10, 20)
    run = tmp_path / "run"

    def read(folder: Path) -> int:
        if step_of(folder) == 20:
            save_steps(30, keep_last=1)
        return open_checkpoint(folder).step

    assert use_checkpoint(find_checkpoint(run), lambda: find_checkpoint(run), read) == 30


def test_a_damaged_checkpoint_is_not_read_twice(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10)
    seen = []

    def read(folder: Path) -> None:
        seen.append(folder)
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        use_checkpoint(find_checkpoint(tmp_path / "run"), lambda: find_checkpoint(tmp_path / "run"), read)
    assert len(seen) == 1
