"""Settings of engines without a bug, in which no check may raise an alarm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

GPT2 = "--n-layer 2 --n-head 4 --n-embd 32 --optimizer adamw --lr 1e-3 --global-batch-size 12 --micro-batch-size 2"
MODERN = (
    "--model tiny-modern-10m --n-head 4 --n-kv-head 2 --n-embd 32 --mlp-width 96 --lr 1e-3 "
    "--global-batch-size 12 --micro-batch-size 2"
)
MOE = (
    "--model tiny-moe-3m --n-head 4 --n-embd 32 --mlp-width 64 --expert-width 48 --num-experts 4 --lr 1e-3 "
    "--global-batch-size 12 --micro-batch-size 2"
)
CPU = {"device": "cpu"}
#: Files that llmscale does not bring.
OWN_DS = {
    "overlap2": {"stage": 2, "overlap_comm": True},
    "overlap1": {"stage": 1, "overlap_comm": True},
    "offload1": {"stage": 1, "offload_optimizer": CPU},
    "scatter1": {"stage": 1, "reduce_scatter": False},
    "bucket2": {"stage": 2, "reduce_bucket_size": 3000, "allgather_bucket_size": 3000},
    "round2": {"stage": 2, "round_robin_gradients": True},
    "plain2": {"stage": 2, "contiguous_gradients": False},
    "all3": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 5000,
        "sub_group_size": 8000,
    },
    "scatter3": {"stage": 3, "reduce_scatter": False},
    "params3": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    # Weights that stay gathered have no copies.
    "hpz3": {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    },
    **{f"bf16_{stage}": {"stage": stage} for stage in (1, 2, 3)},
}


class Setting(NamedTuple):
    """Flags of a run, its ranks, and the tokens of a sequence."""

    flags: str
    ranks: int = 2
    seq_len: int = 32


def with_own_ds(flags: str, folder: Path) -> list[str]:
    """Words of flags, the last of equal ones, with files of ours written into a folder."""
    words: dict[str, list[str]] = {}
    for part in re.split(r" (?=--)", flags):
        name, *values = part.split()
        words[name] = values
    own = words.get("--ds", [""])[0]
    if own in OWN_DS:
        path = folder / f"{own}.json"
        states = dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), own.startswith("bf16_"))
        path.write_text(json.dumps({"zero_optimization": OWN_DS[own], "bf16": {"enabled": True, **states}}))
        words["--ds"] = [str(path)]
    return [word for name, values in words.items() for word in (name, *values)]


def honest_settings() -> list[Setting]:
    """The prototype's settings, and others that came with fillers, hpZ and larger groups."""
    settings = [*_stages(), *_ds_configs(), *_models()]
    for precision in ("fp32", "bf16"):
        settings += [
            Setting(f"{GPT2} --ds zero{stage} --precision {precision} --global-batch-size 10") for stage in range(4)
        ]
        settings += [
            Setting(f"{GPT2} --ds hpz3 --precision {precision}"),
            Setting(f"{MOE} --ds zero2 --precision {precision} --global-batch-size 10 --expert-parallel-size 2"),
            Setting(f"{GPT2} --ds zero1 --precision {precision} --optimizer muon --global-batch-size 10"),
            Setting(
                f"{MODERN} --ds zero2 --precision {precision} --sequence-parallel-size 2 --global-batch-size 6", 2, 31
            ),
            Setting(f"{GPT2} --ds zero2 --precision {precision}", 1, 512),
        ]
    return settings


def _stages() -> list[Setting]:
    settings = []
    for stage in range(4):
        for precision in ("fp32", "bf16", "fp16", "autocast"):
            for ranks in (1, 2) if stage or precision != "fp16" else ():
                batch = 12 if (stage + ranks) % 2 else 4
                clip = "0" if stage == 1 and precision in ("bf16", "fp32") else "1.0"
                checkpointing = ("none", "full", "selective")[(stage + ranks) % 3]
                flags = (
                    f"--global-batch-size {batch} --gradient-clipping {clip} --activation-checkpointing {checkpointing}"
                )
                settings.append(Setting(f"{GPT2} --ds zero{stage} --precision {precision} {flags}", ranks))
    return settings


def _ds_configs() -> list[Setting]:
    settings = [
        Setting(f"{GPT2} --ds {ds} --precision {precision} --global-batch-size {batch}")
        for ds in ("zero2_offload", "zero3_offload", "offload1", "params3")
        for precision in ("fp32", "bf16", "fp16")
        for batch in (4, 12)
    ]
    names = ("overlap2", "overlap1", "scatter1", "bucket2", "round2", "plain2", "all3", "scatter3")
    settings += [Setting(f"{GPT2} --ds {ds} --precision {precision}") for ds in names for precision in ("bf16", "fp32")]
    settings += [
        Setting(f"{model} --ds bf16_{stage} --precision bf16 --global-batch-size {batch}", ranks)
        for stage in (1, 2, 3)
        for model, batch, ranks in ((GPT2, 4, 2), (MODERN, 12, 2), (MOE, 12, 1))
    ]
    return settings


def _models() -> list[Setting]:
    settings = []
    for precision in ("fp32", "bf16"):
        for stage in range(4):
            head = f"--ds zero{stage} --precision {precision}"
            settings.append(Setting(f"{GPT2} {head} --optimizer muon"))
            settings.append(Setting(f"{MODERN} {head} --document-mask"))
            settings.append(Setting(f"{MOE} {head} --z-loss 1e-3 --router-z-loss 1e-3"))
            if stage:
                settings.append(Setting(f"{MOE} {head} --expert-parallel-size 2"))
            if stage != 1:
                divided = "--sequence-parallel-size 2 --global-batch-size 6"
                settings.append(Setting(f"{GPT2} {head} {divided}", 2, 31))
        tail = f"--precision {precision}"
        groups = "--param-group wte*:lr=0.1x:decay=0,blocks.1.attn.*:lr=2x"
        settings += [
            Setting(f"{GPT2} --ds zero0 {tail} --optimizer adafactor"),
            Setting(f"{GPT2} --ds zero2 {tail} --no-tied"),
            Setting(f"{MODERN} --ds zero3 {tail} --no-tied --qk-norm width --norm-placement post"),
            Setting(f"{MODERN} --ds zero2 {tail} --sliding-window 8 --window-pattern LG", 1),
            Setting(f"{MOE} --ds zero2 {tail} --router-score sigmoid --router-bias --shared-expert-width 32"),
            Setting(f"{GPT2} --ds zero2 {tail} {groups}"),
            Setting(f"{MODERN} --ds zero3 {tail} --optimizer muon --lora-rank 4"),
            Setting(f"{GPT2} --ds zero1 {tail} --lora-rank 4 --lora-targets attention"),
            Setting(f"{GPT2} --ds zero2 {tail} --freeze wte.weight,blocks.0.*"),
            Setting(f"{GPT2} --ds zero2 {tail} --z-loss 1e-2 --loss-chunk-tokens 8", 1),
            Setting(f"{MODERN} --ds zero2 {tail} --mlp-tile-tokens 16", 1),
            Setting(f"{MODERN} --ds zero2 {tail} --rope-scaling llama3:8,1,4,16", 1),
            Setting(f"{GPT2} --ds zero3 {tail} --optimizer muon --muon-lr-factor 3", 1),
        ]
    return settings
