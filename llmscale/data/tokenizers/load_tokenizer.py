"""A tokenizer by its name, or the one that a prepared set keeps.

No library is imported before a tokenizer that needs it is loaded.
"""

from __future__ import annotations

from pathlib import Path

from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.data.shards.set_rules import TOKENIZER_FILES, check_no_links
from llmscale.data.tokenizers.hf_tokenizer import load_huggingface
from llmscale.data.tokenizers.tiktoken_tokenizer import load_gpt2, load_ranks_file
from llmscale.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from llmscale.errors import DataError, did_you_mean


def load_tokenizer(spec: str) -> Tokenizer:
    """Load `gpt2`, `bytes`, a FILE.tiktoken, a tokenizer.json or a folder that holds one.

    Raises DataError when it does not exist, cannot be downloaded or is damaged.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        return load_gpt2()
    path = Path(spec)
    if path.suffix == ".tiktoken":
        return load_ranks_file(path)
    if path.is_dir() or path.name == "tokenizer.json":
        return load_huggingface(path)
    raise DataError(
        f"Tokenizer '{spec}' is neither gpt2, bytes, a FILE.tiktoken nor a folder with a tokenizer.json."
        f"{did_you_mean(spec, ['gpt2', 'bytes'])} `llmscale data train-tokenizer` trains one."
    )


def load_set_tokenizer(folder: Path | str, manifest: Manifest | None = None) -> Tokenizer:
    """The tokenizer of a prepared set, from the copy that it keeps. Raises DataError when they differ."""
    manifest = manifest or load_manifest(folder)
    check_no_links(Path(folder), *TOKENIZER_FILES[manifest.tokenizer_files])
    if not manifest.tokenizer_files and manifest.tokenizer != "bytes":
        # Anything else that it names would be a file of this machine.
        raise DataError(f"{folder} keeps no copy of its tokenizer. Prepare the set again with --overwrite.")
    spec = str(Path(folder) / manifest.tokenizer_files) if manifest.tokenizer_files else manifest.tokenizer
    tokenizer = load_tokenizer(spec)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{spec} is not the tokenizer that {folder} was prepared with (sha256 {tokenizer.sha256[:12]}, the "
            f"manifest says {manifest.tokenizer_sha256[:12]}). Prepare the set again with --overwrite."
        )
    return tokenizer
