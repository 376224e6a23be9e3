"""Build the report as one self-contained HTML file, with uPlot, style, script and data in it. No torch.

Contents of run folders are not trusted: they are JSON in an element that browsers do not run, without characters that
could end it, and escaped text. The page's content policy forbids loading anything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from llmscale.terminal.human_numbers import format_duration, format_quantity

Run = Mapping[str, Any]  # as data.build_report builds it
#: Label and kind of a column. The kind is a class of the style.
Column = tuple[str, str]
_NUMBER = "number"
_NAME = "name"
_TEXT = ""
#: Rows from which a table scrolls.
_TALL = 16
_LONGEST_END = 48
_UNKNOWN = "\N{EN DASH}"
#: Parts of a run that the charts do not need.
_NOT_CHARTED = ("summary", "samples", "tables", "expert_load")
#: In this order; each uses what those before it define.
_SCRIPTS = ("numbers.js", "elements.js", "chart.js", "main.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
#: Characters that could end a script element, or begin a comment in one.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def build_page(report: Mapping[str, object], title: str, reload_s: int | None = None) -> str:
    """Return the HTML of what data.build_report returned; `title` is plain text.

    A page with `reload_s` loads itself again after these seconds.
    """
    runs: Sequence[Mapping[str, Any]] = report["runs"]  # type: ignore[assignment]  # as data.build_report builds it
    if len(runs) == 1:
        ended = f"{runs[0]['folder']} · {runs[0]['summary']['ended']} · "
    else:
        ended = ""
    created = str(report["created"]).replace("T", " ").replace("+00:00", " UTC")
    charted = [{key: value for key, value in run.items() if key not in _NOT_CHARTED} for run in runs]
    parts = {
        "TITLE": html.escape(title),
        "RELOAD": "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">',
        "GLOSSARY": build_glossary(_read("glossary.md")),
        "HEAD": html.escape(str(runs[0]["name"]) if len(runs) == 1 else f"{len(runs)} runs"),
        "SUBTITLE": html.escape(f"{ended}report of llmscale {report['llmscale']}, {created}"),
        "SUMMARY": build_summary(report),
        "TABLES": build_tables(report),
        "STYLE": "\n".join(map(_read, _STYLES)),
        "UPLOT": _read("uplot/uPlot.iife.min.js"),
        "SCRIPT": '(() => {\n"use strict";\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();",
        "DATA": embed_json({"unit": report["unit"], "charts": report["charts"], "runs": charted}),
    }
    # In one pass, so that text of a run is never taken as a placeholder.
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], _read("template.html"))


def build_glossary(page: str) -> Html:
    """Return the words and meanings of a Markdown page's table as a list."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page, re.MULTILINE)
    entries = [(word, meaning) for word, meaning in rows[1:] if not word.startswith("-")]
    return tag("dl", *(part for word, meaning in entries for part in (tag("dt", word), tag("dd", meaning))))


def embed_json(value: object) -> str:
    """Return compact JSON for a script element, in which no text is markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def _read(name: str) -> str:
    return resources.files("llmscale.report").joinpath(f"page/{name}").read_text(encoding="utf-8")


class Html(str):
    """Markup. Any other text is escaped."""


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Return an element without its empty attributes; `class_` is the attribute class, `data_value` data-value."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value not in (None, "")
    )
    inner = "".join(part if isinstance(part, Html) else html.escape(str(part)) for part in content)
    return Html(f"<{name}{words}>{inner}</{name}>")


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table of (label, kind) columns and rows of texts or cells."""
    body = [
        tag(
            "tr",
            *(
                cell if isinstance(cell, Html) and cell.startswith("<td") else tag("td", cell, class_=kind)
                for cell, (_, kind) in zip(row, columns, strict=True)
            ),
        )
        for row in rows
    ]
    head = tag("thead", tag("tr", *(tag("th", label, class_=kind) for label, kind in columns)))
    style = "scroll tall" if len(body) > _TALL else "scroll"
    return tag("div", tag("table", head, tag("tbody", *body)), class_=style)


def build_summary(report: Mapping[str, Any]) -> Html:
    """Return the part above the charts: notes, the runs in numbers, and all runs of a folder."""
    if report["notes"]:
        notes = tag("ul", *(tag("li", note) for note in report["notes"]), class_="notes")
    else:
        notes = Html()
    parts = [notes, _summary(report["runs"])]
    if report["listed"]:
        parts.append(_section("All runs", _all_runs(report["listed"])))
    return Html("".join(parts))


