"""Named model sizes with the learning rates and batch sizes of their papers. No torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.errors import ConfigError
from llmscale.suggestions import OTHER_NAMES, did_you_mean
from llmscale.terminal.human_numbers import parse_quantity
from llmscale.untrusted.hub import forgotten_prefix
from llmscale.untrusted.strangers import describe_stranger

_GPT2_VOCAB = 50257
_GPT2 = "Radford et al. 2019, table 2; learning rate and batch of the GPT-3 model of its size"
_GPT3 = "Brown et al. 2020, table 2.1"
_OPT = "Zhang et al. 2022, table 1"
_TINY = "for CPUs and tests"
_MUON = "for CPUs: a modern block, Muon, and the best learning rate that was tried"
_LLAMA3 = "Grattafiori et al. 2024, table 3"
_LLAMA32 = "config.json of Llama 3.2 without its scaling to 131,072 tokens; learning rate and batch of Llama 3 8B"
_QWEN3 = (
    "Yang et al. 2025, table 1, base of rotations before the long-context stage; learning rate and batch of Llama 3"
)
_SMOLLM2 = "SmolLM2 before its context was made longer; learning rate and batch of SmolLM (Allal et al. 2024)"
_OLMOE = "Muennighoff et al. 2024"
_MIXTRAL = "Jiang et al. 2024, table 1; learning rate and batch of Llama 3 8B"
_MODERN = "GPT-2's depth, width and heads with Llama's norm, rotations and gated MLP, and Qwen 3's query-key norm"
_LLAMA_BLOCK: Mapping[str, object] = {
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rotary",
    "activation": "silu",
    "gated_mlp": True,
}
#: OPT's decay to a tenth, and dropout (section 2.2). Its 350m is built like the others, without the published
#: projections.
_OPT_RUN: Mapping[str, object] = {"dropout": 0.1, "schedule": "linear", "min_lr_frac": 0.1}
#: Similarity of a misspelt preset (gtp2-124m) to the one that is meant.
_MISSPELT = 0.85


@dataclass(frozen=True)
class Preset:
    """A published model size. The vocabulary of a run comes from its dataset."""

    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    """Context length in tokens."""
    learning_rate: float
    """Peak learning rate."""
    global_batch_tokens: int
    """Tokens per optimizer step."""
    source: str
    """Source of the numbers."""
    block: Mapping[str, object] = field(default_factory=dict)
    """Further fields of GPTShape; empty for GPT-2's block."""
    vocab_size: int = _GPT2_VOCAB
    """Rows of the published model's token table."""
    run: Mapping[str, object] = field(default_factory=dict)
    """Keys of a run that it sets where the user gives none."""

    def shape(self, vocab_size: int, seq_len: int | None = None) -> GPTShape:
        """Return the model's shape for a vocabulary and, if given, another context."""
        return build_shape(
            {
                "activation": "gelu_tanh",
                **self.block,
                "n_layer": self.n_layer,
                "n_head": self.n_head,
                "n_embd": self.n_embd,
                "vocab_size": vocab_size,
                "seq_len": seq_len or self.seq_len,
            }
        )


_opt = partial(Preset, seq_len=2048, source=_OPT, block={"activation": "relu"}, vocab_size=50_272, run=_OPT_RUN)
_llama3 = partial(Preset, seq_len=8192, global_batch_tokens=2**22, vocab_size=128_256)
_qwen3 = partial(Preset, seq_len=4096, global_batch_tokens=2**22, vocab_size=151_936, source=_QWEN3)
_smollm2 = partial(Preset, seq_len=2048, vocab_size=49_152, source=_SMOLLM2)


def _llama3_block(n_kv_head: int, mlp_width: int, *, tied: bool) -> dict[str, object]:
    sizes = {"n_kv_head": n_kv_head, "mlp_width": mlp_width, "tied": tied}
    return {**_LLAMA_BLOCK, **sizes, "rope_theta": 500_000.0}


def _qwen3_block(mlp_width: int, *, tied: bool, n_kv_head: int = 8) -> dict[str, object]:
    return {
        **_LLAMA_BLOCK,
        "n_kv_head": n_kv_head,
        "head_dim": 128,
        "mlp_width": mlp_width,
        "tied": tied,
        "qk_norm": "head",
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }


def _smollm2_block(n_kv_head: int, mlp_width: int) -> dict[str, object]:
    return {**_LLAMA_BLOCK, "n_kv_head": n_kv_head, "mlp_width": mlp_width}


def _modern_block(mlp_width: int) -> dict[str, object]:
    """Return a modern block. An `mlp_width` of 8/3 of n_embd gives the gated MLP as many weights as GPT-2's."""
    return {**_LLAMA_BLOCK, "mlp_width": mlp_width, "qk_norm": "head"}


def _experts(count: int, chosen: int, width: int) -> dict[str, object]:
    return {"num_experts": count, "experts_per_token": chosen, "expert_width": width}


