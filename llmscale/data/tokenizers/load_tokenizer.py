"""A tokenizer by its name, or the one that a prepared set keeps.

No library is imported before a tokenizer that needs it is loaded.
"""

from __future__ import annotations

from pathlib import Path

from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.data.shards.set_rules import ORIGIN_NAME, TOKENIZER_FILES, check_no_links
from llmscale.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer, load_huggingface, load_old_set, load_saved
from llmscale.data.tokenizers.model_files import JSON_NAME, read_hub
from llmscale.data.tokenizers.tiktoken_tokenizer import load_gpt2, load_ranks_file
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from llmscale.errors import DataError, did_you_mean
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
        tokenizer = load_old_set(path) if path.name == JSON_NAME else load_ranks_file(path)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer that {folder} was prepared with (sha256 {tokenizer.sha256[:12]}, the "
            f"manifest says {manifest.tokenizer_sha256[:12]}). Prepare the set again with --overwrite."
        )
    return tokenizer
