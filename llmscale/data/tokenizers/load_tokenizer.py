"""Load a tokenizer by name, or the one that a prepared dataset keeps.

A tokenizer's library is imported only when it is loaded.
"""

from __future__ import annotations

from pathlib import Path

from llmscale.data.shards.manifest import ORIGIN_NAME, Manifest, load_manifest
from llmscale.data.tokenizers.hugging_face import (
    JSON_NAME,
    HuggingFaceTokenizer,
    load_huggingface,
    load_saved,
    load_vocabulary,
    read_hub,
)
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_gpt2, load_ranks_file
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_json
from llmscale.untrusted.hub import is_hub_name, without_prefix
from llmscale.untrusted.strangers import describe_stranger

#: Tokenizer of a text's own characters, which `make_character_tokenizer` makes.
CHARACTERS = "characters"
#: Largest share of padding rows in an embedding table of which only the size is known. The most in use are DeepSeek's
#: 102,400 rows for 100,015 tokens (2.3 %) and phi-2's 51,200 for 50,295 (1.8 %).
_MOST_PADDING_FRAC = 1 / 16


def load_tokenizer(spec: str, *, eot_token: str = "", parse_special: bool = False) -> Tokenizer:
    """Load `gpt2`, `bytes`, a FILE.tiktoken, a published model's folder (or its tokenizer.json), or a name on the Hub.

    `eot_token` is the text of a model's end-of-text token, if its files leave that open. With `parse_special`, special
    tokens written in a text become those tokens. Raises DataError when the tokenizer does not exist, cannot be
    downloaded or is damaged.
    """
    name = without_prefix(f"Tokenizer '{spec}'", spec, DataError)
    path = Path(name)
    of_model = spec.startswith("hf:") or (spec not in ("bytes", "gpt2") and path.suffix != ".tiktoken")
    if of_model and (path.is_dir() or path.name == JSON_NAME):
        return load_huggingface(path, eot_token=eot_token, parse_special=parse_special)
    if of_model and is_hub_name(name) and (spec.startswith("hf:") or "/" in name):
        return HuggingFaceTokenizer(read_hub(name), asked_eot=eot_token, parse_special=parse_special)
    if spec == CHARACTERS:
        raise DataError(
            f"Tokenizer '{spec}' is made from a text by `llmscale data prepare` and `llmscale train --text`, whose "
            "datasets keep it. Name another tokenizer."
        )
    if of_model:
        if stranger := describe_stranger(path):
            raise DataError(f"Tokenizer '{spec}' holds no tokenizer.{stranger}")
        raise DataError(
            f"Tokenizer '{spec}' is neither gpt2, bytes, {CHARACTERS}, a FILE.tiktoken, a folder with a {JSON_NAME} "
            "nor a model's name on the Hub (ORGANISATION/NAME, or hf:NAME)."
            f"{did_you_mean(spec, ['gpt2', 'bytes', CHARACTERS])} "
            "`llmscale data train-tokenizer` trains one."
        )
    check_end_of_text(spec, eot_token)
    if spec == "bytes":
        return ByteTokenizer(parse_special=parse_special)
    if spec == "gpt2":
        return load_gpt2(parse_special=parse_special)
    return load_ranks_file(path, parse_special=parse_special)


def check_end_of_text(spec: str, eot_token: str) -> None:
    """Raise DataError if a text is named for the end-of-text token of a tokenizer whose token is fixed."""
    if eot_token not in ("", END_OF_TEXT):
        raise DataError(f"--eot-token {eot_token} is wrong: with --tokenizer {spec} documents end with {END_OF_TEXT}.")


def load_set_tokenizer(folder: Path | str, manifest: Manifest | None = None) -> Tokenizer:
    """Load the tokenizer that a prepared dataset keeps. Raises DataError when it does not match the manifest."""
    manifest = manifest or load_manifest(folder)
    if not manifest.tokenizer_files and manifest.tokenizer != "bytes":
        # Any other name would be a file of this machine.
        raise DataError(f"{folder} keeps no copy of its tokenizer. Prepare the dataset again with --overwrite.")
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
            f"{path} is not the tokenizer with which {folder} was prepared (sha256 {tokenizer.sha256[:12]}, in the "
            f"manifest {manifest.tokenizer_sha256[:12]}). Prepare the dataset again with --overwrite."
        )
    return tokenizer


def check_tokenizer_of_weights(set_folder: Path, manifest: Manifest, model_folder: Path) -> str:
    """Compare a dataset's vocabulary with a model folder's, token by token, and return a line for the log.

    Vocabularies may be stored in different files. The model may have more tokens after the dataset's, and more rows
    than tokens. Without a vocabulary in the folder only the sizes are compared, which the line states. A remote
    dataset's tokenizer must have been fetched. Raises DataError naming the difference.
    """
    path = model_folder / "config.json"
    rows = None
    if path.is_file():
        # Some models on the Hub use Infinity for a limit.
        rows = load_json(path, Rules(DataError, max_bytes=CONFIG_MAX_BYTES, not_finite=True)).get("vocab_size")
    if rows is not None and (type(rows) is not int or rows < 1):
        raise DataError(f"{path}: vocab_size is {str(rows)[:40]!r}, and must be a whole number above 0.")
    what = f"{set_folder} was prepared with a tokenizer of {manifest.vocab_size:,} tokens"
    remedy = f"Prepare the text with `llmscale data prepare --tokenizer {model_folder}`."
    if rows is not None and manifest.vocab_size > rows:
        raise DataError(f"{what}, but the weights in {model_folder} have {rows:,} rows. {remedy}")
    name, theirs = load_vocabulary(model_folder)
    if not name and rows is None:
        raise DataError(f"{model_folder} has neither a tokenizer nor a config.json with vocab_size to compare with.")
    if not name and rows is not None:
        if rows - manifest.vocab_size > rows * _MOST_PADDING_FRAC:
            raise DataError(
                f"{what}, but the weights in {model_folder} have {rows:,} rows, more than padding explains. Put the "
                f"model's tokenizer.json into its folder. {remedy}"
            )
        return (
            f"{model_folder} has no tokenizer.json: only sizes were compared, {manifest.vocab_size:,} tokens in the "
            f"dataset, {rows:,} rows in the weights."
        )
    ours = load_set_tokenizer(set_folder, manifest).tokens()
    different = [token for token in sorted(ours) if theirs.get(token) != ours[token]]
    if different:
        first = different[0]
        meant = f"{theirs[first][:60]!r}" if first in theirs else "no token"
        raise DataError(
            f"{set_folder} was prepared with another tokenizer ({manifest.vocab_size:,} tokens) than the weights in "
            f"{model_folder} ({len(theirs):,}): token {first} is {ours[first][:60]!r} in the dataset and {meant} in "
            f"{name}, and {len(different):,} differ. {remedy}"
        )
    if len(theirs) > len(ours):
        more = f", which has {len(theirs) - len(ours):,} more"
    else:
        more = ""
    return f"The dataset's {len(ours):,} tokens are those of {model_folder / name}{more}."
