"""Recognise files that hold text which another tool must extract first, and name that tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from llmscale.data.prepare.sources.source import FileError, join_errors


class ForeignFormat(NamedTuple):
    """A format that is refused."""

    what: str
    """Noun in the plural."""
    suffixes: frozenset[str]
    tool: str
    """Fix, as an order."""
    begins: re.Pattern[bytes] | None = None
    """First bytes of such a file, whatever its name."""
    is_markup: bool = False
    """True if source code, too, may begin like that."""


def _begins(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.IGNORECASE)


_FORMATS = (
    ForeignFormat(
        "web archives (WARC)",
        frozenset({".warc", ".arc", ".wet", ".wat"}),
        "extract the text with trafilatura (of WET files with warcio), and write it as JSON lines",
        _begins(rb"WARC/\d"),
    ),
    ForeignFormat(
        "HTML pages",
        frozenset({".html", ".htm", ".xhtml", ".mhtml", ".mht"}),
        "extract the text with trafilatura, and write it as JSON lines",
        _begins(
            rb"(?:\xef\xbb\xbf)?\s*(?:<!--(?s:.{0,500}?)-->\s*)?"
            rb"(?:<!doctype\s+html|<(?:html|head|body|title|meta|div)[\s>])"
        ),
        is_markup=True,
    ),
    ForeignFormat(
        "XML documents",
        frozenset({".xml", ".rss", ".atom", ".tei"}),
        "extract the text (of a wiki's dump with wikiextractor, else with pandoc), and write it as JSON lines",
        # A dump of Wikipedia begins with its namespace.
        _begins(rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml\s|[a-z][\w:-]{0,40}\s[^<>]{0,500}?\bxmlns\b)"),
        is_markup=True,
    ),
    ForeignFormat("PDF files", frozenset({".pdf"}), "extract the text with pdftotext", _begins(rb"%PDF-")),
    ForeignFormat("PostScript files", frozenset({".ps", ".eps"}), "extract the text with ps2ascii", _begins(rb"%!PS")),
    ForeignFormat("DjVu files", frozenset({".djvu"}), "extract the text with djvutxt", _begins(rb"AT&TFORM")),
    ForeignFormat(
        "e-books",
        frozenset({".epub", ".fb2", ".mobi", ".azw", ".azw3"}),
        "extract the text with `pandoc -t plain` (of Kindle's files with Calibre's ebook-convert)",
    ),
    ForeignFormat(
        "office documents",
        frozenset({".docx", ".doc", ".odt", ".rtf", ".pptx", ".ppt", ".odp"}),
        "extract the text with `pandoc -t plain` (of .doc and .ppt with `soffice --convert-to txt`)",
        _begins(rb"\{\\rtf\d|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ),
    ForeignFormat("spreadsheets", frozenset({".xlsx", ".xls", ".xlsm", ".ods"}), "save them as CSV"),
    ForeignFormat("notebooks", frozenset({".ipynb"}), "convert them with `jupyter nbconvert --to markdown`"),
    ForeignFormat(
        "databases",
        frozenset({".sqlite", ".sqlite3", ".db", ".duckdb", ".mdb"}),
        "export the table as CSV or Parquet",
        _begins(rb"SQLite format 3\0"),
    ),
    ForeignFormat(
        "tables of other formats",
        frozenset({".avro", ".orc", ".tfrecord", ".h5", ".hdf5", ".rds", ".sas7bdat", ".dta"}),
        "write them as Parquet",
        _begins(rb"Obj\x01|ORC[\x00-\x08]|\x89HDF\r\n|FEA1"),
    ),
    ForeignFormat(
        "pickles, which are never loaded",
        frozenset({".pkl", ".pickle", ".pt", ".pth", ".npz", ".joblib"}),
        "write text as JSON lines, and tokens with numpy.save",
        _begins(rb"\x80[\x02-\x05][\x00-\xff]{0,10}[.c(}\]X\x8c\x95]"),
    ),
    ForeignFormat(
        "weights of a model",
        frozenset({".safetensors", ".gguf", ".onnx"}),
        "give the text that it is to be trained on; train takes a model with --init-from",
        _begins(rb"GGUF[\x01-\x04]\0|[\x00-\xff]{4}\0{4}\{\""),
    ),
    ForeignFormat(
        "archives of another kind",
        frozenset({".zip", ".7z", ".rar"}),
        "unpack them",
    ),
)


def foreign_format(suffix: str) -> ForeignFormat | None:
    """Return the format that is refused, by the suffix of a name."""
    return next((kind for kind in _FORMATS if suffix in kind.suffixes), None)


def refuse_foreign_names(names: Sequence[tuple[str, str]]) -> None:
    """Refuse files by their suffixes: (name, suffix), all in one error. Raises FileError."""
    refused = [(name, kind) for name, suffix in names if (kind := foreign_format(suffix))]
    if refused:
        raise join_errors([_refusal(name, kind) for name, kind in refused])


def refuse_foreign_contents(head: bytes, name: str, *, is_code: bool) -> None:
    """Refuse a file by its first bytes; source code may begin with markup. Raises FileError."""
    for kind in _FORMATS:
        if kind.begins and kind.begins.match(head) and not (kind.is_markup and is_code):
            raise _refusal(name, kind)


def _refusal(name: str, kind: ForeignFormat) -> FileError:
    return FileError(name, f" is not read: {kind.what}", f"{kind.tool[0].upper()}{kind.tool[1:]}.")
