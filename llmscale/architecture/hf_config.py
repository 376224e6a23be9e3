"""A transformers `config.json`: the model's exact parameters, and what it does not say about memory. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.description import Architecture
from llmscale.architecture.families.registry import read_shape
from llmscale.architecture.hf_families import describe_hf_model, is_described
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, parse_json
from llmscale.untrusted.hub import fetch_from_hub, find_snapshot, hub_cache, is_offline
from llmscale.untrusted.paths import read_regular

CONFIG_NAME = "config.json"
#: A model on the Hub: NAME or OWNER/NAME.
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class HFModel:
    """A model of transformers: enough for its model states."""

    name: str
    """As the user wrote it."""
    family: str
    """transformers' model_type."""
    architecture: Architecture

    @property
    def num_parameters(self) -> int:
        """As transformers' `num_parameters()`: a tied head counts once."""
        return self.architecture.num_parameters

    @property
    def n_embd(self) -> int:
        """Width of the token embedding, from which "auto" sizes of buffers follow."""
        return self.architecture.token_embedding.shape[1]

    @property
    def unknown(self) -> str:
        """What config.json cannot say about the activations, in one sentence."""
        return (
            f"activations are not estimated: llmscale does not train this kind of {self.family}, and config.json does "
            "not say which attention it will run with (eager keeps batch x heads x seq_len^2 elements a layer, flash "
            "none of them), what its code fuses or upcasts, or how its loss is computed"
        )


def load_hf_model(path_or_name: str) -> HFModel | None:
    """From a config.json, a folder that holds one, or a name on the Hugging Face Hub; None for a model that llmscale
    itself trains (llmscale.architecture.families), of which more than the states is known. Raises ConfigError."""
    source = f"--hf {path_or_name}"
    config = read_config(path_or_name, source)
    try:
        read_shape(config, source)
    except ConfigError:
        if not is_described(config):
            raise
        return HFModel(path_or_name, str(config.get("model_type")), describe_hf_model(config, source))
    return None


def read_config(path_or_name: str, source: str) -> dict[str, object]:
    """A config.json, the one of a folder, or of a name on the Hugging Face Hub; `source` names it in messages.

    A name is looked up in the Hub's cache first, then on the network. Raises ConfigError.
    """
    try:
        contents = _read(path_or_name, source)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.") from None
    # Some models on the Hub have Infinity as a limit.
    return parse_json(contents, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES, not_finite=True), source)


def find_folder(path_or_name: str) -> Path | None:
    """The folder of that path, or the snapshot of that name in the Hub's cache; None when neither is here."""
    path = Path(path_or_name)
    if path.exists():
        return path if path.is_dir() else path.parent
    cached = _find_in_cache(path_or_name) if _NAME.fullmatch(path_or_name) else None
    return cached and cached.parent


def _read(path_or_name: str, source: str) -> bytes:
    path = Path(path_or_name)
    if path.is_dir():
        path = path / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(f"{source}: the folder has no {CONFIG_NAME}.")
    if path.is_file():
        return read_regular(path, CONFIG_MAX_BYTES)
    looks_like_a_path = path_or_name.endswith(".json") or path_or_name.startswith((".", "/", "~"))
    if looks_like_a_path or not _NAME.fullmatch(path_or_name):
        raise ConfigError(
            f"{source} does not exist. Give a {CONFIG_NAME}, its folder, or a name on the Hub such as gpt2."
        )
    cached = _find_in_cache(path_or_name)
    return _fetch(path_or_name, source) if cached is None else read_regular(cached, CONFIG_MAX_BYTES)


def _find_in_cache(name: str) -> Path | None:
    """The config.json of the snapshot that the branch `main` was at, or of the only one there is."""
    snapshot = find_snapshot(name, "main", CONFIG_NAME)
    if snapshot is not None:
        return snapshot / CONFIG_NAME
    found = list((hub_cache(name) / "snapshots").glob(f"*/{CONFIG_NAME}"))
    return found[0] if len(found) == 1 else None


def _fetch(name: str, source: str) -> bytes:
    """From the Hub."""
    try:
        if is_offline():
            raise OSError("HF_HUB_OFFLINE is set")
        contents = fetch_from_hub(f"{name}/resolve/main/{CONFIG_NAME}", CONFIG_MAX_BYTES)
        if contents is None:
            raise OSError(f"File not found: the Hub has no {CONFIG_NAME} of that name")
        return contents
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        raise ConfigError(
            f"{source} is no file or folder here, not in the Hugging Face cache, and cannot be fetched from the Hub "
            f"({reason}). Download its {CONFIG_NAME} and give the file."
        ) from None