def build_tables(report: Mapping[str, Any]) -> Html:
    """Return the part below the charts."""
    runs: Sequence[Run] = report["runs"]
    sections = {
        "Text, the newest first": _of_each(runs, _samples),
        "Beside Chinchilla's law": _law(runs),
        "Load of experts": _of_each(runs, _expert_load),
        "What happened": _timeline(runs),
        "Differences between the runs": _differences(report["differences"], runs),
        "Settings": _of_each(runs, _settings),
    }
    return Html("".join(_section(title, content) for title, content in sections.items() if content))


def _section(title: str, content: Html) -> Html:
    return tag("section", tag("h2", title), content)


def _of_each(runs: Sequence[Run], build: Any) -> Html:
    """Return what `build` returns for each run, below the run's name if there are several."""
    parts = [(run, content) for run in runs if (content := build(run))]
    if len(runs) == 1:
        return Html("".join(content for _, content in parts))
    return Html("".join(tag("details", tag("summary", _label(run)), content) for run, content in parts))


def _label(run: Run) -> Html:
    swatch = tag("i", class_="swatch", style=f"background:var(--c{run['index'] % 8})")
    return tag("span", swatch, run["name"], class_="run")


def _summary(runs: Sequence[Run]) -> Html:
    """Return a tile for each number of one run, a row for each of several runs."""
    rows = [_numbers(run) for run in runs]
    labels = [label for label in rows[0] if any(row[label] != _UNKNOWN for row in rows)]
    if len(runs) == 1:
        return tag(
            "div",
            *(tag("div", tag("b", rows[0][label]), tag("span", label), class_="tile") for label in labels),
            class_="tiles",
        )
    columns = [("run", _NAME), *((label.partition(",")[0], _NUMBER) for label in labels), ("ended", _NAME)]
    return table(
        columns,
        (
            [_label(run), *(row[label] for label in labels), run["summary"]["ended"][:_LONGEST_END]]
            for run, row in zip(runs, rows, strict=True)
        ),
    )


def _numbers(run: Run) -> dict[str, str]:
    s = run["summary"]
    if s["total_steps"] not in (None, s["steps"]):
        steps = f"{_number(s['steps'])} of {_number(s['total_steps'])}"
    else:
        steps = _number(s["steps"])
    memory = s["peak_memory_bytes"]
    return {
        "parameters": _quantity(run["num_parameters"]),
        "steps": steps,
        "tokens": _quantity(s["tokens"]),
        "time in steps": format_duration(s["hours"] * 3600),
        "last loss, nats per token": _number(s["loss"]),
        "validation loss, nats per token": _number(s["validation_loss"]),
        "bits per byte, of the last validation": _number(s["bits_per_byte"]),
        "tokens/s, median": _quantity(s["tokens_per_second"]),
        "MFU, median": _percent(s["mfu"]),
        "peak memory, of one rank": _UNKNOWN if memory is None else f"{memory / 2**30:.3g} GiB",
        "goodput, steps that count, of the wall time": _percent(s["goodput"]),
        "starts": _number(s["starts"]),
    }


def _all_runs(listed: Sequence[Run]) -> Html:
    """Return every run of a folder; page/main.js sorts and filters the rows."""
    columns = {
        "run": _NAME,
        "state": _NAME,
        "step": _NUMBER,
        "loss": _NUMBER,
        "best validation loss": _NUMBER,
        "goodput": _NUMBER,
        "last seen": _NAME,
        "why": _TEXT,
        "command": _TEXT,
    }
    heads = [(tag("button", label, type="button", class_="head"), kind) for label, kind in columns.items()]
    rows = []
    for run in listed:
        if run["total_steps"]:
            of_total = f" of {_number(run['total_steps'])}"
        else:
            of_total = ""
        lost = "killed, or its host is gone" if run["state"] == "lost" else _UNKNOWN
        seen = (run["last_seen"] or _UNKNOWN).replace("T", " ").replace("+00:00", " UTC")
        rows.append(
            [
                run["run"],
                tag("td", run["state"], class_=f"name {run['state']}"),
                _cell(run["step"], f"{_number(run['step'])}{of_total}"),
                _cell(run["loss"], _number(run["loss"])),
                _cell(run["validation_loss"], _number(run["validation_loss"])),
                _cell(run["goodput"], _percent(run["goodput"])),
                seen,
                run["why"] or lost,
                run["command"] or _UNKNOWN,
            ]
        )
    search = Html('<input type="search" placeholder="name, state, error, command" aria-label="filter">')
    return Html(tag("p", "filter ", search, class_="chooser") + table(heads, rows))


def _cell(value: float | None, text: str) -> Html:
    return tag("td", text, class_=_NUMBER, data_value=value)


