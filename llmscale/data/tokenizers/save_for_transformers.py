"""Write any tokenizer as files that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

import json
from pathlib import Path

from llmscale.data.tokenizers.hugging_face import CONFIG_NAME, JSON_NAME, HuggingFaceTokenizer
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, TiktokenTokenizer, Tokenizer, write_bytes

_LONGEST_MERGED_BYTES = 512


def save_for_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and its companions to `folder`, which exists. Raises OSError.

    A published model's files are copied unchanged, chat template included. Ids are the same for all text, except that
    transformers parses special tokens written in a text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.files.write(folder)
        if CONFIG_NAME not in tokenizer.files.extras():
            ids = generation_ids(tokenizer)
            tokens = tokenizer.tokens()
            config = describe_for_transformers(bos=tokens[ids["bos_token_id"]], eos=tokens[ids["eos_token_id"]])
            (folder / CONFIG_NAME).write_text(config, encoding="utf-8")
    elif isinstance(tokenizer, TiktokenTokenizer):
        _save_ranks(tokenizer.ranks, folder)
    else:
        _save_ranks({bytes([value]): value for value in range(256)}, folder)


def generation_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the token ids of config.json and generation_config.json. A model without begin-of-text saw end-of-text
    before every document."""
    ids = {"bos_token_id": tokenizer.bos_tokens[0] if tokenizer.bos_tokens else tokenizer.eot_token}
    ids["eos_token_id"] = tokenizer.eot_token
    if tokenizer.pad_token is None:
        return ids
    return ids | {"pad_token_id": tokenizer.pad_token}


def _save_ranks(ranks: dict[bytes, int], folder: Path) -> None:
    """Byte-level BPE with GPT-2's pattern from token ids by bytes; end-of-text gets the id after them."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    written = {token: write_bytes(token) for token in ranks}
    parts = (_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__))
    merges = [(written[pair[0]], written[pair[1]]) for pair in parts if len(pair) == 2]
    vocab = {written[token]: rank for token, rank in ranks.items()} | {END_OF_TEXT: len(ranks)}
    # tiktoken, too, encodes a piece that is a token as that token, whether merges lead to it or not.
    fast = FastTokenizer(models.BPE(vocab, merges, ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END_OF_TEXT])
    (folder / JSON_NAME).write_text(fast.to_str(), encoding="utf-8")
    config = describe_for_transformers(bos=END_OF_TEXT, eos=END_OF_TEXT)
    (folder / CONFIG_NAME).write_text(config, encoding="utf-8")


def describe_for_transformers(*, bos: str, eos: str) -> str:
    """Return the tokenizer_config.json with which transformers gives the same ids and text."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        # Without this transformers also returns token_type_ids, and `model(**tokenizer(text))` adds their embeddings to
        # GPT-2's input.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return json.dumps(config, indent=1) + "\n"


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts into which merges of lower rank join a token's bytes: the two of its own merge, one for a single
    byte, more if no merge leads to the token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    # This takes quadratic time in the token's length, and a long token is encoded without merges, too.
    while 1 < len(parts) <= _LONGEST_MERGED_BYTES:
        pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        rank, place = min(pairs)
        if rank >= ranks[token]:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
