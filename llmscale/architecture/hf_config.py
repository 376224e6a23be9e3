"""A transformers `config.json`: the model's exact parameters, and what it does not say about memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.description import Architecture
from llmscale.architecture.families.registry import read_shape
from llmscale.architecture.hf_families import describe_hf_model, is_described
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, parse_json
from llmscale.untrusted.hub import is_hub_name, read_hub_files
from llmscale.untrusted.paths import read_regular

CONFIG_NAME = "config.json"


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


@dataclass(frozen=True)
class FoundConfig:
    """A config.json, and where it was found."""

    entries: dict[str, object]
    folder: Path | None
    """That holds it, and may hold the model's other files; None for one on the Hub where the cache cannot be
    written."""
    hub_name: str | None
    """NAME@COMMIT on the Hub; None for a folder or file of the user's."""


def load_hf_model(path_or_name: str) -> HFModel | None:
    """From a config.json, a folder that holds one, or a name on the Hugging Face Hub; None for a model that llmscale
    itself trains (llmscale.architecture.families), of which more than the states is known. Raises ConfigError."""
    source = f"--hf {path_or_name}"
    config = find_config(path_or_name, source).entries
    try:
        read_shape(config, source)
    except ConfigError:
        if not is_described(config):
            raise
        return HFModel(path_or_name, str(config.get("model_type")), describe_hf_model(config, source))
    return None


def find_config(path_or_name: str, source: str) -> FoundConfig:
    """A config.json, the one of a folder, or of NAME or NAME@REVISION on the Hugging Face Hub; `source` names it in
    messages. Raises ConfigError."""
    path = Path(path_or_name)
    if path.is_dir():
        path = path / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(f"{source}: the folder has no {CONFIG_NAME}.")
    if path.is_file():
        try:
            return FoundConfig(_parse(read_regular(path, CONFIG_MAX_BYTES), source), path.parent, None)
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}.") from None
    looks_like_a_path = path_or_name.endswith(".json") or path_or_name.startswith((".", "/", "~"))
    if looks_like_a_path or not is_hub_name(path_or_name):
        raise ConfigError(
            f"{source} does not exist. Give a {CONFIG_NAME}, its folder, or a name on the Hub such as gpt2 or "
            "ORGANISATION/NAME@REVISION."
        )
    found = read_hub_files(path_or_name, CONFIG_NAME, (), CONFIG_MAX_BYTES, ConfigError, source)
    return FoundConfig(_parse(found.contents[CONFIG_NAME], source), found.folder, found.name)


def _parse(contents: bytes, source: str) -> dict[str, object]:
    # Some models on the Hub have Infinity as a limit.
    return parse_json(contents, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES, not_finite=True), source)
