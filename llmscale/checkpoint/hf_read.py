"""Read the weights of a transformers model folder: list its tensors, match them with ours, fill a rank's shards.

Whoever published the folder chose every name in it. safetensors files are mapped into memory and read slice by slice.
So is a `pytorch_model.bin`, read with `weights_only`: it may hold tensors and plain values, and no code. A file is
mapped again for each parameter, so that the pages read do not stay with the process. Imports torch only to read a
`pytorch_model.bin`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmscale.architecture.families.family import HFTensor
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, load_json
from llmscale.untrusted.paths import RefusedFile, is_plain_name, open_regular, unreadable_as
from llmscale.untrusted.strangers import describe_stranger

if TYPE_CHECKING:
    from torch import Tensor

    from llmscale.engine.zero_layout import ShardView

SAFETENSORS_SUFFIX = ".safetensors"
PICKLE_SUFFIX = ".bin"
#: Files that hold all weights, the safe format first. With INDEX_SUFFIX: the index of weights in several files.
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
_MAIN_FILES = tuple(f"{name}{suffix}" for name in _SINGLE_FILES for suffix in ("", INDEX_SUFFIX))
#: Weights of other programs, and parts of a model without their index.
_OTHER_FORMATS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

#: Types that fp32 represents exactly.
LEGAL_DTYPES = ("F32", "F16", "BF16")
_DTYPE_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64"}
#: Tensors that older transformers stored and newer ones compute: rotary wavelengths, GPT-2's causal mask.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_HEAD = "lm_head.weight"
_MODEL_PREFIX = re.compile(r"^[a-z]+\.")
#: Endings of the names of transformers' classes with a language-model head.
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
#: Elements that are converted and checked together: 64 MiB in fp32.
_CHUNK = 1 << 24
#: Prefixes that wrappers of a model give to its tensors.
_WRAPPERS = re.compile(
    r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_forward_module\.|base_model\.model\.|\bmodule\."
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Type in safetensors' spelling: F32, F16, BF16, ..."""


@dataclass(frozen=True)
class WeightsFiles:
    """The files that together hold a model."""

    folder: Path
    files: tuple[Path, ...]
    file_of: Mapping[str, str]
    """Tensor -> name of its file, from the index; empty for a single file."""

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
    """Find the weights of a folder from `save_pretrained` or the Hub. Raises CheckpointError."""
    if folder.is_dir():
        names = [entry.name for entry in folder.iterdir()]
    else:
        names = []
    main = choose_weights(names, str(folder), folder)
    if not main.endswith(INDEX_SUFFIX):
        return WeightsFiles(folder, (_checked(folder / main),), {})
    file_of = load_index(folder / main)
    return WeightsFiles(folder, tuple(_checked(folder / file) for file in sorted({*file_of.values()})), file_of)


def choose_weights(names: Collection[str], source: str, folder: Path | None = None) -> str:
    """Return which of a model's files holds its weights, or is their index.

    `source` names the model in messages, and `folder` is its place on this machine.

    Raises CheckpointError when no file does.
    """
    for name in _MAIN_FILES:
        if name in names:
            return name
    if folder and (stranger := describe_stranger(folder, flag_value=False)):
        raise CheckpointError(f"{source} holds no weights of transformers.{stranger}")
    others = sorted(name for name in names if name.endswith(_OTHER_FORMATS))
    if others:
        has = f", but {others[0][:80]}{f' and {len(others) - 1} more' if len(others) > 1 else ''}"
    else:
        has = ""
    raise CheckpointError(
        f"{source} holds no weights{has}. Legal: {' or '.join(_SINGLE_FILES)}, or one of them in shards with its "
        f"{INDEX_SUFFIX[1:]}."
    )


def list_safetensors(weights: WeightsFiles) -> dict[str, StoredTensor]:
    """List the tensors of safetensors files from their headers. Raises CheckpointError for a damaged file."""
    stored = collect_tensors(tensor for file in weights.files for tensor in _read_header(file))
    weights.check_index(stored)
    return stored


def list_tensors(weights: WeightsFiles) -> dict[str, StoredTensor]:
    """List the tensors of either format. Raises CheckpointError."""
    if not weights.are_pickles:
        return list_safetensors(weights)
    stored = collect_tensors(
        StoredTensor(name, file, tuple(tensor.shape), _DTYPE_NAMES.get(str(tensor.dtype), str(tensor.dtype)))
        for file in weights.files
        for name, tensor in _load_pickle(file).items()
    )
    weights.check_index(stored)
    return stored


