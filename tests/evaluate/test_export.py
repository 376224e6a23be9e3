from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmscale.architecture.families.family import Family
from llmscale.architecture.hf_config import FAMILIES, family_of
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import fill_view, find_weights_files, list_tensors, match_tensors
from llmscale.checkpoint.hf_write import ExportDtype, open_published
from llmscale.checkpoint.initial_weights import PublishedWeights, keep_published
from llmscale.config.hf_model import read_published_model
from llmscale.config.run_config import RunConfig
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError, ConfigError
from llmscale.evaluate import export
from llmscale.evaluate.export import ExportedModel, describe_export, write_model
from llmscale.evaluate.prune import ModelWeights
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.evaluate.weights import open_stored
from llmscale.model.gpt import GPT
from tests.checkpoint.written import write_tensors
from tests.published_models import save_model

ROTARY = {"norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "bias": False, "activation": "silu"}
MODERN = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 257, "seq_len": 40, **ROTARY}
OLMO = {**MODERN, "qk_norm": "width"}
DOTS = {**MODERN, "n_layer": 3, "num_experts": 4, "expert_width": 8, "shared_expert_width": 16, "qk_norm": "head"}
#: By transformers' class: one shape each, with what a file could get wrong.
SHAPES = {
    "GPT2LMHeadModel": GPTShape(2, 2, 16, 257, 24, bias=False, tied=False, mlp_width=56),
    "OPTForCausalLM": GPTShape(2, 4, 32, 300, 24, activation="relu", mlp_width=40),
    "LlamaForCausalLM": GPTShape(**{**MODERN, "seq_len": 96}, n_kv_head=2, rope_scaling="llama3:8,1,4,32"),
    "MistralForCausalLM": GPTShape(**MODERN, n_kv_head=1, sliding_window=8, rope_scaling="linear:4"),
    "Qwen2ForCausalLM": GPTShape(**MODERN, n_kv_head=2, attention_bias="qkv"),
    "Qwen3ForCausalLM": GPTShape(**MODERN, head_dim=20, qk_norm="head", rope_scaling="yarn:4,24"),
    "Olmo2ForCausalLM": GPTShape(**OLMO, n_kv_head=2, norm_placement="post", tied=False),
    "MixtralForCausalLM": GPTShape(**MODERN, num_experts=3, expert_width=20),
    "Qwen3MoeForCausalLM": GPTShape(**MODERN, num_experts=4, expert_width=8, qk_norm="head", dense_layers=1),
    "OlmoeForCausalLM": GPTShape(**OLMO, num_experts=4, normalize_router=False, mlp_width=16),
    "FlexOlmoForCausalLM": GPTShape(**OLMO, num_experts=4, experts_per_token=1, norm_placement="post"),
    "Dots1ForCausalLM": GPTShape(**DOTS, dense_layers=1, router_score="sigmoid", router_bias=True, router_scale=2.5),
}


