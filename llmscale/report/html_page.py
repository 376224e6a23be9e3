"""Build the report as one self-contained HTML file, with uPlot, style, script and data in it. No torch.

Contents of run folders are not trusted: they are JSON in an element that browsers do not run, without characters that
could end it, and the script creates text nodes from them. The page's content policy forbids loading anything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources

#: In this order; each uses what those before it define.
_SCRIPTS = ("numbers.js", "elements.js", "chart.js", "tables.js", "main.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
#: Characters that could end a script element, or begin a comment in one.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def build_page(report: Mapping[str, object], title: str) -> str:
    """Return the HTML of what data.build_report returned; `title` is plain text."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": "\n".join(map(_read, _STYLES)),
        "UPLOT": _read("uplot/uPlot.iife.min.js"),
        "SCRIPT": '(() => {\n"use strict";\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();",
        "DATA": embed_json(report),
    }
    # In one pass, so that text of a run is never taken as a placeholder.
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], _read("template.html"))


def embed_json(value: object) -> str:
    """Return compact JSON for a script element, in which no text is markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def _read(name: str) -> str:
    return resources.files("llmscale.report").joinpath(f"page/{name}").read_text(encoding="utf-8")
