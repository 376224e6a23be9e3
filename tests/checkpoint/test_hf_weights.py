from __future__ import annotations

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_weights import (
    from_hf_state_dict,
    hf_config,
    import_transformers,
    shape_from_hf_config,
    to_hf_state_dict,
)
from llmscale.errors import CheckpointError, ConfigError
from llmscale.model.gpt import GPT

pytest.importorskip("transformers")
transformers = import_transformers()


def small_shape(activation="gelu_tanh", *, bias: bool = True) -> GPTShape:
    return GPTShape(3, 4, 48, 300, 40, activation=activation, bias=bias)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Every weight random, biases and norms too, so that a swapped one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def largest_difference(ours: GPT, theirs) -> float:
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (ours(tokens) - theirs(tokens).logits).abs().max().item()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_logits_are_equal_after_export(activation) -> None:
    shape = small_shape(activation)
    ours = randomised(GPT(shape, seed=0))
    theirs = transformers.GPT2LMHeadModel(hf_config(shape)).eval()
    theirs.load_state_dict(to_hf_state_dict(ours.state_dict(), shape))
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_logits_are_equal_after_import(activation: str) -> None:
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=40, n_embd=48, n_layer=3, n_head=4, activation_function=activation
    )
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    shape = shape_from_hf_config(config)
    ours = GPT(shape, seed=0).eval()
    ours.load_state_dict(from_hf_state_dict(theirs.state_dict(), shape))
    assert largest_difference(ours, theirs) < 1e-5


def test_export_fills_the_biases_that_a_model_lacks() -> None:
    shape = small_shape(bias=False)
    ours = randomised(GPT(shape, seed=0))
    theirs = transformers.GPT2LMHeadModel(hf_config(shape)).eval()
    theirs.load_state_dict(to_hf_state_dict(ours.state_dict(), shape))
    assert largest_difference(ours, theirs) < 1e-5


def test_round_trip_keeps_every_bit_and_clears_the_padding() -> None:
    shape = small_shape()
    state = randomised(GPT(shape, seed=0)).state_dict()
    back = from_hf_state_dict(to_hf_state_dict(state, shape), shape)
    assert back.keys() == state.keys()
    for name in state:
        rows = shape.vocab_size if name == "wte.weight" else None
        assert torch.equal(back[name][:rows], state[name][:rows]), name
    assert back["wte.weight"].shape[0] == shape.padded_vocab_size
    assert not back["wte.weight"][shape.vocab_size :].any()


def test_a_model_without_its_head_is_imported_too() -> None:
    """GPT-2's own checkpoints on the hub are such: no `transformer.`, no head, the causal masks as buffers."""
    shape = small_shape()
    exported = to_hf_state_dict(randomised(GPT(shape, seed=0)).state_dict(), shape)
    del exported["lm_head.weight"]
    bare = {name.removeprefix("transformer."): tensor for name, tensor in exported.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    expected = from_hf_state_dict(exported, shape)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in from_hf_state_dict(bare, shape).items())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_shape_survives_the_configuration(activation) -> None:
    shape = GPTShape(3, 4, 48, 300, 40, activation=activation, dropout=0.1)
    assert shape_from_hf_config(hf_config(shape)) == shape


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("n_inner", 100),
        ("layer_norm_epsilon", 1e-6),
        ("activation_function", "silu"),
        ("attn_pdrop", 0.3),
    ],
)
def test_what_our_model_does_not_compute_is_refused(setting: str, value: object) -> None:
    config = hf_config(small_shape())
    setattr(config, setting, value)
    with pytest.raises(ConfigError, match=f"{setting} {value!r}; only .* can be loaded"):
        shape_from_hf_config(config)


def test_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="of type 'opt'; only 'gpt2' can be loaded"):
        shape_from_hf_config(transformers.OPTConfig())


def test_damaged_weights_are_refused() -> None:
    shape = small_shape()
    whole = to_hf_state_dict(GPT(shape, seed=0).state_dict(), shape)
    lacking = {k: v for k, v in whole.items() if k != "transformer.h.1.attn.c_attn.weight"}
    with pytest.raises(CheckpointError, match=r"lacks 'transformer.h.1.attn.c_attn.weight': it is not"):
        from_hf_state_dict(lacking, shape)
    with pytest.raises(CheckpointError, match=r"no place for 'transformer.h.3.attn.c_attn.bias' and 11 more"):
        deeper = GPTShape(4, 4, 48, 300, 40)
        from_hf_state_dict(to_hf_state_dict(GPT(deeper, seed=0).state_dict(), deeper), shape)
    with pytest.raises(CheckpointError, match=r"wte.weight' is \[300, 48\], and the model's shape says \[299, 48\]"):
        from_hf_state_dict(whole, GPTShape(3, 4, 48, 299, 40))
    with pytest.raises(CheckpointError, match="untied head"):
        from_hf_state_dict(whole | {"lm_head.weight": torch.zeros(300, 48)}, shape)
    with pytest.raises(CheckpointError, match=r"lacks 'ln_f.bias'"):
        state = GPT(shape, seed=0).state_dict()
        del state["ln_f.bias"]
        to_hf_state_dict(state, shape)
