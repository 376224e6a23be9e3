from __future__ import annotations

import json
import re
from pathlib import Path

from llmscale.report.data import build_report
from llmscale.report.html_page import build_page
from tests.report.runs import HOSTILE, full_run, hostile_run


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_one_small_file_that_loads_nothing(tmp_path: Path) -> None:
    report = build_report([full_run(tmp_path)])
    page = build_page(report, "a")
    assert data_of(page)["charts"] == report["charts"]
    assert len(page) < 500_000
    assert not re.search(r"""src\s*=|href\s*=\s*(?!"#)|@import|url\(|fetch\(|XMLHttpRequest|WebSocket""", page)
    assert "default-src 'none'" in page


def test_what_a_run_says_is_no_markup(tmp_path: Path) -> None:
    report = build_report([hostile_run(tmp_path)])
    page = build_page(report, HOSTILE)
    plain = build_page(build_report([full_run(tmp_path / "plain")]), "")
    assert data_of(page)["charts"] == report["charts"]
    for tag in ("<script", "</script", "<img", "<!--"):
        assert page.count(tag) == plain.count(tag)


def test_what_a_run_says_is_no_placeholder(tmp_path: Path) -> None:
    run = full_run(tmp_path / "@SCRIPT@", model="@DATA@ \\1 \\g<0>")
    report = build_report([run])
    page = build_page(report, "@UPLOT@ \\1")
    assert data_of(page)["charts"] == report["charts"]
    assert "@DATA@" in page and page.count("@SCRIPT@") >= 1


def test_a_page_that_is_watched_reloads_itself_and_its_footer_leads_to_the_glossary(tmp_path: Path) -> None:
    report = build_report([full_run(tmp_path)])
    watched, plain = build_page(report, "a", reload_s=10), build_page(report, "a")
    assert '<meta http-equiv="refresh" content="10">' in watched and 'http-equiv="refresh"' not in plain
    assert 'href="#glossary"' in plain and 'id="glossary"' in plain
    for word in ("nats", "MFU", "goodput", "activation checkpointing"):
        assert f"<dt>{word}</dt><dd>" in plain
    assert "<dt>word</dt>" not in plain
