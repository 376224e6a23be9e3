"""Run folders as train.py leaves them, small."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmscale.training.run_folder import METRICS_VERSION

#: tiny-1m's.
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 4096, "seq_len": 256}
#: Of every kind that a file may hold, and none of it may become markup.
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1"><!--\x1b[2J\u202e'
#: Sets named like what every JavaScript object has.
OF_OBJECTS = {"constructor": 1.0, "toString": 1.0, "__proto__": 1.0}


def train(step: int, loss: float | None = None, **values: object) -> dict[str, object]:
    return {
        "kind": "train",
        "step": step,
        "tokens_seen": step * 1024,
        "loss": 3 + 5 / math.sqrt(step) if loss is None else loss,
        "z_loss": None,
        "lr": 1e-3 / step,
        "grad_norm": 1.0,
        "loss_scale": None,
        "tokens_per_second": 2048.0,
        "mfu": None,
        "peak_memory_bytes": 2**29,
        "data_wait_s": 0.1,
        "forward_backward_s": 0.2,
        "optimizer_step_s": 0.1,
        "other_s": 0.1,
        **values,
    }


def start(step: int = 0, history: int = 1, branches: Iterable[tuple[int, int]] = (), **values: object) -> dict:
    facts = {"metrics_version": METRICS_VERSION, "world_size": 2, "zero_stage": 1, "precision": "bf16", "device": "cpu"}
    more = {"tokenizer": "gpt2", "bytes_per_token": 4.0, "estimated_bytes": 2**28}
    place = {"step": step, "history": history, "branches": [list(branch) for branch in branches]}
    return {"kind": "event", "event": "start", **place, **facts, **more, **values}


def write_run(folder: Path, records: Iterable[Mapping[str, object] | str], **config: object) -> Path:
    """`records` are the lines of metrics.jsonl; a text stands as it is, and the last one has no end."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    description = {"config": {"model": "tiny-1m", **config}, "resolved": {"shape": SHAPE, "total_steps": 100}}
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def full_run(folder: Path, num_steps: int = 40, **config: object) -> Path:
    """Of every kind of record one or more, with a restart at half."""
    half = num_steps // 2
    return write_run(
        folder,
        [
            start(),
            *(train(step) for step in range(1, half + 1)),
            {"kind": "event", "event": "stopped", "step": half, "reason": "stopped by SIGTERM"},
            start(half, world_size=1, zero_stage=3),
            *(train(step) for step in range(half + 1, num_steps + 1)),
            {"kind": "validation", "step": num_steps, "loss": 3.5, "num_samples": 4, "bits_per_byte": 1.3},
            {"kind": "evaluation", "step": num_steps, "task": "hellaswag", "values": {"acc": 0.3}, "num_items": 9},
            {"kind": "sample", "step": num_steps, "prompt": "The ", "text": "The end"},
            {"kind": "event", "event": "loss_spike", "step": half + 1, "loss": 9.0, "loss_z": 8.0},
            {
                "kind": "event",
                "event": "expert_load",
                "step": num_steps,
                "blocks": [1, 3],
                "loads": [[2, 0], [0.5, 1.5]],
            },
            {"kind": "event", "event": "slow_rank", "rank": 1, "host": "b", "ratio": 1.5, "phase": "forward"},
            {"kind": "event", "event": "finished", "step": num_steps, "reason": "finished"},
        ],
        **config,
    )


def hostile_run(folder: Path) -> Path:
    """Whatever a file may hold that no run writes."""
    run = write_run(
        folder,
        [
            start(world_size=HOSTILE, zero_stage={"a": [1]}, tokenizer=HOSTILE, bytes_per_token=-1, device=[HOSTILE]),
            *(
                train(step, grad_norm=[1], mfu=True, loss_by_set={HOSTILE: 1.0, "x" * 5000: 2, **OF_OBJECTS})
                for step in (1, 2, 3)
            ),
            train(4, loss=math.nan),
            train(5, loss=math.inf, peak_memory_bytes=-5),
            train(6, lr=1e308),
            train(7, tokens_per_second=0),
            train(8, tokens_seen=1e300),
            *(train(1, 1.0) | {"step": step} for step in (10**30, -1, 1.5, HOSTILE, None, True)),
            {"kind": "evaluation", "step": 7, "task": HOSTILE, "values": {HOSTILE: 0.5, "b": "x", "c": math.nan}},
            {"kind": "evaluation", "step": 7, "task": [], "values": 7},
            {"kind": "sample", "step": 7, "prompt": HOSTILE, "text": HOSTILE * 500},
            {"kind": "event", "event": "loss_spike", "step": 5, "loss": HOSTILE, "samples": {"a": [HOSTILE] * 99}},
            {"kind": "event", "event": "slow_rank", "rank": HOSTILE, "host": HOSTILE, "ratio": HOSTILE},
            {"kind": "event", "event": "nonfinite", "step": 4, "parameters": [HOSTILE]},
            {
                "kind": "event",
                "event": "expert_load",
                "step": 4,
                "blocks": [HOSTILE],
                "loads": [[HOSTILE, 1, 9e99], []],
            },
            {"kind": "event", "event": "expert_load", "step": 5, "blocks": HOSTILE, "loads": [7]},
            {"kind": "event", "event": "collapsed_router", "step": 4, "blocks": {HOSTILE: 1}, "what": HOSTILE},
            {"kind": "event", "event": HOSTILE, "step": 4},
            {"kind": "event", "event": [], "step": 4},
            {"kind": "event", "event": "stopped", "reason": {HOSTILE: HOSTILE}},
            '{"kind":"train","step":9,"loss":1e999,"tokens_seen":' + "9" * 300 + "}\n",
            '{"a":' * 10_000 + "\n",
            "x" * 10_000_000 + "\n",
            "null\n",
            "\x00\x01\n",
            '{"kind": "tra',
        ],
    )
    config = {"model": HOSTILE, "data": HOSTILE, HOSTILE: {"a": {"b": HOSTILE}}}
    shape = {**SHAPE, "n_layer": 10**18}
    (run / "config.json").write_text(json.dumps({"config": config, "resolved": {"shape": shape, "total_steps": "x"}}))
    (run / "starts.jsonl").write_text(json.dumps({"host": HOSTILE, "versions": {HOSTILE: HOSTILE}}) + "\n[1]\n")
    return run
