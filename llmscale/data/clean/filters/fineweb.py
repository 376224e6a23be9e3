"""FineWeb's own filter (Penedo et al. 2024, arXiv 2406.17557, section 3.6).

The thresholds are those of the program that made the data set, datatrove (0.10, `fineweb_quality_filter.py`). They are
the paper's, but for characters in duplicated lines, where the paper says 0.1, and newlines per word, which it lacks.
"""

from __future__ import annotations

from llmscale.data.clean.filters.gopher import count_duplicates
from llmscale.data.clean.findings import Removed, beyond
from llmscale.data.clean.text import Text

MIN_LINES_WITH_END = 0.12
SHORT_LINE_CHARACTERS = 30
MAX_SHORT_LINES = 0.67
MAX_DUPLICATE_CHARACTERS = 0.01
MAX_NEWLINES_PER_WORD = 0.3

#: Code points with Unicode's property Sentence_Terminal, in hexadecimal.
_SENTENCE_TERMINALS = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 "
    "17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f "
    "203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 "
    "aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 "
    "110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 "
    "115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 "
    "16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88"
)


def _unfold(ranges: str) -> frozenset[str]:
    bounds = [part.partition("-") for part in ranges.split()]
    return frozenset(chr(code) for low, _, high in bounds for code in range(int(low, 16), int(high or low, 16) + 1))


_LINE_ENDS = _unfold(_SENTENCE_TERMINALS)


def filter_fineweb(text: Text) -> Removed | None:
    """Lists, menus and repeated lines."""
    content = text.content
    lines = [line for line in content.split("\n") if line.strip()]
    if not lines:
        return Removed({"rule": "empty"})
    ended = sum(line[-1] in _LINE_ENDS for line in lines) / len(lines)
    if ended < MIN_LINES_WITH_END:
        return Removed(beyond("line_punct_ratio", ended, MIN_LINES_WITH_END))
    short = sum(len(line) <= SHORT_LINE_CHARACTERS for line in lines) / len(lines)
    if short > MAX_SHORT_LINES:
        return Removed(beyond("short_line_ratio", short, MAX_SHORT_LINES))
    num_newlines = content.count("\n")
    duplicates = count_duplicates(lines)[1] / (len(content) - num_newlines)
    if duplicates > MAX_DUPLICATE_CHARACTERS:
        return Removed(beyond("char_dup_ratio", duplicates, MAX_DUPLICATE_CHARACTERS))
    newlines = num_newlines / len(text.words)
    if newlines > MAX_NEWLINES_PER_WORD:
        return Removed(beyond("list_ratio", newlines, MAX_NEWLINES_PER_WORD))
    return None
