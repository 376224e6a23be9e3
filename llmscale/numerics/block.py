"""The run's own block: two layers of each kind at full width, on weights and tokens that hide nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.deepspeed.schema import Precision
from llmscale.config.hf_model import is_published, read_published_model, with_published_shape
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run, with_ds_keys
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig

#: Samples of the data that a check pretends to have: more than any schedule needs.
_SAMPLES = 10**9
#: Context of a run that names none.
_SEQ_LEN = 1024
#: Micro-batches of a rank, and sequences of each, at most.
_MICRO_STEPS = 3
_SEQUENCES = 2
#: Tokens of a micro-batch: enough for sums over tokens in 16 bit to show, and on a CPU few enough for a minute.
_TOKENS = 1024
_LEAST_TOKENS = 32
_CPU_PRODUCTS = 4 * 10**9
#: Share of tokens that end a document.
_ENDS = 0.08


@dataclass(frozen=True)
class Case:
    """A run to check, and what is changed in it."""

    config: RunConfig
    ds: DsConfig
    precision: Precision | None = None
    """Precision in place of the run's."""
    micro_steps: int = _MICRO_STEPS
    steps: int = 2
    math_attention: bool = False
    """True if attention takes torch's plain kernel."""
    one_chunk: bool = False
    """True if the loss of a micro-batch is computed at once."""
    vocab_size: int = 1000
    seq_len: int | None = None
    """Tokens of a sequence; None for as many as the machine computes in seconds."""

    @property
    def chosen_precision(self) -> Precision:
        return self.precision or self.ds.with_flags(self.config.precision, None).precision


def read_case(flags: Sequence[str]) -> Case:
    """Return the case of a run's flags. Raises ConfigError."""
    config = parse_run_config(flags)
    ds = read_ds_config(Path(config.ds))
    config = with_ds_keys(config, ds)
    if is_published(config.model):
        config = with_published_shape(config, read_published_model("--model", config.model, config))
    return Case(config, ds)


@dataclass(frozen=True)
class Block:
    """The resolved block of a run."""

    config: RunConfig
    resolved: ResolvedRun
    full: ResolvedRun
    """The run itself."""
    lr: float
    fillers: int = field(default=0)
    """Micro-batches without sequences in the last micro-step."""


def cut_block(case: Case, world_size: int, *, on_gpu: bool) -> Block:
    """Resolve a case, cut to what a few seconds can compute. Raises ConfigError."""
    ds = case.ds
    neutral = {
        "seq_len": None,
        "vocab_size": None,
        "steps": None,
        "tokens": None,
        "minutes": None,
        "batch_ramp_from": None,
        "batch_ramp_tokens": None,
        "seq_len_ramp_from": None,
        "seq_len_ramp_tokens": None,
        "overfit_batch": None,
    }
    config = case.config.model_copy(update=neutral)
    facts = SetFacts(case.vocab_size, case.config.seq_len or _SEQ_LEN, _SAMPLES, case.vocab_size - 1)
    full = resolve_run(config, ds, facts, world_size)
    update = _fewer_layers(full)
    update["precision"] = case.precision or config.precision
    sequences = min(full.plan.micro_batch_size, _SEQUENCES)
    one = resolve_run(config.model_copy(update=update), ds, facts, world_size)
    affordable = _CPU_PRODUCTS // one.shape.num_parameters
    tokens = max(_LEAST_TOKENS, 1 << affordable.bit_length() - 1 if affordable else 0)
    seq_len = case.seq_len or (_TOKENS if on_gpu else min(_TOKENS, tokens)) // sequences
    ranks = full.plan.ranks
    if ranks.sequence_parallel_size > 1 and seq_len % ranks.sequence_parallel_size == 0:
        seq_len -= 1  # uneven parts
    update |= _shorter(case, full, seq_len, sequences * seq_len)
    micro_steps = min(full.plan.gradient_accumulation_steps, case.micro_steps)
    groups = ranks.data_parallel_size
    # Without accumulation none: a rank without gradients would hide what it does to them.
    has_fillers = full.plan.computed(full.plan.global_batch_size) > full.plan.global_batch_size
    fillers = int(has_fillers and groups > 1 and micro_steps > 1)
    update |= {
        "micro_batch_size": sequences,
        "global_batch_size": sequences * (micro_steps * groups - fillers),
        "global_batch_tokens": None,
    }
    config = config.model_copy(update=update)
    resolved = resolve_run(config, ds, replace(facts, seq_len=seq_len), world_size)
    resolved = _with_buckets(resolved if on_gpu else resolved.on_cpu())
    return Block(config, resolved, full, resolved.schedule.lr, fillers)


