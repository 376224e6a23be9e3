"""`llmscale checkpoint list|show|verify|diff|prune|import|export|reshard`: the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.inventory import (
    FoundCheckpoints,
    delete_checkpoint,
    find_best,
    find_checkpoint,
    find_checkpoints,
    open_checkpoint,
    prunable,
    read_state,
    report_passed_over,
)
from llmscale.checkpoint.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    checkpoints_folder,
    find_damage,
    load_manifest,
    load_pieces,
)
from llmscale.cli import checkpoint_files
from llmscale.config.command_line import run_place
from llmscale.config.run_keys import flatten
from llmscale.config.user_paths import is_view, shown, url_of
from llmscale.errors import CheckpointError
from llmscale.terminal.progress import show_progress
from llmscale.terminal.table import Column, output_width, table_lines, wrap_line
from llmscale.untrusted.terminal import print_to_stderr, print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser

_COLUMNS = (
    Column("checkpoint", is_text=True),
    Column("step"),
    Column("tokens", drop=1),
    Column("ranks", drop=4),
    Column("stage", drop=5),
    Column("precision", drop=6),
    Column("GiB", drop=2),
    Column("created", is_text=True, drop=3),
    Column("", is_text=True, least=24),
)


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `checkpoint` with its subcommands."""
    parser = subparsers.add_parser("checkpoint")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, handler, text in (
        ("list", _list, "one line per checkpoint of a run"),
        ("show", _show, "everything about one checkpoint"),
        ("verify", _verify, "read every byte and compare it with the manifest; exit status 1 on damage"),
        ("prune", _prune, "delete abandoned checkpoints: those of steps that a rollback discarded"),
    ):
        action = actions.add_parser(
            name, help=text, description=text, example=f"llmscale checkpoint {name} runs/default"
        )
        action.add_argument("run", type=run_place, metavar="RUN", help="run folder, or one checkpoint of it")
        action.set_defaults(handler=handler)
    text = "compare configuration and state of two checkpoints"
    example = "llmscale checkpoint diff runs/a runs/b"
    diff = actions.add_parser("diff", help=text, example=example)
    diff.add_argument("a", type=run_place, metavar="A", help="run folder or checkpoint")
    diff.add_argument("b", type=run_place, metavar="B", help="run folder or checkpoint")
    diff.set_defaults(handler=_diff)
    checkpoint_files.add_actions(actions)


def _list(args: argparse.Namespace) -> int:
    checkpoints = _find(args.run)
    best = find_best(checkpoints.current)
    rows = [(saved.step, _row(saved, _mark(saved, checkpoints.current[0], best))) for saved in checkpoints.current]
    rows += [
        (saved.step, _row(saved, f"abandoned (history {saved.history.number})")) for saved in checkpoints.abandoned
    ]
    rows.sort(key=lambda entry: -entry[0])
    if rows:
        for line in table_lines(_COLUMNS, [cells for _, cells in rows], output_width()):
            print(line)
    for path, problem in checkpoints.damaged:
        print_visible(f"{path.name}  DAMAGED: {problem}")
    if checkpoints.abandoned:
        print()
        for line in wrap_line(
            f"The run is in history {checkpoints.history.number}. Abandoned checkpoints are of steps that a rollback "
            "discarded: they are kept, and resumed by name only (--resume PATH). "
            f"`llmscale checkpoint prune {args.run}` deletes them.",
            output_width(),
        ):
            print_visible(line)
    return 0


def _mark(saved: Checkpoint, latest: Checkpoint, best: Checkpoint | None) -> str:
    marks = ["latest"] if saved is latest else []
    if saved is best and saved.manifest.validation:
        marks.append(f"best (loss {saved.manifest.validation.loss:.4f})")
    if marks:
        return f"<- {', '.join(marks)}"
    return ""


def _row(saved: Checkpoint, mark: str) -> list[str]:
    m = saved.manifest
    numbers = [str(m.step), f"{m.tokens_seen:,}", str(m.world_size), str(m.zero_stage)]
    return [saved.path.name, *numbers, m.precision, f"{m.num_bytes / 2**30:.3f}", m.created, mark]


