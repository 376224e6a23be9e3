"""Whether stored tensors are those of a model, and which of them make each of our parameters. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmscale.architecture.families.family import HFTensor
from llmscale.checkpoint.hf_files import StoredTensor
from llmscale.errors import CheckpointError

#: Types of weights that fp32 takes exactly.
LEGAL_DTYPES = ("F32", "F16", "BF16")
#: Stored by older transformers and computed anew by newer ones: rotary wavelengths, GPT-2's causal mask.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_HEAD = "lm_head.weight"
_MODEL_PREFIX = re.compile(r"[a-z]+\.")


@dataclass(frozen=True)
class Piece:
    """Rows of one of our parameters, and the stored tensor that has them."""

    wanted: HFTensor
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As ours, if the whole were read: [rows, columns] or [elements]."""
        return self.stored.shape[::-1] if self.wanted.transposed else self.stored.shape

    @property
    def first_row(self) -> int:
        return self.wanted.first_row

    @property
    def num_rows(self) -> int:
        """That ours has."""
        return self.shape[0] - self.wanted.skipped_rows


def match_tensors(
    stored: Mapping[str, StoredTensor], wanted: Iterable[HFTensor], source: str
) -> dict[str, tuple[Piece, ...]]:
    """Our parameters by name, with the stored tensors that make them.

    Names may lack the prefix of the model without its head, as GPT-2's on the Hub do. Raises CheckpointError for what
    is missing, has another shape or no floating-point type, and for what would be left out.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    rest = dict(stored)
    for tensor in wanted:
        names = [name for name in (tensor.name, _MODEL_PREFIX.sub("", tensor.name, count=1)) if name in rest]
        if not names:
            raise CheckpointError(_missing(tensor, stored, source))
        piece = Piece(tensor, rest.pop(names[0]))
        _check_tensor(piece, source)
        if tensor.parameter:
            found[tensor.parameter] = (*found.get(tensor.parameter, ()), piece)
    surplus = sorted(name for name in rest if name != _HEAD and not _HARMLESS.fullmatch(name))
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{source} holds '{surplus[0]}'{more}, which the model of its config.json has no place for. Name a folder "
            "that save_pretrained wrote, of a causal language model."
        )
    return found


def has_unused_head(stored: Mapping[str, StoredTensor], pieces: Mapping[str, tuple[Piece, ...]]) -> bool:
    """Whether a head is stored that a tied model does not use."""
    return _HEAD in stored and all(piece.stored.name != _HEAD for of in pieces.values() for piece in of)


def _missing(tensor: HFTensor, stored: Mapping[str, StoredTensor], source: str) -> str:
    if tensor.name == _HEAD:
        return (
            f"{source} has no '{_HEAD}', and its config.json does not tie the head to the token embedding. If the "
            'model is a tied one, its config.json lacks "tie_word_embeddings": true.'
        )
    return (
        f"{source} has no '{tensor.name}' among its {len(stored):,} tensors: they are not of the model that its "
        "config.json describes, or the download is not complete."
    )


def _check_tensor(piece: Piece, source: str) -> None:
    wanted, stored = piece.wanted, piece.stored
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
