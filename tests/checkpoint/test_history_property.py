"""Whatever a user does and whenever the machine dies: what was saved is there, what comes next is what was meant."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmscale.checkpoint.inventory import (
    commit_checkpoint,
    delete_checkpoint,
    find_best,
    find_checkpoints,
    free_name,
    history_after,
    point_latest,
    prunable,
    record_history,
    remove_leftovers,
)
from llmscale.checkpoint.manifest import (
    Checkpoint,
    CheckpointManifest,
    History,
    Validation,
    checkpoint_name,
    checkpoints_folder,
    find_damage,
    hash_file,
)
from tests.checkpoint.killer import Killer

KILLER = Killer()
#: More changes on disk than any of the actions makes.
NEVER = 10_000


@dataclass
class Run:
    """A run's folder beside what must be in it: a line is the ids of the checkpoints that lead to a state."""

    folder: Path
    keep_last: int = 3
    keep_every: int = 0
    history: History = field(default_factory=History)
    step: int = 0
    line: tuple[str, ...] = ()
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The line that each checkpoint ends."""
    steps: dict[str, int] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    """List the checkpoints that must be on disk."""
    damaged: set[str] = field(default_factory=set)
    num_saves: int = 0

    def found(self) -> dict[str, Checkpoint]:
        """Readable checkpoints on disk, by the id in their state."""
        checkpoints = find_checkpoints(self.folder)
        return {id_of(saved): saved for saved in [*checkpoints.current, *checkpoints.abandoned]}

    def current(self) -> list[str]:
        return [id_of(saved) for saved in find_checkpoints(self.folder).current]

    def save(self, num_steps: int, kill_after: int) -> None:
        """Train and save, as train.py does."""
        step, self.num_saves = self.step + num_steps, self.num_saves + 1
        identity, before = f"id-{self.num_saves}", set(self.there)
        with KILLER.after(kill_after) as died:
            assert write_checkpoint(self, step, identity) == []
        on_disk = set(self.found())
        if died and identity not in on_disk:
            assert on_disk == before - self.damaged_manifests(), "a save that was not finished cost something"
            self.restart(NEVER)
            return
        line = (*self.line, identity)
        self.lines[identity], self.steps[identity] = line, step
        may_go = self.expired(line)
        gone = before - on_disk - self.damaged_manifests()
        assert gone <= may_go if died else gone == may_go, (gone, may_go)
        self.there = (before | {identity}) - gone
        self.step, self.line = step, line
        if died:
            self.restart(NEVER)

    def expired(self, line: tuple[str, ...]) -> set[str]:
        """By the rule in the documentation, written down a second time."""
        expired, num_whole = set(), 0
        for identity in reversed(line):
            if identity in self.damaged_manifests() or (identity not in self.there and identity != line[-1]):
                continue
            if num_whole >= self.keep_last and (not self.keep_every or self.steps[identity] % self.keep_every):
                expired.add(identity)
            num_whole += identity not in self.damaged
        return expired - {self.best(line)}

    def best(self, line: tuple[str, ...]) -> str | None:
        """The lowest validation loss among what is whole; of two that are equal, the newer one's."""
        undamaged = [i for i in reversed(line) if (i in self.there or i == line[-1]) and i not in self.damaged]
        return min((i for i in undamaged if loss_of(i) is not None), key=lambda i: loss_of(i) or 0.0, default=None)

    def damaged_manifests(self) -> set[str]:
        return {identity for identity in self.damaged if identity.endswith("!")}

    def restart(self, kill_after: int, target: str | None = None) -> None:
        """Start from `target`, or from the newest that is good."""
        on_disk = self.found()
        good = [identity for identity in self.current() if find_damage(on_disk[identity].path) is None]
        expected = [identity for identity in reversed(self.line) if identity in self.there - self.damaged]
        assert good == expected, "what is to come next is not what was meant"
        chosen = target or (good[0] if good else None)
        if chosen is None:
            return
        with KILLER.after(kill_after) as died:
            checkpoints = find_checkpoints(self.folder)
            history = history_after(checkpoints, on_disk[chosen].path, self.folder)
            if history != checkpoints.history:
                record_history(self.folder, history, on_disk[chosen].path)
                point_latest(self.folder, on_disk[chosen].path)
            remove_leftovers(self.folder)
        assert set(self.found()) == set(on_disk), "going back deleted something"
        went = find_checkpoints(self.folder).history
        if (
            died
            and went == self.history
            and self.current() != [i for i in reversed(self.lines[chosen]) if i in on_disk]
        ):
            # Dead before it had gone back: all is as it was.
            self.restart(NEVER)
            return
        self.history, self.line, self.step = went, self.lines[chosen], self.steps[chosen]
        if died:
            self.restart(NEVER)

    def damage_newest(self) -> None:
        newest = find_checkpoints(self.folder).current[:1]
        for saved in newest:
            with (saved.path / "__0_0.distcp").open("ab") as file:
                file.write(b"x")
            self.damaged.add(id_of(saved))

    def check(self) -> None:
        """Check what must hold at any time."""
        checkpoints = find_checkpoints(self.folder)
        on_disk = self.found()
        assert set(on_disk) == self.there
        best = find_best(checkpoints.current)
        assert (best and id_of(best)) == (self.best(self.line) if self.line else None)
        assert self.current() == [identity for identity in reversed(self.line) if identity in self.there]
        assert not checkpoints.passed_over
        assert not checkpoints.damaged
        assert all(find_damage(saved.path) is None for i, saved in on_disk.items() if i not in self.damaged)


