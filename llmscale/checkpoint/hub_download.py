"""A model's files from the Hugging Face Hub: fetched once per node, while the other ranks wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from llmscale.engine.collectives import gather, together
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError, ConfigError

#: Weights and what describes them; nothing that is run, and no copies in other formats (they lie in folders).
_WANTED = ("*.safetensors", "*.json")
_UNWANTED = ("*/*",)
#: Between two looks at whether the downloads have ended: no collective waits longer, however long they take.
_POLL_S = 2.0


class _Download(threading.Thread):
    """Beside the collectives, so that a download may take longer than one of them may."""

    def __init__(self, name: str, source: str) -> None:
        super().__init__(daemon=True)
        self._model, self._source = name, source
        self.folder: Path | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.folder = _snapshot(self._model, self._source)
        except Exception as error:  # raised again by the rank's own thread
            self.failure = error


def download_model(name: str, source: str, here: Path | None, world: World) -> Path:
    """The folder with a model's safetensors and JSON files in the Hub's cache on this node. Collective.

    `source` names it in messages; `here` is where this node has it already. Where it has not, its first rank fetches
    it. Raises CheckpointError on every rank.
    """
    download = _Download(name, source) if world.local_rank == 0 and here is None else None
    if download is not None:
        download.start()
    while not all(gather(world.control, download is None or not download.is_alive())):
        time.sleep(_POLL_S)

    def outcome() -> Path | None:
        if download is None:
            return here
        if download.failure is not None:
            raise download.failure
        return download.folder

    folders = gather(world.control, together(world.control, outcome))
    folder = folders[world.rank - world.local_rank]
    assert folder is not None
    return folder


def _snapshot(name: str, source: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"{source}: the Hub needs huggingface_hub: pip install huggingface_hub.") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
    except Exception as error:  # its own kinds, those of its transport, and OSError
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{source} cannot be fetched from the Hugging Face Hub ({type(error).__name__}: {reason}). Download its "
            "safetensors and JSON files and name their folder; what needs permission is fetched with HF_TOKEN set."
        ) from None
