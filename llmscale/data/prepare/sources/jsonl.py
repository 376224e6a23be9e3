"""JSON lines: a document a line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.source import (
    Document,
    Place,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    lacks_field,
    missing_field,
)
from llmscale.errors import DataError

_CHUNK_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_OBJECT_BEGINS = re.compile(r'\ufeff?\s*(\[\s*)?(?=\{\s*")')
#: Whole numbers as any others, without Python's limit of 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float)


def is_jsonl(head: bytes, name: str, options: ReadOptions) -> bool:
    """Return whether a file of text that begins with `head` is JSON lines.

    One object or array without the field among files of plain text is text: a settings file in a folder of code.
    Raises DataError for records that are not a line each.
    """
    text = head.decode(errors="ignore")
    if (begin := _OBJECT_BEGINS.match(text)) is None:
        return False
    line_end = text.find("\n", begin.end()) % (len(text) + 1)
    try:
        record, end = _DECODER.raw_decode(text, begin.end())
        is_alone = begin[1] is not None or not text[end:].lstrip().startswith("{")
        if is_alone and options.has_plain and options.text_field not in record:
            return False
    except (ValueError, RecursionError):  # damaged, or longer than the head
        if not re.search(rf"{re.escape(json.dumps(options.text_field))}\s*:", text):
            return False
        end = line_end + text[begin.end() : line_end].rstrip().endswith(("{", "[", ","))
    if begin[1] is not None or end > line_end:
        raise DataError(
            f"{name} is a JSON array or document, and records are read from JSON lines. Make a line of each record: "
            "`jq -c '.[]' FILE` of an array, `jq -c . FILE` of objects."
        )
    return True


def read_jsonl(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Places are (byte, line), of the next line, from 0. Raises DataError when the first record lacks the field."""
    offset, number = start or (0, 0)
    skip_bytes(file, offset)
    is_first = not offset
    limit_bytes = source.MAX_DOCUMENT_BYTES
    field, fast = options.text_field, _fast_parser()
    while line := file.readline(limit_bytes + 1):
        size_bytes = len(line)
        offset, number = offset + size_bytes, number + 1
        line = line.removeprefix(_BOM) if number == 1 else line
        reason = ""
        if size_bytes > limit_bytes:
            reason = f"longer than {limit_bytes >> 20} MiB, the longest document"
            offset += _skip_line(file) if not line.endswith(b"\n") else 0
        elif line.isspace() or not line:
            continue
        if not reason:
            record = _parse(line, fast)
            if isinstance(record, dict):
                text = record.get(field)
                if isinstance(text, str):
                    is_first = False
                    yield Document(text, (offset, number))
                    continue
                if field in record:
                    reason = f"the field '{field}' holds {type(text).__name__}, not text"
                elif is_first:
                    raise missing_field(f"{name}, line {number}", field, list(record))
                else:
                    reason = lacks_field(field, list(record))
            else:
                reason = record
        yield Rejected(f"{name}, line {number}", reason, line, (offset, number))


def _fast_parser() -> Callable[[bytes], object]:
    """orjson, where it is installed. What it takes means the same to `json`, which may take what orjson refuses (NaN,
    half a surrogate pair, deep nesting) and says why not."""
    try:
        import orjson
    except ImportError:
        return lambda _: None
    return cast(Callable[[bytes], object], orjson.loads)


def _parse(line: bytes, fast: Callable[[bytes], object]) -> dict[str, object] | str:
    """The object that a line is, or why it is none."""
    with suppress(ValueError):
        record = fast(line)
        if isinstance(record, dict):
            return record
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg} at character {error.pos + 1})"
    except ValueError as error:
        return f"not valid JSON ({error})"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    # UTF-8 has no half of a surrogate pair; an escape may be one.
    if b"\\ud" in line or b"\\uD" in line:
        record = {key: without_lone_surrogates(v) if isinstance(v, str) else v for key, v in record.items()}
    return record


def skip_bytes(file: BinaryIO, count: int) -> None:
    """Go to byte `count` of a file that has just been opened."""
    if file.seekable():
        file.seek(count)
        return
    while count > 0 and (chunk := file.read(min(count, _CHUNK_BYTES))):
        count -= len(chunk)


def _skip_line(file: BinaryIO) -> int:
    """The rest of a line, however long; its bytes."""
    count = 0
    while chunk := file.readline(_CHUNK_BYTES):
        count += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return count


def without_lone_surrogates(text: str) -> str:
    r"""JSON may hold half a surrogate pair (`\ud83d`), which UTF-8 cannot: U+FFFD takes its place."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
