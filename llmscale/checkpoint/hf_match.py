"""Whether stored tensors are those of a model, and which of them make each of our parameters. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
#: Ends of the names of transformers' classes that have this head.
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


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
    stored: Mapping[str, StoredTensor], wanted: Iterable[HFTensor], source: str, architecture: str = ""
) -> dict[str, tuple[Piece, ...]]:
    """Our parameters by name, with the stored tensors that make them.

    Names may lack the prefix of the model without its head, as GPT-2's on the Hub do. `architecture`: the class whose
    weights they are said to be, for messages. Raises CheckpointError for what is missing, has another shape or no
    floating-point type, and for what would be left out.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    rest = dict(stored)
    missing = []
    for tensor in wanted:
        names = [name for name in (tensor.name, _without_prefix(tensor.name)) if name in rest]
        if not names:
            missing.append(tensor.name)
            continue
        piece = Piece(tensor, rest.pop(names[0]))
        _check_tensor(piece, source)
        if tensor.parameter:
            found[tensor.parameter] = (*found.get(tensor.parameter, ()), piece)
    surplus = sorted(name for name in rest if name != _HEAD and not _HARMLESS.fullmatch(name))
    if missing or surplus:
        raise CheckpointError(_explain(missing, surplus, stored, source, architecture))
    return found


def has_unused_head(stored: Mapping[str, StoredTensor], pieces: Mapping[str, tuple[Piece, ...]]) -> bool:
    """Whether a head is stored that a tied model does not use."""
    return _HEAD in stored and all(piece.stored.name != _HEAD for of in pieces.values() for piece in of)


def _without_prefix(name: str) -> str:
    return _MODEL_PREFIX.sub("", name, count=1)


def _explain(
    missing: Sequence[str], surplus: Sequence[str], stored: Mapping[str, StoredTensor], source: str, architecture: str
) -> str:
    """What the files are instead of the language model that config.json describes."""
    is_language_model = not architecture or architecture.endswith(_LANGUAGE_MODELS)
    is_decoder = not is_language_model and architecture.endswith("Model")
    if not (is_language_model or is_decoder):
        differences = [f"lacks {_first(missing)}"] if missing else []
        differences += [f"holds {_first(surplus)}"] if surplus else []
        return (
            f"{source} is of the class {architecture}, not a causal language model: it {' and '.join(differences)}. "
            "Name the model that it was made from."
        )
    if [*missing] == [_HEAD] and is_decoder:
        return (
            f"{source} is of the class {architecture}, the decoder without a head: it has no '{_HEAD}', and its "
            "config.json does not tie the head to the token embedding. Name the folder of the whole language model."
        )
    if [*missing] == [_HEAD]:
        return (
            f"{source} has no '{_HEAD}', and its config.json does not tie the head to the token embedding. If the "
            'model is a tied one, its config.json lacks "tie_word_embeddings": true.'
        )
    if missing:
        names = [_without_prefix(name) for name in missing] if is_decoder else missing
        return (
            f"{source} has no {_first(names)} among its {len(stored):,} tensors: they are not of the model that its "
            "config.json describes, or the download is not complete."
        )
    return (
        f"{source} holds {_first(surplus)}, which the model of its config.json has no place for. Name a folder that "
        "save_pretrained wrote, of a causal language model."
    )


def _first(names: Sequence[str]) -> str:
    return f"'{names[0]}'{f' and {len(names) - 1:,} more' if len(names) > 1 else ''}"


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
