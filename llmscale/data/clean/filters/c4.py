"""C4's filter of lines and pages (Raffel et al. 2020, JMLR 21/140, section 2.2).

The order of the rules, those on long words, citations and policies, and the marks that end a line are from its code
(tensorflow_datasets' `c4_utils.py`) as datatrove has it (0.10, `c4_filters.py`). The list of bad words is left out.
"""

from __future__ import annotations

import re

from llmscale.data.clean.findings import Changed, Removed, Why, beyond
from llmscale.data.clean.text import Text

MIN_SENTENCES = 5
MIN_LINE_WORDS = 3
MAX_WORD_CHARACTERS = 1000
LINE_ENDS = (".", "?", "!", '"', "'")
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
#: Not within a run of marks: to begin at each of them would take a time that grows with its square.
_SENTENCE_END = re.compile(
    r"(?<![.?!\u3002\uff01\uff1f])[.?!\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f]"
)


class C4Filter:
    """Takes lines out of a page, or the page away."""

    def __init__(self, *, terminal_punctuation: bool) -> None:
        """`terminal_punctuation`: lines must end in a mark that ends a sentence. C4 had it so; FineWeb left it out, as
        it takes a third of the text and brings no more than the rest together (Penedo et al. 2024, section 3.5)."""
        self._needs_end = terminal_punctuation

    def __call__(self, text: Text) -> Removed | Changed | None:
        kept: list[str] = []
        parts: list[tuple[str, Why]] = []
        num_sentences = 0
        for raw in text.content.splitlines():
            whole = raw.strip()
            line = _CITATION.sub("", whole).strip()
            why = self._judge(line)
            if isinstance(why, Removed):
                return why
            if why is None:
                num_sentences += max(1, len(_SENTENCE_END.findall(line)))
                kept.append(line)
                if line != whole:
                    parts.append((" ".join(_CITATION.findall(whole)), {"rule": "citation"}))
            elif whole:
                parts.append((whole, why))
        if num_sentences < MIN_SENTENCES:
            return Removed(beyond("too_few_sentences", num_sentences, MIN_SENTENCES))
        content = "\n".join(kept).strip()
        if content == text.content:
            return None
        return Changed(content, parts)

    def _judge(self, line: str) -> Why | Removed | None:
        """Why a line that is without citations goes, or the page."""
        words = line.split()
        longest = max(map(len, words), default=0)
        if longest > MAX_WORD_CHARACTERS:
            return beyond("too_long_word", longest, MAX_WORD_CHARACTERS)
        if self._needs_end and (not line.endswith(LINE_ENDS) or line.endswith("...")):
            return {"rule": "no_terminal_punc"}
        if len(words) < MIN_LINE_WORDS:
            return beyond("too_few_words", len(words), MIN_LINE_WORDS)
        lower = line.lower()
        if "lorem ipsum" in lower:
            return Removed({"rule": "lorem_ipsum"})
        if "javascript" in lower:
            return {"rule": "javascript"}
        if "{" in line:
            return Removed({"rule": "curly_bracket"})
        policy = next((phrase for phrase in POLICIES if phrase in lower), None)
        return {"rule": "policy", "phrase": policy} if policy else None
