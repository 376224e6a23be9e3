"""The rungs of ladder.py: each adds one thing to the previous one. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A model that the ladder trains."""

    preset: str
    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    batch: int
    """Sequences per step and rank."""
    cpu_batch: int
    """Sequences per step and rank on a CPU, where the first rung's steps would take minutes."""


VOCAB_SIZE = 50257
MODELS = {
    "seed": Model("tiny-10m", 4, 4, 256, 512, 32, 4),
    "gpt2-124m": Model("gpt2-124m", 12, 12, 768, 1024, 8, 1),
}


@dataclass(frozen=True)
class Rung:
    name: str
    switch: str | None = None
    """Field of ladder_gpt.Ways that it turns on; None for train.py."""
    flags: tuple[str, str] | tuple[()] = ()
    """Flag and value that it adds to train.py's command line."""
    is_parallel: bool = False
    """True if this rung and all later ones run on several ranks."""
    needs: str = ""
    """Requirement of the rung: "gpu", "bf16" (instructions for it), "inductor", "ranks" or none."""


#: Number of the first rung that is train.py.
FIRST_OF_TRAIN_PY = 8


def list_rungs(configs: Path) -> list[Rung]:
    """Return the rungs in order; `configs` is the folder of ds_configs."""

    def ds(name: str) -> tuple[str, str]:
        return "--ds", str(configs / f"{name}.json")

    return [
        Rung("naive loop", "none"),
        Rung("one product for q, k and v", "one_product"),
        Rung("fused attention", "fused_attention"),
        Rung("bf16", "bf16", needs="bf16"),
        Rung("losses read every 10 steps", "reads_loss_every", needs="gpu"),
        Rung("gradients set to None", "zero_to_none"),
        Rung("fused AdamW", "fused_adamw"),
        Rung("loss in chunks", "chunked_loss"),
        Rung("train.py, ZeRO-0", flags=ds("zero0")),
        Rung("compiled blocks", flags=("--compile", "on"), needs="inductor"),
        Rung("activation checkpointing", flags=("--activation-checkpointing", "full")),
        Rung("more ranks, ZeRO-0", is_parallel=True, needs="ranks"),
        Rung("ZeRO-1", flags=ds("zero1")),
        Rung("ZeRO-2", flags=ds("zero2")),
        Rung("ZeRO-3", flags=ds("zero3")),
        Rung("offload to the host", flags=ds("zero3_offload"), needs="gpu"),
    ]


def why_not(rung: Rung, *, is_gpu: bool, world_size: int, precision: str) -> str | None:
    """Return why this rung is not run on this machine, or None."""
    if rung.needs == "gpu" and not is_gpu:
        waits = rung.switch == "reads_loss_every"
        return "a CPU has nothing to wait for" if waits else "a CPU's tensors are in the host's memory already"
    if rung.needs == "bf16" and precision == "fp32":
        return "no instructions for bf16 here, or --precision fp32"
    if rung.needs == "inductor" and not is_gpu and precision != "fp32":
        return "torch 2.13's inductor fails in bf16 on a CPU; --precision fp32 shows it"
    if rung.needs == "ranks" and world_size == 1:
        return "one device"
    return None


def is_parallel(rungs: list[Rung], number: int) -> bool:
    return any(rung.is_parallel for rung in rungs[: number + 1])


def switches(rungs: list[Rung], number: int, left_out: set[str]) -> dict[str, object]:
    """Return the arguments of ladder_gpt.Ways for a lower rung, without those that need what is `left_out`."""
    on = [rung.switch for rung in rungs[1 : number + 1] if rung.switch and rung.needs not in left_out]
    return {name: 10 if name == "reads_loss_every" else True for name in on}


def flags(rungs: list[Rung], number: int, left_out: set[str]) -> dict[str, str]:
    """Return the flags that a rung and those below it add to train.py's command line."""
    merged = dict([rungs[FIRST_OF_TRAIN_PY].flags])
    for rung in rungs[: number + 1]:
        if rung.needs not in left_out and rung.flags:
            merged |= dict([rung.flags])
    return merged