def random_model(shape: GPTShape) -> GPT:
    """Every weight random, biases and norms too, so that a swapped one shows."""
    model = GPT(shape, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def save(model: GPT, folder: Path, world_size: int = 1, state: str = "master") -> Path:
    """Its parameters as a checkpoint's tensors, and an optimizer state."""
    tensors = {f"{state}/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    tensors |= {f"exp_avg/{name}": -parameter.detach() for name, parameter in model.named_parameters()}
    return write_tensors(folder, tensors, world_size)


@pytest.fixture
def model() -> GPT:
    return random_model(GPTShape(1, 2, 16, 257, 8))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(model, dtype=..., shard_bytes=..., ...)` exports from a new checkpoint to tmp_path/out."""

    def written(
        model: GPT,
        *,
        dtype: ExportDtype = "fp32",
        shard_bytes: int = 10**9,
        world_size: int = 1,
        state: str = "master",
        out: Path = tmp_path / "out",
        overwrite: bool = False,
        family: Family | None = None,
    ) -> Path:
        checkpoint = save(model, tmp_path.with_name(f"{tmp_path.name}-checkpoint"), world_size, state)
        exported = ExportedModel(model.shape, family or family_of(model.shape), dtype, shard_bytes)
        write_model(
            open_stored(checkpoint, model.shape, None),
            exported,
            ByteTokenizer(),
            out,
            card="# card\n",
            overwrite=overwrite,
        )
        return out

    return written


def continue_greedily(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    return tokens


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same(name: str, write: Callable[..., Path]) -> None:
    pytest.importorskip("transformers")
    transformers = import_transformers()
    ours = random_model(SHAPES[name])
    family = next(family for family in FAMILIES.values() if family.architecture == name)
    # What OPT computes GPT-2 computes too, and comes first.
    assert family_of(ours.shape) is (family if name != "OPTForCausalLM" else FAMILIES["gpt2"])
    out = write(ours, world_size=3, shard_bytes=20_000, family=family)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert type(theirs).__name__ == name
    shape = ours.shape
    tokens = torch.randint(shape.vocab_size, (2, shape.seq_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
        assert logits.shape[-1] == shape.vocab_size, "no padding rows"
        assert (logits - ours(tokens)).abs().max() < 1e-5
        # Longer than the original context of models with RoPE scaling.
        count = min(40 if shape.rope_scaling else 12, shape.seq_len - 5)
        text = theirs.generate(tokens[:, :5], max_new_tokens=count, do_sample=False, eos_token_id=None)
        assert text.tolist() == continue_greedily(ours, tokens[:, :5], count).tolist()
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.dtype == torch.float32


def test_what_is_no_tensor_is_in_the_configuration(write: Callable[..., Path]) -> None:
    model = random_model(GPTShape(2, 4, 48, 257, 40, activation="gelu_tanh", dropout=0.1))
    config = json.loads((write(model, dtype="bf16") / "config.json").read_text())
    assert [config[name] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.1, 0.1, 0.1]
    assert (config["n_positions"], config["vocab_size"], config["activation_function"]) == (40, 257, "gelu_new")
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)
    assert (config["torch_dtype"], config["architectures"]) == ("bfloat16", ["GPT2LMHeadModel"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_weights_give_the_same_bytes_however_they_were_stored(
    dtype: ExportDtype, model: GPT, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = contents(write(model, dtype=dtype, shard_bytes=10_000))
    assert "model.safetensors.index.json" in first
    # A part now ends within most tensors.
    monkeypatch.setattr(export, "_PART_ELEMENTS", 50)
    others = ((1, "master"), (5, "master"), (2, "frozen"))
    for number, (world_size, state) in enumerate(others):
        out = tmp_path / f"other-{number}"
        write(model, dtype=dtype, shard_bytes=10_000, world_size=world_size, state=state, out=out)
        assert contents(out) == first


def test_weights_that_fp16_cannot_hold_are_refused(model: GPT, write: Callable[..., Path], tmp_path: Path) -> None:
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[3, 4] = -7e4
    with pytest.raises(ConfigError, match=r"fp16 cannot hold the 70000 in 'transformer.h.0.mlp.c_fc.weight'"):
        write(model, dtype="fp16")
    assert not list(tmp_path.iterdir())
    write(model, dtype="bf16")


def test_weights_that_diverged_are_refused(model: GPT, write: Callable[..., Path], tmp_path: Path) -> None:
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[3, 4] = torch.inf
    with pytest.raises(ConfigError, match=r"'transformer.h.0.mlp.c_fc.weight' holds NaN"):
        write(model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("master/wpe.weight"), "lacks 'wpe.weight'"),
        (lambda tensors: tensors.update({"master/more": torch.ones(3)}), "holds 'more'"),
        (
            lambda tensors: tensors.update({"master/ln_f.bias": torch.ones(3)}),
            "'ln_f.bias' has 3 elements, and its configuration requires 16",
        ),
    ],
)
def test_tensors_of_another_model_are_refused(change: Callable, message: str, model: GPT, tmp_path: Path) -> None:
    tensors = {f"master/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    change(tensors)
    checkpoint = write_tensors(tmp_path / "checkpoint", tensors)
    exported = ExportedModel(model.shape, family_of(model.shape), "fp32", 10**9)
    with pytest.raises(CheckpointError, match=message):
        write_model(
            open_stored(checkpoint, model.shape, None),
            exported,
            ByteTokenizer(),
            tmp_path / "out",
            card="",
            overwrite=False,
        )
    assert not (tmp_path / "out").exists()


def test_who_may_read_one_file_may_read_all(model: GPT, write: Callable[..., Path]) -> None:
    assert len({path.stat().st_mode for path in write(model, dtype="bf16").iterdir()}) == 1


#: What published configurations say that a shape does not, with the odd ones among them.
PUBLISHED = {
    "gpt2": {"resid_pdrop": 0.1, "eos_token_id": 256, "bos_token_id": 256, "summary_type": "cls_index"},
    "opt": {"eos_token_id": 256, "bos_token_id": 2, "pad_token_id": 1},
    "llama": {
        "bos_token_id": 255,
        "eos_token_id": [256, 257],
        "rope_theta": 5e5,
        "max_position_embeddings": 128,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"bos_token_id": None, "eos_token_id": 256, "initializer_range": 0.5},
    "qwen3": {"eos_token_id": None},
    "olmo2": {"eos_token_id": 256, "pad_token_id": 258},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_says_what_the_published_model_said(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = save_model(tmp_path / "published", name, **PUBLISHED[name])
    model = read_published_model("--init-from", f"hf:{tmp_path / 'published'}")
    stored = list_tensors(find_weights_files(tmp_path / "published"))
    pieces = match_tensors(stored, model.tensors, model.source)
    keep_published(PublishedWeights(model, model.shape, pieces=pieces), 16, None, tmp_path / "run", RunConfig())
    shape = replace(model.shape, seq_len=16)
    exported = describe_export(shape, open_published(tmp_path / "run", RunConfig()), "fp32", 10**9)
    ours = GPT(shape, seed=0)
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            flat = parameter.view(-1)
            fill_view(ShardView(flat, 0, flat.numel()), pieces[parameter_name])
    write_model(ModelWeights(ours), exported, ByteTokenizer(), tmp_path / "out", card="# card\n", overwrite=False)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (tmp_path / "published" / file).read_text()
        )
    again = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (_, one), (_, other) in zip(again.named_parameters(), theirs.named_parameters(), strict=True):
        # The rows of OPT that no position uses are zeros here.
        assert torch.equal(one[2:], other[2:]), "every position is there, and nothing was trained"


def test_a_changed_rotation_is_in_the_configuration_in_one_form_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_model(tmp_path, "llama", eos_token_id=256)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 1e4}}))
    model = read_published_model("--init-from", f"hf:{tmp_path}")
    shape = replace(model.shape, seq_len=128, rope_theta=1e6)
    written, _ = export._configs(describe_export(shape, model, "bf16", 10**9), ByteTokenizer())
    assert (written["rope_theta"], written["max_position_embeddings"], written["dtype"]) == (1e6, 128, "bfloat16")
    assert "rope_parameters" not in written


def test_special_tokens_that_the_model_lacks_are_replaced(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_model(tmp_path, "gpt2")
    model = read_published_model("--init-from", f"hf:{tmp_path}")
    written, generation = export._configs(describe_export(model.shape, model, "fp32", 10**9), ByteTokenizer())
    assert [written["bos_token_id"], written["eos_token_id"], generation["eos_token_id"]] == [256] * 3


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "positions.safetensors"])
def test_a_link_among_what_a_run_keeps_of_its_model_is_neither_exported_nor_copied(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"auth": "secret"}')
    remaining = tmp_path / "run" / "published"
    remaining.mkdir(parents=True)
    (remaining / "config.json").write_text("{}")
    (remaining / name).unlink(missing_ok=True)
    (remaining / name).symlink_to(tmp_path / "secret.json")
    with pytest.raises(ConfigError, match=f"published/{name} is a symbolic link"):
        open_published(tmp_path / "run", RunConfig())
    with pytest.raises(ConfigError, match="is a symbolic link"):
        keep_published(None, 16, tmp_path / "run" / "checkpoints" / "step_1", tmp_path / "new", RunConfig())
    assert not (tmp_path / "new").exists()
