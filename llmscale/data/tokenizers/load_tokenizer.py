"""A tokenizer by its name, or the one that a prepared set keeps.

No library is imported before a tokenizer that needs it is loaded.
"""

from __future__ import annotations

from pathlib import Path

from llmscale.data.shards.manifest import ORIGIN_NAME, TOKENIZER_FILES, Manifest, check_no_links, load_manifest
from llmscale.data.tokenizers.hugging_face import (
    JSON_NAME,
    HuggingFaceTokenizer,
    load_huggingface,
    load_saved,
    load_vocabulary,
    read_hub,
)
from llmscale.data.tokenizers.tiktoken_tokenizer import load_gpt2, load_ranks_file
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json
from llmscale.untrusted.hub import is_hub_name


def load_tokenizer(spec: str, *, eot_token: str = "", parse_special: bool = False) -> Tokenizer:
    """Load `gpt2`, `bytes`, a FILE.tiktoken, a published model's folder (or its tokenizer.json), or a name on the Hub.

    `eot_token` is the text of a model's end-of-text token, where its files leave that open. With `parse_special`,
    special tokens that are written out in a text become those tokens. Raises DataError when the tokenizer does not
    exist, cannot be downloaded or is damaged.
    """
    name = spec.removeprefix("hf:")
    path = Path(name)
    of_model = spec.startswith("hf:") or (spec not in ("bytes", "gpt2") and path.suffix != ".tiktoken")
    if of_model and (path.is_dir() or path.name == JSON_NAME):
        return load_huggingface(path, eot_token=eot_token, parse_special=parse_special)
    if of_model and is_hub_name(name) and (spec.startswith("hf:") or "/" in name):
        return HuggingFaceTokenizer(read_hub(name), asked_eot=eot_token, parse_special=parse_special)
    if of_model:
        raise DataError(
            f"Tokenizer '{spec}' is neither gpt2, bytes, a FILE.tiktoken, a folder with a {JSON_NAME} nor a model's "
            f"name on the Hub (ORGANISATION/NAME, or hf:NAME).{did_you_mean(spec, ['gpt2', 'bytes'])} "
            "`llmscale data train-tokenizer` trains one."
        )
    if eot_token not in ("", END_OF_TEXT):
        raise DataError(f"--eot-token {eot_token} cannot be: with --tokenizer {spec} documents end with {END_OF_TEXT}.")
    if spec == "bytes":
        return ByteTokenizer(parse_special=parse_special)
    if spec == "gpt2":
        return load_gpt2(parse_special=parse_special)
    return load_ranks_file(path, parse_special=parse_special)


def load_set_tokenizer(folder: Path | str, manifest: Manifest | None = None) -> Tokenizer:
    """The tokenizer of a prepared set, from the copy that it keeps. Raises DataError when they differ."""
    manifest = manifest or load_manifest(folder)
    check_no_links(Path(folder), *TOKENIZER_FILES[manifest.tokenizer_files])
    if not manifest.tokenizer_files and manifest.tokenizer != "bytes":
        # Anything else that it names would be a file of this machine.
        raise DataError(f"{folder} keeps no copy of its tokenizer. Prepare the set again with --overwrite.")
    path = Path(folder) / manifest.tokenizer_files
    tokenizer: Tokenizer
    if not manifest.tokenizer_files:
        tokenizer = ByteTokenizer()
    elif path.name == ORIGIN_NAME:
        tokenizer = load_saved(path)
    else:
        tokenizer = load_ranks_file(path)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer that {folder} was prepared with (sha256 {tokenizer.sha256[:12]}, the "
            f"manifest says {manifest.tokenizer_sha256[:12]}). Prepare the set again with --overwrite."
        )
    return tokenizer


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
