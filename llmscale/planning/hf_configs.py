"""What DeepSpeed leaves for the activations of a transformers model, of which the states alone are known. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.hf_config import HFModel
from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.deepspeed.resolve import resolve_ds_config
from llmscale.config.deepspeed.schema import Precision, ResolvedDsConfig
from llmscale.config.optimizers import ADAMW
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.memory.hf_states import HFStates, estimate_hf_states
from llmscale.memory.zero_settings import ZeroSetup
from llmscale.planning.largest_micro_batch import Machines
from llmscale.planning.strategy import DEFAULT_NVME_PATH, Strategy, legal_strategies, strategy_of


@dataclass(frozen=True)
class HFConfig:
    """One ds_config without activation checkpointing."""

    strategy: Strategy
    states: HFStates
    room_bytes: int
    """For activations; negative: missing."""
    ds_config: ResolvedDsConfig

    @property
    def fits(self) -> bool:
        return self.room_bytes > 0


def find_hf_configs(
    model: HFModel, machines: Machines, precision: Precision, global_batch_size: int | None
) -> list[HFConfig]:
    """Every stage and offload that DeepSpeed can train."""
    ranks = ParallelLayout(machines.world_size)
    # Only whether there is accumulation matters to the states; most runs have it.
    plan = build_batch_plan(
        global_batch_size=global_batch_size or 2 * ranks.data_parallel_size, ranks=ranks, seq_len=1, micro_batch_size=1
    )
    found = []
    for ds, mode in legal_strategies(precision, DEFAULT_NVME_PATH, ("none",)):
        resolved = ResolvedDsConfig.model_validate(resolve_ds_config(ds, model, plan))
        states = estimate_hf_states(model, ZeroSetup(resolved, ranks.shard_ranks, ADAMW))
        room = states.room_bytes(machines.gpu_bytes)
        spare = machines.gpu_bytes - states.estimate.total_bytes
        found.append(HFConfig(strategy_of(ds, mode), states, min(room, spare) if spare < 0 else room, resolved))
    return found


def roomiest(configs: list[HFConfig]) -> HFConfig:
    """The one that leaves most for activations, without offload if one of those fits; else what misses least."""
    fitting = [config for config in configs if config.fits]
    on_gpu = [config for config in fitting if config.strategy.offload == "-"]
    return max(on_gpu or fitting or configs, key=lambda config: config.room_bytes)
