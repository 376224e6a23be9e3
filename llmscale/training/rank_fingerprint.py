"""What must be the same on every rank before they train together, and what may differ.

Ranks that differ train something that nobody asked for (another learning rate, one other token) or hang in the first
collective that only some of them call (another number of steps, another ZeRO stage). So each sums up in one digest per
section what it was started with, and only when digests differ do the ranks tell each other more: one speaks for all
that agree with it, so that a thousand ranks cost no more than two.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import llmscale
from llmscale.checkpoint.manifest import MANIFEST_NAME
from llmscale.data.mixture import TrainingSets
from llmscale.data.shards.manifest import Manifest
from llmscale.engine.collectives import gather, on_main_rank, together
from llmscale.engine.process_group import World
from llmscale.files.source_hashes import hash_or_reason, source_hashes
from llmscale.training.published_weights import FoundWeights, fingerprint_weights
from llmscale.training.rank_differences import (
    DATA_SECTION,
    SOURCES_SECTION,
    Section,
    contribute,
    explain,
    find_speakers,
)
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_folder import library_versions
from llmscale.training.run_inputs import PreparedRun, as_plain

#: Keys of a run that may differ, each with its reason (docs/cluster.md has them too).
MAY_DIFFER = {
    "config": "a path; the keys in the file are compared",
    "ds": "a path; the ds_config is compared",
    "data": "a path or URL, mounted elsewhere; the set's contents are compared",
    "data_cache": "a local disk",
    "cache_limit_gib": "a local disk",
    "num_workers": "changes who reads a sample, not which",
    "run": "a path; that it is one folder is checked by what lies in it",
    "wandb": "only the main rank's counts",
    "wandb_project": "only the main rank's counts",
    "wandb_name": "only the main rank's counts",
    "profile": "only the main rank's counts",
    "plain": "only the main rank's counts",
    "tensorboard": "only the main rank's counts",
}
#: Keys that say what others say too; their effect is in the resolved run and the ds_config.
_RESOLVED_KEYS = ("model", "global_batch_tokens", "tokens", "warmup_tokens", "decay_tokens", "gradient_clipping")
#: The resolved run's names of keys of a run.
_NAMES = {"peak_lr": "lr", "name": "schedule", "total_steps": "steps"}
#: Variables that change the arithmetic of a rank, or let NCCL's ranks wait for each other in different algorithms.
_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("NCCL_ALGO", "NCCL_PROTO"),
)


def check_ranks_agree(run: PreparedRun, world: World) -> None:
    """Raise on every rank, with what differs, the values and the ranks, unless all were started alike. Collective."""
    compare_ranks(run_sections(run, world.device.type), world.control)


def check_same_checkpoint(folder: Path | None, world: World) -> None:
    """The same for the checkpoint that this rank goes on from. Collective."""
    chosen = {"name": "none", MANIFEST_NAME: "none"}
    if folder is not None:
        chosen = {"name": folder.name, MANIFEST_NAME: hash_or_reason(folder / MANIFEST_NAME)}
    compare_ranks({"checkpoint": chosen}, world.control)


def check_same_weights(weights: FoundWeights, world: World) -> None:
    """The same for published weights that this rank begins with. Collective."""
    compare_ranks({"weights": together(world.control, lambda: fingerprint_weights(weights))}, world.control)


def claim_one_run_folder(claim: RunFolderClaim, world: World) -> None:
    """Have the main rank claim the run folder. Raise on every rank unless it can and all see it. Collective."""
    owner = on_main_rank(world.control, claim.take)
    # Not on the main rank itself: closing a second handle of a locked file releases the lock.
    together(world.control, lambda: None if world.is_main else claim.check_is_seen(owner))


def run_sections(run: PreparedRun, device_type: str) -> dict[str, Section]:
    """What this rank was started with."""
    versions = {name: str(version) for name, version in library_versions().items()}
    # A patch release of Python changes no arithmetic.
    versions |= {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    variables = {name: os.environ.get(name, "not set") for name in _VARIABLES}
    ds_config = flatten(run.resolved.ds_config)
    return {
        "configuration": _configuration(run),
        # NVMe disks may be mounted anywhere.
        "ds_config": {key: value for key, value in ds_config.items() if not key.endswith("nvme_path")},
        DATA_SECTION: _data_sets(run.sets),
        SOURCES_SECTION: source_hashes(Path(llmscale.__file__).parent),
        "versions": versions,
        "environment": {**variables, "kind of device": device_type},
    }


def _configuration(run: PreparedRun) -> dict[str, str]:
    """Every key with the value that it has come to."""
    config, resolved = as_plain(run.config), run.resolved.as_dict()
    kept = {key: value for key, value in config.items() if key not in MAY_DIFFER and key not in _RESOLVED_KEYS}
    # Which checkpoint or weights a path means is compared by what lies there.
    kept["resume"] = config["resume"] if config["resume"] in ("auto", "none") else "a checkpoint"
    kept["init_from"] = None if run.config.init_from is None else "weights"
    # So are items and prompts.
    kept["eval_tasks"] = [f"{task.name} {task.sha256[:16]}" for task in run.tasks]
    kept["sample_prompts"] = hashlib.sha256(json.dumps(run.prompts).encode()).hexdigest()[:16]
    kept |= {"precision": run.resolved.precision, "activation_checkpointing": run.resolved.checkpointing}
    values = {key: _text(value) for key, value in kept.items()}
    for path, text in flatten(resolved).items():
        name = path.rpartition(".")[2]
        values[_NAMES.get(name, name)] = text
    return values


def _data_sets(sets: TrainingSets) -> dict[str, str]:
    """Every set, and of a mix its proportions."""
    if sets.recipe is None:
        return _data_set(sets.manifest)
    stages = [f"{stage.shares} until {stage.until} of the run" for stage in sets.recipe.stages]
    values = {"stages": "; ".join(stages)}
    for name, location in zip(sets.names, sets.locations, strict=True):
        values |= {f"{name}/{key}": text for key, text in _data_set(location.manifest).items()}
    return values


def _data_set(manifest: Manifest) -> dict[str, str]:
    """What decides what sample k is, shard by shard: a set's own word for what it is could be a copy's."""
    values = {
        name: _text(getattr(manifest, name))
        for name in ("tokenizer_sha256", "vocab_size", "eot_token", "seq_len", "dtype", "hash_algorithm")
    }
    for split, held in manifest.splits.items():
        values |= {f"{split}/{shard.name}": f"{shard.hash} ({shard.num_samples} samples)" for shard in held.shards}
    return values


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one, keys joined by dots, values as text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def compare_ranks(sections: Mapping[str, Section], group: dist.ProcessGroup) -> None:
    """Raise ConfigError, or DataError when only data differs, on every rank unless all bring the same. Collective."""
    contributions = gather(group, contribute(sections))
    speakers = find_speakers(contributions)
    if not speakers:
        return
    rank = dist.get_rank(group)
    details = gather(group, {name: sections.get(name, {}) for name, ranks in speakers.items() if rank in ranks})
    raise explain(contributions, details)
