"""Stored tensors against those of a model: what is accepted, and which one an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.architecture.hf_config import FAMILIES
from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import StoredTensor, has_unused_head, match_tensors
from llmscale.errors import CheckpointError

SHAPE = GPTShape(n_layer=1, n_head=2, n_embd=8, vocab_size=20, seq_len=16)
WANTED = tuple(FAMILIES["gpt2"].tensors(SHAPE))


def stored_tensors(dtype: str = "F32") -> dict[str, StoredTensor]:
    return {t.name: StoredTensor(t.name, Path("model.safetensors"), t.shape, dtype) for t in WANTED}


def test_every_parameter_is_found_with_and_without_the_models_prefix() -> None:
    stored = stored_tensors()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    for given in (stored, bare):
        assert match_tensors(given, WANTED, "hf:x").keys() == {tensor.name for tensor in SHAPE.tensors.all}


def test_what_older_files_have_besides_is_left_out() -> None:
    extra = {"transformer.h.0.attn.bias": (1, 1, 16, 16), "h.0.attn.masked_bias": (), "lm_head.weight": (20, 8)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = (2,)
    more = {name: StoredTensor(name, Path("f"), shape, "F32") for name, shape in extra.items()}
    pieces = match_tensors({**stored_tensors(), **more}, WANTED, "hf:x")
    assert has_unused_head({**stored_tensors(), **more}, pieces)
    assert not has_unused_head(stored_tensors(), pieces)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64", "torch.quint8"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=rf"has the type {dtype}. Legal: F32, F16, BF16"):
        match_tensors(stored_tensors(dtype), WANTED, "hf:x")


def test_missing_surplus_and_other_shapes_are_named() -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    stored = stored_tensors()
    less = {key: value for key, value in stored.items() if key != name}
    more = {**stored, "score.weight": stored[name], "a.weight": stored[name]}
    other = {**stored, name: StoredTensor(name, Path("f"), (32, 8), "F32")}
    for given, said in (
        (less, f"hf:x has no '{name}' among its {len(less)} tensors"),
        (more, "hf:x holds 'a.weight' and 1 more, which the model of its config.json has no place for"),
        (other, rf"hf:x: '{name}' has the shape \[32, 8\], and \[8, 32\] by its config.json"),
    ):
        with pytest.raises(CheckpointError, match=said):
            match_tensors(given, WANTED, "hf:x")


@pytest.mark.parametrize(
    ("architecture", "lacks", "holds", "said"),
    [
        ("LlamaForCausalLM", ["lm_head.weight"], [], r'its config.json lacks "tie_word_embeddings": true'),
        (
            "LlamaModel",
            ["lm_head.weight"],
            [],
            "hf:x is of the class LlamaModel, the decoder without a head: .* the whole",
        ),
        ("LlamaModel", ["model.norm.weight"], [], r"hf:x has no 'norm\.weight' among its"),
        (
            *("LlamaForSequenceClassification", ["lm_head.weight"], ["score.weight"]),
            "class LlamaForSequenceClassification, not a causal .* it lacks 'lm_head.weight' and holds 'score.weight'",
        ),
        ("LlamaForTokenClassification", [], ["score.weight"], "not a causal language model: it holds 'score.weight'"),
        ("LlamaForCausalLM", [], ["a", "b"], "holds 'a' and 1 more, which the model"),
    ],
)
def test_another_class_of_the_family_is_named(architecture: str, lacks: list[str], holds: list[str], said: str) -> None:
    untied = SHAPE.changed({"positions": "rotary", "norm": "rmsnorm", "gated_mlp": True, "tied": False, "bias": False})
    wanted = tuple(FAMILIES["llama"].tensors(untied))
    is_bare = architecture == "LlamaModel"
    stored = {t.name: StoredTensor(t.name, Path("f"), t.shape, "F32") for t in wanted if t.name not in lacks}
    stored |= {name: StoredTensor(name, Path("f"), (2, 8), "F32") for name in holds}
    stored = {name.removeprefix("model.") if is_bare else name: tensor for name, tensor in stored.items()}
    with pytest.raises(CheckpointError, match=said) as caught:
        match_tensors(stored, wanted, "hf:x", architecture)
    assert ("tie_word_embeddings" in str(caught.value)) == (architecture == "LlamaForCausalLM" and bool(lacks))


def test_an_untied_model_without_a_head_says_what_may_be_wrong() -> None:
    untied = GPTShape(n_layer=1, n_head=2, n_embd=8, vocab_size=20, seq_len=16, tied=False)
    with pytest.raises(CheckpointError, match=r'lacks "tie_word_embeddings": true'):
        match_tensors(stored_tensors(), FAMILIES["gpt2"].tensors(untied), "hf:x")
