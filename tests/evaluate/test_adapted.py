"""Adapters of every family, merged and in peft's files, compute what the run computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmscale.architecture.families.family import Family
from llmscale.architecture.hf_config import FAMILIES
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_write import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from llmscale.checkpoint.peft_files import read_adapters
from llmscale.config.run_arguments import parse_run_config
from llmscale.data.tokenizers.tokenizer import ByteTokenizer
from llmscale.errors import CheckpointError, LlmscaleError
from llmscale.evaluate.evaluation import transformers_folder
from llmscale.evaluate.export import ExportedModel, export_adapters, write_model
from llmscale.evaluate.model_source import ModelSource, open_model
from llmscale.evaluate.prune import ModelWeights
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.evaluate.weights import Merged
from llmscale.model.gpt import GPT
from llmscale.training.inputs import read_inputs
from tests.evaluate.test_export import SHAPES, random_model, save

FAMILY_OF = {family.architecture: family for family in FAMILIES.values()}


def adapted(name: str) -> tuple[GPT, Family]:
    return random_model(replace(SHAPES[name], lora_rank=3, lora_alpha=5.0)), FAMILY_OF[name]


def export(model: GPT, family: Family, folder: Path) -> Path:
    checkpoint = save(model, folder / "checkpoint", world_size=3)
    export_adapters(checkpoint, model.shape, family, "base", folder / "adapters", card="# card\n", overwrite=False)
    return folder / "adapters"


def tokens_for(shape: GPTShape) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (2, shape.seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_and_files_of_peft_hold_the_adapters(name: str, tmp_path: Path) -> None:
    model, family = adapted(name)
    merged, plain = GPT(SHAPES[name], seed=1), Merged(ModelWeights(model), model.shape)
    with torch.no_grad():
        for own, tensor in (*merged.named_parameters(), *merged.named_buffers()):
            # In two parts, of which the first ends within a row.
            first = tensor.numel() // 3 + 1
            parts = plain.read(own, 0, first), plain.read(own, first, tensor.numel() - first)
            tensor.copy_(torch.cat(parts).view_as(tensor))
        tokens = tokens_for(model.shape)
        torch.testing.assert_close(merged.eval()(tokens), model(tokens), atol=2e-5, rtol=1e-4)
    back = read_adapters(export(model, family, tmp_path), model.shape, family)
    state = model.state_dict()
    assert back
    assert all(torch.equal(value, state[own]) for own, value in back.items())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "OPTForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM"])
def test_peft_computes_the_same(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, family = adapted(name)
    base = ExportedModel(SHAPES[name], family, "fp32", 10**9)
    write_model(ModelWeights(model), base, ByteTokenizer(), tmp_path / "base", card="", overwrite=False)
    theirs = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, export(model, family, tmp_path)).eval()
    tokens = tokens_for(model.shape)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-5


def test_layers_that_peft_left_out_get_zeros_and_others_are_refused(tmp_path: Path) -> None:
    model, family = adapted("LlamaForCausalLM")
    folder = export(model, family, tmp_path)
    path, tensors = folder / ADAPTER_WEIGHTS_NAME, load_file(folder / ADAPTER_WEIGHTS_NAME)
    save_file({name: tensor for name, tensor in tensors.items() if "k_proj" not in name}, path)
    adapters = read_adapters(folder, model.shape, family)
    queries, keys = 4 * 8, 2 * 8
    b = adapters["blocks.0.attn.qkv.lora_B"]
    assert not b[queries : queries + keys].any()
    assert torch.equal(b[:queries], model.state_dict()["blocks.0.attn.qkv.lora_B"][:queries])
    with pytest.raises(CheckpointError, match="lora-targets attention"):
        read_adapters(folder, replace(model.shape, lora_targets="attention"), family)
    config = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())
    for wrong in ({"r": 4}, {"use_dora": True}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {"peft_type": "LOHA"}):
        (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config | wrong))
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            read_adapters(folder, model.shape, family)


def test_adapters_that_cannot_begin_the_run_are_named_before_it(tiny_set: Path, tmp_path: Path) -> None:
    model, family = adapted("LlamaForCausalLM")
    base = ExportedModel(SHAPES["LlamaForCausalLM"], family, "fp32", 10**9)
    write_model(ModelWeights(model), base, ByteTokenizer(), tmp_path / "base", card="", overwrite=False)
    lora_from = ["--lora-from", str(export(model, family, tmp_path))]
    begin = ["--init-from", f"hf:{tmp_path / 'base'}", "--lora-rank", "3"]
    for flags, message in (
        ([*begin, *lora_from], "--lora-alpha 5"),
        ([*begin, "--lora-alpha", "5", "--lora-from", str(tmp_path)], "adapter_config.json"),
        (["--lora-rank", "3", "--resume", str(tmp_path), *lora_from], "begins a new run"),
        ([*begin, "--lora-alpha", "5", "--lora-targets", "mlp", *lora_from], "has no place for"),
        ([*begin, "--num-experts", "4"], "random"),
    ):
        with pytest.raises(LlmscaleError, match=message):
            read_inputs(parse_run_config(["--data", str(tiny_set), "--run", str(tmp_path / "run"), *flags]))


@pytest.mark.parametrize("rank", [0, 3])
def test_lm_eval_gets_a_folder_with_the_adapters_merged_for_a_while(rank: int, tmp_path: Path) -> None:
    shape = replace(SHAPES["LlamaForCausalLM"], vocab_size=257)
    if rank:
        shape = replace(shape, lora_rank=rank, lora_alpha=5.0)
    model = random_model(shape)
    source = ModelSource(tmp_path, 3, model.shape, ByteTokenizer(), None, "", None, None, lambda: ModelWeights(model))
    tokens = tokens_for(model.shape)
    with transformers_folder(source) as folder, torch.no_grad():
        exported = open_model(folder).load_model().cpu()
        torch.testing.assert_close(exported(tokens), model(tokens), atol=2e-5, rtol=1e-4)
    assert not folder.parent.exists()
