"""Decide with all ranks where a run begins: compare the ranks, confirm the checkpoint, enter its history, load it.

Check that all ranks were started alike before they train together.

Ranks that differ train something that nobody asked for (another learning rate, one different token), or hang in the
first collective that only some of them call (another number of steps, another ZeRO stage). Each rank gets what rank 0
was started with, and sends what differs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import llmscale
from llmscale.architecture.layers import is_adapter
from llmscale.checkpoint.initial_weights import (
    FrozenBase,
    base_of_checkpoint,
    check_base,
    checksum_of,
    fingerprint_weights,
    load_published_weights,
)
from llmscale.checkpoint.inventory import (
    FoundCheckpoints,
    find_checkpoints,
    history_after,
    is_of_run,
    point_best,
    point_latest,
    record_history,
    remove_leftovers,
)
from llmscale.checkpoint.load import (
    find_damage_together,
    find_newest_good,
    load_engine,
    load_weights,
    share_descriptions,
)
from llmscale.checkpoint.manifest import MANIFEST_NAME, Checkpoint, History
from llmscale.checkpoint.peft_files import load_adapters
from llmscale.checkpoint.run_state import SavedRun, read_saved_run
from llmscale.config.hf_model import is_published
from llmscale.config.run_keys import flatten, keys_with
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.loss_scale import get_scaler_state, set_scaler_state
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError, ConfigError, DataError, LlmscaleError
from llmscale.training.inputs import as_plain, open_named
from llmscale.training.run_folder import RunFolderClaim, hash_or_reason, library_versions, source_hashes
from llmscale.training.start import Start

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def confirm_start(start: Start, world: World, report: Callable[[str], None], at: Path | None = None) -> Start:
    """Return the start from a checkpoint that all ranks have verified and see alike. Collective.

    Call it when the run folder is claimed: the newest checkpoint may be another one than `start` found, or damaged.
    `at` is one to go back to in place of what the configuration says. Removes what interrupted saves left.

    Raises CheckpointError if the named checkpoint is damaged, if all checkpoints of the run are, or if it belongs to
    another run; ConfigError if ranks see different ones.
    """
    config, control = start.config, world.control
    is_auto = at is None and config.init_from is None and config.resume == "auto"
    if is_auto:
        share_descriptions(config.run, control, world.disks)
    # Rank 0 reads the folder for all: another rank might read it later and choose another checkpoint.
    listing = on_main_rank(control, lambda: find_checkpoints(config.run))
    start = replace(start, listing=listing)
    chosen = (
        find_newest_good(listing, config.run, control, world.disks, report)
        if is_auto
        else _find_named(start, at, world, report)
    )
    resumes = at is not None or start.resumes

    def read() -> SavedRun | None:
        source = start.source
        if chosen is None or source is None or source.manifest != chosen.manifest:
            source = read_saved_run(chosen) if chosen else None
        start.at(source, resumes=resumes)  # raises what all ranks would raise
        return source

    # Rank 0 reads it; hashes confirm later that the others see the same files.
    source = on_main_rank(control, read)
    if source is not None and chosen is not None:
        source = replace(source, path=chosen.path)
    start = start.at(source, resumes=resumes)
    if start.left_out and at is None:
        report(f"{start.left_out} has acted at an earlier start of this launch, and is left out")
    for warning in start.warnings:
        report(f"WARNING: {warning}")
    same = {"name": "none", MANIFEST_NAME: "none"}
    if chosen is not None:
        same = {"name": chosen.path.name, MANIFEST_NAME: hash_or_reason(chosen.path / MANIFEST_NAME)}
    compare_ranks({"checkpoint": same}, control)
    if (weights := start.weights) is not None and at is None:
        compare_ranks({"weights": on_all_ranks(control, lambda: fingerprint_weights(weights))}, control)
    if start.base is not None and at is None:
        start = replace(start, base=_confirm_base(start, start.base, world))

    def clean() -> None:
        for line in remove_leftovers(config.run):
            report(line)

    on_each_disk(control, world.disks, clean)
    return start


def _confirm_base(start: Start, base: FrozenBase, world: World) -> FrozenBase:
    """Return the weights beside adapters with their checksum, which is the checkpoint's. Collective.

    Raises CheckpointError if they are damaged, or others.
    """
    control = world.control
    if start.source is not None and not start.resumes:
        base = base_of_checkpoint(start.source)  # a run that trains may have a newer one by now
    elif base.source and (damage := find_damage_together(base.source, control, world.disks)):
        raise CheckpointError(damage)
    files = start.weights.files if start.weights else ()
    base = replace(base, checksum=on_each_disk(control, world.disks, lambda: checksum_of(base, files)))
    if start.source is not None and start.state is not None:
        check_base(base, start.source)
    return base


def _find_named(start: Start, at: Path | None, world: World, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that the user named, or `at`, verified; None without one. Collective."""
    config = start.config
    flag, path = ("--init-from", config.init_from) if at is None and config.init_from else ("--resume", config.resume)
    path = path if at is None else str(at)
    if path is None or path in ("auto", "none") or is_published(path):
        return None

    def look() -> tuple[str, Checkpoint]:
        checkpoint = open_named(flag, path, report)
        return os.path.relpath(checkpoint.path, path), checkpoint

    # Rank 0's answer counts: another rank might see a newer checkpoint of a run that trains.
    inside, checkpoint = on_main_rank(world.control, look)
    checkpoint = replace(checkpoint, path=Path(os.path.normpath(Path(path) / inside)))
    if damage := find_damage_together(checkpoint, world.control, world.disks):
        raise CheckpointError(f"{flag} {path}: {damage} Name another checkpoint.")
    return checkpoint