def loss_of(identity: str) -> float | None:
    """The validation loss of a save, as if at random; every fourth has none."""
    number = int(identity.removeprefix("id-").rstrip("!"))
    return None if number % 4 == 0 else number * 7 % 5 + 1.0


def id_of(saved: Checkpoint) -> str:
    return saved.manifest.precision


def write_checkpoint(run: Run, step: int, identity: str) -> list[str]:
    folder = checkpoints_folder(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = free_name(folder / f".{checkpoint_name(step)}.partial")
    partial.mkdir()
    for name in ("__0_0.distcp", "tensors.json"):
        (partial / name).write_text(identity)
    manifest = CheckpointManifest(
        step, 0, 1, 0, identity, "now", files=(hash_file(partial / "__0_0.distcp"),), history=run.history
    )
    if loss := loss_of(identity):
        manifest = replace(manifest, validation=Validation(loss, "8 of a set"))
    return commit_checkpoint(run.folder, partial, manifest, {}, keep_last=run.keep_last, keep_every=run.keep_every)


KILLS = st.sampled_from([NEVER] * 40 + list(range(40)))
ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from([10, 10, 10, 3]), KILLS),
    st.tuples(st.just("save"), st.sampled_from([10, 10, 10, 3]), KILLS),
    st.tuples(st.just("go back"), st.integers(0, 50), KILLS),
    st.tuples(st.just("restart"), st.just(0), KILLS),
    st.tuples(st.just("damage"), st.booleans(), st.just(0)),
    st.tuples(st.just("keep"), st.integers(1, 4), st.sampled_from([0, 20, 30])),
    st.tuples(st.just("prune"), st.just(0), st.just(0)),
)


@contextmanager
def new_run() -> Iterator[Run]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield Run(folder)
    finally:
        shutil.rmtree(folder)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=4, max_size=25))
def test_what_was_saved_is_there_and_what_comes_next_is_what_was_meant(actions: list[tuple[str, int, int]]) -> None:
    with new_run() as run:
        for what, number, other in actions:
            if what == "save":
                run.save(number, other)
            elif what == "go back":
                good = sorted(run.there - run.damaged)
                if good:
                    run.restart(other, good[number % len(good)])
            elif what == "restart":
                run.restart(other)
            elif what == "damage":
                run.damage_newest()
                if number:
                    run.restart(NEVER)
            elif what == "keep":
                run.keep_last, run.keep_every = number, other
            else:
                for path in prunable(find_checkpoints(run.folder)):
                    delete_checkpoint(path)
                run.there = set(run.line) & run.there
            run.check()
