"""Check that all ranks were started alike before they train together.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import llmscale
from llmscale.config.run_keys import flatten, keys_with
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_main_rank
from llmscale.engine.process_group import World
from llmscale.errors import ConfigError, DataError, LlmscaleError
from llmscale.training.inputs import as_plain
from llmscale.training.run_folder import RunFolderClaim, library_versions, source_hashes
from llmscale.training.start import Start

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
_DATA_SECTION = "dataset"
_ABSENT = "absent"
#: Parts of a difference that an error shows.
_MAX_ITEMS = 4
_MAX_VALUES = 3
_MAX_RANGES = 4
_MAX_HOSTS = 2
_MAX_VALUE_LENGTH = 60
_HASH_LENGTH = 64
_HASH_DIGITS = 12


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
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str)


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
        if len(items) > _MAX_ITEMS:
            more = f"; {len(items) - _MAX_ITEMS} more of its keys differ"
        else:
            more = ""
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
            if is_hash:
                text = text[:_HASH_DIGITS]
            else:
                text = f"{text[: _MAX_VALUE_LENGTH - 3]}..."
        word = f"{text} on {describe_ranks(ranks)}"
        if words and len(set(hosts)) > 1:
            names = list(dict.fromkeys(hosts[rank] for rank in ranks))
            if len(names) > _MAX_HOSTS:
                more = f" and {len(names) - _MAX_HOSTS} more"
            else:
                more = ""
            word += f" (host {', '.join(names[:_MAX_HOSTS])}{more})"
        words.append(word)
    if len(by_value) > _MAX_VALUES:
        more = f" and {len(by_value) - _MAX_VALUES} other values elsewhere"
    else:
        more = ""
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