def enter_history(start: Start, world: World, report: Callable[[str], None]) -> History:
    """Return the history of this start's checkpoints; a run that goes back permanently begins a new one here.

    Call it when only the first step can still fail. Collective. Raises CheckpointError if the record of a new history
    cannot be written.
    """

    def enter() -> History:
        try:
            # Another disk has its own list; nobody else has written to this one since it was listed.
            listing = start.listing if start.listing and world.disks.is_one else find_checkpoints(start.config.run)
            return _enter(start, listing, report)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"the run cannot go back: {error}") from error

    return on_each_disk(world.control, world.disks, enter)


def _enter(start: Start, listing: FoundCheckpoints, report: Callable[[str], None]) -> History:
    run, source, state = start.config.run, start.source, start.state
    if source is None or state is None:
        return listing.history
    history = history_after(listing, source.path, run)
    if history != listing.history or not is_of_run(source.path, run) or listing.notes:
        _begin_history(run, history, listing, source, report)
    try:
        point_best(run, listing.under(history).current)
    except (CheckpointError, OSError) as error:
        report(f"WARNING: `best` may not name the best checkpoint: {error}")
    return history


def _begin_history(
    run: Path, history: History, listing: FoundCheckpoints, source: Checkpoint, report: Callable[[str], None]
) -> None:
    record_history(run, history, source.path)
    current = {checkpoint.path for checkpoint in listing.under(history).current}
    abandoned = [checkpoint for checkpoint in listing.current if checkpoint.path not in current]
    if abandoned:
        report(_describe_abandoned(abandoned, history, source, run))
    try:
        point_latest(run, source.path)
    except OSError as error:
        report(f"WARNING: `latest` still points to an abandoned checkpoint: {error}")


def _describe_abandoned(abandoned: list[Checkpoint], history: History, source: Checkpoint, run: Path) -> str:
    """Describe in one line the checkpoints that going back abandons; the newest comes first in the list."""
    gib = sum(checkpoint.manifest.num_bytes for checkpoint in abandoned) / 2**30
    first, last = abandoned[-1].path.name, abandoned[0].path.name
    names = f"{first} to {last}" if len(abandoned) > 1 else last
    return (
        f"history {history.number} of this run begins at step {source.step}. Abandoned: {names} "
        f"({len(abandoned)}, {gib:.2f} GiB), neither resumed nor deleted unless you ask for it: --resume PATH, "
        f"llmscale checkpoint prune {run}"
    )


