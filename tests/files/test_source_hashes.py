from __future__ import annotations

import hashlib
from pathlib import Path

from llmscale.files.source_hashes import source_hashes


def test_every_python_file_by_its_path_and_a_reason_where_one_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "note.txt").write_text("not code")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert source_hashes(tmp_path) == {
        "gone.py": "cannot be read: No such file or directory",
        "inner/a.py": hashlib.sha256(b"x = 1\n").hexdigest(),
    }