def _law(runs: Sequence[Run]) -> Html:
    known = [run for run in runs if run["law"]]
    if not known:
        return Html()
    labels = ("parameters N", "tokens D", "D / N", "last loss", "validation loss", "expected loss", "best N", "best D")
    rows = []
    for run in known:
        s = run["summary"]
        size = run["num_parameters"]
        low = s["expected_loss_low"]
        high = s["expected_loss_high"]
        if run["law"]["applies"]:
            expected = f"{_number(s['expected_loss'])} ({low:.3g} to {high:.3g})"
        else:
            expected = "not below a uniform guess"
        losses = (_number(s["loss"]), _number(s["validation_loss"]), expected)
        best = (_quantity(s["optimal_parameters"]), _quantity(s["optimal_tokens"]))
        rows.append([_label(run), _quantity(size), _quantity(s["tokens"]), _number(s["tokens"] / size), *losses, *best])
    law = known[0]["law"]
    note = (
        f"{law['name']}: {law['source']}. Nats per token, on text and a tokenizer like theirs; in brackets 80 % by the "
        "errors of the fit. The best size and tokens are those of the same FLOPs."
    )
    if any(run["law"]["is_extrapolation"] for run in known):
        note += " It rests on models of 44M to 16B parameters: beyond, this is an extrapolation."
    return Html(
        table([("run", _NAME), *((label, _NUMBER) for label in labels)], rows) + tag("p", note, class_="chooser")
    )


def _timeline(runs: Sequence[Run]) -> Html:
    rows = []
    for run in runs:
        axis = run["axis"]
        for mark in run["marks"]:
            tokens, hours = (
                float(np.interp(mark["step"], [0, *axis["steps"]], [0, *axis[name]])) for name in ("tokens", "hours")
            )
            numbers = [_number(mark["step"]), _quantity(tokens), format_duration(hours * 3600)]
            rows.append([_label(run), *numbers, tag("td", mark["text"], class_=mark["kind"])])
    columns = [("run", _NAME), ("step", _NUMBER), ("tokens", _NUMBER), ("time", _NUMBER), ("what", _TEXT)]
    is_alone = len(runs) == 1
    if rows:
        return table(columns[is_alone:], [row[is_alone:] for row in rows])
    return Html()


def _samples(run: Run) -> Html:
    rows = []
    for sample in reversed(run["samples"]):
        prompt = sample["prompt"]
        text = sample["text"]
        prompt = prompt if text.startswith(prompt) else ""
        rows.append([_number(sample["step"]), tag("pre", tag("b", prompt), text[len(prompt) :])])
    if rows:
        return table([("step", _NUMBER), ("text", _TEXT)], rows)
    return Html()


def _expert_load(run: Run) -> Html:
    """Return a row per block and a cell per expert: fuller with more tokens, alarming without any."""
    load = run["expert_load"]
    rows = [row for row in load.get("loads", ()) if row]
    if not rows:
        return Html()
    columns = [
        ("block", _NUMBER),
        (f"experts 0 to {max(map(len, rows)) - 1}", _TEXT),
        ("least", _NUMBER),
        ("most", _NUMBER),
    ]
    cells = []
    for block, row in zip(load["blocks"], rows, strict=False):
        values = [value or 0 for value in row]
        strip = tag("div", *(_expert(number, value) for number, value in enumerate(values)), class_="strip")
        cells.append([block, strip, _number(min(values)), _number(max(values))])
    words = (
        f"Tokens of each expert at step {_number(load['step'])}, 1 for the mean of its block. Full colour: 2 or more."
    )
    return Html(table(columns, cells) + tag("p", words, class_="chooser"))


def _expert(number: int, load: float) -> Html:
    share = max(0.0, min(100.0, load * 50))
    if load:
        colour = f"color-mix(in srgb, var(--accent) {share:.0f}%, var(--card))"
    else:
        colour = "var(--alarm)"
    return tag("i", title=f"expert {number}: {_number(load)}", style=f"background:{colour}")


def _differences(differences: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Html:
    if not differences:
        return Html()
    columns = [("setting", "key"), *((_label(run), _TEXT) for run in runs)]
    return table(
        columns,
        ([f"{row['section']}: {row['key']}", *(value or _UNKNOWN for value in row["values"])] for row in differences),
    )


def _settings(run: Run) -> Html:
    columns = [("setting", "key"), ("value", _TEXT)]
    sections = [(section, entries) for section, entries in run["tables"].items() if entries]
    return Html(
        "".join(
            tag("details", tag("summary", section), table(columns, entries.items())) for section, entries in sections
        )
    )


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _quantity(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return format_quantity(value)


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.3g} %"