def load_initial_state(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    """Load the checkpoint, or the weights that a new run begins with. Collective. Raises LlmscaleError."""
    source, state = start.source, start.state
    if source is None or state is None:
        name = _load_first_weights(start, engine, world, report, progress)
        if name is not None:
            report(f"weights from {name}; everything else starts at step 0")
        return
    if start.base is not None:
        _load_base(start, start.base, engine, world, progress)
    cast = load_checkpoint(engine, source, world, get_scaler_state(engine))
    report(f"continuing from {source.path}: step {state.step}, {state.tokens_seen:,} tokens seen")
    if state.precision != start.resolved.precision:
        report(
            f"precision changes from {state.precision} to {start.resolved.precision}: "
            f"{cast or 'fp32 master weights and optimizer states are taken over exactly'}; a loss scaler, where there "
            "is one, starts from its configuration"
        )
    elif cast:
        report(cast)


def _load_base(
    start: Start, base: FrozenBase, engine: DeepSpeedEngine, world: World, progress: Callable[[], object]
) -> None:
    """Load the weights beside a checkpoint's adapters. Collective. Raises CheckpointError."""
    if base.source is not None:
        load_weights(engine, base.source.path, world.control, world.disks, keeps=is_adapter)
    elif start.weights is not None:
        load_published_weights(engine, start.weights, world.control, progress)


def load_checkpoint(
    engine: DeepSpeedEngine, source: SavedRun, world: World, configured_scaler: dict[str, float] | None
) -> str | None:
    """Load weights, optimizer states and loss scaler; a checkpoint without a scaler resets it to the configured one.

    Collective. Returns a line about states of another type, or None. Raises CheckpointError.
    """
    state = source.state
    cast = load_engine(
        engine,
        source.path,
        state.optimizer_scalars,
        world.control,
        world.disks,
        with_frozen=not state.base,
    )
    engine.global_steps = state.step
    set_scaler_state(engine, source.state.loss_scaler or configured_scaler)
    return cast


def _load_first_weights(
    start: Start,
    engine: DeepSpeedEngine,
    world: World,
    report: Callable[[str], None],
    progress: Callable[[], object],
) -> str | None:
    """Load the weights of --init-from, and return their name; None without --init-from. Collective."""
    name = None
    if start.weights is not None:
        for note in start.weights.notes:
            report(note)
        load_published_weights(engine, start.weights, world.control, progress)
        name = start.weights.name
    elif start.source is not None:
        load_weights(engine, start.source.path, world.control, world.disks, keeps=is_adapter)
        name = str(start.source.path)
    if (folder := start.config.lora_from) is not None:
        load_adapters(engine, folder, start.weights.model if start.weights else None, world.control)
        name = f"{name}, adapters from {folder}"
    return name


#: Settings of one rank by key. Errors show the values.
Section = Mapping[str, str]

#: Variables that change the arithmetic of a rank, or let NCCL's ranks wait for each other in different algorithms.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_DATA_SECTION, _ABSENT = "dataset", "absent"
#: Parts of a difference that an error shows.
_MAX_ITEMS, _MAX_VALUES, _MAX_RANGES, _MAX_HOSTS = 4, 3, 4, 2
_MAX_VALUE_LENGTH, _HASH_LENGTH, _HASH_DIGITS = 60, 64, 12


def check_ranks_agree(run: Start, world: World) -> None:
    """Raise ConfigError or DataError on every rank unless all were started alike. Collective."""
    compare_ranks(_sections(run, world.device.type), world.control)


def claim_run_folder(claim: RunFolderClaim, world: World) -> Disks:
    """Claim the run folder on rank 0, and on one rank of each node that does not see rank 0's. Collective.

    Returns which ranks share a disk. Raises on every rank if a claim fails.
    """
    owner = on_main_rank(world.control, claim.take)
    # Not on rank 0: closing a second handle of a locked file releases the lock.
    sees_main = gather(world.control, world.is_main or claim.is_visible(owner))
    starts = itertools.accumulate((0, *world.ranks_per_node[:-1]))
    firsts = [start for start, node in zip(starts, world.ranks_per_node, strict=True) for _ in range(node)]
    disks = Disks(tuple(0 if sees else first for sees, first in zip(sees_main, firsts, strict=True)))
    is_own_main = not world.is_main and disks.mains[world.rank] == world.rank
    on_all_ranks(world.control, lambda: claim.take() if is_own_main else None)
    return disks


def compare_ranks(sections: Mapping[str, Section], group: dist.ProcessGroup) -> None:
    """Raise ConfigError, or DataError if only data differ, on every rank unless all have the same. Collective."""
    of_main = on_main_rank(group, lambda: sections)
    differences = gather(group, (platform.node(), find_differences(of_main, sections)))
    if any(own for _, own in differences):
        raise describe_differences(of_main, differences)


def _sections(run: Start, device_type: str) -> dict[str, Section]:
    """Return everything that this rank was started with."""
    versions = {name: str(version) for name, version in library_versions().items()}
    # A patch release of Python changes no arithmetic.
    versions |= {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    variables = {name: os.environ.get(name, "not set") for name in _VARIABLES}
    ds_config = {path: _text(value) for path, value in flatten(run.resolved.ds_config)}
    # Not by path: nodes may have copies.
    names = run.sets.names if run.sets.recipe else ("fingerprint",)
    sets = {name: at.manifest.fingerprint for name, at in zip(names, run.sets.locations, strict=True)}
    for stage in run.sets.recipe.stages if run.sets.recipe else ():
        sets[f"proportions until {stage.until} of the run"] = str(stage.shares)
    return {
        "configuration": _configuration(run),
        # NVMe disks may be mounted anywhere.
        "ds_config": {key: value for key, value in ds_config.items() if not key.endswith("nvme_path")},
        _DATA_SECTION: sets,
        "sources": source_hashes(Path(llmscale.__file__).parent),
        "versions": versions,
        "environment": {**variables, "kind of device": device_type},
    }


def _configuration(run: Start) -> dict[str, str]:
    """Return every key with its resolved value."""
    config = as_plain(run.config)
    # The number of steps is the schedule's, too.
    resolved = {name: values for name, values in run.resolved.as_dict().items() if name != "total_steps"}
    compared = {key: config[key] for key in keys_with(ranks="same")}
    compared["minutes"] = config["minutes"]
    # The content of checkpoints, weights, items and prompts is compared, not their paths.
    compared["resume"] = config["resume"] if config["resume"] in ("auto", "none") else "a checkpoint"
    compared["init_from"] = None if run.config.init_from is None else "weights"
    compared["eval_tasks"] = [f"{task.name} {task.sha256[:16]}" for task in run.tasks]
    compared["sample_prompts"] = hashlib.sha256(json.dumps(run.prompts).encode()).hexdigest()[:16]
    compared |= {"precision": run.resolved.precision, "activation_checkpointing": run.resolved.checkpointing}
    flat = {path.rpartition(".")[2]: _text(value) for path, value in flatten(resolved)}
    return {key: _text(value) for key, value in compared.items()} | flat


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


#: Values of a rank by section and key.
Differences = Mapping[tuple[str, str], str]


def find_differences(of_main: Mapping[str, Section], sections: Mapping[str, Section]) -> Differences:
    """Return this rank's values that differ from rank 0's."""
    own, others = ({(name, key): of[name][key] for name in of for key in of[name]} for of in (sections, of_main))
    return {place: own.get(place, _ABSENT) for place in {**others, **own} if own.get(place) != others.get(place)}


def describe_differences(
    of_main: Mapping[str, Section], differences: Sequence[tuple[str, Differences]]
) -> LlmscaleError:
    """Return an error of one line, however many ranks: what differs, its values, and the ranks that have them.

    `differences`: by rank, its host and the values that differ from rank 0's.
    """
    hosts = [host for host, _ in differences]
    by_section: dict[str, list[str]] = {}
    for section, key in dict.fromkeys(place for _, own in differences for place in own):
        first = of_main.get(section, {}).get(key, _ABSENT)
        by_value = _ranks_by([own.get((section, key), first) for _, own in differences])
        by_section.setdefault(section, []).append(f"{key} is {_describe_values(by_value, hosts)}")
    parts = []
    for section, items in by_section.items():
        more = f"; {len(items) - _MAX_ITEMS} more of its keys differ" if len(items) > _MAX_ITEMS else ""
        parts.append(f"{section}: {'; '.join(items[:_MAX_ITEMS])}{more}")
    kind = DataError if [*by_section] == [_DATA_SECTION] else ConfigError
    return kind(
        f"the ranks were not started alike, so they cannot train together. {'. '.join(parts)}. Start every rank with "
        "the same flags, files, data and software."
    )


def _ranks_by(values: Sequence[str]) -> dict[str, list[int]]:
    """Group ranks by their value, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0])))


def _describe_values(by_value: Mapping[str, list[int]], hosts: Sequence[str]) -> str:
    """Describe the values of a key with the ranks that have them; but for the first also with their hosts."""
    words: list[str] = []
    for text, ranks in list(by_value.items())[:_MAX_VALUES]:
        if len(text) > _MAX_VALUE_LENGTH:
            is_hash = len(text) == _HASH_LENGTH and text.isalnum()
            text = text[:_HASH_DIGITS] if is_hash else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
        word = f"{text} on {describe_ranks(ranks)}"
        if words and len(set(hosts)) > 1:
            names = list(dict.fromkeys(hosts[rank] for rank in ranks))
            more = f" and {len(names) - _MAX_HOSTS} more" if len(names) > _MAX_HOSTS else ""
            word += f" (host {', '.join(names[:_MAX_HOSTS])}{more})"
        words.append(word)
    more = f" and {len(by_value) - _MAX_VALUES} other values elsewhere" if len(by_value) > _MAX_VALUES else ""
    return ", ".join(words) + more


def describe_ranks(ranks: Sequence[int]) -> str:
    """Describe ascending ranks briefly: `ranks 0-3 and 7`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{f' and {left} more' if left else ''}"
