"""Children of Python in a folder that holds a stranger's modules, on every Python that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Starts children in every way, in the folder that it stands in.
STARTS = """
import multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
sys.path.insert(0, {root!r})
from llmscale.untrusted.interpreter import code_command, module_command, protect_children

def where(_):
    import socket
    return socket.__file__

if __name__ == "__main__":
    protect_children()
    for method in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            print(pool.submit(where, 0).result())
    memory = shared_memory.SharedMemory(create=True, size=8)  # starts the resource tracker
    memory.close()
    memory.unlink()
    print(subprocess.check_output(code_command("import socket; print(socket.__file__)"), text=True).strip())
    print(subprocess.check_output(module_command("calendar", "2000", "1"), text=True).split()[0])
    print(subprocess.run(module_command("nothing"), stderr=subprocess.PIPE, text=True).stderr.strip())
    print(subprocess.check_output([sys.executable, "-u", *module_command("site")[1:]], text=True))
"""
PYTHONS = {sys.executable, *map(str, Path.home().glob(".pyenv/versions/3.10*/bin/python"))}


@pytest.mark.parametrize("python", sorted(PYTHONS))
def test_children_import_nothing_from_the_folder_they_stand_in(python: str, tmp_path: Path) -> None:
    crawl = tmp_path / "crawl"
    crawl.mkdir()
    for name in ("socket", "multiprocessing", "signal", "runpy", "calendar", "threading", "llmscale", "tempfile"):
        (crawl / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    (tmp_path / "starts.py").write_text(STARTS.format(root=str(ROOT)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, str(tmp_path / "starts.py")], cwd=crawl, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    spawned, forked, code, module, missing, *site = done.stdout.splitlines()
    assert str(crawl) not in spawned + forked + code
    assert module == "January"
    assert missing.endswith("No module named nothing")
    assert not any(repr(str(crawl)) in line for line in site)


def test_empty_entries_of_pythonpath_are_dropped_and_others_kept(tmp_path: Path) -> None:
    program = (
        "import os; from llmscale.untrusted.interpreter import protect_children; protect_children(); "
        "print(os.environ['PYTHONPATH'])"
    )
    environment = {**os.environ, "PYTHONPATH": f":{ROOT}::/elsewhere:"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{ROOT}:/elsewhere", done.stderr
