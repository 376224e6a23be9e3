"""The dry run of any module: its bytes by hand, at every stage, and what is said of one that cannot run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from llmscale.dry_run.module import OwnModule
from llmscale.dry_run.module_rows import Blocks, micro_steps_of
from llmscale.errors import ConfigError
from tests.dry_run.test_engine import in_a_process

PRELUDE = """
from llmscale.dry_run.module import OwnModule, simulate_module
from tests.own_module import LENGTH, VOCAB, Net, divide
WIDE = 4096

class Wide(Net):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(WIDE, WIDE)
        self.frozen_wide = torch.nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.register_buffer("table", torch.zeros(WIDE, WIDE))

    def forward(self, tokens, targets):
        ones = torch.ones(1, WIDE, device=tokens.device, dtype=self.wide.weight.dtype)
        return super().forward(tokens, targets) + self.frozen_wide(self.wide(ones)).float().mean()

def simulate(module, stage, precision="bf16", ranks=4, **keys):
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}, **keys}
    if stage == 3:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 1000
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return simulate_module(module, {"gradient_accumulation_steps": 2, **config}, ranks)

def batch():
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return tokens, tokens
"""


def in_process(code: str) -> object:
    return in_a_process(PRELUDE + code)


#: Elements of the trained wide layer, of the frozen one and of the buffer: the rest of the module is nothing beside it.
WIDE = 4096**2


def test_resident_bytes_are_what_one_counts_by_hand() -> None:
    """Weights and buffers, trained and frozen; masters and moments of what is trained; none of it twice."""
    counted = in_process("""
cells = {(0, "fp32"): None, (0, "bf16"): None, (2, "fp32"): None, (2, "bf16"): None, (3, "bf16"): None}
for stage, precision in cells:
    run = simulate(OwnModule(Wide, batch()), stage, precision)
    cells[stage, precision] = [run.resident.total_bytes, run.resident.gradients_bytes, run.num_parameters]
print(json.dumps([*cells.values()]))
""")
    assert isinstance(counted, list)
    frozen, buffer, trained = (WIDE,) * 3
    expected = [
        4 * (trained + frozen + buffer) + 8 * trained,
        # DeepSpeed casts parameters alone; buffers keep their type.
        2 * (trained + frozen) + 4 * buffer + 12 * trained,
        4 * (trained + frozen + buffer) + 12 * trained / 4,
        2 * (trained + frozen) + 4 * buffer + 12 * trained / 4,
        # Frozen weights are divided, too; buffers are not, and zero.Init makes them in bf16.
        2 * (trained + frozen) / 4 + 2 * buffer + 12 * trained / 4,
    ]
    for (total, gradients, parameters), by_hand in zip(counted, expected, strict=True):
        assert total - gradients == pytest.approx(by_hand, rel=0.01)
        assert parameters == pytest.approx(2 * WIDE, rel=0.001)


def test_offload_moves_states_and_any_optimizer_has_its_own() -> None:
    offloaded, sgd, plain, foreach = in_process("""
section = {"offload_optimizer": {"device": "cpu"}}
offloaded = simulate_module(
    OwnModule(Wide, batch()),
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, **section}}, 4)
def optimizer(kind, **settings):
    return lambda module: kind([p for p in module.parameters() if p.requires_grad], lr=0.1, **settings)
AdamW = torch.optim.AdamW
made = optimizer(torch.optim.SGD, momentum=0.9), optimizer(AdamW, foreach=False), optimizer(AdamW)
runs = [simulate(OwnModule(Wide, batch(), optimizer=one), 0, "fp32", 1) for one in made]
print(json.dumps([offloaded.host_bytes, runs[0].resident.optimizer_bytes, *(run.step.total_bytes for run in runs[1:])]))
""")  # type: ignore[misc]  # JSON
    # Masters, moments and gradients in fp32; DeepSpeed copies some of them for the transfer.
    assert (12 + 4) * WIDE / 4 <= offloaded <= 28 * WIDE / 4
    assert sgd == pytest.approx(4 * WIDE, rel=0.01)
    # Of one large tensor, a step of tensor by tensor holds two temporaries, and the default on a GPU, all at once, one.
    assert plain - foreach == pytest.approx(4 * WIDE, rel=0.01)


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
def llama():
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1024, use_cache=False, tie_word_embeddings=True))
ids = torch.zeros(2, 256, dtype=torch.long)
module = OwnModule(llama, {"input_ids": ids, "labels": ids})
"""


@pytest.mark.slow
def test_shared_keys_tied_tables_and_checkpointing_of_transformers() -> None:
    answers = in_process(
        LLAMA
        + """
cells = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
runs = [simulate(module, stage, precision) for stage, precision in cells]
recomputing = simulate(module.with_checkpointing(), 2)
print(json.dumps([[run.resident.total_bytes, run.backward.activations_bytes, run.backward.logits_bytes]
                  for run in (*runs, recomputing)]))
"""
    )
    assert isinstance(answers, list)
    *runs, recomputing = answers
    parameters = 1024 * 256 + 2 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 688 + 512) + 256
    for (total, activations, logits), (stage, is_half) in zip(
        runs, [(stage, half) for stage in range(4) for half in (False, True)], strict=True
    ):
        weights = (2 if is_half else 4) * parameters / (4 if stage == 3 else 1)
        states = (12 if is_half or stage else 8) * parameters / (4 if stage else 1)
        assert total >= 0.98 * (weights + states)
        assert activations > 0 and logits >= 2 * 255 * 1024 * 4
    assert recomputing[1] < 0.6 * runs[5][1]


