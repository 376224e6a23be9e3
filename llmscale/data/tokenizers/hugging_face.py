"""Load a published model's tokenizer or any tokenizer.json, and find its special tokens, without transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmscale.data.shards.manifest import (
    MAX_VOCAB_SIZE,
    ORIGIN_NAME,
    TOKENIZER_EXTRAS,
    TokenizerOrigin,
    hash_files,
    load_origin,
)
from llmscale.data.tokenizers.tokenizer import END_OF_TEXT, TokenArray, Tokenizer
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, MAX_BYTES, Rules, load_json, parse_json
from llmscale.untrusted.hub import read_hub_files
from llmscale.untrusted.paths import read_regular, unreadable_as
from llmscale.untrusted.strangers import describe_stranger

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as FastTokenizer

#: Form of the markers of chats and code filling (DeepSeek's with full-width bars).
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_BRACKETED = re.compile(r"<.*>|\[.*\]", re.DOTALL)
JSON_NAME = "tokenizer.json"
#: GPT-2's older format, with merges in another file; OPT has only this one on the Hub.
VOCAB_NAME = "vocab.json"
ADDED_NAME = "added_tokens.json"
#: Alternative vocabulary files; a folder needs one.
VOCABULARY_NAMES = (JSON_NAME, VOCAB_NAME)
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
#: Read for their end-of-text entries, and not kept.
_MODEL_NAMES = ("config.json", "generation_config.json")
_MAP_NAME = "special_tokens_map.json"


def with_special_markers(record: dict[str, object], template: str) -> dict[str, object]:
    """Return a tokenizer.json with every marker marked special, so that it is encoded as text; `record` itself if all
    are.

    Markers are added tokens of the form <|...|>, and those in brackets that occur in the chat `template`: Qwen's
    <|fim_prefix|> and <tool_call>. Other added tokens (runs of spaces, HTML tags, words) belong to ordinary text.
    """
    entries = _added(record)
    texts = [str(entry.get("content")) for entry in entries]
    are_markers = [_MARKER.fullmatch(text) or (_BRACKETED.fullmatch(text) and text in template) for text in texts]
    marks = [bool(mark) and not entry.get("special") for mark, entry in zip(are_markers, entries, strict=True)]
    if not any(marks):
        return record
    special = [{**entry, "special": True} if mark else entry for entry, mark in zip(entries, marks, strict=True)]
    return {**record, "added_tokens": special}


def special_ids(record: dict[str, object]) -> list[int]:
    """Return the ids of the special tokens, without the unknown token, which text can become."""
    model = record.get("model")
    unknown = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else ()
    ids = [(entry.get("id"), entry.get("content")) for entry in _added(record) if entry.get("special")]
    return [token for token, text in ids if isinstance(token, int) and text not in unknown and token not in unknown]


def _added(record: dict[str, object]) -> list[dict[str, object]]:
    added = record.get("added_tokens")
    return added if isinstance(added, list) else []


def load_vocabulary(folder: Path) -> tuple[str, dict[int, str]]:
    """Return the name of a folder's vocabulary file, empty if missing, and its tokens by id.

    Raises DataError when the file is damaged.
    """
    if (path := folder / JSON_NAME).is_file():
        return JSON_NAME, tokens_by_id(load_json(path, Rules(DataError)), str(path))
    if (path := folder / VOCAB_NAME).is_file():
        files = [path, *([folder / ADDED_NAME] if (folder / ADDED_NAME).is_file() else [])]
        entries = [entry for file in files for entry in load_json(file, Rules(DataError)).items()]
        return VOCAB_NAME, _by_id(entries, str(path))
    return "", {}


def tokens_by_id(record: dict[str, Any], where: str) -> dict[int, str]:
    """Return the tokens by id in a tokenizer.json, the model's and added ones. Raises DataError."""
    try:
        vocab = record["model"]["vocab"]
        if not isinstance(vocab, dict):  # a Unigram model's pieces with scores, in the order of ids
            vocab = {piece: place for place, (piece, _) in enumerate(vocab)}
        entries = [*vocab.items(), *((entry["content"], entry["id"]) for entry in record.get("added_tokens") or [])]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{where} is not a tokenizer that `tokenizers` can read: model.vocab or added_tokens is wrong."
        ) from None
    return _by_id(entries, where)


