from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.harness import why_it_failed
from scripts.bench.memory import memory_grid
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(("ending", "why"), [("os.kill(os.getpid(), 9)", "ended with status -9"), ("1 / 0", "ZeroDiv")])
def test_a_child_that_dies_has_a_reason(ending: str, why: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import os; {ending}"], capture_output=True, text=True)
    assert why_it_failed(done).startswith(why)


def test_rows_that_were_measured_stay_when_the_grid_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, actual = [cell.name for cell in memory_grid.list_cells()[:2]], tmp_path / "grid.json"

    def measure(cell: memory_grid.Cell, how: str, timeout_s: float) -> memory_grid.Row:
        if cell.name == names[1]:
            raise KeyboardInterrupt
        return {"cell": cell.name, "problem": "ended with status -9"}

    monkeypatch.setattr(memory_grid, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["memory_grid.py", "--measure", "dry-run", "--json", str(actual)])
    with pytest.raises(KeyboardInterrupt):
        memory_grid.main()
    assert [row["cell"] for row in json.loads(actual.read_text())["rows"]] == names[:1]


def test_a_cell_sets_its_allocator_before_it_imports_torch() -> None:
    program = "import sys; import scripts.bench.memory.memory_grid; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
