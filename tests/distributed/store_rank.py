"""train.py as a rank of a test: short waits for a store, and the folders of the rank's own node.

`{node}` in LLMSCALE_RUNS and NODE_FOLDER, the working folder, is the number of the node. STORE_END_S is how long the
end of training waits.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

from llmscale.data.storage import faults
from llmscale.training import publish_run
from tests.conftest import TRAIN

_saved = publish_run.RunPublisher.saved


def saved_and_published(self: publish_run.RunPublisher, checkpoint: Path) -> None:
    """Keep a tiny run from saving faster than it publishes: only the newest checkpoint that waits is uploaded."""
    _saved(self, checkpoint)
    while self._lease and self._thread.is_alive() and self._waiting and not self.problem:
        time.sleep(0.01)


if __name__ == "__main__":
    publish_run.RunPublisher.saved = saved_and_published  # type: ignore[method-assign]
    node = str(int(os.environ["RANK"]) // int(os.environ["LOCAL_SIZE"]))
    for name in ("LLMSCALE_RUNS", "NODE_FOLDER"):
        if name in os.environ:
            os.environ[name] = os.environ[name].replace("{node}", node)
    os.chdir(os.environ.get("NODE_FOLDER", "."))
    faults.RETRY_PAUSES_S = (0.1, 0.3, 0.3, 0.3)
    publish_run._RECORDS_S = 1.0
    publish_run._END_S = float(os.environ.get("STORE_END_S", "60"))
    runpy.run_path(str(TRAIN), run_name="__main__")