def _by_id(entries: Iterable[tuple[object, object]], where: str) -> dict[int, str]:
    tokens: dict[int, str] = {}
    for token, number in entries:
        if type(number) is not int or not 0 <= number < MAX_VOCAB_SIZE:
            raise DataError(
                f"{where} has the token id {str(number)[:40]}. Legal: whole numbers below {MAX_VOCAB_SIZE:,}, since "
                "tables have a row for every id."
            )
        if not isinstance(token, str):
            raise DataError(f"{where}: the vocabulary has {str(token)[:40]!r} where a token's text should be.")
        if tokens.setdefault(number, token) != token:
            raise DataError(f"{where}: the tokens {tokens[number][:40]!r} and {token[:40]!r} have one id, {number}.")
    return tokens


@dataclass(frozen=True)
class ModelFiles:
    """Contents of a model's tokenizer files, read once."""

    name: str
    """Folder as the user named it, or the Hub's NAME@COMMIT."""
    tokenizer_json: bytes
    others: dict[str, bytes]
    """Contents of the other files, by name."""

    def extras(self) -> dict[str, bytes]:
        """Return the other files that are kept with the tokenizer."""
        return {name: self.others[name] for name in TOKENIZER_EXTRAS if name in self.others}

    def write(self, folder: Path) -> None:
        """Write tokenizer.json and the files that are kept with it. Raises OSError."""
        for name, contents in {JSON_NAME: self.tokenizer_json, **self.extras()}.items():
            (folder / name).write_bytes(contents)

    def record(self, name: str) -> dict[str, object]:
        """Return the JSON object in another file; empty if missing. Raises DataError."""
        if name not in self.others:
            return {}
        # Some models on the Hub use Infinity for a limit, most tokenizers 10^30.
        rules = Rules(DataError, max_bytes=CONFIG_MAX_BYTES, not_finite=True)
        return parse_json(self.others[name], rules, f"{self.name}/{name}")

    def chat_template(self) -> str:
        """Return the concatenated chat templates as text; they are never run."""
        inside = self.record(CONFIG_NAME).get("chat_template")
        return self.others.get(TEMPLATE_NAME, b"").decode(errors="replace") + (
            json.dumps(inside, ensure_ascii=False) if inside else ""
        )


def read_folder(folder: Path) -> ModelFiles:
    """Read a folder's files. Raises DataError without a tokenizer.json, or for an unreadable file."""
    if not (folder / JSON_NAME).is_file():
        if stranger := describe_stranger(folder, flag_value=False):
            raise DataError(f"{folder} holds no {JSON_NAME}.{stranger}")
        slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        raise DataError(
            f"{folder} holds no {JSON_NAME}{f', only {slow[0]}' if slow else ''}. A slow tokenizer can be converted "
            "where transformers is installed, with `AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)`."
        )
    names = (*TOKENIZER_EXTRAS, *_MODEL_NAMES)
    others = {name: _read(folder / name) for name in names if (folder / name).is_file()}
    return ModelFiles(str(folder), _read(folder / JSON_NAME), others)


def read_hub(name: str) -> ModelFiles:
    """Read a model's files from the Hub. Raises DataError when it is unavailable or has no tokenizer.json."""
    fetched = read_hub_files(name, JSON_NAME, (*TOKENIZER_EXTRAS, *_MODEL_NAMES), MAX_BYTES, DataError)
    return ModelFiles(fetched.name, fetched.contents.pop(JSON_NAME), fetched.contents)


def _read(path: Path) -> bytes:
    with unreadable_as(DataError, f"The tokenizer {path}"):
        return read_regular(path, MAX_BYTES)


