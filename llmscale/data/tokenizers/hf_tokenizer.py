"""Any fast Hugging Face tokenizer, read from its tokenizer.json through `tokenizers` (no transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmscale.data.shards.set_rules import MAX_VOCAB_SIZE
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, TokenArray, Tokenizer
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES, Rules, load_json, parse_json
from llmscale.untrusted.paths import read_regular

JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json and the end-of-text token that its tokenizer_config.json names."""

    def __init__(self, json_path: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        try:
            contents = read_regular(json_path, MAX_BYTES)
            record = parse_json(contents, Rules(DataError), str(json_path))
            self._fast = FastTokenizer.from_buffer(contents)
        except OSError as error:
            raise DataError(f"Cannot read the tokenizer {json_path}: {error.strerror}.") from None
        except DataError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception for a malformed file
            raise DataError(f"{json_path} is not a tokenizer that `tokenizers` can read: {error}.") from None
        self._contents = contents
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        self.spec = str(json_path.parent)
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=0) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise DataError(
                f"{json_path} has the token id {self.vocab_size - 1}. Tables would have a row for every id below it: "
                f"at most {MAX_VOCAB_SIZE:,} are allowed."
            )
        self._eot_text = _end_of_text(json_path)
        eot_token = self._fast.token_to_id(self._eot_text)
        if eot_token is None:
            raise DataError(
                f"{json_path} has no end-of-text token: '{self._eot_text}' is not in its vocabulary. Name "
                "one that is "
                f'as "eos_token" in {json_path.parent / CONFIG_NAME}.'
            )
        self.eot_token = int(eot_token)
        self.sha256 = hashlib.sha256(contents + f"\nend-of-text {eot_token}".encode()).hexdigest()
        self.newline_is_a_border = _is_gpt2_like(record)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return [
            self._encode_forged(text) if self._eot_text in text and self.eot_token in ids else ids
            for text, ids in zip(texts, arrays, strict=True)
        ]

    def _encode_forged(self, text: str) -> TokenArray:
        """Encode text whose characters the model itself merges into end-of-text, by cutting them."""
        middle = max(len(self._eot_text) // 2, 1)
        head, tail = self._eot_text[:middle], self._eot_text[middle:]
        parts = text.split(self._eot_text)
        broken = [tail * (i > 0) + part + head * (i < len(parts) - 1) for i, part in enumerate(parts)]
        pieces = self._fast.encode_batch_fast(broken, add_special_tokens=False)
        return np.concatenate([np.array(piece.ids, np.uint32) for piece in pieces])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=False)
        return text

    def tokens(self) -> dict[int, str]:
        return {number: token for token, number in self._fast.get_vocab(with_added_tokens=True).items()}

    def save(self, folder: Path) -> str:
        (folder / JSON_NAME).write_bytes(self._contents)
        write_config(folder, self._eot_text)
        return JSON_NAME


def write_config(folder: Path, end_of_text: str) -> None:
    """The tokenizer_config.json with which transformers gives the same ids and the same text. Raises OSError."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        # Left out, it gives token_type_ids too, and `model(**tokenizer(text))` adds their embeddings to GPT-2's input.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_huggingface(path: Path) -> HuggingFaceTokenizer:
    """From a tokenizer.json or its folder. Raises DataError when it has no usable end-of-text."""
    json_path = path / JSON_NAME if path.is_dir() else path
    if not json_path.is_file():
        raise DataError(
            f"{path} holds no {JSON_NAME}. A slow tokenizer can be converted with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)`."
        )
    return HuggingFaceTokenizer(json_path)


def _end_of_text(json_path: Path) -> str:
    """The text of the eos_token of the tokenizer_config.json beside it, else `<|endoftext|>`."""
    config_path = json_path.parent / CONFIG_NAME
    if not config_path.is_file():
        return END_OF_TEXT
    eos = load_json(config_path, Rules(DataError)).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return text if isinstance(text, str) and text else END_OF_TEXT


def _is_gpt2_like(record: dict[str, object]) -> bool:
    """Whether text is split by GPT-2's pattern and nothing else: a border around a single newline."""
    splitter = record.get("pre_tokenizer")
    return (
        record.get("normalizer") is None
        and isinstance(splitter, dict)
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex") is True
        and splitter.get("add_prefix_space") is False
    )
