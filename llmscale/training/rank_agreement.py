"""Check that all ranks were started alike before they train together.

Ranks that differ train something that nobody asked for (another learning rate, one different token), or hang in the
first collective that only some of them call (another number of steps, another ZeRO stage). Each rank reduces what it
was started with to one digest per section. Only if digests differ, one representative of each group of equal ranks
sends the values: a thousand ranks cost no more than two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import llmscale
from llmscale.checkpoint.initial_weights import PublishedWeights, fingerprint_weights
from llmscale.checkpoint.manifest import MANIFEST_NAME
from llmscale.config.run_config import keys_with
from llmscale.data.mixture import TrainingSets
from llmscale.data.shards.manifest import Manifest
from llmscale.engine.collectives import Disks, gather, on_all_ranks, on_main_rank
from llmscale.engine.process_group import World
from llmscale.errors import ConfigError, DataError, LlmscaleError
from llmscale.files.source_hashes import hash_or_reason, source_hashes
from llmscale.training.inputs import as_plain
from llmscale.training.run_folder import RunFolderClaim, library_versions
from llmscale.training.start import Start

#: Settings of one rank by key. Errors show the values.
Section = Mapping[str, str]

#: Variables that change the arithmetic of a rank, or let NCCL's ranks wait for each other in different algorithms.
_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("NCCL_ALGO", "NCCL_PROTO"),
)
#: Sections whose values are long hashes.
_DATA_SECTION, _SOURCES_SECTION = "dataset", "sources"
#: Parts of a difference that an error shows.
_MAX_ITEMS = 4
_MAX_VALUES = 3
_MAX_RANGES = 4
_MAX_HOSTS = 2
_MAX_VALUE_LENGTH = 60
_HASH_DIGITS = 12


def check_ranks_agree(run: Start, world: World) -> None:
    """Raise ConfigError or DataError on every rank unless all were started alike. Collective."""
    compare_ranks(_sections(run, world.device.type), world.control)


def check_same_checkpoint(folder: Path | None, world: World) -> None:
    """Raise ConfigError on every rank unless all begin with the same checkpoint. Collective."""
    chosen = {"name": "none", MANIFEST_NAME: "none"}
    if folder is not None:
        chosen = {"name": folder.name, MANIFEST_NAME: hash_or_reason(folder / MANIFEST_NAME)}
    compare_ranks({"checkpoint": chosen}, world.control)


def check_same_weights(weights: PublishedWeights, world: World) -> None:
    """Raise ConfigError on every rank unless all begin with the same published weights. Collective."""
    compare_ranks({"weights": on_all_ranks(world.control, lambda: fingerprint_weights(weights))}, world.control)


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
    if disks.is_one:
        return disks
    is_own_main = not world.is_main and disks.mains[world.rank] == world.rank
    owners = gather(world.control, on_all_ranks(world.control, lambda: claim.take() if is_own_main else None))
    if not is_own_main and (own := owners[disks.mains[world.rank]]) is not None:
        claim.join(own)
    return disks


def compare_ranks(sections: Mapping[str, Section], group: dist.ProcessGroup) -> None:
    """Raise ConfigError, or DataError if only data differ, on every rank unless all have the same. Collective."""
    digests = gather(group, digest(sections))
    speakers = representatives(digests)
    if not speakers:
        return
    rank = dist.get_rank(group)
    details = gather(group, {name: sections.get(name, {}) for name, ranks in speakers.items() if rank in ranks})
    raise describe_differences(digests, details)


def _sections(run: Start, device_type: str) -> dict[str, Section]:
    """Return everything that this rank was started with."""
    versions = {name: str(version) for name, version in library_versions().items()}
    # A patch release of Python changes no arithmetic.
    versions |= {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    variables = {name: os.environ.get(name, "not set") for name in _VARIABLES}
    ds_config = _flatten(run.resolved.ds_config)
    return {
        "configuration": _configuration(run),
        # NVMe disks may be mounted anywhere.
        "ds_config": {key: value for key, value in ds_config.items() if not key.endswith("nvme_path")},
        _DATA_SECTION: _data_sets(run.sets),
        _SOURCES_SECTION: source_hashes(Path(llmscale.__file__).parent),
        "versions": versions,
        "environment": {**variables, "kind of device": device_type},
    }


def _configuration(run: Start) -> dict[str, str]:
    """Return every key with its resolved value."""
    config = as_plain(run.config)
    # The number of steps is the schedule's, too.
    resolved = {name: values for name, values in run.resolved.as_dict().items() if name != "total_steps"}
    kept = {key: config[key] for key in keys_with(ranks="same")}
    # The content of checkpoints, weights, items and prompts is compared, not their paths.
    kept["resume"] = config["resume"] if config["resume"] in ("auto", "none") else "a checkpoint"
    kept["init_from"] = None if run.config.init_from is None else "weights"
    kept["eval_tasks"] = [f"{task.name} {task.sha256[:16]}" for task in run.tasks]
    kept["sample_prompts"] = hashlib.sha256(json.dumps(run.prompts).encode()).hexdigest()[:16]
    kept |= {"precision": run.resolved.precision, "activation_checkpointing": run.resolved.checkpointing}
    values = {key: _text(value) for key, value in kept.items()}
    for path, text in _flatten(resolved).items():
        values[path.rpartition(".")[2]] = text
    return values


def _data_sets(sets: TrainingSets) -> dict[str, str]:
    """Describe every dataset, and the proportions of a mixture."""
    if sets.recipe is None:
        return _data_set(sets.manifest)
    stages = [f"{stage.shares} until {stage.until} of the run" for stage in sets.recipe.stages]
    values = {"stages": "; ".join(stages)}
    for name, location in zip(sets.names, sets.locations, strict=True):
        values |= {f"{name}/{key}": text for key, text in _data_set(location.manifest).items()}
    return values


def _data_set(manifest: Manifest) -> dict[str, str]:
    """Describe a dataset shard by shard: a copy could carry another dataset's name."""
    values = {
        name: _text(getattr(manifest, name))
        for name in ("tokenizer_sha256", "vocab_size", "eot_token", "seq_len", "dtype", "hash_algorithm")
    }
    for split, held in manifest.splits.items():
        values |= {f"{split}/{shard.name}": f"{shard.hash} ({shard.num_samples} samples)" for shard in held.shards}
    return values


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings: keys joined by dots, values as text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