def find_end_of_text(files: ModelFiles, tokens: dict[int, str], asked: str = "") -> tuple[int, str]:
    """Return the end-of-text token among `tokens` (by id) with a text on its origin: `asked`, else the one on which the
    model's files agree.

    tokenizer_config.json (else special_tokens_map.json) names it by text, config.json and generation_config.json by one
    or several ids. If none does, it is `<|endoftext|>`. Among several, those in the chat template end a turn, not a
    text: an instruction-tuned Llama 3 has <|eot_id|> and <|end_of_text|>. Raises DataError unless exactly one remains.
    """
    ids = {text: token for token, text in tokens.items()}
    marked = [text for text in ids if text.startswith("<") and text.endswith(">") and len(text) > 2]
    examples = f"It has, for example, {', '.join(marked[:6]) or 'no token in angle brackets'}."
    if asked:
        if asked not in ids:
            hint = did_you_mean(asked, marked)
            raise DataError(f"--eot-token '{asked[:80]}' is not a token of {files.name}.{hint} {examples}")
        return ids[asked], "--eot-token"
    named_by: dict[int, str] = {}
    for token, origin in _named(files, ids):
        if token not in tokens:
            raise DataError(
                f"{files.name}: {origin} names the token {str(token)[:80]}, which {JSON_NAME} lacks. Name the "
                "end-of-text token with --eot-token."
            )
        named_by[token] = f"{named_by[token]} and {origin}" if token in named_by else origin
    if not named_by and END_OF_TEXT in ids:
        return ids[END_OF_TEXT], f"no file names one, and {JSON_NAME} has it"
    if not named_by:
        raise DataError(
            f"{files.name} has no end-of-text token: no file names an eos_token, and '{END_OF_TEXT}' is not in its "
            f"vocabulary. Name one with --eot-token. {examples}"
        )
    left = named_by
    if len(named_by) > 1:
        template = files.chat_template()
        left = {token: origin for token, origin in named_by.items() if tokens[token] not in template}
    if len(left) != 1:
        choice = "; ".join(f"'{tokens[token]}' ({origin})" for token, origin in named_by.items())
        raise DataError(f"{files.name} names several end-of-text tokens: {choice}. Choose one with --eot-token.")
    [(token, origin)] = left.items()
    others = "".join(f"; '{tokens[other]}' ends a turn of its chats" for other in named_by if other != token)
    return token, origin + others


def _named(files: ModelFiles, ids: dict[str, int]) -> Iterator[tuple[Any, str]]:
    """Yield what files name as end-of-text, each with its origin: an id, or a text that has none."""
    for name in (CONFIG_NAME, _MAP_NAME):
        if text := token_text(files, name, "eos_token"):
            yield ids.get(text, repr(text)), f"eos_token of {name}"
            break
    for name in _MODEL_NAMES:
        named = files.record(name).get("eos_token_id")
        for token in named if isinstance(named, list) else [named]:
            if token is not None:
                yield token if type(token) is int else repr(token), f"eos_token_id of {name}"


def token_text(files: ModelFiles, name: str, key: str) -> str:
    """Return the text of a special token that a file names, as a string or an object with `content`; empty for none."""
    named = files.record(name).get(key)
    if isinstance(named, dict):
        text = named.get("content")
    else:
        text = named
    return text if isinstance(text, str) else ""


def find_beginning(
    files: ModelFiles, template: tuple[int, ...], tokens: dict[int, str], eot_token: int
) -> tuple[int, ...]:
    """Return the tokens that the model saw before every document: its begin-of-text token, or none.

    `template` are the tokens that tokenizer.json adds before a text; add_bos_token of tokenizer_config.json overrides
    it, as in transformers and llama.cpp. End-of-text is not repeated: the one that ends a document begins the next.
    Raises DataError.
    """
    add = files.record(CONFIG_NAME).get("add_bos_token")
    if add is not None and not isinstance(add, bool):
        raise DataError(f"{files.name}/{CONFIG_NAME}: add_bos_token is {str(add)[:40]!r}, and must be true or false.")
    if add and not template:
        bos = token_text(files, CONFIG_NAME, "bos_token")
        template = tuple(token for token, text in tokens.items() if text == bos)
    beginning = () if add is False or template == (eot_token,) else template
    unknown = [token for token in beginning if token not in tokens]
    if unknown:
        raise DataError(f"{files.name}/{JSON_NAME}: its template begins with the token {unknown[0]}, which it lacks.")
    return beginning


