"""A published model's tokenizer, or any other tokenizer.json, through `tokenizers` (no transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.set_rules import ORIGIN_NAME, check_no_links
from llmscale.data.shards.tokenizer_origin import TokenizerOrigin, hash_files, load_origin
from llmscale.data.tokenizers.document_ends import find_beginning, find_end_of_text, token_text
from llmscale.data.tokenizers.model_files import CONFIG_NAME, JSON_NAME, ModelFiles, read_folder
from llmscale.data.tokenizers.special_tokens import are_all_special, special_ids, with_special_markers, without_special
from llmscale.data.tokenizers.tokenizer import TokenArray, Tokenizer
from llmscale.data.tokenizers.vocabulary_files import tokens_by_id
from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


@dataclass(frozen=True)
class Ends:
    """What stands around every document."""

    eot_token: int
    bos_tokens: tuple[int, ...]
    origin: str
    """What says so, for people."""
    from_old_set: bool = False
    """Whether documents were written by an older version, which put nothing before them whatever the model's template
    says."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json with what the files beside it say of documents.

    Special tokens and markers (special_tokens.py) in a text are ordinary text, unless `parse_special`.
    """

    def __init__(
        self, files: ModelFiles, *, ends: Ends | None = None, asked_eot: str = "", parse_special: bool = False
    ) -> None:
        """`ends` as they were once decided; else the files say, but for end-of-text where `asked_eot` names it.

        Raises DataError.
        """
        where = f"{files.name}/{JSON_NAME}"
        record = parse_json(files.tokenizer_json, Rules(DataError), where)
        tokens = tokens_by_id(record, where)
        _check_runs_nothing(files)
        _check_model(record, where)
        plain = record if parse_special else with_special_markers(record, files.chat_template())
        self._fast = _build(files.tokenizer_json if plain is record else json.dumps(plain).encode(), where)
        self._fast.encode_special_tokens = not parse_special
        self.files, self.spec, self._parse_special = files, files.name, parse_special
        self.vocab_size = max(tokens, default=0) + 1
        if ends is None or not ends.from_old_set:
            _check_same_tokens(self.tokens(), tokens, where)
        self.ends = ends or self._decide_ends(tokens, asked_eot)
        self.eot_token, self.bos_tokens = self.ends.eot_token, self.ends.bos_tokens
        for token in (self.eot_token, *self.bos_tokens):
            if token not in tokens:
                raise DataError(f"{where} has no token {token}, with which documents end or begin.")
        self.sha256 = hashlib.sha256(files.tokenizer_json + f"\nend-of-text {self.eot_token}".encode()).hexdigest()
        self.newline_is_a_border = not parse_special and _is_gpt2_like(plain)
        pad = token_text(files, CONFIG_NAME, "pad_token")
        self.pad_token = next((token for token, text in tokens.items() if pad and text == pad), None)
        #: By token id, whether a text may not become it.
        self._never = np.zeros(self.vocab_size, bool)
        if not parse_special:
            self._never[[self.eot_token, *self.bos_tokens, *special_ids(plain)]] = True
        self._plain = plain

    def plain_record(self) -> dict[str, object]:
        """tokenizer.json for another program, which shall make the same of a text: without the special tokens, which
        are text, unless they are to be parsed."""
        if self._parse_special:
            return self._plain
        return without_special(self._plain)

    def never_from_text(self) -> NDArray[np.bool_]:
        """By token id, whether a text may not become it, [vocab_size]."""
        return self._never

    def describe_ends(self) -> str:
        """What stands around documents, and what says so, in a sentence."""
        tokens = self.tokens()
        begin = "".join(f" begin with {tokens[token]!r} ({token}) and" for token in self.bos_tokens)
        return f"Documents{begin} end with {tokens[self.eot_token]!r} ({self.eot_token}, {self.ends.origin})."

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        with _told(f"{self.spec}/{JSON_NAME} cannot encode the text"):
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return [
            np.array(self._encode_cut(text), np.uint32) if self._never[ids].any() else ids
            for text, ids in zip(texts, arrays, strict=True)
        ]

    def _encode_cut(self, text: str) -> list[int]:
        """Encode text of whose characters the model itself makes a special token, by cutting them."""
        with _told(f"{self.spec}/{JSON_NAME} cannot encode the text"):
            encoding = self._fast.encode(text, add_special_tokens=False)
        cuts = {0, len(text)}
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._never[token] and end - begin > 1:
                cuts.add((begin + end) // 2)
            elif token == self.eot_token:
                raise DataError(
                    f"{self.spec}/{JSON_NAME}: text holds {text[begin:end]!r}, which is the end-of-text token. Choose "
                    "one that no text holds with --eot-token."
                )
        places = sorted(cuts)
        if len(places) == 2:  # a special token of one character, such as "!" for padding: text needs it
            return list(encoding.ids)
        return [token for begin, end in pairwise(places) for token in self._encode_cut(text[begin:end])]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=False)
        return text

    def tokens(self) -> dict[int, str]:
        return {number: token for token, number in self._fast.get_vocab(with_added_tokens=True).items()}

    def save(self, folder: Path) -> str:
        (folder / JSON_NAME).write_bytes(self.files.tokenizer_json)
        extras = self.files.extras()
        for name, contents in extras.items():
            (folder / name).write_bytes(contents)
        ends = self.ends
        kept = (tuple(extras), hash_files(extras))
        TokenizerOrigin(self.spec, ends.eot_token, ends.bos_tokens, ends.origin, *kept).save(folder)
        return ORIGIN_NAME

    def _decide_ends(self, tokens: dict[int, str], asked_eot: str) -> Ends:
        eot = find_end_of_text(self.files, tokens, asked_eot)
        with _told(f"{self.spec}/{JSON_NAME} cannot encode a text"):
            encoding = self._fast.encode("a", add_special_tokens=True)
        # The mask is 0 where the text's own tokens are; the template's are before them.
        mask = encoding.special_tokens_mask
        template = tuple(encoding.ids[: mask.index(0) if 0 in mask else 0])
        return Ends(eot.token, find_beginning(self.files, template, tokens, eot.token), eot.origin)


def load_huggingface(path: Path, *, eot_token: str = "", parse_special: bool = False) -> HuggingFaceTokenizer:
    """From a tokenizer.json or its folder; `eot_token` names the end-of-text token. Raises DataError."""
    folder = path if path.is_dir() else path.parent
    return HuggingFaceTokenizer(read_folder(folder), asked_eot=eot_token, parse_special=parse_special)


def load_saved(path: Path) -> HuggingFaceTokenizer:
    """What `save` wrote; `path` is that of its origin.json. Raises DataError."""
    origin = load_origin(path)
    check_no_links(path.parent, JSON_NAME, *origin.files)
    files = read_folder(path.parent)
    for name in origin.files:
        origin.check(name, files.others.get(name), str(path.parent))
    kept = {name: files.others[name] for name in origin.files}
    ends = Ends(origin.eot_token, origin.bos_tokens, origin.eot_origin)
    return HuggingFaceTokenizer(ModelFiles(files.name, files.tokenizer_json, kept), ends=ends)


def load_old_set(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer.json of a set of an older version: its documents end with eos_token of the tokenizer_config.json
    beside it, and have nothing before them. Raises DataError."""
    files = read_folder(path.parent)
    kept = {name: contents for name, contents in files.others.items() if name == CONFIG_NAME}
    files = ModelFiles(files.name, files.tokenizer_json, kept)
    tokens = tokens_by_id(parse_json(files.tokenizer_json, Rules(DataError), str(path)), str(path))
    eot = find_end_of_text(files, tokens)
    return HuggingFaceTokenizer(files, ends=Ends(eot.token, (), eot.origin, from_old_set=True))