def collect_tensors(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors by name. Raises CheckpointError for a tensor that two files hold."""
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
    """Read which file holds each tensor. Raises CheckpointError for files outside the folder, or of another format."""
    suffix = Path(path.name.removesuffix(INDEX_SUFFIX)).suffix
    with unreadable_as(CheckpointError, path):
        weight_map = load_json(path, Rules(CheckpointError, not_finite=True)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files. Download it again.")
    for name, file in weight_map.items():
        if not is_plain_name(file) or not file.endswith(suffix):
            raise CheckpointError(
                f"{path}: {str(file)[:80]!r}, the file of '{name[:80]}', is not a {suffix} file of this folder."
            )
    return weight_map


def _checked(path: Path) -> Path:
    """Return the path of a file that exists, is a regular one and no Git LFS pointer."""
    try:
        open_regular(path).close()  # follows links, of which the Hub's cache is made
    except RefusedFile as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except OSError:
        raise CheckpointError(f"{path} is missing, and the index beside it names it. Complete the download.") from None
    return path


def _read_header(path: Path) -> list[StoredTensor]:
    # safetensors itself checks that the header has at most 100 MB, and that tensors cover the file without overlap.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensors = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118  not a mapping
            return [StoredTensor(name, path, tuple(t.get_shape()), str(t.get_dtype())) for name, t in tensors]
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a complete safetensors file: {reason}. Download it again.") from None


@dataclass(frozen=True)
class TensorSlice:
    """Rows of one of our parameters, and the stored tensor that holds them."""

    wanted: HFTensor
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor in our orientation: [rows, columns] or [elements]."""
        return self.stored.shape[::-1] if self.wanted.transposed else self.stored.shape

    @property
    def first_row(self) -> int:
        return self.wanted.first_row

    @property
    def num_rows(self) -> int:
        """Number of rows that our parameter takes."""
        return self.shape[0] - self.wanted.skipped_rows


def match_tensors(
    stored: Mapping[str, StoredTensor], wanted: Iterable[HFTensor], source: str, architecture: str = ""
) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the stored tensors that make up each of our parameters, by parameter name.

    Names may lack the prefix of the model without its head, as GPT-2's on the Hub do. `source` and `architecture` (the
    class in config.json) are for messages. Raises CheckpointError for a tensor that is missing, surplus, of another
    shape, or not of a floating-point type.
    """
    pieces: dict[str, list[TensorSlice]] = {}
    rest = dict(stored)
    missing = []
    for tensor in wanted:
        names = [name for name in (tensor.name, _without_prefix(tensor.name)) if name in rest]
        if not names:
            missing.append(tensor.name)
            continue
        piece = TensorSlice(tensor, rest.pop(names[0]))
        _check_tensor(piece, source)
        if tensor.parameter:
            pieces.setdefault(tensor.parameter, []).append(piece)
    surplus = sorted(name for name in rest if name != _HEAD and not _HARMLESS.fullmatch(name))
    if missing or surplus:
        raise CheckpointError(_explain_mismatch(missing, surplus, stored, source, architecture))
    return {parameter: tuple(slices) for parameter, slices in pieces.items()}


def has_unused_head(stored: Mapping[str, StoredTensor], pieces: Mapping[str, tuple[TensorSlice, ...]]) -> bool:
    """Return whether the files hold a head that a tied model does not use."""
    return _HEAD in stored and all(piece.stored.name != _HEAD for of in pieces.values() for piece in of)


def _without_prefix(name: str) -> str:
    return _MODEL_PREFIX.sub("", name, count=1)


def _explain_mismatch(
    missing: Sequence[str], surplus: Sequence[str], stored: Mapping[str, StoredTensor], source: str, architecture: str
) -> str:
    """Return what files lack or hold beyond the model of their config.json, why probably, and what to name instead."""
    is_decoder = architecture.endswith("Model") and not architecture.endswith(_LANGUAGE_MODELS)
    named = [_without_prefix(name) if is_decoder else name for name in missing]
    if missing:
        differences = [f"lacks {_first(named)}"]
    else:
        differences = []
    differences += [f"holds {_first(surplus)}"] if surplus else []
    unwrapped = {_WRAPPERS.sub("", name) for name in stored}
    if architecture and not is_decoder and not architecture.endswith(_LANGUAGE_MODELS):
        hint = f"the class {architecture} is not a causal language model. Name the model that it was made from"
    elif [*missing] == [_HEAD] and is_decoder:
        hint = f"the class {architecture} is the decoder without a head. Name the folder of the whole language model"
    elif [*missing] == [_HEAD]:
        hint = 'the model may be a tied one whose config.json lacks "tie_word_embeddings": true'
    elif missing and unwrapped != {*stored} and unwrapped & {*missing, *map(_without_prefix, missing)}:
        hint = (
            "a wrapper such as torch.compile's, FSDP's or peft's was saved in place of the model, as in "
            f"'{min(stored)}'. Save the model inside it with save_pretrained"
        )
    elif missing:
        hint = "they are of another model, or the download is not complete"
    else:
        hint = "the model has no place for it. Name a folder that save_pretrained wrote, of a causal language model"
    return f"{source} {' and '.join(differences)}, compared with its config.json ({len(stored):,} tensors): {hint}."


def _first(names: Sequence[str]) -> str:
    return f"'{names[0]}'{f' and {len(names) - 1:,} more' if len(names) > 1 else ''}"


def _check_tensor(piece: TensorSlice, source: str) -> None:
    wanted = piece.wanted
    stored = piece.stored
    if stored.shape != wanted.shape:
        raise CheckpointError(
            f"{source}: '{stored.name}' has the shape {list(stored.shape)}, and {list(wanted.shape)} by its "
            "config.json: they are of two models."
        )
    if stored.dtype not in LEGAL_DTYPES:
        raise CheckpointError(
            f"{source}: '{stored.name}' has the type {stored.dtype}. Legal: {', '.join(LEGAL_DTYPES)}; name the folder "
            "of the weights before they were quantised."
        )


class Sliceable(Protocol):
    """A stored tensor whose slices can be read."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