def _find(run: Path) -> FoundCheckpoints:
    """Return a run's checkpoints, and report skipped ones on stderr. Raises CheckpointError without any."""
    checkpoints = find_checkpoints(run)
    report_passed_over(checkpoints, print_to_stderr)
    if not (checkpoints.current or checkpoints.abandoned or checkpoints.damaged):
        raise CheckpointError(f"{run} has no checkpoints. Is it a run folder (one that train.py's --run named)?")
    return checkpoints


def _show(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(args.run, print_to_stderr)
    print_visible(shown(checkpoint.path))
    for key in ("step", "tokens_seen", "world_size", "zero_stage", "precision", "created"):
        print_visible(f"  {key}: {getattr(checkpoint.manifest, key)}")
    for file in checkpoint.manifest.files:
        print_visible(f"  {file.num_bytes:>14,} bytes  {file.name}  xxh3_128 {file.xxh3_128}")
    print(json.dumps(read_state(checkpoint.path), indent=2))
    return 0


def _verify(args: argparse.Namespace) -> int:
    checkpoints = find_checkpoints(args.run)
    report_passed_over(checkpoints, print_to_stderr)
    folders = [saved.path for saved in [*checkpoints.current, *checkpoints.abandoned]]
    folders += [path for path, _ in checkpoints.damaged]
    if not folders:
        folders = [args.run if (args.run / MANIFEST_NAME).is_file() else find_checkpoint(args.run)]
    abandoned = {saved.path for saved in checkpoints.abandoned}
    num_damaged = 0
    total_bytes = sum(saved.manifest.num_bytes for saved in [*checkpoints.current, *checkpoints.abandoned])
    with show_progress("Verifying", total_bytes) as progress:
        for folder in folders:
            damage = find_damage(folder, progress=progress.add) or _find_remote_damage(folder)
            num_damaged += damage is not None
            mark = " (abandoned)" if folder in abandoned else ""
            progress.clear()
            print_visible(f"{folder.name}{mark}: {_intact(folder) if damage is None else f'DAMAGED: {damage}'}")
    return 1 if num_damaged else 0


def _find_remote_damage(folder: Path) -> str | None:
    if url_of(folder) is None:
        return None
    from llmscale.checkpoint.remote_run import drop_tensors
    from llmscale.checkpoint.tensor_files import fetch_checkpoint  # imports torch

    try:
        return fetch_checkpoint(folder)
    finally:
        if is_view(folder):
            drop_tensors(folder)


def _intact(folder: Path) -> str:
    pieces = load_pieces(folder)
    if pieces is None or pieces.remote:
        return "intact"
    return (
        f"intact on this disk ({len(pieces.files)} of {len(load_manifest(folder).files)} files; others are elsewhere)"
    )


def _prune(args: argparse.Namespace) -> int:
    if checkpoints_folder(args.run).is_symlink():
        raise CheckpointError(f"{checkpoints_folder(args.run)} is a symbolic link. Name the run that it points to.")
    checkpoints = _find(args.run)
    folders = prunable(checkpoints)
    if url_of(args.run) and folders:
        from llmscale.checkpoint.remote_run import prune_run

        prune_run(args.run, [folder.name for folder in folders], print_to_stderr)
    for folder in folders:
        try:
            delete_checkpoint(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be deleted: {error.strerror or error}.") from None
        print_visible(f"deleted {folder.name}")
    if not folders:
        print_visible(f"no abandoned checkpoints: all are of history {checkpoints.history.number}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    a = find_checkpoint(args.a, print_to_stderr)
    b = find_checkpoint(args.b, print_to_stderr)
    left, right = ({key: value for key, value in flatten(read_state(one)) if value != {}} for one in (a, b))
    print_visible(f"- {a}\n+ {b}")
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            print_visible(f"{key}\n  - {left.get(key, '(absent)')}\n  + {right.get(key, '(absent)')}")
    return 0
