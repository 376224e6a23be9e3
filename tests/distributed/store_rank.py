"""train.py as a rank of a test: short waits for a store, and the folders of the rank's own node.

`{node}` in LLMSCALE_RUNS and NODE_FOLDER, the working folder, is the number of the node. STORE_END_S is how long the
end of training waits.
"""

from __future__ import annotations

import os
import runpy

from llmscale.data.storage import faults
from llmscale.training import publish_run
from tests.conftest import TRAIN

if __name__ == "__main__":
    node = str(int(os.environ["RANK"]) // int(os.environ["LOCAL_SIZE"]))
    for name in ("LLMSCALE_RUNS", "NODE_FOLDER"):
        if name in os.environ:
            os.environ[name] = os.environ[name].replace("{node}", node)
    os.chdir(os.environ.get("NODE_FOLDER", "."))
    faults.RETRY_PAUSES_S = (0.1, 0.3, 0.3, 0.3)
    publish_run._RECORDS_S = 1.0
    publish_run._END_S = float(os.environ.get("STORE_END_S", "60"))
    runpy.run_path(str(TRAIN), run_name="__main__")