@dataclass(frozen=True)
class RankDigest:
    """A rank's first message: a few hundred bytes."""

    host: str
    digests: Mapping[str, bytes]
    """Digest by section."""


def digest(sections: Mapping[str, Section]) -> RankDigest:
    """Return this rank's digests."""
    digests = {
        name: hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest() for name, values in sections.items()
    }
    return RankDigest(platform.node(), digests)


def representatives(digests: Sequence[RankDigest]) -> dict[str, set[int]]:
    """Return for each section that differs the first rank of each group of equal ranks."""
    names = {name: None for rank in digests for name in rank.digests}
    found: dict[str, set[int]] = {}
    for name in names:
        groups = _ranks_by([rank.digests.get(name) for rank in digests])
        if len(groups) > 1:
            found[name] = {ranks[0] for ranks in groups.values()}
    return found


def describe_differences(digests: Sequence[RankDigest], details: Sequence[Mapping[str, Section]]) -> LlmscaleError:
    """Return an error of one line, however many ranks: what differs, its values, and the ranks that have them.

    `details` holds, by rank, the sections that a representative sent.
    """
    hosts = [rank.host for rank in digests]
    lines: list[str] = []
    differing = representatives(digests)
    for name in differing:
        groups = _ranks_by([rank.digests.get(name) for rank in digests])
        sections = {rank: details[ranks[0]].get(name, {}) for ranks in groups.values() for rank in ranks}
        keys = {key: None for section in {id(s): s for s in sections.values()}.values() for key in section}
        items = []
        for key in keys:
            by_value = _ranks_by([sections[rank].get(key, "absent") for rank in range(len(hosts))])
            if len(by_value) > 1:
                is_hash = name in (_SOURCES_SECTION, _DATA_SECTION)
                items.append(f"{key} is {_describe_values(by_value, hosts, is_hash=is_hash)}")
        more = f"; {len(items) - _MAX_ITEMS} more of its keys differ" if len(items) > _MAX_ITEMS else ""
        lines.append(f"{name}: {'; '.join(items[:_MAX_ITEMS])}{more}")
    kind = DataError if list(differing) == [_DATA_SECTION] else ConfigError
    return kind(
        f"the ranks were not started alike, so they cannot train together. {'. '.join(lines)}. Start every rank with "
        "the same flags, files, data and software."
    )


def _ranks_by(values: Sequence[object]) -> dict[object, list[int]]:
    """Group ranks by their value, the most frequent first."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0])))


def _describe_values(by_value: Mapping[object, list[int]], hosts: Sequence[str], *, is_hash: bool) -> str:
    shown: list[str] = []
    for value, ranks in list(by_value.items())[:_MAX_VALUES]:
        text = str(value)
        text = text[:_HASH_DIGITS] if is_hash and len(text) > _MAX_VALUE_LENGTH else text
        text = text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
        where = _describe_hosts(ranks, hosts) if len(set(hosts)) > 1 and shown else ""
        shown.append(f"{text} on {describe_ranks(ranks)}{where}")
    more = f" and {len(by_value) - _MAX_VALUES} other values elsewhere" if len(by_value) > _MAX_VALUES else ""
    return ", ".join(shown) + more


def _describe_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - _MAX_HOSTS} more" if len(names) > _MAX_HOSTS else ""
    return f" (host {', '.join(names[:_MAX_HOSTS])}{more})"


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
