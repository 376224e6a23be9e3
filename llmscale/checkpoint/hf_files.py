"""Which weights a folder of transformers holds: its files, and the name, shape and type of every tensor. No torch.

Whoever published the folder chose every name in it. Nothing is unpickled here: what a `pytorch_model.bin` holds is seen
when torch reads it (checkpoint/hf_tensors.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import RefusedFile, check_regular, is_plain_name

SAFETENSORS_SUFFIX, PICKLE_SUFFIX = ".safetensors", ".bin"
#: The file that holds all weights or the one that says which file holds which, the safe format first.
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
_MAIN_FILES = tuple(f"{name}{suffix}" for name in _SINGLE_FILES for suffix in ("", INDEX_SUFFIX))
#: Weights of other programs, and parts of a model without their index.
_OTHER_FORMATS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, F16, BF16, ..."""


@dataclass(frozen=True)
class WeightsFiles:
    """The files that together hold a model."""

    folder: Path
    files: tuple[Path, ...]
    file_of: Mapping[str, str]
    """Tensor -> name of its file, as the index says; empty where there is one file."""

    @property
    def are_pickles(self) -> bool:
        return self.files[0].suffix == PICKLE_SUFFIX

    def check_index(self, stored: Mapping[str, StoredTensor]) -> None:
        """Raise CheckpointError when the index names a tensor that its file has not."""
        for name, file in self.file_of.items():
            if name not in stored or stored[name].file.name != file:
                raise CheckpointError(
                    f"{self.folder}: the index says that {file} holds '{name}', and it does not. Download both again."
                )


def find_weights_files(folder: Path) -> WeightsFiles:
    """The files of a folder that `save_pretrained` wrote, or the Hub has. Raises CheckpointError."""
    main = choose_weights([name for name in _MAIN_FILES if (folder / name).exists()], str(folder))
    if not main.endswith(INDEX_SUFFIX):
        return WeightsFiles(folder, (_checked(folder / main),), {})
    file_of = load_index(folder / main)
    return WeightsFiles(folder, tuple(_checked(folder / file) for file in sorted({*file_of.values()})), file_of)


def choose_weights(names: Collection[str], source: str) -> str:
    """Of the files of a model the one that holds its weights, or the index that says which do. Raises CheckpointError,
    which names `source` and what it has instead."""
    for name in _MAIN_FILES:
        if name in names:
            return name
    others = sorted(name for name in names if name.endswith(_OTHER_FORMATS))
    has = f", but {others[0][:80]}{f' and {len(others) - 1} more' if len(others) > 1 else ''}" if others else ""
    raise CheckpointError(
        f"{source} holds no weights{has}. Legal: {' or '.join(_SINGLE_FILES)}, or one of them in shards with its "
        f"{INDEX_SUFFIX[1:]}."
    )


def list_safetensors(weights: WeightsFiles) -> dict[str, StoredTensor]:
    """Every tensor of safetensors files, from their headers. Raises CheckpointError for a damaged one."""
    stored = collect_tensors(tensor for file in weights.files for tensor in _read_header(file))
    weights.check_index(stored)
    return stored


def collect_tensors(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """By name. Raises CheckpointError for a tensor that stands in two files."""
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in stored:
            raise CheckpointError(
                f"{tensor.file} holds '{tensor.name}', which {stored[tensor.name].file.name} holds too: they are files "
                "of two models."
            )
        stored[tensor.name] = tensor
    return stored


def load_index(path: Path) -> dict[str, str]:
    """Tensor -> file, of an index. Raises CheckpointError for files outside of the folder, or of another kind."""
    suffix = Path(path.name.removesuffix(INDEX_SUFFIX)).suffix
    try:
        weight_map = load_json(path, Rules(CheckpointError, not_finite=True)).get("weight_map")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files. Download it again.")
    for name, file in weight_map.items():
        if not is_plain_name(file) or not file.endswith(suffix):
            raise CheckpointError(
                f"{path}: {str(file)[:80]!r}, the file of '{name[:80]}', is no {suffix} file of this folder."
            )
    return weight_map


def _checked(path: Path) -> Path:
    """The file, when it is there and one."""
    try:
        check_regular(path, follow_links=True)  # the Hub's cache is made of links
    except RefusedFile as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except OSError:
        raise CheckpointError(f"{path} is missing, and the index beside it names it. Complete the download.") from None
    return path


def _read_header(path: Path) -> list[StoredTensor]:
    """safetensors' own checks: at most 100 MB of header, and tensors that cover the file without overlap."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensors = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118  it is no mapping
            return [StoredTensor(name, path, tuple(t.get_shape()), str(t.get_dtype())) for name, t in tensors]
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is no whole safetensors file: {reason}. Download it again.") from None
