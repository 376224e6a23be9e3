"""The checkpoints of a run as its ranks see them: listed by rank 0, verified by all, on one disk or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from llmscale.checkpoint.disks import find_missing, share_descriptions
from llmscale.checkpoint.inventory import (
    FoundCheckpoints,
    explain_no_checkpoint,
    find_checkpoints,
    history_after,
    is_of_run,
    open_checkpoint,
    point_best,
    point_latest,
    record_history,
    remove_leftovers,
    report_passed_over,
)
from llmscale.checkpoint.manifest import MANIFEST_NAME, Checkpoint, History, checkpoints_folder, find_damage
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.errors import CheckpointError


class CheckpointStore:
    """The checkpoints of one run folder, for all ranks of a job. Every rank calls every method at the same place."""

    def __init__(
        self, run: Path, group: dist.ProcessGroup, disks: Disks, report: Callable[[str], None] = lambda line: None
    ) -> None:
        """`group` are all ranks, `disks` those that see the same folder. `report` gets a line on every rank; the
        caller decides who prints."""
        self.run = run
        self.group = group
        self.disks = disks
        self._report = report

    def list(self) -> FoundCheckpoints:
        """Return rank 0's listing: another rank might read the folder later, and choose otherwise. Collective.

        Raises CheckpointError if a disk cannot be read.
        """
        return on_main_rank(self.group, find_checkpoints, self.run)

    def share(self) -> None:
        """Give every disk the descriptions of all checkpoints, before they are listed. Collective."""
        share_descriptions(self.run, self.group, self.disks)

    def newest_whole(self, listing: FoundCheckpoints, *, hint: str = "") -> Checkpoint | None:
        """Return the newest undamaged checkpoint of the current history; None when the run has no checkpoints.

        Collective: the ranks share the hashing. Every skipped entry is reported. Raises CheckpointError when no
        checkpoint is undamaged: only the user may decide to start from scratch. `hint` says how.
        """
        report_passed_over(listing, self._report)
        for folder, damage in listing.damaged:
            self._report(f"WARNING: {folder.name} is damaged and passed over: {damage}")
        for checkpoint in map(self._here, listing.current):
            problem = self.find_damage(checkpoint)
            if problem is None:
                return checkpoint
            self._report(f"WARNING: {checkpoint.path.name} is damaged and passed over: {problem}")
        if listing.current or listing.abandoned or listing.damaged or listing.origin:
            raise CheckpointError(explain_no_checkpoint(listing, self.run) + hint)
        nearly = [path for path, _ in listing.passed_over if (path / MANIFEST_NAME).is_file()]
        if nearly:
            raise CheckpointError(
                f"{checkpoints_folder(self.run)} has nothing to continue from but {nearly[0].name}, which is passed "
                f"over (see above). Take it by naming its folder, or begin in another one.{hint}"
            )
        return None

    def open(self, step: int) -> Checkpoint:
        """Return the current history's checkpoint of a step, verified. Collective. Raises CheckpointError."""
        checkpoint = self._here(on_main_rank(self.group, open_checkpoint, self.run, step=step))
        if damage := self.find_damage(checkpoint):
            raise CheckpointError(damage)
        return checkpoint

    def find_damage(self, checkpoint: Checkpoint) -> str | None:
        """Find damage, with the hashing shared by the ranks of each disk; all return the same. Collective.

        `checkpoint` is as rank 0 has read it, of this run or another; another disk has its own manifest.
        """
        rank = dist.get_rank(self.group)
        neighbours = self.disks.neighbours(rank)
        part = neighbours.index(rank)
        parts = len(neighbours)

        def look() -> str | None:
            if self.disks.is_one:
                return checkpoint.find_damage(part, parts)
            return find_damage(checkpoint.path, part, parts)

        findings = gather(self.group, on_all_ranks(self.group, look))
        damage = next((finding for finding in findings if finding), None)
        return damage or find_missing(checkpoint, self.group)

    def remove_leftovers(self) -> None:
        """Remove what interrupted saves left on every disk. Collective."""
        for line in on_each_disk(self.group, self.disks, remove_leftovers, self.run):
            self._report(line)

    def enter_history(
        self, source: Checkpoint | None, listing: FoundCheckpoints | None = None, *, hint: str = ""
    ) -> History:
        """Return the history of the checkpoints that follow `source`; a run that goes back permanently begins a new one
        here. `listing` is rank 0's, if it is at hand. `hint` says how to reach what is abandoned.

        Call it when only the first step can still fail. Collective. Raises CheckpointError if the record of a new
        history cannot be written.
        """
        # Another disk has its own list; nobody else has written to this one since it was listed.
        known = listing if self.disks.is_one else None
        return on_each_disk(self.group, self.disks, self._enter, source, known, hint)

    def _enter(self, source: Checkpoint | None, known: FoundCheckpoints | None, hint: str) -> History:
        try:
            listing = known or find_checkpoints(self.run)
            if source is None:
                return listing.history
            history = history_after(listing, source.path, self.run)
            if history != listing.history or not is_of_run(source.path, self.run) or listing.notes:
                self._begin(history, listing, source, hint)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"the run cannot go back: {error}") from error
        try:
            point_best(self.run, listing.under(history).current)
        except (CheckpointError, OSError) as error:
            self._report(f"WARNING: `best` may not name the best checkpoint: {error}")
        return history

    def _begin(self, history: History, listing: FoundCheckpoints, source: Checkpoint, hint: str) -> None:
        record_history(self.run, history, source.path)
        current = {checkpoint.path for checkpoint in listing.under(history).current}
        abandoned = [checkpoint for checkpoint in listing.current if checkpoint.path not in current]
        if abandoned:
            self._report(_describe_abandoned(abandoned, history, source) + hint)
        try:
            point_latest(self.run, source.path)
        except OSError as error:
            self._report(f"WARNING: `latest` still points to an abandoned checkpoint: {error}")

    def _here(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint at this rank's path: the copy of a remote run may be elsewhere on another node."""
        return replace(checkpoint, path=checkpoints_folder(self.run) / checkpoint.path.name)


def _describe_abandoned(abandoned: list[Checkpoint], history: History, source: Checkpoint) -> str:
    """Describe in one line the checkpoints that going back abandons; the newest comes first in the list."""
    gib = sum(checkpoint.manifest.num_bytes for checkpoint in abandoned) / 2**30
    first = abandoned[-1].path.name
    last = abandoned[0].path.name
    names = f"{first} to {last}" if len(abandoned) > 1 else last
    return (
        f"history {history.number} of this run begins at step {source.step}. Abandoned: {names} "
        f"({len(abandoned)}, {gib:.2f} GiB), neither resumed nor deleted unless you ask for it"
    )