#: GPT-3's tables give batch sizes in tokens as 0.5M, 1M, 1.5M (here 2^19, 2^20, 3 x 2^19 ...), sequences of 2048.
#: GPT-3 13B is printed with 5140 wide and 40 heads of 128; 40 x 128 = 5120 is what can be built.
PRESETS: dict[str, Preset] = {
    "tiny-1m": Preset(4, 4, 128, 128, 1e-3, 4096, _TINY),
    "tiny-3m": Preset(6, 6, 192, 256, 1e-3, 8192, _TINY),
    "tiny-10m": Preset(6, 6, 384, 256, 1e-3, 16384, _TINY),
    "tiny-modern-10m": Preset(6, 6, 384, 256, 1e-3, 16384, _TINY, _modern_block(1024)),
    "tiny-muon-1m": Preset(4, 4, 128, 128, 1e-2, 6144, _MUON, _modern_block(384), run={"optimizer": "muon"}),
    "tiny-muon-10m": Preset(6, 6, 384, 256, 4e-3, 16384, _MUON, _modern_block(1024), run={"optimizer": "muon"}),
    "tiny-moe-3m": Preset(4, 4, 128, 128, 1e-3, 4096, _TINY, _modern_block(384) | _experts(8, 2, 192)),
    "gpt2-124m": Preset(12, 12, 768, 1024, 6e-4, 2**19, _GPT2),
    "gpt2-350m": Preset(24, 16, 1024, 1024, 3e-4, 2**19, _GPT2),
    "gpt2-774m": Preset(36, 20, 1280, 1024, 2.5e-4, 2**19, _GPT2),
    "gpt2-1.5b": Preset(48, 25, 1600, 1024, 2e-4, 2**20, _GPT2),
    "gpt3-125m": Preset(12, 12, 768, 2048, 6e-4, 2**19, _GPT3),
    "gpt3-350m": Preset(24, 16, 1024, 2048, 3e-4, 2**19, _GPT3),
    "gpt3-760m": Preset(24, 16, 1536, 2048, 2.5e-4, 2**19, _GPT3),
    "gpt3-1.3b": Preset(24, 16, 2048, 2048, 2e-4, 2**20, _GPT3),
    "gpt3-2.7b": Preset(32, 32, 2560, 2048, 1.6e-4, 2**20, _GPT3),
    "gpt3-6.7b": Preset(32, 32, 4096, 2048, 1.2e-4, 2**21, _GPT3),
    "gpt3-13b": Preset(40, 40, 5120, 2048, 1e-4, 2**21, _GPT3),
    "gpt3-175b": Preset(96, 96, 12288, 2048, 0.6e-4, 3 * 2**20 + 2**17, _GPT3),
    "opt-125m": _opt(12, 12, 768, learning_rate=6e-4, global_batch_tokens=2**19),
    "opt-350m": _opt(24, 16, 1024, learning_rate=3e-4, global_batch_tokens=2**19),
    "opt-1.3b": _opt(24, 32, 2048, learning_rate=2e-4, global_batch_tokens=2**20),
    "opt-2.7b": _opt(32, 32, 2560, learning_rate=1.6e-4, global_batch_tokens=2**20),
    "opt-6.7b": _opt(32, 32, 4096, learning_rate=1.2e-4, global_batch_tokens=2**21),
    "opt-13b": _opt(40, 40, 5120, learning_rate=1e-4, global_batch_tokens=2**22),
    "opt-30b": _opt(48, 56, 7168, learning_rate=1e-4, global_batch_tokens=2**22),
    "opt-66b": _opt(64, 72, 9216, learning_rate=0.8e-4, global_batch_tokens=2**21),
    "opt-175b": _opt(96, 96, 12288, learning_rate=1.2e-4, global_batch_tokens=2**21),
    "gpt-modern-124m": Preset(12, 12, 768, 1024, 6e-4, 2**19, _MODERN, _modern_block(2048)),
    "gpt-modern-350m": Preset(24, 16, 1024, 1024, 3e-4, 2**19, _MODERN, _modern_block(2752)),
    "gpt-modern-1.5b": Preset(48, 25, 1600, 1024, 2e-4, 2**20, _MODERN, _modern_block(4288)),
    "llama3-1b": _llama3(16, 32, 2048, learning_rate=3e-4, source=_LLAMA32, block=_llama3_block(8, 8192, tied=True)),
    "llama3-3b": _llama3(28, 24, 3072, learning_rate=3e-4, source=_LLAMA32, block=_llama3_block(8, 8192, tied=True)),
    "llama3-8b": _llama3(32, 32, 4096, learning_rate=3e-4, source=_LLAMA3, block=_llama3_block(8, 14336, tied=False)),
    "llama3-70b": _llama3(
        80, 64, 8192, learning_rate=1.5e-4, source=_LLAMA3, block=_llama3_block(8, 28672, tied=False)
    ),
    "qwen3-0.6b": _qwen3(28, 16, 1024, learning_rate=3e-4, block=_qwen3_block(3072, tied=True)),
    "qwen3-1.7b": _qwen3(28, 16, 2048, learning_rate=3e-4, block=_qwen3_block(6144, tied=True)),
    "qwen3-4b": _qwen3(36, 32, 2560, learning_rate=3e-4, block=_qwen3_block(9728, tied=True)),
    "qwen3-8b": _qwen3(36, 32, 4096, learning_rate=3e-4, block=_qwen3_block(12288, tied=False)),
    "qwen3-32b": _qwen3(64, 64, 5120, learning_rate=1.5e-4, block=_qwen3_block(25600, tied=False)),
    "qwen3-30b-a3b": _qwen3(
        48,
        32,
        2048,
        learning_rate=3e-4,
        block=_qwen3_block(6144, tied=False, n_kv_head=4) | _experts(128, 8, 768),
    ),
    "mixtral-8x7b": Preset(
        32,
        32,
        4096,
        seq_len=32_768,
        learning_rate=3e-4,
        global_batch_tokens=2**22,
        source=_MIXTRAL,
        block={
            **_LLAMA_BLOCK,
            "n_kv_head": 8,
            "mlp_width": 14336,
            "tied": False,
            "rope_theta": 1e6,
            **_experts(8, 2, 14336),
        },
        vocab_size=32_000,
    ),
    "olmoe-1b-7b": Preset(
        16,
        16,
        2048,
        seq_len=4096,
        learning_rate=4e-4,
        global_batch_tokens=2**22,
        source=_OLMOE,
        block={
            **_LLAMA_BLOCK,
            "mlp_width": 1024,
            "tied": False,
            "qk_norm": "width",
            **_experts(64, 8, 1024),
            "normalize_router": False,
        },
        vocab_size=50_304,
    ),
    "smollm2-135m": _smollm2(30, 9, 576, learning_rate=3e-3, global_batch_tokens=2**20, block=_smollm2_block(3, 1536)),
    "smollm2-360m": _smollm2(32, 15, 960, learning_rate=3e-3, global_batch_tokens=2**20, block=_smollm2_block(5, 2560)),
    "smollm2-1.7b": _smollm2(
        24, 32, 2048, learning_rate=5e-4, global_batch_tokens=2**21, block=_smollm2_block(32, 8192)
    ),
}


