"""metrics.jsonl of interrupted, continued and broken runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.report.history import load_history
from llmscale.training.run_folder import METRICS_VERSION


def train(step: int, loss: float, rate: float = 100.0) -> str:
    record = {"kind": "train", "step": step, "loss": loss, "tokens_seen": step * 8, "tokens_per_second": rate}
    return json.dumps(record)


def validation(step: int, loss: float) -> str:
    return json.dumps({"kind": "validation", "step": step, "loss": loss, "num_samples": 4})


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return write


def test_reads_losses_tokens_and_speed(write_run: Callable[..., Path]) -> None:
    event = json.dumps({"kind": "event", "event": "finished", "step": 2})
    history = load_history(write_run(train(1, 5.0, 1), train(2, 4.0, 30), train(3, 3.5, 20), validation(3, 4.5), event))
    assert history.train == {1: 5.0, 2: 4.0, 3: 3.5}
    assert history.validation == {3: 4.5}
    assert history.tokens_seen[3] == 24
    assert history.median_tokens_per_second == 25


def test_what_a_restart_abandoned_is_forgotten(write_run: Callable[..., Path]) -> None:
    """Saved at 2, killed after 4, continued from 2 with other losses."""
    first = [train(step, 9.0 - step) for step in range(1, 5)]
    history = load_history(write_run(*first[:2], validation(2, 7.5), *first[2:], validation(4, 6.0), train(3, 6.5)))
    assert history.train == {1: 8.0, 2: 7.0, 3: 6.5}
    assert history.validation == {2: 7.5}
    assert list(history.tokens_per_second) == [1, 2, 3]


def start(step: int, history: int = 1, *branches: tuple[int, int]) -> str:
    return json.dumps({"kind": "event", "event": "start", "step": step, "history": history, "branches": branches})


def test_the_curve_is_that_of_the_line_that_leads_to_the_end(write_run: Callable[..., Path]) -> None:
    """Back from 4 to 2, then from there to the abandoned 4 again: what was trained in between belongs to neither."""
    first = [start(0), *(train(step, 10.0 + step) for step in range(1, 5)), validation(4, 1.0)]
    second = [start(2, 2, (1, 2)), train(3, 23.0), train(4, 24.0), train(5, 25.0), validation(5, 2.0)]
    assert load_history(write_run(*first, *second)).train == {1: 11.0, 2: 12.0, 3: 23.0, 4: 24.0, 5: 25.0}
    third = [start(4, 3, (1, 4)), train(5, 35.0)]
    history = load_history(write_run(*first, *second, *third))
    assert history.train == {1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 35.0}
    assert history.validation == {4: 1.0}
    assert history.tokens_seen.keys() == history.train.keys()


def test_steps_of_parts_that_overlap_count_once(write_run: Callable[..., Path]) -> None:
    """The second history says that it left the first at 4, and has records from 2 on."""
    first = [start(0), *(train(step, 10.0 + step) for step in range(1, 5)), validation(4, 1.0)]
    later = [
        start(2, 2, (1, 4)),
        train(3, 23.0),
        validation(3, 3.0),
        train(4, 24.0),
        train(5, 25.0),
        validation(5, 2.0),
    ]
    history = load_history(write_run(*first, *later))
    assert list(history.steps.steps) == [1, 2, 3, 4, 5]
    assert list(history.steps.values["loss"]) == [11.0, 12.0, 13.0, 14.0, 25.0]
    assert [(step, record["kind"]) for step, record in history.others] == [
        (0, "event"),
        (4, "validation"),
        (5, "validation"),
    ]
    assert history.num_abandoned == 2


def test_what_a_run_went_back_from_is_forgotten_before_it_logs_again(write_run: Callable[..., Path]) -> None:
    first = [start(0), *(train(step, 10.0 + step) for step in range(1, 5))]
    assert load_history(write_run(*first, start(2, 2, (1, 2)))).train == {1: 11.0, 2: 12.0}
    assert load_history(write_run(*first, start(3))).train == {1: 11.0, 2: 12.0, 3: 13.0}


def test_a_loss_that_was_no_number_is_nan(write_run: Callable[..., Path]) -> None:
    lost = json.dumps({"kind": "train", "step": 2, "loss": None, "tokens_seen": 16, "tokens_per_second": 1.0})
    assert math.isnan(load_history(write_run(train(1, 5.0), lost)).train[2])


def test_no_run_and_no_step_are_one_clear_line(write_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name a run folder"):
        load_history(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no training step yet"):
        load_history(write_run())


def test_records_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    good = {"kind": "train", "step": 1, "loss": 2.0, "tokens_seen": 8, "tokens_per_second": 1.0}
    wrong: list[object] = [{**good, key: value} for key in good for value in ("\x1b[2J", [], {}, True, -1)]
    # Those of another kind may be anybody's.
    num_bad = len(wrong) - 5 + 1
    lines = [json.dumps(record) for record in [good, *wrong, [1], None, 7, {}, {"kind": []}, {"kind": "train"}]]
    contents = "\n".join(lines).encode() + b"\n\xff\xfe\n" + b'{"a":' * 3000 + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(contents)
    history = load_history(tmp_path)
    assert (history.train, history.num_bad_records) == ({1: 2.0}, num_bad)
    assert [note.split(" not ")[0] for note in history.notes()] == ["5 lines are", f"{num_bad} records do"]


def test_a_rate_that_is_not_known_costs_no_record(write_run: Callable[..., Path]) -> None:
    unknown = [json.dumps(json.loads(train(step, 4.0)) | {"tokens_per_second": None}) for step in (1, 2)]
    history = load_history(write_run(unknown[0], train(2, 3.0, 50.0), train(3, 2.0, 70.0)))
    assert (list(history.train), history.median_tokens_per_second, list(history.notes())) == ([1, 2, 3], 70.0, [])
    assert math.isnan(load_history(write_run(*unknown)).median_tokens_per_second)


def test_broken_lines_are_counted_and_a_torn_end_is_said(tmp_path: Path) -> None:
    lines = [train(1, 2.0).encode(), b"{", b"\xff", b"", b'{"a":' * 5000, b"x" * 3_000_000, train(2, 1.0).encode()]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b'\n{"kind": "tr')
    history = load_history(tmp_path)
    assert list(history.train) == [1, 2]
    assert (history.num_bad_lines, history.is_torn) == (4, True)


def test_what_a_newer_version_wrote_is_refused_in_one_line(write_run: Callable[..., Path]) -> None:
    begins = json.loads(start(0)) | {"metrics_version": METRICS_VERSION}
    assert load_history(write_run(json.dumps(begins), train(1, 2.0))).train == {1: 2.0}
    newer = json.dumps(begins | {"metrics_version": METRICS_VERSION + 1})
    with pytest.raises(ConfigError, match=r"newer llmscale \(metrics version") as error:
        load_history(write_run(newer, train(1, 2.0)))
    assert "\n" not in str(error.value)
    # Also where it is no start by this version's rules.
    with pytest.raises(ConfigError, match="newer llmscale"):
        load_history(write_run(json.dumps(json.loads(newer) | {"history": "main", "step": "x"}), train(1, 2.0)))


def test_events_are_told_of_late(write_run: Callable[..., Path]) -> None:
    """A spike is known some steps after it; going back to before it forgets it all the same."""
    spike = json.dumps({"kind": "event", "event": "loss_spike", "step": 2, "loss": 9.0})
    first = [start(0), *(train(step, 1.0) for step in range(1, 5)), spike, validation(4, 1.0)]
    history = load_history(write_run(*first))
    assert [step for step, _ in history.others] == [0, 2, 4]
    history = load_history(write_run(*first, start(1, 2, (1, 1)), train(2, 3.0)))
    assert [step for step, _ in history.others] == [0, 1]
    assert (history.train, history.num_abandoned) == ({1: 1.0, 2: 3.0}, 3)


def test_sets_of_a_mix_have_columns_from_where_they_begin(write_run: Callable[..., Path]) -> None:
    def mixed(step: int, **losses: float) -> str:
        return json.dumps(json.loads(train(step, 1.0)) | {"loss_by_set": losses})

    columns = load_history(write_run(train(1, 1.0), mixed(2, a=2.0), mixed(3, b=3.0))).steps.values
    losses = {name: [str(loss) for loss in columns[f"loss of {name}"]] for name in "ab"}
    assert losses == {"a": ["nan", "2.0", "nan"], "b": ["nan", "nan", "3.0"]}
    many = {f"set{number}": 1.0 for number in range(1000)}
    assert len(load_history(write_run(mixed(1, **many))).steps.values) < 100
