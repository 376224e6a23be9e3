from __future__ import annotations

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_weights import hf_config, import_transformers, to_hf_state_dict
from llmscale.model.gpt import GPT

pytest.importorskip("transformers")
transformers = import_transformers()


def small_shape(activation="gelu_tanh", *, bias: bool = True) -> GPTShape:
    return GPTShape(3, 4, 48, 300, 40, activation=activation, dropout=0.1, bias=bias)


def randomised(model: GPT) -> GPT:
    """Every weight random, biases and norms too, so that a swapped one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def largest_difference(ours: GPT) -> float:
    """Between our logits and those of the GPT2LMHeadModel with its weights."""
    theirs = transformers.GPT2LMHeadModel(hf_config(ours.shape, 299, torch.float32)).eval()
    missing, surplus = theirs.load_state_dict(to_hf_state_dict(ours), strict=False)
    assert (missing, surplus) == (["lm_head.weight"], []), "all but the head, which is tied"
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (ours(tokens) - theirs(tokens).logits).abs().max().item()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_logits_are_equal(activation) -> None:
    assert largest_difference(randomised(GPT(small_shape(activation), seed=0))) < 1e-5


def test_biases_that_a_model_lacks_are_zeros() -> None:
    ours = randomised(GPT(small_shape(bias=False), seed=0))
    assert largest_difference(ours) < 1e-5
    assert not to_hf_state_dict(ours)["transformer.h.0.attn.c_attn.bias"].any()


def test_the_padding_rows_are_cut_off() -> None:
    ours = randomised(GPT(small_shape(), seed=0))
    table = to_hf_state_dict(ours)["transformer.wte.weight"]
    assert torch.equal(table, ours.wte.weight[:300])
    assert ours.wte.weight.shape[0] == 384


def test_what_is_no_tensor_is_in_the_configuration() -> None:
    config = hf_config(small_shape(), 299, torch.bfloat16)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.1)
    assert (config.n_positions, config.vocab_size, config.activation_function) == (40, 300, "gelu_new")
    assert (config.bos_token_id, config.eos_token_id) == (299, 299)
    assert config.to_dict()["dtype"] == "bfloat16"
