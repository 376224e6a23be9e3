"""The files of a published model that a run keeps, so that its exports say what the model's own folder said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.families.family import Family
from llmscale.architecture.families.registry import get_family, read_shape
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.checkpoint.hf_folder import CONFIG_NAME, GENERATION_NAME
from llmscale.data.prepare.atomic_folder import new_folder
from llmscale.data.tokenizers.save_for_transformers import generation_ids
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError, ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json

if TYPE_CHECKING:
    from torch import Tensor

#: Folder of a run that holds them.
PUBLISHED_NAME = "published"
#: Rows of a position table that are longer than the run's sequences, and the parameter that they belong to.
_POSITIONS_NAME, POSITIONS = "positions.safetensors", "wpe.weight"
_RULES = Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES, not_finite=True, large_numbers=True)


@dataclass(frozen=True)
class PublishedRecord:
    """What a published model's folder says of it besides its weights and its tokenizer."""

    config: Mapping[str, object]
    """config.json."""
    generation: Mapping[str, object] | None
    """generation_config.json."""
    folder: Path

    @property
    def family(self) -> Family:
        return get_family(self.config, str(self.folder))

    @property
    def shape(self) -> GPTShape:
        return build_shape(read_shape(self.config, str(self.folder)))

    def describe(self, shape: GPTShape, family: Family) -> dict[str, object]:
        """Return the config.json of a model of this one's kind: its own entries, where the shapes differ the new ones.
        Empty where that would be another model."""
        own = self.shape
        before, now = family.write(own), family.write(shape)
        differ = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        stale = differ | ({"rope_parameters"} if differ & {"rope_theta", "rope_scaling"} else set())
        entries = {key: value for key, value in self.config.items() if key not in stale}
        entries |= {key: now[key] for key in differ & now.keys()}
        return entries if family is self.family and _is_kind_of(shape, own) else {}

    def last_positions(self, first: int) -> Tensor | None:
        """Return the rows of the position table from row `first` on, [rows, n_embd]; None without a longer table.
        Raises CheckpointError."""
        path = self.folder / _POSITIONS_NAME
        if self.shape.positions != "learned" or first >= self.shape.seq_len or not path.is_file():
            return None
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        wanted = (self.shape.seq_len - first, self.shape.n_embd)
        try:
            rows = load_file(path)[POSITIONS].float()
        except (SafetensorError, OSError, KeyError):
            rows = None
        if rows is None or rows.shape != wanted:
            raise CheckpointError(f"{path} does not hold the {wanted[0]:,} positions after {first:,}; it was altered.")
        return rows


def _is_kind_of(shape: GPTShape, own: GPTShape) -> bool:
    """Return whether two shapes differ in nothing but what entries of a config.json change alone."""
    free = ("seq_len", "rope_theta", "rope_scaling", "sliding_window", "dropout", "document_end")
    return own.changed({name: getattr(shape, name) for name in free}) == shape


def load_record(folder: Path) -> PublishedRecord | None:
    """Read the record of a folder of transformers, or of a run's `published`; None where there is none. Raises
    ConfigError for a damaged one."""
    if not (folder / CONFIG_NAME).is_file():
        return None
    path = folder / GENERATION_NAME
    return PublishedRecord(
        load_json(folder / CONFIG_NAME, _RULES), load_json(path, _RULES) if path.is_file() else None, folder
    )


def save_record(record: PublishedRecord, run: Path, positions: Tensor | None) -> None:
    """Keep a record in a run folder that has none. `positions`: what `last_positions` shall return. Raises DataError,
    OSError."""
    out = run / PUBLISHED_NAME
    if out.exists():
        return
    with new_folder(out, replace=False) as folder:
        (folder / CONFIG_NAME).write_text(json.dumps(record.config, indent=2))
        if record.generation is not None:
            (folder / GENERATION_NAME).write_text(json.dumps(record.generation, indent=2))
        if positions is not None:
            from safetensors.torch import save_file

            save_file({POSITIONS: positions.contiguous()}, folder / _POSITIONS_NAME)


def token_ids(record: PublishedRecord | None, tokenizer: Tokenizer) -> tuple[dict[str, object], dict[str, object]]:
    """Return the special tokens that config.json and generation_config.json name.

    A record's own stay, null as null, unless the model has no such token, or none of its ends is the end of the
    documents that the run trained on.
    """
    own: dict[str, object] = {"pad_token_id": None, **generation_ids(tokenizer)}
    if record is None:
        return own, {key: value for key, value in own.items() if value is not None}
    files = [record.config, record.generation or {}]
    ends = [end for file in files for end in _as_list(file.get("eos_token_id"))]
    is_end_known = tokenizer.eot_token in ends or (not ends and "eos_token_id" in record.config)
    found: list[dict[str, object]] = []
    for file in files:
        kept = {key: file[key] for key in own if key in file}
        for key, value in kept.items():
            if any(type(token) is not int or not 0 <= token < record.shape.vocab_size for token in _as_list(value)):
                kept[key] = own[key]
        found.append(kept if is_end_known else {**kept, "eos_token_id": tokenizer.eot_token})
    config, generation = found
    return config, generation if record.generation is not None else config


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
