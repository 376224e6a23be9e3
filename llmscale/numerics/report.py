"""Report a check as a table for a reader, and as JSON. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmscale.numerics.links import Finding

Verdict = Literal["right", "wrong"]
#: Layer kinds of parameters, by a pattern of their names; the first that matches counts.
_KINDS = (
    ("router", r"\.router\."),
    ("experts", r"\.(experts|shared)\."),
    ("norms", r"(^|\.)(ln_\w+|[qk]_norm)\."),
    ("attention", r"\.attn\."),
    ("MLP", r"\.mlp\."),
    ("embeddings", r"^w[tp]e\."),
    ("head", r"^head\."),
)
_WRONG = {
    "weights": "the forward pass does not compute with the rounded master weights",
    "loss": "the loss is not that of the plain model",
    "gradient": "the model's own gradients are not those of the plain model",
    "reduce": "the optimizer is not given the mean of the ranks' gradients",
    "norm": "norm or clipping is not that of the gradients",
    "update": "the optimizer's step is not that of the plain optimizer",
}
#: Setting that other processes try.
ONE_RANK = "1 rank"
#: Settings after it, which tell less.
LAST = ("another ZeRO stage", "--precision fp32")


@dataclass(frozen=True)
class Row:
    """The comparison of a link and a layer kind that is nearest to its bound, or furthest beyond it."""

    link: str
    what: str
    difference: float | None
    """None for one that is not finite."""
    allowed: float
    share: float | None
    verdict: Verdict
    parameter: str
    step: int
    """Number of the step, from 1."""
    rank: int | None = None
    """The rank that is wrong, if one alone is."""
    note: str = ""


@dataclass(frozen=True)
class Pass:
    """All comparisons in one precision."""

    precision: str
    description: str
    rows: tuple[Row, ...]
    seconds: float
    first_wrong: Row | None = None


@dataclass(frozen=True)
class Try:
    """Another setting with which the wrong pass was repeated."""

    setting: str
    verdict: Verdict


@dataclass(frozen=True)
class Report:
    """Answer of `llmscale doctor --numerics`."""

    passes: tuple[Pass, ...]
    tries: tuple[Try, ...] = field(default=())

    @property
    def first_wrong(self) -> Row | None:
        """Return the first wrong comparison, of the arithmetic if that is wrong."""
        return next((one.first_wrong for one in self.passes if one.first_wrong), None)

    @property
    def setting(self) -> str | None:
        """Return the setting that makes the difference."""
        return next((attempt.setting for attempt in self.tries if attempt.verdict == "right"), None)


def kind_of(name: str) -> str:
    """Return the layer kind of a parameter."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), name)


def as_row(finding: Finding) -> Row:
    """Return a comparison as a row."""
    is_finite = math.isfinite(finding.error)
    share = finding.share
    return Row(
        link=finding.link,
        what=kind_of(finding.name) if finding.link == "gradient" else "",
        difference=finding.error if is_finite else None,
        allowed=finding.bound,
        share=share if math.isfinite(share) else None,
        verdict="wrong" if finding.is_wrong else "right",
        parameter=finding.name,
        step=finding.step + 1,
        rank=finding.rank,
        note=finding.note,
    )


def worst_rows(findings: Sequence[Finding], links: Sequence[str]) -> tuple[Row, ...]:
    """Return a row for each link, for each layer kind of the gradients, in the order of the links."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.link, kind_of(finding.name) if finding.link == "gradient" else "")
        if key not in worst or finding.share > worst[key].share:
            worst[key] = finding
    order = sorted(worst, key=lambda key: links.index(key[0]))
    return tuple(as_row(worst[key]) for key in order)


def table_lines(report: Report) -> list[str]:
    """Return a table for each pass, and the verdict."""
    lines = []
    for one in report.passes:
        lines += [one.description, f"{'link':9} {'what':24} {'difference':>11} {'allowed':>9} {'share':>8}"]
        lines += [_row_line(row) for row in one.rows]
        lines.append("")
    seconds = sum(one.seconds for one in report.passes)
    return [*lines, *_verdict_lines(report), f"({seconds:.0f} s)"]


def _row_line(row: Row) -> str:
    if row.share == 0 and not row.allowed:
        share = "equal"
    elif row.share is None:
        share = "-"
    else:
        share = f"{row.share:.3g}"
    difference = "not equal" if row.difference is None else f"{row.difference:.2g}"
    what = row.what or (row.note if row.link in ("loss", "norm") and len(row.note) <= 24 else "")
    line = f"{row.link:9} {what:24} {difference:>11} {row.allowed:9.2g} {share:>8}"
    if row.verdict == "wrong":
        return f"{line}  WRONG  {row.parameter}, step {row.step}"
    return line


def describe_wrong(row: Row) -> str:
    """Return sentences about a wrong comparison, without its step."""
    where = "" if row.parameter == "all" else f", first {row.parameter}"
    size = "" if row.share is None else f", {row.share:.3g} times what is allowed"
    note = f" ({row.note})" if row.note else ""
    rank = "" if row.rank is None else f" Only rank {row.rank} is wrong."
    return f"{_WRONG[row.link]}{where}{size}{note}.{rank}"


def _verdict_lines(report: Report) -> list[str]:
    first = report.first_wrong
    if first is None:
        nearest = max((row for one in report.passes for row in one.rows), key=lambda row: row.share or 0.0)
        return [f"RIGHT: every link is within what rounding explains, at most {nearest.share or 0:.2f} of it."]
    lines = [f"WRONG in step {first.step}: {describe_wrong(first)}"]
    wrong = ", ".join(attempt.setting for attempt in report.tries if attempt.verdict == "wrong")
    if report.setting:
        lines.append(f"Right with: {report.setting}.")
    elif report.tries:
        lines.append("No other setting makes a difference: look at the model, the optimizer and its groups.")
    return [*lines, *([f"Still wrong with: {wrong}."] if wrong else [])]
