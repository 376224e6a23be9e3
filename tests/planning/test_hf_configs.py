"""The room that a transformers model's states leave, under every stage and offload."""

from __future__ import annotations

from llmscale.architecture.hf_config import load_hf_model
from llmscale.planning.hf_configs import find_hf_configs, roomiest
from llmscale.planning.largest_micro_batch import Machines

GIB = 2**30
NEOX_8B = """{"model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
"intermediate_size": 16384, "vocab_size": 50432}"""


def test_room_and_the_layout_that_leaves_most(tmp_path) -> None:
    (tmp_path / "config.json").write_text(NEOX_8B)
    model = load_hf_model(str(tmp_path))
    assert model is not None
    configs = find_hf_configs(model, Machines(1, 8, 80 * GIB), "bf16", None)
    assert [config.strategy.checkpointing for config in configs] == ["none"] * len(configs)
    assert {config.ds_config.gradient_accumulation_steps for config in configs} == {2}, "most runs accumulate"
    best = roomiest(configs)
    assert best.fits
    assert (best.strategy.zero_stage, best.strategy.offload) == (3, "-")
    small = find_hf_configs(model, Machines(1, 1, 8 * GIB), "bf16", 1)
    assert {config.ds_config.gradient_accumulation_steps for config in small} == {1}
    missing = [config for config in small if not config.fits]
    assert missing and all(config.room_bytes <= 0 for config in missing)
    assert roomiest(missing).room_bytes == max(config.room_bytes for config in missing)
