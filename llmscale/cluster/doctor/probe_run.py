"""Facts about a run as this host would start it: ds_config, flags, data, run folder. By train.py's own checks, no
torch."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from llmscale.checkpoint.history import find_checkpoints
from llmscale.cluster.doctor.host_facts import DataFacts, FileFacts, FolderFacts, RunFacts
from llmscale.config.arguments import parse_run_config
from llmscale.config.deepspeed.problems import find_problems
from llmscale.config.deepspeed.schema import load_ds_config, parse_ds_config
from llmscale.config.run_config import RunConfig
from llmscale.config.shipped import DS_CONFIGS
from llmscale.data.mix.training_sets import TrainingSets, open_training_sets
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import LlmscaleError
from llmscale.training.run_inputs import prepare_run


def gather_ds(path: str) -> FileFacts:
    """Whether a ds_config is there and legal, and all that is wrong with it."""
    path = str(DS_CONFIGS.find(Path(path)))
    try:
        config = load_ds_config(Path(path))
    except LlmscaleError as error:
        return FileFacts(path, (str(error),), _hash(path))
    problems = tuple(f"{path}: {problem}" for problem in find_problems(config))
    return FileFacts(path, problems, _hash(path), () if problems else parse_ds_config(config, path).warnings)


def gather_run(flags: Sequence[str], world_size: int) -> RunFacts:
    """What train.py would find with these flags."""
    try:
        config = parse_run_config(flags)
    except LlmscaleError as error:
        return RunFacts(FileFacts(" ".join(flags), (str(error),), None), None, None, None)
    file = str(config.config) if config.config else ""
    return RunFacts(
        config=FileFacts(file, (), _hash(file) if file else None),
        data=_describe_data(config),
        folder=describe_folder(config.run),
        problem=_try(config, world_size),
    )


def _try(config: RunConfig, world_size: int) -> str | None:
    try:
        prepare_run(config, world_size)
    except LlmscaleError as error:
        return str(error)
    return None


def _describe_data(config: RunConfig) -> DataFacts:
    """The manifest, and one stat per shard of a local set. Of a remote set manifest and index come into its cache."""
    try:
        sets = open_training_sets(config.data, config.data_cache)
        for location in sets.locations:
            for split in location.manifest.splits if location.remote is None else ():
                check_files(location.folder, split, location.manifest)
    except LlmscaleError as error:
        return DataFacts(config.data, str(error))
    manifest = sets.manifest
    return DataFacts(
        name=config.data,
        problem=None,
        fingerprint=sets.fingerprint if sets.recipe is None else _hash_mix(sets),
        vocab_size=manifest.vocab_size,
        seq_len=manifest.seq_len,
        num_train_samples=sets.num_train_samples,
        eot_token=manifest.eot_token,
    )


def _hash_mix(sets: TrainingSets) -> str:
    """Of the sets and their proportions, which must be the same everywhere, too."""
    return hashlib.sha256(f"{sets.fingerprint} {sets.recipe.stages if sets.recipe else ()}".encode()).hexdigest()


def describe_folder(run: Path) -> FolderFacts:
    """The run folder, which need not exist yet."""
    exists_at = next(folder for folder in (run, *run.absolute().parents) if os.path.exists(folder))
    try:
        checkpoints = find_checkpoints(run).current
    except LlmscaleError:
        # train.py's own checks say so.
        checkpoints = []
    return FolderFacts(
        run=str(run),
        exists_at=os.path.abspath(exists_at),
        writable=os.path.isdir(exists_at) and os.access(exists_at, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(exists_at).free,
        checkpoints_bytes=sum(checkpoint.manifest.num_bytes for checkpoint in checkpoints),
        num_checkpoints=len(checkpoints),
    )


def _hash(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
