"""What gpu.py runs, in the order of what it is worth: a run that is cut short has what matters most. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory_cells import list_cells

GPT2_VOCAB, LLAMA_VOCAB = 50_257, 128_256


@dataclass(frozen=True)
class Cell:
    """One process: train.py, nanoGPT's train.py, or a cell of memory_grid.py."""

    kind: str
    """"train", "nanogpt" or "grid"."""
    model: str
    """A preset, or of the grid a cell's name."""
    zero_stage: int = 1
    compiled: bool = False
    offload: str = "none"
    """"none", "optimizer" or "parameters"."""
    n_layer: int | None = None
    """Blocks instead of the preset's: what does not fit as a whole has the speed of its blocks in part."""
    micro_batch_sizes: Sequence[int] = (32, 16, 8, 4, 2, 1)
    """The first one that the memory estimate says fits is taken."""
    tokens_per_step: int = 2**17
    seq_len: int = 1024
    vocab_size: int = GPT2_VOCAB
    turn: int = 1
    """Which time the same is run: what is compared takes turns."""
    compared: bool = False
    """Whether it is one of the two whose speeds are compared: their micro-batch and step are the same."""
    least_s: float = 45
    """Below this there is no point in beginning."""

    @property
    def name(self) -> str:
        if self.kind == "grid":
            return f"memory {self.model}"
        words = [self.model if self.kind == "train" else f"nanoGPT {self.model}"]
        words += [f"{self.n_layer} blocks"] if self.n_layer else []
        words += [f"ZeRO-{self.zero_stage}"] if self.kind == "train" else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += ["compiled" if self.compiled else "eager"]
        words += [f"turn {self.turn}"] if self.turn > 1 else []
        return ", ".join(words)

    def ds_config(self, precision: str) -> dict[str, object]:
        """The ds_config file that a user would write for it; `precision`: bf16 or fp32."""
        zero: dict[str, object] = {"stage": self.zero_stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        return {"zero_optimization": zero, **({"bf16": {"enabled": True}} if precision == "bf16" else {})}


#: Both sides of the comparison have the same micro-batch and the same tokens per step.
_124M = {"model": "gpt2-124m", "micro_batch_sizes": (16, 8, 4), "tokens_per_step": 2**18}
_1_5B = {"model": "gpt2-1.5b"}
_LLAMA_1B = {"model": "llama3-1b", "seq_len": 8192, "vocab_size": LLAMA_VOCAB, "micro_batch_sizes": (4, 2, 1)}
_LLAMA_8B = {"model": "llama3-8b", "seq_len": 8192, "vocab_size": LLAMA_VOCAB, "micro_batch_sizes": (4, 2, 1)}
#: Small to large, and something of every stage: what context and reserve are calibrated with.
_GRID = (
    "gpt2-124m-z1-bf16-mb16-full",
    "gpt2-774m-z2-bf16-mb4-selective",
    "gpt2-124m-z3-bf16-mb16",
    "gpt2-1.5b-z2-bf16-mb4-offload-optimizer-full",
    "gpt2-124m-z0-bf16-mb16",
    "gpt2-774m-z3-bf16-mb8-full",
    "gpt2-350m-z2-bf16-mb4-acc1",
    "gpt3-2.7b-z1-bf16-mb2-full",
)


def list_gpu_cells() -> list[Cell]:
    """On one GPU."""
    pair = [Cell(kind, **_124M, compiled=True, compared=True) for kind in ("train", "nanogpt")]
    again = [replace(cell, turn=2) for cell in reversed(pair)]
    grid = [Cell("grid", name, least_s=25) for name in _GRID]
    stages = [Cell("train", **_124M, zero_stage=stage, compiled=True) for stage in (0, 2, 3)]
    sizes = [Cell("train", model, compiled=True) for model in ("gpt2-350m", "gpt2-774m")]
    eager = [
        *(Cell("train", model) for model in ("gpt2-350m", "gpt2-774m")),
        *(Cell("train", **_1_5B), Cell("train", **_LLAMA_1B)),
    ]
    offload = [
        Cell("train", **_1_5B, zero_stage=2, offload="optimizer", compiled=True, least_s=60),
        Cell("train", **_1_5B, zero_stage=3, offload="parameters", compiled=True, least_s=60),
    ]
    return [
        *pair,
        Cell("train", **_1_5B, compiled=True),
        *grid[:2],
        Cell("train", **_LLAMA_8B, n_layer=8, compiled=True),
        Cell("train", **_124M),
        *again,
        *grid[2:4],
        Cell("train", **_LLAMA_8B, zero_stage=2, offload="optimizer", compiled=True, least_s=240),
        *stages,
        Cell("train", **_LLAMA_1B, compiled=True),
        *sizes,
        *grid[4:6],
        *offload,
        Cell("train", **_1_5B, zero_stage=3, compiled=True),
        *eager,
        *(Cell("train", **_124M, zero_stage=stage) for stage in (0, 2, 3)),
        *grid[6:],
    ]


def list_cpu_cells() -> list[Cell]:
    """The same kinds of cells so small that a CPU runs them: shows that everything works, and no speed."""
    tiny = {"seq_len": 128, "n_layer": 1, "tokens_per_step": 512, "micro_batch_sizes": (2,), "least_s": 1}
    return [
        *(Cell(kind, "tiny-1m", compared=True, **tiny) for kind in ("train", "nanogpt")),
        *(Cell("train", "tiny-1m", stage, **tiny) for stage in (0, 2, 3)),
        Cell("train", "tiny-1m", 2, offload="optimizer", **tiny),
        Cell("train", "tiny-modern-10m", compiled=True, **tiny),
        Cell("grid", list_cells()[0].name, least_s=1),
    ]