@dataclass(frozen=True)
class Ends:
    """Tokens before and after every document."""

    eot_token: int
    bos_tokens: tuple[int, ...]
    origin: str
    """Text on what names these tokens."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, with document ends from the files beside it.

    Special tokens and markers in a text are encoded as text, unless `parse_special`.
    """

    def __init__(
        self, files: ModelFiles, *, ends: Ends | None = None, asked_eot: str = "", parse_special: bool = False
    ) -> None:
        """`ends` are stored document ends; else the files decide, with end-of-text `asked_eot` if given.

        Raises DataError.
        """
        where = f"{files.name}/{JSON_NAME}"
        record = parse_json(files.tokenizer_json, Rules(DataError), where)
        tokens = tokens_by_id(record, where)
        _check_deterministic(files, record, where)
        if parse_special:
            plain = record
        else:
            plain = with_special_markers(record, files.chat_template())
        self._fast = _build(files.tokenizer_json if plain is record else json.dumps(plain).encode(), where)
        self._fast.encode_special_tokens = not parse_special
        self.files = files
        self.spec = files.name
        self._parse_special = parse_special
        self.vocab_size = max(tokens, default=0) + 1
        _check_same_tokens(self.tokens(), tokens, where)
        self.ends = ends or self._decide_ends(tokens, asked_eot)
        self.eot_token = self.ends.eot_token
        self.bos_tokens = self.ends.bos_tokens
        for token in (self.eot_token, *self.bos_tokens):
            if token not in tokens:
                raise DataError(f"{where} lacks the token {token}, with which documents end or begin.")
        self.sha256 = hashlib.sha256(files.tokenizer_json + f"\nend-of-text {self.eot_token}".encode()).hexdigest()
        self.newline_is_a_border = not parse_special and _is_gpt2_like(plain)
        pad = token_text(files, CONFIG_NAME, "pad_token")
        self.pad_token = next((token for token, text in tokens.items() if pad and text == pad), None)
        #: True for token ids that text must not become, [vocab_size].
        self.never_from_text = np.zeros(self.vocab_size, bool)
        if not parse_special:
            self.never_from_text[[self.eot_token, *self.bos_tokens, *special_ids(plain)]] = True
        self._plain = plain

    def plain_record(self) -> dict[str, object]:
        """Return a tokenizer.json with which another program encodes text as this one does: without special tokens,
        unless they are parsed."""
        if self._parse_special:
            return self._plain
        ordinary = [entry for entry in _added(self._plain) if not entry.get("special")]
        return {**self._plain, "added_tokens": ordinary, "post_processor": None}

    def describe_ends(self) -> str:
        """Return a sentence on the tokens around documents and their origin."""
        tokens = self.tokens()
        begin = "".join(f" begin with {tokens[token]!r} ({token}) and" for token in self.bos_tokens)
        return f"Documents{begin} end with {tokens[self.eot_token]!r} ({self.eot_token}, {self.ends.origin})."

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        with _one_line(f"{self.spec}/{JSON_NAME} cannot encode the text"):
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return [
            np.array(self._encode_cut(text), np.uint32) if self.never_from_text[ids].any() else ids
            for text, ids in zip(texts, arrays, strict=True)
        ]

    def _encode_one(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        with _one_line(f"{self.spec}/{JSON_NAME} cannot encode the text"):
            return self._fast.encode(text, add_special_tokens=add_special_tokens)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text, and the places in it at which each begins and ends."""
        encoding = self._encode_one(text)
        return list(encoding.ids), list(encoding.offsets)

    def parsing_special(self) -> HuggingFaceTokenizer:
        """Return the tokenizer that encodes special tokens in a text as such."""
        return HuggingFaceTokenizer(self.files, ends=self.ends, parse_special=True)

    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of the special tokens."""
        return tuple(str(entry["content"]) for entry in _added(self._plain) if entry.get("special"))

    def _encode_cut(self, text: str) -> list[int]:
        """Encode text whose characters the model would turn into a special token, by cutting it within."""
        encoding = self._encode_one(text)
        cuts = {0, len(text)}
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self.never_from_text[token] and end - begin > 1:
                cuts.add((begin + end) // 2)
            elif token == self.eot_token:
                raise DataError(
                    f"{self.spec}/{JSON_NAME}: the text contains {text[begin:end]!r}, which is the end-of-text token. "
                    "Choose one that no text contains with --eot-token."
                )
        places = sorted(cuts)
        if len(places) == 2:  # a special token of one character, such as "!" for padding, is needed for text
            return list(encoding.ids)
        return [token for begin, end in pairwise(places) for token in self._encode_cut(text[begin:end])]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=False)
        return text

    def tokens(self) -> dict[int, str]:
        return {number: token for token, number in self._fast.get_vocab(with_added_tokens=True).items()}

    def save(self, folder: Path) -> str:
        self.files.write(folder)
        ends = self.ends
        extras = self.files.extras()
        extra_facts = (tuple(extras), hash_files(extras))
        TokenizerOrigin(self.spec, ends.eot_token, ends.bos_tokens, ends.origin, *extra_facts).save(folder)
        return ORIGIN_NAME

    def _decide_ends(self, tokens: dict[int, str], asked_eot: str) -> Ends:
        eot_token, origin = find_end_of_text(self.files, tokens, asked_eot)
        encoding = self._encode_one("a", add_special_tokens=True)
        # The mask is 0 at the text's own tokens; the template's are before them.
        mask = encoding.special_tokens_mask
        template = tuple(encoding.ids[: mask.index(0) if 0 in mask else 0])
        return Ends(eot_token, find_beginning(self.files, template, tokens, eot_token), origin)


def load_huggingface(path: Path, *, eot_token: str = "", parse_special: bool = False) -> HuggingFaceTokenizer:
    """Load a tokenizer.json or its folder; `eot_token` names the end-of-text token. Raises DataError."""
    folder = path if path.is_dir() else path.parent
    return HuggingFaceTokenizer(read_folder(folder), asked_eot=eot_token, parse_special=parse_special)


def load_saved(path: Path) -> HuggingFaceTokenizer:
    """Load what `save` wrote, given the path of origin.json. Raises DataError."""
    origin = load_origin(path)
    files = read_folder(path.parent)
    for name in origin.files:
        origin.check(name, files.others.get(name), str(path.parent))
    extras = {name: files.others[name] for name in origin.files}
    ends = Ends(origin.eot_token, origin.bos_tokens, origin.eot_origin)
    return HuggingFaceTokenizer(ModelFiles(files.name, files.tokenizer_json, extras), ends=ends)


def _build(contents: bytes, where: str) -> FastTokenizer:
    from tokenizers import Tokenizer as FastTokenizer

    with _one_line(f"{where} is not a tokenizer that `tokenizers` can read"):
        fast = FastTokenizer.from_buffer(contents)
        fast.no_truncation()
        fast.no_padding()
    return fast


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn errors of `tokenizers`, which raises plain Exception, into one-line DataErrors."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {' '.join(str(error).split())[:200]}.") from None


