"""Write the validation items of HellaSwag as JSON lines, unless the file exists: `hellaswag.py FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmscale.files.atomic_write import write_parts_durably


def main(path: Path) -> None:
    """Download the items to `path`, which is complete or not there."""
    if path.is_file():
        return
    from datasets import load_dataset

    items = load_dataset("Rowan/hellaswag", split="validation", streaming=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parts_durably(path, (json.dumps(item) + "\n" for item in items))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
