"""Choose the fastest encoder with exactly a tokenizer's tokens: gigatoken if it agrees, else the tokenizer's library.

gigatoken is used for byte-level BPE only, and only if it gives the tokenizer's tokens for a set of difficult texts and
for the first documents of the input.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from llmscale.config.bundled_files import install_command
from llmscale.data.tokenizers.hugging_face import HuggingFaceTokenizer
from llmscale.data.tokenizers.load_tokenizer import CHARACTERS
from llmscale.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    RANKS_NAME,
    TiktokenTokenizer,
    TokenArray,
    Tokenizer,
    cut_text,
)
from llmscale.errors import DataError

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer

EncoderName = Literal["auto", "gigatoken", "reference"]
#: Characters of a long document that the tokenizer's library gets at once, if the document may be cut.
_PIECE_CHARACTERS = 1 << 18
#: Characters of the first documents for the comparison.
_CHECKED_CHARACTERS = 1 << 19
#: gigatoken caches every word, up to 2.6 bytes per character of random text; reloading it after this many characters
#: empties the cache and takes 0.2 s.
_RENEWED_CHARACTERS = 1 << 30
#: Texts that distinguish patterns which split text almost alike.
_HARD_TEXTS = (
    "",
    " ",
    "  \n\n \t\n   x  \r\n\r\ny   ",
    "I'll we'Ve don't 'S'sT it's'll THEY'RE ''' 'tis",
    "1 12 123 1234 12345678 3.14159e-10 1,000,000 ²³ ½ Ⅷ ٣٤٥ 四五",
    "def f(x):\n\treturn {'a': [x ** 2, -x], \"b\": None}  # comment\n\n\n    pass\n",
    "naïve café ﬁn Straße ŉ ǅ İstanbul e\u0301 n\u0303 \u0345",
    "한국어 日本語テキスト 中文标点。 العربية हिन्दी ไทย עברית",
    "🙂🙃 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u200b\u200d\ufeff\u00a0\u2028\u2029\u3000 \x00\x01\x1c\x1f\x7f\x85 \U000e0001 \uffff",
    "a" * 3000,
    " " * 300 + "x" + "\n" * 300 + "=" * 300,
    "aA1 A1a _x_ __init__ x_1 $100 %d #tag @user http://example.com/?q=1&b=2 C++ a.b,c;d:e!f?g",
    f"{END_OF_TEXT} <|im_start|>user<|im_end|> <s></s> [INST] <unk> <pad> <|eot_id|>",
)


#: All characters except those that are in NFC beside any neighbour in every version of Unicode; gigatoken and
#: `tokenizers` have different versions.
_NFC_MAY_CHANGE = re.compile("[^\x00-\u02ff\u0400-\u0482\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u4e00-\u9fff]")


class Encoder(Protocol):
    """Encodes texts to token ids; thread-safe."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the token ids of each text. Raises DataError."""


