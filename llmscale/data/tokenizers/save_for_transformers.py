"""Any of our tokenizers as the files that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

import json
from pathlib import Path

from llmscale.data.tokenizers.byte_letters import write_bytes
from llmscale.data.tokenizers.hf_tokenizer import JSON_NAME, HuggingFaceTokenizer, write_config
from llmscale.data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

_LONGEST_MERGED_BYTES = 512


def save_for_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`, which exists. Raises OSError.

    Ids are the same for all text but the one case that transformers treats in its own way: end-of-text written out in
    a text becomes the token.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        path = folder / tokenizer.save(folder)
        record = json.loads(path.read_bytes())
        # Data is prepared without the tokens that a template puts around a text.
        record["post_processor"] = None
        path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    elif isinstance(tokenizer, TiktokenTokenizer):
        _save_ranks(tokenizer.ranks, folder)
    else:
        _save_ranks({bytes([value]): value for value in range(256)}, folder)


def _save_ranks(ranks: dict[bytes, int], folder: Path) -> None:
    """Byte-level BPE with GPT-2's pattern from token ids by bytes; end-of-text gets the id behind them."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    written = {token: write_bytes(token) for token in ranks}
    parts = (_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__))
    merges = [(written[pair[0]], written[pair[1]]) for pair in parts if len(pair) == 2]
    vocab = {written[token]: rank for token, rank in ranks.items()} | {END_OF_TEXT: len(ranks)}
    # tiktoken too takes a piece that is a token as a whole, whether merges lead there or not.
    fast = FastTokenizer(models.BPE(vocab, merges, ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END_OF_TEXT])
    (folder / JSON_NAME).write_text(fast.to_str(), encoding="utf-8")
    write_config(folder, END_OF_TEXT)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts that a token's bytes are merged into by the merges of lower rank: the two of its own merge; one for a
    single byte; more where no merge leads to the token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    # Finding the merges of a long token takes the square of its length; it is encoded without them too.
    while 1 < len(parts) <= _LONGEST_MERGED_BYTES:
        found = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        rank, place = min(found)
        if rank >= ranks[token]:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