def _check_deterministic(files: ModelFiles, record: dict[str, object], where: str) -> None:
    """Refuse a tokenizer that needs a program of its own, or chance. Raises DataError."""
    if named := files.record(CONFIG_NAME).get("auto_map"):
        raise DataError(
            f"{files.name}/{CONFIG_NAME} has an auto_map: this tokenizer needs its own code ({str(named)[:80]}), which "
            f"llmscale never runs. If {JSON_NAME} is complete, remove auto_map in a copy of the folder."
        )
    model = record.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise DataError(
            f"{where}: model.dropout is {str(model['dropout'])[:40]}, so a text gets different tokens each time. Set "
            "it to null in a copy of the folder."
        )


def _check_same_tokens(built: dict[int, str], stated: dict[int, str], where: str) -> None:
    """Check that ids are those of the file: `tokenizers` gives an added token the next free id instead."""
    for token, text in stated.items():
        if built.get(token) != text:
            raise DataError(
                f"{where} states {text[:60]!r} as token {token}, and `tokenizers` gives that id to "
                f"{built.get(token, 'nothing')[:60]!r}: ids must have no gaps, with added tokens after the model's."
            )


def _is_gpt2_like(record: dict[str, object]) -> bool:
    """Return whether text is split by GPT-2's pattern only, so that a single newline is a border."""
    splitter = record.get("pre_tokenizer")
    return (
        record.get("normalizer") is None
        and isinstance(splitter, dict)
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex") is True
        and splitter.get("add_prefix_space") is False
        # No added token is parsed in text.
        and all(entry.get("special") for entry in _added(record))
    )
