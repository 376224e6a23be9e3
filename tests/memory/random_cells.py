"""Random steps whose memory is compared: models, stages, precisions, offloads, optimizers and their settings."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field

from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.loss_settings import LossSettings
from llmscale.config.optimizers import ADAFACTOR, ADAMW, MUON
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.errors import ConfigError

OPTIMIZERS = {optimizer.name: optimizer for optimizer in (ADAMW, MUON, ADAFACTOR)}
MODES: tuple[CheckpointingMode, ...] = ("none", "selective", "full")
LARGE = (
    *("gpt2-124m", "gpt2-350m", "gpt2-1.5b", "gpt3-2.7b", "gpt3-13b", "gpt-modern-350m", "llama3-1b", "llama3-8b"),
    *("llama3-70b", "qwen3-0.6b", "qwen3-8b", "smollm2-135m", "smollm2-1.7b", "tiny-moe-3m", "olmoe-1b-7b"),
    *("mixtral-8x7b", "qwen3-30b-a3b"),
)
SMALL = ("tiny-10m", "gpt2-124m", "gpt-modern-124m", "smollm2-135m", "tiny-moe-3m")


@dataclass(frozen=True)
class Cell:
    """A step in the words of a user."""

    model: str
    change: dict[str, object]
    ds: dict[str, object]
    mode: CheckpointingMode
    ranks: int
    micro_batch: int
    accumulation: int
    optimizer: str
    chunk_tokens: int
    frozen: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int:
        zero = self.ds["zero_optimization"]
        assert isinstance(zero, dict)
        return zero["stage"]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def resolve(self) -> ResolvedStep:
        """Raises ConfigError for settings that do not go together."""
        shape = PRESETS[self.model].shape(50_257).changed(self.change)
        optimizer = OPTIMIZERS[self.optimizer]
        if self.frozen:
            optimizer = optimizer.with_rules([], self.frozen, shape.tensors.all)
        balance = 0.01 if shape.num_experts and not shape.router_bias else 0.0
        plan = build_batch_plan(
            global_batch_size=self.micro_batch * self.accumulation * self.ranks,
            ranks=ParallelLayout(self.ranks),
            seq_len=shape.seq_len,
            micro_batch_size=self.micro_batch,
        )
        loss = LossSettings(chunk_tokens=self.chunk_tokens, balance_loss=balance)
        return resolve_step(parse_ds_config(self.ds, "cell"), shape, plan, self.mode, optimizer, loss)


def draw_cell(rng: random.Random, models: tuple[str, ...] = LARGE, **change: object) -> Cell:
    """Return a random cell that resolves; `change` is part of every one."""
    while True:
        cell = _draw(rng, rng.choice(models), dict(change))
        try:
            cell.resolve()
        except ConfigError:
            continue
        return cell


def _draw(rng: random.Random, model: str, change: dict[str, object]) -> Cell:
    stage, ranks = rng.choice([0, 1, 1, 2, 2, 3, 3, 3]), rng.choice([1, 1, 2, 8, 8, 64])
    precision, mode = rng.choice(["bf16"] * 5 + ["fp16", "fp32", "autocast"]), rng.choice(MODES)
    accumulation = rng.choice([1, 2, 4])
    ds: dict[str, object] = {"zero_optimization": _draw_zero(rng, stage)}
    if precision != "fp32":
        ds["torch_autocast" if precision == "autocast" else precision] = {"enabled": True}
    if mode == "full" and rng.random() < 0.15:
        ds["activation_checkpointing"] = {"cpu_checkpointing": True}
    if accumulation > 1 and precision == "bf16" and rng.random() < 0.15:
        ds["data_types"] = {"grad_accum_dtype": "bf16"}
    optimizer = rng.choice([MUON, ADAFACTOR] if stage == 0 else [MUON]) if rng.random() < 0.2 else ADAMW
    return Cell(
        model=model,
        change=change | _draw_change(rng, model),
        ds=ds,
        mode=mode,
        ranks=ranks,
        micro_batch=rng.choice([1, 1, 2, 4, 8, 16]),
        accumulation=accumulation,
        optimizer=optimizer.name,
        chunk_tokens=rng.choice([2048, 2048, 2048, 512, 8192]),
        frozen=[rng.choice(["blocks.0.*", "blocks.*.attn.*"])] if rng.random() < 0.05 else [],
    )


def _draw_zero(rng: random.Random, stage: int) -> dict[str, object]:
    zero: dict[str, object] = {"stage": stage}
    if stage and rng.random() < 0.3:
        device = rng.choice(
            [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/x"}] if stage == 3 else [{"device": "cpu"}]
        )
        zero["offload_optimizer"] = device
        if stage == 3 and rng.random() < 0.6:
            zero["offload_param"] = device
    if stage in (1, 2) and rng.random() < 0.15:
        zero["overlap_comm"] = True
    if stage and rng.random() < 0.2:
        zero["reduce_bucket_size"] = rng.choice([10_000_000, 50_000_000])
    return zero


def _draw_change(rng: random.Random, model: str) -> dict[str, object]:
    """Return a change of the model's blocks."""
    shape = PRESETS[model].shape(50_257)
    is_gpt2 = shape.positions == "learned"
    change: dict[str, object] = {}
    if rng.random() < 0.2:
        change["dropout"] = 0.1
    elif rng.random() < 0.2 and not is_gpt2:
        change[rng.choice(["document_end", "sliding_window"])] = 256
    if is_gpt2 and rng.random() < 0.3:
        change |= rng.choice([{"activation": "relu"}, {"bias": False}, {"document_end": 0}, {"tied": False}])
    if not is_gpt2 and not shape.num_experts and rng.random() < 0.4:
        change |= rng.choice(
            [
                {"attention_bias": "qkv", "qk_norm": "none", "norm_placement": "pre"},
                {"qk_norm": "head"},
                {"qk_norm": "width", "norm_placement": "post", "attention_bias": "none"},
                {"tied": not shape.tied},
            ]
        )
    if rng.random() < 0.1:
        change["head_dim"] = rng.choice([80, 96, 160])
    if shape.num_experts and rng.random() < 0.3:
        change["dense_layers"] = 1
    return change
