"""A published model's tokenizer, or any other tokenizer.json, through `tokenizers` (no transformers)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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

#: A WordPiece model takes time by the square of a word, a Unigram model by its longest token; that takes 340 bytes for
#: each character, too. Finding added tokens takes time by the squares of their lengths.
_MOST_TOKEN_CHARACTERS, _MOST_WORD_CHARACTERS, _MOST_TRIE_CHARACTERS = 1 << 15, 1000, 4 << 20
_MOST_ADDED_SQUARES = 1 << 27
#: Published rules make at most 36 characters of one (ALBERT's); nine hostile ones can fill any memory.
_MOST_RULES, _MOST_GROWTH = 64, 64
#: Runs of every visible letter of ASCII, and of blanks.
_PROBE = "".join(f"{chr(code) * 40} " for code in range(32, 127)) + "\n" * 40 + "0a" * 40
#: Where rules hold rules.
_INNER = ("normalizers", "pretokenizers", "processors", "decoders")


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
        _check_model(record, tokens, where)
        plain = record if parse_special else with_special_markers(record, files.chat_template())
        self._fast = _build(files.tokenizer_json if plain is record else json.dumps(plain).encode(), where)
        self._fast.encode_special_tokens = not parse_special
        # A pattern that takes exponential time on a run of letters fails here, before anything is written.
        with _told(f"{where} cannot encode a text"), without_panics(), suppress(Exception):
            self._fast.encode(_PROBE, add_special_tokens=False)
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
        with _told(f"{self.spec}/{JSON_NAME} cannot encode a text"), without_panics():
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

    with _told(f"{where} is not a tokenizer that `tokenizers` can read"), without_panics():
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


@contextmanager
def without_panics() -> Iterator[None]:
    """Keep Rust from writing to stderr where and why it panics: the exception says it in a sentence."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_runs_nothing(files: ModelFiles) -> None:
    named = files.record(CONFIG_NAME).get("auto_map")
    if named:
        raise DataError(
            f"{files.name}/{CONFIG_NAME} has an auto_map: this tokenizer is code of its own ({str(named)[:80]}), which "
            f"is never run. If {JSON_NAME} is all of it, take auto_map out of a copy of the folder."
        )


def _check_model(record: dict[str, object], tokens: dict[int, str], where: str) -> None:
    """Raise DataError for what no data set can bear, and for what takes memory or time without bounds."""
    model = record.get("model")
    model = model if isinstance(model, dict) else {}
    if model.get("dropout"):
        raise DataError(
            f"{where}: model.dropout is {str(model['dropout'])[:40]}, so a text has other tokens each time. Make it "
            "null in a copy of the folder."
        )
    lengths, is_unigram = list(map(len, tokens.values())), model.get("type") == "Unigram"
    longest = _MOST_WORD_CHARACTERS if is_unigram else _MOST_TOKEN_CHARACTERS
    listed = record.get("added_tokens")
    added = sum(len(str(entry.get("content"))) ** 2 for entry in listed) if isinstance(listed, list) else 0
    bounded = [
        ("the longest token's length", max(lengths, default=0), longest),
        ("the sum of the added tokens' squared lengths", added, _MOST_ADDED_SQUARES),
        ("max_input_chars_per_word", model.get("max_input_chars_per_word"), _MOST_WORD_CHARACTERS),
        ("the length of all tokens", sum(lengths) if is_unigram else 0, _MOST_TRIE_CHARACTERS),
    ]
    with _told(f"{where} is not a tokenizer that `tokenizers` can read"):
        for parts in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
            rules, said = [rule for part in parts for rule in _rules(record.get(part))], " with ".join(parts)
            bounded.append((f"the number of rules of {said}", len(rules), _MOST_RULES))
            growth = _growth(rules[:_MOST_RULES])
            bounded.append((f"the number of characters that {said} makes of one", growth, _MOST_GROWTH))
    for what, value, most in bounded:
        if isinstance(value, (int, float)) and value > most:
            raise DataError(
                f"{where}: {what} is {value:,.0f}. Legal: at most {most:,}; published tokenizers stay far below."
            )


def _rules(section: object) -> Iterator[dict]:
    """Yield every rule of a section, in order, those within a Sequence too."""
    waiting = [section]
    while waiting:
        rule = waiting.pop()
        if isinstance(rule, dict):
            yield rule
            waiting += [part for key in _INNER if isinstance(rule.get(key), list) for part in reversed(rule[key])]


def _growth(rules: Sequence[dict]) -> float:
    """Return how many characters all rules can make of one. Raises KeyError and its like for damaged rules."""
    growth, is_plain = 1.0, True
    for rule in rules:
        kind = str(rule.get("type"))
        growth *= max(1.0, _rule_growth(rule, kind, is_plain))
        # Unicode's forms lengthen a text once, unless another rule makes again what they take apart.
        is_plain = is_plain and kind.startswith(("NF", "Sequence"))
    return growth


def _rule_growth(rule: dict, kind: str, is_plain: bool) -> float:
    if kind == "Replace":
        literal = rule["pattern"].get("String")
        return len(rule["content"]) / max(1, len(literal)) if literal else 1 + len(rule["content"])
    if kind == "Prepend":
        return 1 + len(rule["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(rule["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(len(text.decode(errors="replace")) for text in texts)
    if kind == "TemplateProcessing":
        sizes = {name: len(special["ids"]) for name, special in rule["special_tokens"].items()}
        return sum(sizes[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else 1 for piece in rule["single"])
    if kind.startswith("NF"):
        return 1 if is_plain else 18
    return {"ByteLevel": 4, "BertNormalizer": 3}.get(kind, 1)


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
