"""The page in a real browser: it draws without an error, loads nothing, and runs nothing that a run says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmscale.report.data import build_report
from llmscale.report.html_page import build_page
from llmscale.report.run_list import ListedRun, read_run
from tests.conftest import HANG_S
from tests.report.runs import full_run, hostile_run, start, train, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")

#: What the browser says of the page when it is drawn. The zoom drags over the first chart.
PROBE = """
<script>
const said = [];
addEventListener("error", (event) => said.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => said.push(`${event.violatedDirective} ${event.blockedURI}`));
</script>
"""
REPORT = """
<script>
addEventListener("load", () => setTimeout(() => {
  const over = document.querySelector(".u-over"), box = over.getBoundingClientRect();
  const mouse = (target, type, part) => target.dispatchEvent(new MouseEvent(type,
    { clientX: box.left + box.width * part, clientY: box.top + 20, bubbles: true, button: 0, movementX: 9 }));
  mouse(over, "mouseenter", 0.5);
  mouse(over, "mousemove", 0.5);
  const tip = document.querySelector(".u-legend").textContent;
  const heads = () => [...document.querySelectorAll("button.head")];
  const rows = () => heads().slice(0, 1).flatMap((head) => [...head.closest("table").tBodies[0].rows]);
  const cells = () => rows().filter((row) => !row.hidden)
    .map((row) => row.cells[0].textContent);
  const press = (label) => heads().find((head) => head.textContent.startsWith(label))?.click();
  const orders = [];
  press("loss"); orders.push(cells()); press("loss"); orders.push(cells());
  const filter = document.querySelector('input[type="search"]');
  if (filter) { filter.value = "MEMORY"; filter.dispatchEvent(new Event("input")); orders.push(cells()); }
  mouse(over, "mousedown", 0.3); mouse(over, "mousemove", 0.6); mouse(document, "mouseup", 0.6);
  setTimeout(() => {
    const facts = {
      orders, said, tip, hacked: window.hacked ?? null, images: document.images.length,
      charts: [...document.querySelectorAll(".card h3")].map((title) => title.firstChild.textContent),
      drawn: [...document.querySelectorAll("canvas")].map((canvas) =>
        new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size > 2),
      loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
      isZoomed: !document.getElementById("whole").disabled,
      drawnMs: document.body.dataset.drawnMs, theme: document.documentElement.dataset.theme,
      title: document.title, notes: [...document.querySelectorAll(".notes li")].map((note) => note.textContent),
      text: document.getElementById("main").innerText.length,
    };
    const box = Object.assign(document.createElement("pre"), { id: "facts", textContent: JSON.stringify(facts) });
    document.body.append(box);
  }, 100);
}, 100));
</script>
"""


def facts_of(folders: Sequence[Path], scratch: Path, view: str = "", listed: Sequence[ListedRun] = ()) -> dict:
    """Open the report of some runs, and ask it."""
    page = build_page(build_report(folders, listed), "runs").replace("<style>", f"{PROBE}<style>", 1)
    head, _, tail = page.rpartition("</body>")
    (scratch / "page.html").write_text(f"{head}{REPORT}</body>{tail}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,2000"]
    flags += [f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    assert CHROMIUM is not None
    address = f"file://{scratch / 'page.html'}{view}"
    done = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, timeout=HANG_S)
    match = re.search(r'<pre id="facts">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr
    text = match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&nbsp;", "\xa0")
    facts = json.loads(text)
    assert facts["said"] == []
    assert facts["loaded"] == []
    assert facts["drawn"] and all(facts["drawn"])
    assert len(facts["drawn"]) == len(facts["charts"])
    return facts


@pytest.mark.parametrize("view", ["", "#axis=tokens&theme=dark", "#axis=flops&unit=bits&theme=nonsense"])
def test_a_run_with_everything(view: str, tmp_path: Path) -> None:
    facts = facts_of([full_run(tmp_path / "a", 150)], tmp_path, view)
    titles = ["Training and validation loss", "hellaswag", "Learning rate", "Gradient norm"]
    titles += ["Throughput", "Share of time by phase", "Waiting for data", "Memory of one rank"]
    assert facts["charts"] == titles
    assert "training" in facts["tip"]
    assert facts["isZoomed"]
    assert facts["drawnMs"]
    assert facts["theme"] == ("dark" if "dark" in view else "light")


def test_a_run_of_three_lines_and_one_that_is_lost(tmp_path: Path) -> None:
    three = write_run(tmp_path / "three", [start(), train(1), train(2)])
    assert "Training loss" in facts_of([three], tmp_path)["charts"]
    lost = write_run(tmp_path / "lost", [train(step, float("nan")) for step in range(1, 10)])
    assert "Training loss" not in facts_of([lost], tmp_path)["charts"]


def test_many_runs(tmp_path: Path) -> None:
    facts = facts_of([full_run(tmp_path / f"run{number}", 30 + number) for number in range(13)], tmp_path)
    assert "Training loss" in facts["charts"]
    assert facts["tip"].count("run") >= 13


def test_the_table_of_a_folder_is_sorted_and_filtered(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / f"run{number}", 30 + number) for number in range(3)]
    hostile = "<img src=x onerror=window.hacked=1> out of memory"
    listed = [replace(read_run(run), loss=loss) for run, loss in zip(runs, (2.0, 10.0, None), strict=True)]
    listed[2] = replace(listed[2], state="failed", error=hostile, command=hostile)
    facts = facts_of(runs, tmp_path, listed=listed)
    names = [[Path(run).name for run in order] for order in facts["orders"]]
    assert names == [["run0", "run1", "run2"], ["run1", "run0", "run2"], ["run2"]]
    assert facts["hacked"] is None and facts["images"] == 0


def test_a_hostile_run_runs_nothing(tmp_path: Path) -> None:
    facts = facts_of([hostile_run(tmp_path / "<img src=x onerror=window.hacked=1>")], tmp_path)
    assert facts["hacked"] is None
    assert facts["images"] == 0
    assert len(facts["notes"]) == 3
    assert facts["text"] > 100


@pytest.mark.slow
def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    facts = facts_of([write_run(tmp_path / "long", (train(step) for step in range(1, 100_001)))], tmp_path)
    assert "Training loss" in facts["charts"]
