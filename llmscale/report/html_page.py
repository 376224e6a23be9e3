"""Build the report as one self-contained HTML file, with uPlot, style, script and data in it. No torch.

Contents of run folders are not trusted: they are JSON in an element that browsers do not run, without characters that
could end it, and escaped text. The page's content policy forbids loading anything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from llmscale.report.page_tables import build_summary, build_tables

#: In this order; each uses what those before it define.
_SCRIPTS = ("numbers.js", "elements.js", "chart.js", "main.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
#: Characters that could end a script element, or begin a comment in one.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def build_page(report: Mapping[str, object], title: str) -> str:
    """Return the HTML of what data.build_report returned; `title` is plain text."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]  # type: ignore[assignment]  # as data.build_report builds it
    ended = f"{runs[0]['folder']} · {runs[0]['summary']['ended']} · " if len(runs) == 1 else ""
    created = str(report["created"]).replace("T", " ").replace("+00:00", " UTC")
    parts = {
        "TITLE": html.escape(title),
        "HEAD": html.escape(str(runs[0]["name"]) if len(runs) == 1 else f"{len(runs)} runs"),
        "SUBTITLE": html.escape(f"{ended}report of llmscale {report['llmscale']}, {created}"),
        "SUMMARY": build_summary(report),
        "TABLES": build_tables(report),
        "STYLE": "\n".join(map(_read, _STYLES)),
        "UPLOT": _read("uplot/uPlot.iife.min.js"),
        "SCRIPT": '(() => {\n"use strict";\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();",
        "DATA": embed_json(
            {"unit": report["unit"], "charts": report["charts"], "runs": [_charted(run) for run in runs]}
        ),
    }
    # In one pass, so that text of a run is never taken as a placeholder.
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], _read("template.html"))


def _charted(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the charts need of a run."""
    return {key: value for key, value in run.items() if key not in ("summary", "samples", "tables", "expert_load")}


def embed_json(value: object) -> str:
    """Return compact JSON for a script element, in which no text is markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def _read(name: str) -> str:
    return resources.files("llmscale.report").joinpath(f"page/{name}").read_text(encoding="utf-8")
