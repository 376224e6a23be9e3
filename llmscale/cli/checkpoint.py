"""`llmscale checkpoint list|show|verify|diff`: what a run has saved, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.checkpoint.find import find_checkpoint, read_state
from llmscale.checkpoint.manifest import find_damage, list_checkpoints, load_manifest, read_latest
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `checkpoint` and its own subcommands."""
    parser = subparsers.add_parser("checkpoint", help="list, show, verify and compare checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, handler, text in (
        ("list", _list, "one line per checkpoint of a run"),
        ("show", _show, "everything about one checkpoint"),
        ("verify", _verify, "read every byte and compare it with the manifest; exit status 1 on damage"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("run", type=Path, metavar="RUN", help="run folder, or one checkpoint of it")
        action.set_defaults(handler=handler)
    diff = actions.add_parser("diff", help="what differs between two checkpoints' configuration and state")
    diff.add_argument("a", type=Path, metavar="A", help="run folder or checkpoint")
    diff.add_argument("b", type=Path, metavar="B", help="run folder or checkpoint")
    diff.set_defaults(handler=_diff)


def _list(args: argparse.Namespace) -> int:
    folders = list_checkpoints(args.run)
    if not folders:
        raise CheckpointError(f"{args.run} has no checkpoints. Is it a run folder (one that train.py's --run named)?")
    latest = read_latest(args.run)
    print(
        f"{'checkpoint':<16} {'step':>8} {'tokens':>16} {'ranks':>5} {'stage':>5} {'precision':>9} {'GiB':>8}  created"
    )
    for folder in folders:
        try:
            m = load_manifest(folder)
        except CheckpointError as error:
            print(f"{folder.name:<16} DAMAGED: {error}")
            continue
        mark = "  <- latest" if folder.name == latest else ""
        print(
            f"{folder.name:<16} {m.step:>8} {m.tokens_seen:>16,} {m.world_size:>5} {m.zero_stage:>5} {m.precision:>9} "
            f"{m.num_bytes / 2**30:>8.3f}  {m.created}{mark}"
        )
    return 0


def _show(args: argparse.Namespace) -> int:
    folder = find_checkpoint(args.run)
    manifest = load_manifest(folder)
    print(folder)
    for key in ("step", "tokens_seen", "world_size", "zero_stage", "precision", "created"):
        print(f"  {key}: {getattr(manifest, key)}")
    for file in manifest.files:
        print(f"  {file.num_bytes:>14,} bytes  {file.name}  xxh3_128 {file.xxh3_128}")
    print(json.dumps(read_state(folder), indent=2))
    return 0


def _verify(args: argparse.Namespace) -> int:
    folders = list_checkpoints(args.run) or [find_checkpoint(args.run)]
    num_damaged = 0
    for folder in folders:
        damage = find_damage(folder)
        num_damaged += damage is not None
        print(f"{folder.name}: {'whole' if damage is None else f'DAMAGED: {damage}'}")
    return 1 if num_damaged else 0


def _diff(args: argparse.Namespace) -> int:
    a, b = find_checkpoint(args.a), find_checkpoint(args.b)
    left, right = dict(_flatten(read_state(a))), dict(_flatten(read_state(b)))
    print(f"- {a}\n+ {b}")
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            print(f"{key}\n  - {left.get(key, '(absent)')}\n  + {right.get(key, '(absent)')}")
    return 0


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested mappings as dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
