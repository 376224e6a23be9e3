"""The grid of memory_grid.py: which model, under which ds_config, at which micro-batch. No torch."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_SIZE = 50257


@dataclass(frozen=True)
class Cell:
    """One run of the grid, on one GPU."""

    model: str
    """A preset."""
    zero_stage: int
    offload: str
    """"none", "optimizer" (its states in host memory) or "parameters" (these too; stage 3)."""
    checkpointing: str
    """"none", "selective" or "full"."""
    micro_batch_size: int
    precision: str = "bf16"
    gradient_accumulation_steps: int = 2
    seq_len: int | None = None
    """Tokens; None is the preset's."""

    @property
    def name(self) -> str:
        parts = [self.model, f"z{self.zero_stage}", self.precision, f"mb{self.micro_batch_size}"]
        parts += [f"offload-{self.offload}"] if self.offload != "none" else []
        parts += [self.checkpointing] if self.checkpointing != "none" else []
        parts += [f"acc{self.gradient_accumulation_steps}"] if self.gradient_accumulation_steps != 2 else []
        parts += [f"seq{self.seq_len}"] if self.seq_len else []
        return "-".join(parts)

    def ds_config(self) -> dict[str, object]:
        """The ds_config file that a user would write for it."""
        zero: dict[str, object] = {"stage": self.zero_stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        config: dict[str, object] = {"zero_optimization": zero}
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True}
        if self.precision == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config


def list_cells() -> list[Cell]:
    """Ordered from small to large, so that a run that is cut short has covered every stage."""
    small = [
        Cell("gpt2-124m", stage, "none", checkpointing, micro_batch_size)
        for stage in (0, 1, 2, 3)
        for checkpointing, micro_batch_size in (("none", 4), ("none", 16), ("selective", 8), ("full", 16))
    ]
    precisions = [
        Cell("gpt2-124m", stage, "none", "none", 8, precision)
        for stage, precision in ((0, "fp32"), (2, "fp32"), (2, "autocast"), (3, "autocast"), (1, "fp16"), (3, "fp16"))
    ]
    accumulation = [Cell("gpt2-350m", stage, "none", "none", 4, "bf16", 1) for stage in (1, 2, 3)]
    long = [Cell("gpt3-350m", 2, "none", "full", 2, seq_len=8192)]
    medium = [
        Cell("gpt2-774m", stage, "none", checkpointing, micro_batch_size)
        for stage in (1, 2, 3)
        for checkpointing, micro_batch_size in (("none", 2), ("selective", 4), ("full", 8))
    ]
    offload = [
        Cell("gpt2-1.5b", stage, where, "full", 4)
        for stage, where in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters"))
    ]
    large = [
        *(Cell("gpt3-2.7b", stage, "none", "full", 2) for stage in (1, 2, 3)),
        *(Cell("gpt3-2.7b", stage, "optimizer", "full", 4) for stage in (2, 3)),
        *(Cell("gpt3-6.7b", stage, "optimizer", "full", micro) for stage in (2, 3) for micro in (1, 4)),
        Cell("gpt3-6.7b", 3, "parameters", "full", 2),
    ]
    return [*small, *precisions, *accumulation, *long, *medium, *offload, *large]