def get_preset(name: str) -> Preset:
    """Return the preset of that name. Raises ConfigError with the closest and all legal names."""
    if name not in PRESETS:
        hint = describe_stranger(Path(name)) or forgotten_prefix(name) or _suggest(name)
        raise ConfigError(
            f"model '{name}' is not a preset.{hint} Presets: {', '.join(PRESETS)}. "
            "For any other shape give n_layer, n_head and n_embd."
        )
    return PRESETS[name]


def _suggest(name: str) -> str:
    """Return a hint at the preset that a name probably means: of the same family, and the nearest in size."""
    plain = name.lower().replace("_", "-")
    if plain in PRESETS or plain.replace("-", "_") in OTHER_NAMES:
        return did_you_mean(name, PRESETS)
    family = _family(plain)
    alike = [preset for preset in PRESETS if _family(preset) == family]
    if not alike:
        meant = difflib.get_close_matches(plain, PRESETS, n=1, cutoff=_MISSPELT)
        if meant:
            return f" Did you mean {meant[0]!r}?"
        return " A published model is named hf:ORGANISATION/NAME, or hf:FOLDER."
    generation = plain.split("-")[0]
    if generation != family:  # gpt3, of gpt2 and gpt3
        alike = [preset for preset in alike if preset.split("-")[0] == generation] or alike
    size = re.search(r"-(\d+(?:\.\d+)?[mb])(?![a-z0-9])", plain)
    if size and float(size[1][:-1]) > 0:
        wanted = parse_quantity(size[1])
        nearest = min(alike, key=lambda preset: abs(math.log(nominal_parameters(preset) / wanted)))
        return f" Did you mean {nearest!r}?"
    return did_you_mean(name, alike)


def _family(name: str) -> str:
    """Return the words of a name before its first number: gpt of gpt2-124m, gpt-j of gpt-j-6b."""
    words = re.match("[a-z]+(?:-[a-z]+(?![a-z0-9.]))*", name)
    return words[0] if words else ""


def nominal_parameters(name: str) -> float:
    """Return the size in a preset's name, or the actual size for families whose names are rounded more.

    GPT-2 and GPT-3 sizes are for GPT-2's vocabulary; those of tiny presets count only the blocks.
    """
    preset = PRESETS[name]
    if preset.vocab_size != _GPT2_VOCAB:
        return preset.shape(preset.vocab_size).num_parameters
    return parse_quantity(name.rpartition("-")[2])


def nearest_preset(shape: GPTShape) -> str:
    """Return the name of the preset with the nearest size, as a ratio; of those with experts if the shape has them.

    Presets with keys of a run are left out: their learning rates are for these.
    """
    alike = [
        name
        for name, preset in PRESETS.items()
        if ("num_experts" in preset.block) == bool(shape.num_experts) and not preset.run
    ]
    return min(alike, key=lambda name: abs(math.log(nominal_parameters(name) / shape.num_parameters)))
