"""Files of torch.save that others wrote: mapped, and nothing in them is executed."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmscale.errors import CheckpointError
from llmscale.untrusted.paths import is_plain_name

#: Key of `extra` for the client_state of a loop that calls DeepSpeed's save_checkpoint.
CLIENT_STATE = "client_state"
#: Longest name of a tag in the file `latest`.
_MAX_TAG_BYTES = 1024
_MAX_REASON = 200


class StoredFields:
    """Stands for DeepSpeed's loss scalers and places of parameters: their fields, and none of their methods."""


class _Stage(int):
    """Stands for DeepSpeed's ZeroStageEnum."""


#: Classes of DeepSpeed that its files hold, by the names under which releases since 0.10 pickle them.
_STAND_INS: list[tuple[Any, str]] = [
    (StoredFields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StoredFields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StoredFields, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def read_pickle(path: Path, allow: Sequence[type] = (), expected: type = dict) -> Any:
    """Map a file that may hold tensors, plain values, the classes above and those of `allow`.

    Raises CheckpointError, also where its contents are not as `expected`.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals([*_STAND_INS, *allow]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickles that are refused anyway
            # A file of before torch 1.6 is not an archive, and cannot be mapped.
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_explain_refusal(path, str(error))) from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its instructions run into
        reason = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read, it is damaged or no file of torch.save: {reason}") from None
    if not isinstance(contents, expected):
        raise CheckpointError(f"{path} holds a {type(contents).__name__} where DeepSpeed writes a dictionary.")
    return contents


def _explain_refusal(path: Path, text: str) -> str:
    named = re.search(r"(?:GLOBAL|class|global) ([\w]+(?:\.[\w]+)+)", text)
    if named is None:
        # The rest of torch's text recommends to load the file all the same.
        reason = " ".join(text.partition("WeightsUnpickler error:")[2].split())[:_MAX_REASON]
        return f"{path} is damaged, or holds more than tensors and plain values: {reason or 'its pickle is not read'}"
    name = named[1][:_MAX_REASON]
    if "was not an allowed" not in text:
        return f"{path} holds {name}, which would run code: it is not loaded."
    return (
        f"{path} holds an object of {name}, and loading it could run code. If you trust the file and the class, "
        f"load it in your script: api.load_deepspeed(..., allow=[{name.rpartition('.')[2]}])."
    )


def tag_folder(folder: Path, tag: str | None = None) -> Path | None:
    """Return the folder of a tag, by default of that in the file `latest`; None without one.

    A folder that is one of a tag itself is returned. Raises CheckpointError for a tag that does not name a folder.
    """
    if tag is None:
        for name in ("latest", "latest_universal"):
            with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                tag = file.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
                break
    if tag is None:
        return folder if is_deepspeed_checkpoint(folder) else None
    if not is_plain_name(tag):
        raise CheckpointError(
            f"the tag {tag[:_MAX_REASON]!r} of {folder} does not name a folder, such as global_step100."
        )
    return folder / tag


def is_deepspeed_checkpoint(place: Path) -> bool:
    """Return whether a folder has DeepSpeed's files of a model."""
    return any(place.glob("*model_states.pt"))


def flat(tensor: Tensor, path: Path) -> Tensor:
    """Return a stored tensor flat, a view where its elements follow each other. Raises CheckpointError.

    Strides of 0 would make a few stored bytes a tensor of any size.
    """
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{path} holds a tensor {list(tensor.shape)} of fewer stored bytes.")
    return tensor.detach().reshape(-1)


def pack(client_state: Mapping[str, Any]) -> str:
    """Return tensors and plain values as text. Raises CheckpointError for what `unpack` would refuse."""
    contents = io.BytesIO()
    torch.save(dict(client_state), contents)
    text = base64.b64encode(contents.getvalue()).decode()
    try:
        unpack(text, ())
    except CheckpointError as error:
        raise CheckpointError(f"client_state would not be loaded again: {error}") from None
    return text


def unpack(text: str, allow: Sequence[type]) -> dict[str, Any]:
    """Return the client_state of `pack`. Raises CheckpointError for classes that are not allowed."""
    if not text:
        return {}
    try:
        with torch.serialization.safe_globals([*allow]):
            return dict(torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise CheckpointError(f"it holds more than tensors and plain values: {reason}") from None
