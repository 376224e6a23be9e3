from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmscale.checkpoint.initial_weights import FrozenBase, base_of_checkpoint, check_base, checksum_of, provide_model
from llmscale.checkpoint.manifest import CheckpointManifest
from llmscale.checkpoint.run_state import RunState, SavedRun
from llmscale.engine.collectives import Disks
from llmscale.engine.process_group import World
from llmscale.errors import CheckpointError
from tests.hub_server import COMMIT, Hub, lead_to_hub, serve_model


def saved(path: Path, base: dict[str, str]) -> SavedRun:
    manifest = CheckpointManifest(3, 100, 1, 2, "fp32", "2026-01-01T00:00:00+00:00", ())
    return SavedRun(path, manifest, RunState(3, 0, 0, 0, {}, "fp32", {}, base=base))


def test_a_base_is_known_by_every_byte_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 << 20))
    base = FrozenBase("hf:there", checksum=checksum_of(FrozenBase("hf:there"), [path]))
    adapters = saved(tmp_path / "step-3", base.as_dict())
    check_base(base, adapters)
    with path.open("r+b") as file:
        file.seek(3 << 19)  # in the middle
        file.write(b"1")
    changed = FrozenBase("hf:there", checksum=checksum_of(base, [path]))
    with pytest.raises(CheckpointError, match=rf"{base.checksum} and is {changed.checksum}"):
        check_base(changed, adapters)


def test_adapters_are_no_base(tmp_path: Path) -> None:
    assert base_of_checkpoint(saved(tmp_path / "model", {})).place == str((tmp_path / "model").resolve())
    with pytest.raises(CheckpointError, match="--merge"):
        base_of_checkpoint(saved(tmp_path / "adapters", {"place": "hf:there", "checksum": "1"}))


NAME = f"own/model@{COMMIT}"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def write_index(folder: Path, name: str, files: list[str]) -> None:
    (folder / name).write_text(json.dumps({"weight_map": {f"t{number}": file for number, file in enumerate(files)}}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Of a model in two shards, with much beside them that nobody needs."""
    files = tmp_path / "files"
    files.mkdir()
    beside = ("config.json", "README.md", "modeling.py", "consolidated.safetensors", "params.json", "pytorch_model.bin")
    for name in (*beside, "tokenizer.json", "training_args.bin", "model.gguf", *SHARDS):
        (files / name).write_text(name)
    write_index(files, "model.safetensors.index.json", SHARDS)
    with serve_model(files, tmp_path / "home", monkeypatch) as served:
        yield served


def provide(here: Path | None = None, progress: object = int) -> Path:
    assert dist.group.WORLD is not None
    world = World(0, 1, 0, (1,), torch.device("cpu"), "cpu", dist.group.WORLD, Disks((0,)))
    return provide_model(NAME, "--init-from hf:own/model", here, world, progress)  # type: ignore[arg-type]


pytestmark = pytest.mark.usefixtures("one_rank")


def test_safetensors_are_preferred_and_nothing_else_is_fetched(hub: Hub) -> None:
    calls: list[int] = []
    assert provide(progress=lambda: calls.append(1)) == hub.snapshot
    assert hub.cached == {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}
    assert calls, "it got on, and said so"


def test_a_model_of_pickles_is_fetched_as_pickles(hub: Hub) -> None:
    for path in hub.files.glob("*model*.*"):
        path.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"hf:own/model on the Hub holds no weights, but consolidated.safetensors and 1 more\. Legal",
    ):
        provide()
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name in names:
        (hub.files / name).write_text(name)
    write_index(hub.files, "pytorch_model.bin.index.json", names)
    provide()
    assert hub.cached == {"config.json", "tokenizer.json", "pytorch_model.bin.index.json", *names}


def test_what_is_not_what_the_hub_has_is_found_and_what_is_is_read_through_once(hub: Hub) -> None:
    folder = provide()
    blobs = {hashlib.sha256(name.encode()).hexdigest(): folder / name for name in SHARDS}
    assert {path.name for path in (hub.cache / ".llmscale-verified").iterdir()} == blobs.keys()
    asked = len(hub.asked)
    assert provide(folder) == folder
    assert len(hub.asked) == asked
    digest, path = blobs.popitem()
    path.resolve().write_text("damaged")
    with pytest.raises(CheckpointError, match=rf"blobs/{digest} is damaged: its sha256 is .*Remove it and run again"):
        provide(folder)
    path.resolve().unlink()
    assert provide() == folder
    assert path.read_text() == path.name


def test_without_the_network_cached_weights_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "model.safetensors"):
        hub.snapshot.mkdir(parents=True, exist_ok=True)
        (hub.snapshot / name).write_text(name)
    lead_to_hub(monkeypatch, hub.home)
    assert provide() == hub.snapshot
    (hub.snapshot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be fetched from the Hugging Face Hub .*refused") as caught:
        provide()
    assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        provide()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="TRANSFORMERS_OFFLINE is set"):
        provide()


def test_an_index_may_not_name_files_elsewhere(hub: Hub) -> None:
    write_index(hub.files, "model.safetensors.index.json", ["../../x.safetensors"])
    with pytest.raises(CheckpointError, match=r"is not a \.safetensors file of this folder"):
        provide()
    write_index(hub.files, "model.safetensors.index.json", ["*.safetensors"])
    (hub.cache / "snapshots").rename(hub.cache / "old")
    with pytest.raises(CheckpointError, match=re.escape("*.safetensors is missing")):
        provide()
    assert "consolidated.safetensors" not in hub.cached