def _fewer_layers(full: ResolvedRun) -> dict[str, object]:
    """Return the keys of two layers of each kind."""
    shape = full.shape
    update: dict[str, object] = {"n_layer": 2, "dropout": 0.0}
    if shape.num_experts:
        update |= {"dense_layers": min(shape.dense_layers, 1), "expert_interval": 1}
    if len(shape.window_pattern) > 2:
        update["window_pattern"] = "LG"
    return update


def _shorter(case: Case, full: ResolvedRun, seq_len: int, tokens: int) -> dict[str, object]:
    """Return the keys of windows, chunks and tiles of which a micro-batch has several."""
    if case.one_chunk:
        chunk = tokens
    else:
        chunk = max(1, tokens // 2)
    update: dict[str, object] = {"loss_chunk_tokens": min(case.config.loss_chunk_tokens, chunk)}
    if full.shape.sliding_window:
        update["sliding_window"] = min(full.shape.sliding_window, max(1, seq_len // 4))
    if full.shape.mlp_tile_tokens:
        update["mlp_tile_tokens"] = min(full.shape.mlp_tile_tokens, max(1, tokens // 4))
    return update


def _with_buckets(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with reduction buckets of which its gradients fill several."""
    section = resolved.ds_config["zero_optimization"]
    if not isinstance(section, dict) or "reduce_bucket_size" not in section:
        return resolved
    size = min(int(section["reduce_bucket_size"]), max(1, resolved.shape.num_parameters // 3))
    zero = {**section, "reduce_bucket_size": size}
    return replace(resolved, ds_config={**resolved.ds_config, "zero_optimization": zero})


def with_clipping(block: Block, norm: float) -> Block:
    """Return the block with a clipping that clips: at half of its first norm, if the run clips at all."""
    resolved = block.resolved
    if not resolved.ds_config["gradient_clipping"]:
        return block
    return replace(block, resolved=replace(resolved, ds_config={**resolved.ds_config, "gradient_clipping": norm / 2}))


def first_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Draw weights that hide nothing: no zero bias, no norm of 1, attention that is uneven, routers that choose."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        x = torch.randn(tuple(shape), generator=generator)
        if "norm" in name or re.search(r"ln_\w+\.weight", name):
            weights[name] = 1 + 0.1 * x
        elif len(shape) == 1:
            weights[name] = 0.05 * x
        elif "router" in name:
            weights[name] = x * (2.0 / math.sqrt(shape[-1]))
        elif name in ("wte.weight", "wpe.weight", "head.weight"):
            weights[name] = 0.1 * x
        else:
            weights[name] = x * (0.7 / math.sqrt(shape[-1]))
    return weights


def global_batch(step: int, resolved: ResolvedRun) -> list[Tensor]:
    """Return a step's micro-batches over all ranks, ids [sequences, t + 1], with documents of uneven lengths."""
    plan = resolved.plan
    vocab_size = resolved.shape.vocab_size
    generator = torch.Generator().manual_seed(1000 + step)
    size = (plan.global_batch_size, plan.seq_len + 1)
    tokens = torch.randint(0, vocab_size - 1, size, generator=generator)
    ends = torch.rand(size, generator=generator) < _ENDS
    return list(torch.where(ends, vocab_size - 1, tokens).split(plan.micro_batch_size))


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch."""

    micro_batches: list[Tensor]
    weights: list[float]
    """Weight of each micro-batch's loss; 0 for a filler."""
    to_verify: list[Tensor]
    """Micro-batches that this rank computes with the plain model: those of all ranks are the global batch."""


def share_of(rank: int, resolved: ResolvedRun, batch: Sequence[Tensor]) -> Share:
    """Return the part of a rank; a filler repeats the first micro-batch."""
    plan = resolved.plan
    layout = plan.ranks
    groups = plan.ranks.data_parallel_size
    places = [step * groups + layout.group_of(rank) for step in range(plan.gradient_accumulation_steps)]
    weight = plan.loss_weight(plan.global_batch_size)
    own = [place for place in places if place < len(batch)]
    parts = layout.sequence_parallel_size
    return Share(
        [batch[place if place < len(batch) else 0] for place in places],
        [weight if place < len(batch) else 0.0 for place in places],
        [batch[place] for place in own[rank % parts :: parts]],
    )