def fill_view(view: ShardView, pieces: Sequence[TensorSlice]) -> None:
    """Fill a rank's part of a parameter from the stored tensors that make it up.

    Rows without a stored tensor are padding of the vocabulary and become zeros. No token reads them and no gradient
    reaches them, so they stay zeros under any weight decay. Stored rows after our last one (positions of a longer
    context) are left out. Raises CheckpointError for weights that are not finite.
    """
    local = view.local
    covered = 0
    with _opened_files() as opened:
        for piece in sorted(pieces, key=lambda piece: piece.first_row):
            columns = piece.shape[1] if len(piece.shape) == 2 else 1
            first = piece.first_row * columns
            start = max(view.start, first)
            stop = min(view.start + local.numel(), first + piece.num_rows * columns)
            if start < stop:
                part = local.narrow(0, start - view.start, stop - start)
                _fill_range(part, opened(piece.stored), piece, columns, start - first)
                covered += stop - start
    if covered < local.numel():
        # The stored tensors follow each other without a gap from the first row.
        local[covered:].zero_()


def _fill_range(local: Tensor, stored: Sliceable, piece: TensorSlice, columns: int, start: int) -> None:
    """Fill `local` [n] with elements [start, start + n) of the slice's rows."""
    at = 0
    for rows, cols in _rectangles(start, start + local.numel(), columns):
        part = _read(stored, piece, rows, cols)
        target = local.narrow(0, at, part.numel())
        target.view(part.shape).copy_(part)
        at += part.numel()
        if not target.isfinite().all():
            raise CheckpointError(
                f"{piece.stored.file}: '{piece.stored.name}' holds values that are not finite numbers: the weights "
                "are of a run that diverged, or the file is damaged. Name other weights."
            )


def _read(stored: Sliceable, piece: TensorSlice, rows: slice, columns: slice) -> Tensor:
    """Read a rectangle in our orientation."""
    rows = slice(rows.start + piece.wanted.skipped_rows, rows.stop + piece.wanted.skipped_rows)
    if len(piece.shape) == 1:
        return stored[(rows,)]
    if piece.wanted.transposed:
        return stored[columns, rows].t()
    return stored[rows, columns]


def _rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements [start, stop) of a row-major matrix as (rows, columns) of at most _CHUNK elements."""
    while start < stop:
        row, column = divmod(start, columns)
        full_rows = min((stop - start) // columns, max(1, _CHUNK // columns))
        if column or not full_rows:
            end = min(columns, column + stop - start)
            yield slice(row, row + 1), slice(column, end)
            start += end - column
        else:
            yield slice(row, row + full_rows), slice(0, columns)
            start += full_rows * columns


@contextmanager
def _opened_files() -> Iterator[Callable[[StoredTensor], Sliceable]]:
    """Yield a function that returns a stored tensor for slicing; each file is mapped into memory once."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[Path, Callable[[str], Sliceable]] = {}
    with ExitStack() as stack:

        def opened(tensor: StoredTensor) -> Sliceable:
            path = tensor.file
            try:
                if path not in tensors and path.suffix == PICKLE_SUFFIX:
                    tensors[path] = _load_pickle(path).__getitem__
                elif path not in tensors:
                    tensors[path] = stack.enter_context(safe_open(path, framework="pt")).get_slice
                return tensors[path](tensor.name)
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())[:200]
                raise CheckpointError(f"{path}: '{tensor.name}' cannot be read: {reason}.") from None

        yield opened


def _load_pickle(path: Path) -> Mapping[str, Tensor]:
    """Map the tensors of a `pytorch_model.bin` into memory without running code in it. Raises CheckpointError."""
    import torch

    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} holds more than tensors, which only its own code could read, and that is never run. Name a folder "
            "with safetensors."
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # torch's unpickler raises anything for bytes that are not its own
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}".strip()
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Save it as safetensors with transformers' save_pretrained."
        ) from None
    is_table = isinstance(values, dict) and all(
        isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values.values()
    )
    if not is_table:
        raise CheckpointError(f"{path} is not a table of tensors. Name a folder that save_pretrained wrote.")
    return {str(name): tensor.detach() for name, tensor in values.items()}
