"""Whether the tokenizer that a set was prepared with is the one that published weights were trained with."""

from __future__ import annotations

from pathlib import Path

from llmscale.data.shards.manifest import Manifest
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.tokenizers.vocabulary_files import load_vocabulary
from llmscale.errors import DataError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json

#: Share of an embedding table that may be padding, where nothing but its size is known. DeepSeek's 102,400 rows for
#: 100,015 tokens (2.3 %) and phi-2's 51,200 for 50,295 (1.8 %) are the most that families in use have.
_MOST_PADDING_FRAC = 1 / 16


def check_tokenizer_of_weights(set_folder: Path, manifest: Manifest, model_folder: Path) -> str:
    """Hold a set's vocabulary against a model folder's, token by token; returns one line for the log.

    Equal vocabularies pass however the files write them, and where the model's has more tokens behind the set's, or its
    table more rows than both. A folder without a vocabulary passes when the sizes allow it, and the line says so. A
    remote set's tokenizer must have been fetched. Raises DataError naming what differs.
    """
    rows = _rows_of_weights(model_folder)
    remedy = f"Prepare the text with `llmscale data prepare --tokenizer {model_folder}`."
    if rows is not None and manifest.vocab_size > rows:
        raise DataError(
            f"{set_folder} was prepared with a tokenizer of {manifest.vocab_size:,} tokens, and the weights in "
            f"{model_folder} have rows for {rows:,}. {remedy}"
        )
    name, theirs = load_vocabulary(model_folder)
    if not name:
        return _compare_sizes(set_folder, manifest, model_folder, rows, remedy)
    ours = load_set_tokenizer(set_folder, manifest).tokens()
    different = [token for token in sorted(ours) if theirs.get(token) != ours[token]]
    if different:
        first = different[0]
        meant = f"{theirs[first][:60]!r}" if first in theirs else "no token"
        raise DataError(
            f"{set_folder} was prepared with another tokenizer ({manifest.vocab_size:,} tokens) than the weights in "
            f"{model_folder} ({len(theirs):,}): token {first} is {ours[first][:60]!r} in the set and {meant} in "
            f"{name}, and {len(different):,} differ. {remedy}"
        )
    more = f", which has {len(theirs) - len(ours):,} more" if len(theirs) > len(ours) else ""
    return f"The set's {len(ours):,} tokens are those of {model_folder / name}{more}."


def _compare_sizes(set_folder: Path, manifest: Manifest, model_folder: Path, rows: int | None, remedy: str) -> str:
    if rows is None:
        raise DataError(f"{model_folder} has neither a tokenizer nor a config.json with vocab_size to compare with.")
    if rows - manifest.vocab_size > rows * _MOST_PADDING_FRAC:
        raise DataError(
            f"{set_folder} was prepared with a tokenizer of {manifest.vocab_size:,} tokens, and the weights in "
            f"{model_folder} have rows for {rows:,}: more than padding explains. Put the model's tokenizer.json into "
            f"its folder. {remedy}"
        )
    return (
        f"{model_folder} has no tokenizer.json: only sizes were compared, {manifest.vocab_size:,} tokens in the set, "
        f"{rows:,} rows in the weights."
    )


def _rows_of_weights(model_folder: Path) -> int | None:
    """vocab_size of config.json; None when there is none."""
    path = model_folder / "config.json"
    if not path.is_file():
        return None
    # Some models on the Hub have Infinity as a limit.
    config = load_json(path, Rules(DataError, max_bytes=CONFIG_MAX_BYTES, not_finite=True))
    rows = config.get("vocab_size")
    if rows is None:
        return None
    if type(rows) is not int or rows < 1:
        raise DataError(f"{path}: vocab_size is {str(rows)[:40]!r}, and must be a whole number above 0.")
    return rows
