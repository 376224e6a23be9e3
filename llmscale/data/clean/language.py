"""Language, by py3langid: langid.py's model (Lui & Baldwin 2012) retrained, 4.6 MB within the package.

Nothing is downloaded. It is BSD-licensed and needs numpy alone. Of the others fastText's model is fetched or under a
share-alike licence, and lingua's is 100 MB and more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.data.clean.findings import Removed
from llmscale.data.clean.text import Text
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

#: A longer text is judged by three pieces of this many characters: its beginning, middle and end.
_PIECE_CHARACTERS = 1000


def load_identifier() -> LanguageIdentifier:
    """Raises DataError when py3langid is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise DataError(f"The step language needs py3langid: `{install_command('data,clean')}`.") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def check_languages(languages: tuple[str, ...]) -> None:
    """Raises DataError for a code that is not known."""
    known = load_identifier().labels
    for language in languages:
        if language not in known:
            raise DataError(
                f"--languages {language} is not known.{did_you_mean(language, known)} Legal (ISO 639): "
                f"{', '.join(sorted(known))}."
            )


class LanguageFilter:
    """Keeps documents in some languages."""

    def __init__(self, languages: tuple[str, ...], min_confidence: float) -> None:
        """`min_confidence` is of the most probable language, which must be one of `languages`."""
        self._languages = frozenset(languages)
        self._min_confidence = min_confidence
        self._identifier = load_identifier()

    def __call__(self, text: Text) -> Removed | None:
        language, confidence = self._identifier.classify(_sample(text.content))
        if language in self._languages and confidence >= self._min_confidence:
            return None
        rule = "language_confidence" if language in self._languages else "language"
        return Removed({"rule": rule, "language": language, "value": round(confidence, 3)})


def _sample(text: str) -> str:
    if len(text) <= 3 * _PIECE_CHARACTERS:
        return text
    middle = (len(text) - _PIECE_CHARACTERS) // 2
    return "\n".join((text[:_PIECE_CHARACTERS], text[middle : middle + _PIECE_CHARACTERS], text[-_PIECE_CHARACTERS:]))