def _build(contents: bytes, where: str) -> FastTokenizer:
    from tokenizers import Tokenizer as FastTokenizer

    with _told(f"{where} is not a tokenizer that `tokenizers` can read"):
        fast = FastTokenizer.from_buffer(contents)
        fast.no_truncation()
        fast.no_padding()
    return fast


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tells a fault of `tokenizers` in one line: it raises bare Exception, and where its own code breaks something that
    is no Exception."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {' '.join(str(error).split())[:200]}.") from None


def _check_runs_nothing(files: ModelFiles) -> None:
    named = files.record(CONFIG_NAME).get("auto_map")
    if named:
        raise DataError(
            f"{files.name}/{CONFIG_NAME} has an auto_map: this tokenizer is code of its own ({str(named)[:80]}), which "
            f"is never run. If {JSON_NAME} is all of it, take auto_map out of a copy of the folder."
        )


def _check_model(record: dict[str, object], where: str) -> None:
    """What `tokenizers` would do and no data set can bear."""
    model = record.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise DataError(
            f"{where}: model.dropout is {str(model['dropout'])[:40]}, so a text has other tokens each time. Make it "
            "null in a copy of the folder."
        )


def _check_same_tokens(built: dict[int, str], stated: dict[int, str], where: str) -> None:
    """`tokenizers` gives an added token the next free id, whatever the file says."""
    for token, text in stated.items():
        if built.get(token) != text:
            raise DataError(
                f"{where} states {text[:60]!r} as token {token}, and `tokenizers` gives that id to "
                f"{built.get(token, 'nothing')[:60]!r}: ids must be without gaps, added tokens behind the model's."
            )


def _is_gpt2_like(record: dict[str, object]) -> bool:
    """Whether text is split by GPT-2's pattern and nothing else: a border around a single newline."""
    splitter = record.get("pre_tokenizer")
    return (
        record.get("normalizer") is None
        and isinstance(splitter, dict)
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex") is True
        and splitter.get("add_prefix_space") is False
        and are_all_special(record)
    )
