"""The report as one HTML file that needs nothing else: uPlot, style, script and data are in it. No torch.

Whatever a run says is data: it stands as JSON in an element that browsers do not run, without a character that could
end it, and the script makes text nodes of it. The page's own policy forbids it to load anything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources

#: In this order; each uses what those before it define.
_SCRIPTS = ("numbers.js", "elements.js", "chart.js", "chart_list.js", "tables.js", "main.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
#: What could end a script element, or begin a comment in one.
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
    # At once: what a run says is no placeholder.
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], _read("template.html"))


def embed_json(value: object) -> str:
    """Compact JSON that may stand within a script element: no text in it is markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def _read(name: str) -> str:
    return resources.files("llmscale.report").joinpath(f"page/{name}").read_text(encoding="utf-8")
