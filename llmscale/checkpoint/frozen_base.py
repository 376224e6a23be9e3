"""The frozen weights beside a run's adapters: where they are, and a checksum. A checkpoint holds adapters alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from llmscale.checkpoint.initial_weights import PublishedWeights
from llmscale.checkpoint.inventory import open_checkpoint
from llmscale.checkpoint.run_state import SavedRun, read_saved_run
from llmscale.config.hf_model import PREFIX, is_published
from llmscale.config.user_paths import url_of
from llmscale.data.shards.verify_shards import hash_file
from llmscale.errors import CheckpointError, ConfigError, LlmscaleError


@dataclass(frozen=True)
class FrozenBase:
    """Weights beside adapters."""

    place: str
    """Their place, as --init-from names it."""
    source: SavedRun | None = None
    """Their checkpoint; None for a published model."""
    checksum: str = ""
    """Checksum of their files; empty until these are read."""

    def as_dict(self) -> dict[str, str]:
        return {"place": self.place, "checksum": self.checksum}


def base_of_checkpoint(source: SavedRun) -> FrozenBase:
    """Describe a checkpoint's weights. Raises CheckpointError if they are adapters."""
    if source.state.base:
        raise CheckpointError(
            f"{source.path} holds adapters, not a model. Begin with its base, {source.state.base['place']}, or merge "
            "both with `llmscale export RUN --merge --to FOLDER`, and begin with hf:FOLDER."
        )
    return FrozenBase(url_of(source.path) or str(source.path.resolve()), source)


def base_of_published(weights: PublishedWeights) -> FrozenBase:
    """Describe a published model's weights. Raises ConfigError if the run adds experts to it."""
    model = weights.model
    if weights.adds_experts:
        raise ConfigError(
            f"{weights.name} has no experts, and beside adapters their routers would stay random. Leave out "
            "--num-experts, or train a model with experts first and name that run with --init-from."
        )
    return FrozenBase(f"{PREFIX}{model.hub_name or (model.folder or Path(model.name)).resolve()}")


def open_base(place: str) -> FrozenBase:
    """Read the description of the checkpoint at `place`, or take a published model's name. Raises LlmscaleError."""
    return (
        FrozenBase(place) if is_published(place) else base_of_checkpoint(read_saved_run(open_checkpoint(Path(place))))
    )


def explain_missing(place: str, run: Path, error: LlmscaleError, flag: str = "--init-from") -> CheckpointError:
    """Return the error of a base that is not where it was; `flag` names another place."""
    return CheckpointError(
        f"{run} holds adapters, and their base {place} cannot be read: {error} If it has moved, name its new place "
        f"with {flag}."
    )


def checksum_of(base: FrozenBase, files: Iterable[Path] = ()) -> str:
    """Return the checksum of a base, read whole if it is a published model's `files`; of a checkpoint its manifest has
    the hashes of the files. Raises OSError."""
    hashes = (
        {file.name: file.xxh3_128 for file in base.source.manifest.files}
        if base.source
        else {path.name: hash_file(path, "xxh3_128") for path in files}
    )
    return xxhash.xxh3_128("\n".join(f"{name} {digest}" for name, digest in sorted(hashes.items()))).hexdigest()


def check_base(base: FrozenBase, saved: SavedRun) -> None:
    """Raise CheckpointError unless these are the weights that the adapters of a checkpoint were trained beside."""
    wanted = saved.state.base.get("checksum")
    if wanted not in (None, base.checksum):
        raise CheckpointError(
            f"{base.place} holds other weights than those that the adapters of {saved.path} were trained beside: the "
            f"checksum was {wanted} and is {base.checksum}. Put these back, or name their place with --init-from. "
            "Adapters of other weights are a new --run."
        )