BAD = """
import torch
from torch import nn
from llmscale.errors import LlmscaleError
def raising():
    raise ValueError("two\\nlines")
x = torch.zeros(2, 3)
cells = {
    "raises": lambda: OwnModule(raising, (x,)),
    "no module": lambda: OwnModule(lambda: 3, (x,)),
    "no loss": lambda: OwnModule(lambda: nn.Linear(3, 3), (x,)),
    "other shapes": lambda: OwnModule(lambda: nn.Linear(4, 4), (x,)),
    "no batch": lambda: OwnModule(lambda: nn.Linear(3, 3), 3),
    "no tensors": lambda: OwnModule(lambda: nn.Linear(3, 3), {"x": 3}),
    "no checkpointing": lambda: OwnModule(lambda: nn.Linear(3, 1), (x,)).with_checkpointing(),
}
said = {}
for name, make in cells.items():
    try:
        said[name] = str(simulate(make(), 3 if name == "no module" else 1))
    except LlmscaleError as error:
        said[name] = str(error)
try:
    simulate(OwnModule(lambda: nn.Linear(3, 1), (x,)), 1, optimizer={"type": "OneBitAdam"})
except LlmscaleError as error:
    said["optimizer"] = str(error)
print(json.dumps(said))
"""


def test_what_cannot_run_is_one_line() -> None:
    messages = in_process(BAD)
    assert isinstance(messages, dict)
    expected = {
        "raises": "build raised ValueError: two lines",
        "no module": "build returned int: it must return a torch.nn.Module",
        "no loss": "build gives no loss, but a tensor [2, 3]",
        "other shapes": "build on the example batch raised RuntimeError: ",
        "no batch": "the example batch has the type int: it must be a dict",
        "no tensors": "the example batch has the type dict without tensors",
        "no checkpointing": "a Linear has no gradient_checkpointing_enable()",
        "optimizer": "the ds_config's optimizer 'OneBitAdam' is not simulated",
    }
    for name, words in expected.items():
        assert words in messages[name], (name, messages[name])
        assert "\n" not in messages[name]


def blocks(count: int, first: int = 0, period: int = 1) -> Blocks:
    return Blocks(count, first, period, lambda _: OwnModule(nn.Module, (torch.zeros(1),)))


@pytest.mark.parametrize(
    ("of", "stage", "sizes"),
    [
        (blocks(32), 0, (1, 2)),
        (blocks(32), 3, (3, 4)),
        (blocks(3), 2, None),
        (blocks(7), 3, None),
        (blocks(61, first=3), 2, (4, 5)),
        (blocks(48, period=4), 3, (12, 16)),
    ],
)
def test_few_blocks_are_simulated_where_that_is_less_work(of: Blocks, stage: int, sizes: tuple[int, int]) -> None:
    assert of.sizes(stage) == sizes


def test_a_batch_that_the_gpus_do_not_divide_is_refused() -> None:
    assert micro_steps_of(None, 4, 8) == 2
    assert micro_steps_of(64, 4, 8) == 2
    with pytest.raises(
        ConfigError, match=r"65 is not a multiple of 32: 8 GPUs with micro-batches of 4\. Legal: 32, 64"
    ):
        micro_steps_of(65, 4, 8)


#: Families that llmscale does not train, each small; transformers' own entries.
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
SIZES |= {"intermediate_size": 128}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = GROUPED | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "granite": GROUPED,
    "smollm3": GROUPED | {"pad_token_id": 0},
    "phi": SIZES,
    "phi3": GROUPED | {"pad_token_id": 0},
    "stablelm": GROUPED,
    "cohere": GROUPED,
    "starcoder2": GROUPED,
    "olmo": GROUPED,
    "olmo3": GROUPED,
    "exaone4": GROUPED,
    "gpt_neox": SIZES,
    "falcon": SIZES,
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 512},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "vocab_size": 512},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "gpt_oss": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
}
OF_FAMILY = """
from llmscale.dry_run.hf_module import read_hf_module
answers = {}
for name, entries in FAMILIES.items():
    found = read_hf_module({**entries, "model_type": name}, name, micro_batch_size=2, seq_len=32, default_seq_len=64)
    runs = [simulate(found.module, 3), simulate(found.blocks.cut(2), 3)]
    answers[name] = [found.num_parameters, runs[0].num_parameters, found.blocks.count, found.blocks.period,
                     runs[0].backward.total_bytes, runs[1].backward.total_bytes]
print(json.dumps(answers))
"""


def check_families(families: dict[str, dict[str, object]]) -> None:
    answers = in_process(f"FAMILIES = json.loads({json.dumps(json.dumps(families))})" + OF_FAMILY)
    assert isinstance(answers, dict)
    for name, (declared, simulated, count, period, complete, cut) in answers.items():
        assert declared == simulated, name
        assert (count, period) == (3, 1), name
        assert 0 < cut < complete, name


def test_transformers_own_model_of_a_family_is_simulated() -> None:
    check_families({name: FAMILIES[name] for name in ("gemma2", "granite")})


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(FAMILIES)[start::4] for start in range(4)])
def test_families_that_llmscale_does_not_train(names: list[str]) -> None:
    check_families({name: FAMILIES[name] for name in names})
