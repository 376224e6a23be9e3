"""Models and checkpoints of other programs are named for what they are, without loading them."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.architecture.hf_config import find_config
from llmscale.checkpoint.hf_read import find_weights_files
from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.config.presets import get_preset
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.untrusted.strangers import describe_stranger


class Armed:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        return open, (str(self.trap), "w")


def torch_file(path: Path, **entries: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps({**entries, "trap": Armed(path.parent / "sprung")}))
    return path


def deepspeed(folder: Path) -> Path:
    torch_file(folder / "global_step100" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch_file(folder / "global_step100" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step100")
    return folder


def nanogpt(folder: Path) -> Path:
    torch_file(folder / "ckpt.pt", model={}, model_args={}, iter_num=1)
    return folder


def lightning(folder: Path) -> Path:
    torch_file(folder / "last.ckpt", **{"pytorch-lightning_version": "2.0"})
    return folder


def plain(folder: Path) -> Path:
    torch_file(folder / "model.pth", weight=1)
    return folder


def distributed(folder: Path) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"")
    (folder / "__0_0.distcp").write_bytes(b"")
    return folder


def megatron(folder: Path) -> Path:
    torch_file(folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def meta(folder: Path) -> Path:
    torch_file(folder / "consolidated.00.pth")
    (folder / "params.json").write_text("{}")
    return folder


STRANGERS = {
    deepspeed: "zero_to_fp32",
    nanogpt: "a checkpoint of nanoGPT",
    lightning: "a checkpoint of PyTorch Lightning",
    plain: "a file of torch.save",
    distributed: "dcp_to_torch",
    megatron: "a checkpoint of Megatron-LM",
    meta: "Meta's own files of Llama",
}
#: What reads a user's path as a model.
READERS: dict[str, Callable[[Path], object]] = {
    "--resume, --init-from, eval, sample, export": find_checkpoint,
    "--init-from hf:": find_weights_files,
    "--hf, --model hf:": lambda path: find_config(str(path), "--hf X"),
    "--model": lambda path: get_preset(str(path)),
    "--tokenizer": lambda path: load_tokenizer(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
def test_a_stranger_is_named_wherever_a_model_is_read(
    make: Callable[[Path], Path], reader: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "it")
    with pytest.raises(LlmscaleError) as error:
        READERS[reader](folder)
    text = str(error.value)
    assert STRANGERS[make] in text
    assert "\n" not in text
    assert not list(tmp_path.rglob("sprung"))


def test_a_file_is_named_as_its_folder_is(tmp_path: Path) -> None:
    file = nanogpt(tmp_path / "out") / "ckpt.pt"
    for reader in ("--resume, --init-from, eval, sample, export", "--hf, --model hf:", "--model"):
        with pytest.raises(LlmscaleError, match="a checkpoint of nanoGPT"):
            READERS[reader](file)
    with pytest.raises(LlmscaleError, match="a checkpoint of nanoGPT"):
        load_tokenizer(str(file))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "llama.cpp" in describe_stranger(tmp_path / "x.gguf")


@pytest.mark.parametrize("place", ["it", "it/global_step100", "it/global_step100/x_optim_states.pt"])
def test_deepspeeds_checkpoint_is_recognised_at_every_level(tmp_path: Path, place: str) -> None:
    deepspeed(tmp_path / "it")
    torch_file(tmp_path / "it" / "global_step100" / "x_optim_states.pt")
    assert f"zero_to_fp32 {tmp_path / 'it'} OUT" in describe_stranger(tmp_path / place)


def test_a_folder_of_transformers_gets_its_prefix(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for reader in ("--resume, --init-from, eval, sample, export", "--model"):
        with pytest.raises(LlmscaleError, match=f"Did you mean 'hf:{folder}'"):
            READERS[reader](folder)
    (tmp_path / "trainer" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "trainer" / "checkpoint-1000").mkdir()
    for step in (500, 1000):
        (tmp_path / "trainer" / f"checkpoint-{step}" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "checkpoint-1000'" in describe_stranger(tmp_path / "trainer")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("step-5/.metadata", "step-5/__0_0.distcp"), "It holds step-5. It is a checkpoint of torch.distributed"),
        (("m.gguf",), "It holds m.gguf. It is a GGUF file"),
        (("model.safetensors",), "weights without their config.json"),
        (
            ("checkpoint-500/config.json", "checkpoint-500/global_step500/mp_rank_00_model_states.pt"),
            "It holds checkpoint-500. It holds a checkpoint of DeepSpeed's engine",
        ),
        # Trainer's checkpoint, with complete weights beside DeepSpeed's.
        (("config.json", "model.safetensors", "global_step5/mp_rank_00_model_states.pt"), "Did you mean 'hf:{}'?"),
    ],
)
def test_what_lies_a_level_below_is_named(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "llama"}' if name.endswith("config.json") else "GGUF")
    assert words.format(tmp_path) in describe_stranger(tmp_path)


@pytest.mark.parametrize("contents", ['{"config": {}}', "[1]", "not json", "[" * 5000])
def test_a_run_folder_and_broken_files_are_no_strangers(tmp_path: Path, contents: str) -> None:
    (tmp_path / "config.json").write_text(contents)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    assert describe_stranger(tmp_path) == ""
    assert describe_stranger(tmp_path / "absent") == ""


def test_a_published_model_is_no_checkpoint() -> None:
    with pytest.raises(LlmscaleError, match="train --init-from hf:gpt2"):
        find_checkpoint(Path("hf:gpt2"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-7b", "Did you mean 'llama3-8b'?"),
        ("llama2-13b", "Did you mean 'llama3-8b'?"),
        ("Llama-3.1-8B", "Did you mean 'llama3-8b'?"),
        ("lama3-8b", "Did you mean 'llama3-8b'?"),
        ("gpt3-7b", "Did you mean 'gpt3-6.7b'?"),
        ("qwen2.5-7b", "Did you mean 'qwen3-8b'?"),
        ("mixtral-8x22b", "Did you mean 'mixtral-8x7b'?"),
        ("mistral-7b", "hf:ORGANISATION/NAME"),
        ("olmo-1b", "hf:ORGANISATION/NAME"),
        ("falcon-7b", "hf:ORGANISATION/NAME"),
    ],
)
def test_another_family_is_never_meant(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        get_preset(name)
    assert hint in str(error.value)
    assert ("Did you mean" in hint) == ("Did you mean" in str(error.value))