class ReferenceEncoder:
    """The tokenizer's library, as the rest of llmscale uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self.name = "tokenizers"
        else:
            self.name = "tiktoken"

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        if not self._tokenizer.newline_is_a_border:
            return self._tokenizer.encode_batch(texts)
        cut = [list(cut_text(text, _PIECE_CHARACTERS)) for text in texts]
        arrays = iter(self._tokenizer.encode_batch([piece for pieces in cut for piece in pieces]))
        parts = [[next(arrays) for _ in pieces] for pieces in cut]
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]


class GigatokenEncoder:
    """gigatoken; texts that NFC may change, or that give a forbidden token, are encoded by the tokenizer."""

    name = "gigatoken"

    def __init__(
        self, tokenizer: TiktokenTokenizer | HuggingFaceTokenizer, native: BPETokenizer, *, is_nfc: bool
    ) -> None:
        """`is_nfc`: whether the tokenizer normalises text to NFC, which `native` does not."""
        self._tokenizer = tokenizer
        self._native = native
        self._is_nfc = is_nfc
        self._num_characters = 0
        self._never = tokenizer.never_from_text if isinstance(tokenizer, HuggingFaceTokenizer) else None

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        self._num_characters += sum(map(len, texts))
        if self._num_characters > _RENEWED_CHARACTERS:
            self._num_characters = 0
            self._native, _ = _load(self._tokenizer)
        # Only the two NumPy arrays of the Awkward array are used. parallel=False, as its threads have no limit.
        layout = self._native.encode_batch(list(texts), parallel=False).layout
        tokens = layout.content.data
        ends = layout.offsets.data
        arrays = [tokens[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        doubtful = [place for place, text in enumerate(texts) if self._is_nfc and _NFC_MAY_CHANGE.search(text)]
        if self._never is not None and len(tokens) and self._never[tokens].any():
            doubtful += [place for place, array in enumerate(arrays) if self._never[array].any()]
        for place, array in zip(doubtful, self._tokenizer.encode_batch([texts[k] for k in doubtful]), strict=True):
            arrays[place] = array
        return arrays


def choose_encoder(tokenizer: Tokenizer, wanted: EncoderName, first_texts: Sequence[str]) -> tuple[Encoder, str]:
    """Return an encoder and, if it is not gigatoken, the reason. `first_texts` are the input's first documents.

    Raises DataError when gigatoken is `wanted` and not usable.
    """
    reference = ReferenceEncoder(tokenizer)
    if wanted == "reference":
        return reference, ""
    why_not = "it encodes byte-level BPE only"
    is_bpe = False
    if isinstance(tokenizer, (TiktokenTokenizer, HuggingFaceTokenizer)) and tokenizer.spec != CHARACTERS:
        is_bpe = True
        try:
            native, is_nfc = _load(tokenizer)
            encoder = GigatokenEncoder(tokenizer, native, is_nfc=is_nfc)
            why_not = _find_difference(encoder, reference, [*_HARD_TEXTS, *_first_characters(first_texts)])
            if not why_not:
                return encoder, ""
        except ImportError:
            why_not = f"it is not installed (`{install_command('data')}`, on Python 3.11 or later)"
        except _Unfit as error:
            why_not = str(error)
        except (KeyboardInterrupt, SystemExit, MemoryError, DataError):
            raise
        except BaseException as error:  # Rust's panics are BaseException
            why_not = f"it fails ({' '.join(str(error).split())[:200]})"
    if wanted == "gigatoken":
        raise DataError(f"--encoder gigatoken cannot encode with {tokenizer.spec}: {why_not}.")
    return reference, f"Encoding with {reference.name}, not gigatoken: {why_not}." if is_bpe else ""


def _first_characters(texts: Sequence[str]) -> Iterator[str]:
    left = _CHECKED_CHARACTERS
    for text in texts:
        if left > 0:
            yield text[:left]
            left -= len(text)


class _Unfit(Exception):
    """gigatoken cannot replace this tokenizer."""


def _load(tokenizer: TiktokenTokenizer | HuggingFaceTokenizer) -> tuple[BPETokenizer, bool]:
    """Return gigatoken's tokenizer and whether the tokenizer uses NFC. Raises ImportError, _Unfit."""
    from gigatoken import gigatoken_rs

    if isinstance(tokenizer, TiktokenTokenizer):
        record = {}
    else:
        record = tokenizer.plain_record()
    normalizer = record.get("normalizer")
    is_nfc = normalizer == {"type": "NFC"}
    if normalizer is not None and not is_nfc:
        raise _Unfit("the tokenizer normalises text in another way than NFC")
    if isinstance(tokenizer, TiktokenTokenizer):
        special = {END_OF_TEXT: tokenizer.eot_token} if tokenizer.parse_special else {}
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            return gigatoken_rs.BPETokenizer.from_tiktoken(Path(folder) / RANKS_NAME, "gpt2", special), False
    native = gigatoken_rs.load_hf_json(json.dumps({**record, "normalizer": None}))
    if not isinstance(native, gigatoken_rs.BPETokenizer):
        raise _Unfit("it encodes byte-level BPE only")
    return native, is_nfc


def _find_difference(encoder: Encoder, reference: Encoder, texts: Sequence[str]) -> str:
    """Return the first difference between two encoders on the texts, or an empty string."""
    for text, ours, theirs in zip(texts, encoder.encode(texts), reference.encode(texts), strict=True):
        if not np.array_equal(ours, theirs):
            place = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            return f"token {place} of the text {text[:60]!r} differs"
    return ""
