"""Runs that others published and that the throughput model was not fitted to, and what it says of them.

published_runs.csv holds them, one a line. A run *counts* in the error that is stated when all of this is so:

1. a dense decoder-only transformer whose blocks llmscale can describe, with causal attention over the whole context;
2. products in bf16 or fp16, on a GPU of the table at its usual power;
3. every GPU computes whole sequences through whole layers: DDP, ZeRO or FSDP, and no tensor, context or pipeline
   parallelism;
4. attention in a fused kernel, as llmscale's is: FlashAttention 1 or 2;
5. its source states the GPUs, the sequences a GPU takes at once, their length, and a rate measured over steps, not over
   weeks with restarts;
6. none of its numbers went into a constant of the model.

The rule was written down before any error was computed. What does not count says why in `counts`, and is estimated
nevertheless where it can be expressed: attention of another kind as FlashAttention-2, GPUs that share a sequence or a
layer (`gpus_per_sequence`) as one GPU of so many times the rates, without what they say to each other.

How a line is expressed: `recomputed` is the share of blocks that are recomputed; `fused` says that what lies between
matrix products runs in fused kernels, by torch.compile or by hand, and counts as compiled; a fused `loss` counts as one
chunk, for it moves as much. A network that its source does not state is that of NVIDIA's reference design, 200 Gbit/s
for an A100 and 400 for an H100. FSDP gathers twice and scatters once every micro-step, by block; with `no_sync` it
scatters at the last one. `ZERO3` is DeepSpeed's, with its defaults.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import Cluster, Interconnect, get_gpu
from llmscale.config.resolve import ResolvedStep
from llmscale.planning.kernels import KernelSettings
from llmscale.planning.step_time import Throughput, Traffic, count_traffic, estimate_step
from tests.planning.conftest import StepOf


def _gpt(n_layer: int, n_head: int, n_embd: int, vocab_size: int = 50257, **keys: object) -> dict[str, object]:
    return {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size, **keys}


def _llama(layers: int, heads: int, kv: int, width: int, mlp: int, vocab: int, **keys: object) -> dict[str, object]:
    block = {"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
    return _gpt(layers, heads, width, vocab, n_kv_head=kv, mlp_width=mlp, tied=False, **block, **keys)


_OLMO = {"qk_norm": "width", "norm_placement": "post"}
_SQUARED_RELU = {"bias": False, "positions": "rotary", "activation": "relu", "tied": False}
MODELS: dict[str, dict[str, object]] = {
    "gpt2-124m": _gpt(12, 12, 768),
    "gpt2-350m": _gpt(24, 16, 1024),
    "gpt2-774m": _gpt(36, 20, 1280),
    "gpt2-1.5b": _gpt(48, 25, 1600),
    "gpt3-125m": _gpt(12, 12, 768),
    "gpt3-1.3b": _gpt(24, 16, 2048),
    "gpt3-2.7b": _gpt(32, 32, 2560),
    "gpt3-175b": _gpt(96, 96, 12288),
    "gpt3-175b-megatron": _gpt(96, 96, 12288, 51200),
    "gpt-530b": _gpt(105, 128, 20480, 51200),
    "gpt-1.7b": _gpt(24, 24, 2304, 51200),
    "gpt-3.6b": _gpt(30, 32, 3072, 51200),
    "gpt-7.5b": _gpt(36, 32, 4096, 51200),
    "gpt-18b": _gpt(40, 48, 6144, 51200),
    "gpt-22b": _gpt(48, 64, 6144, 51200),
    "llama2-7b": _llama(32, 32, 32, 4096, 11008, 32000),
    "llama2-13b": _llama(40, 40, 40, 5120, 13824, 32000),
    "llama2-34b": _llama(48, 64, 8, 8192, 22016, 32000),
    "llama2-70b": _llama(80, 64, 8, 8192, 28672, 32000),
    "llama3-8b": _llama(32, 32, 8, 4096, 14336, 128256),
    "llama3-15b": _llama(40, 40, 8, 5120, 17920, 128256),
    "llama3-70b": _llama(80, 64, 8, 8192, 28672, 128256),
    "llama3-8b-olmo": _llama(32, 32, 8, 4096, 14336, 100352),
    "olmo-1b": _llama(18, 16, 16, 2048, 5632, 100352, **_OLMO),
    "olmo-7b": _llama(32, 32, 32, 4096, 11008, 100352, **_OLMO),
    "olmo-13b": _llama(40, 40, 40, 5120, 13824, 100352, **_OLMO),
    "tinyllama-1.1b": _llama(22, 32, 4, 2048, 5632, 32000),
    "nemotron4-15b": _gpt(32, 48, 6144, 256000, n_kv_head=8, mlp_width=24576, **_SQUARED_RELU),
    "nanochat-d24": _gpt(24, 12, 1536, 32768, norm="rmsnorm", qk_norm="head", **_SQUARED_RELU),
}

_BF16 = {"bf16": {"enabled": True}}
_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


def read_rows(name: str) -> list[dict[str, str]]:
    """A table of this folder, `#` lines left out."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def fsdp_traffic(shape: GPTShape, *, gathers: int, scatters: int, gradient_bytes: int, group: int = 1) -> Traffic:
    """Of a step in which FSDP gathers and scatters all blocks so many times, parameters in 16 bit. `group`: HSDP, which
    does so within groups of ranks, and all-reduces a group's gradients across them."""
    elements, units = shape.num_parameters, shape.n_layer + 2
    moved = elements * (2 * gathers + gradient_bytes * scatters)
    calls = (gathers + scatters) * units
    if group > 1:
        return Traffic(0, 2 * elements * gradient_bytes, 2 * units, moved, calls, group)
    return Traffic(2.0 * elements * gathers, float(elements * gradient_bytes * scatters), calls)


@dataclass(frozen=True)
class PublishedRun:
    """One line of published_runs.csv."""

    row: dict[str, str]

    @property
    def counts(self) -> bool:
        return self.row["counts"] == "yes"

    @property
    def is_expressible(self) -> bool:
        """Whether the model can say anything of it."""
        return "pipeline" not in self.row["counts"] and "fp8" not in self.row["counts"]

    @property
    def shape(self) -> GPTShape:
        return GPTShape(seq_len=int(self.row["seq_len"]), **MODELS[self.row["model"]])  # type: ignore[arg-type]

    @property
    def gpus(self) -> int:
        return int(self.row["gpus"])

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As published, or from FLOP/s by the source's formula."""
        rate, shape = float(self.row["rate"]), self.shape
        if self.row["unit"] == "tokens/s":
            return rate
        layers, width, seq_len = shape.n_layer, shape.n_embd, shape.seq_len
        if self.row["unit"] == "TFLOP/s 6N+12Lhs":
            return rate * 1e12 / (6 * shape.num_parameters + 12 * layers * width * seq_len)
        # Narayanan et al. 2021, formula (3): recomputation is counted.
        share = 1 + seq_len / (6 * width) + shape.vocab_size / (16 * layers * width)
        return rate * 1e12 / (96 * layers * width**2 * share)

    def estimate(self, step_of: StepOf) -> float:
        """Tokens per second and GPU."""
        recomputed = 1.0 if self.row["recomputed"] == "selective" else float(self.row["recomputed"])
        mode: CheckpointingMode = "selective" if self.row["recomputed"] == "selective" else "full"
        # Blocks take their turns: of a step in which some are recomputed, so much is as if all were.
        seconds = (1 - recomputed) / self._step(step_of, "none").tokens_per_second
        seconds += recomputed / self._step(step_of, mode).tokens_per_second
        return 1 / seconds / self.gpus

    def over_estimate(self, step_of: StepOf) -> float:
        """Published over estimated rate: below 1 the model is too fast."""
        return self.tokens_per_second_per_gpu / self.estimate(step_of)

    def _resolve(self, step_of: StepOf, checkpointing: CheckpointingMode) -> ResolvedStep:
        row, ranks = self.row, self.gpus // int(self.row["gpus_per_sequence"])
        micro, steps = int(row["micro_batch_size"]), int(row["accumulation"])
        plan = build_batch_plan(
            global_batch_size=ranks * micro * steps,
            ranks=ParallelLayout(ranks),
            seq_len=int(row["seq_len"]),
            micro_batch_size=micro,
        )
        zero = {"stage": self._stage, "overlap_comm": True}
        return step_of({**_BF16, "zero_optimization": zero}, self.shape, plan, checkpointing)

    @property
    def _ranks_per_node(self) -> int:
        return max(1, int(self.row["gpus_per_node"]) // int(self.row["gpus_per_sequence"]))

    @property
    def _network(self) -> Interconnect:
        return Interconnect("published", float(self.row["network_gbit_per_node"]) * 1e9 / 8, True, 2e-6, "")

    @property
    def _stage(self) -> int:
        return {"zero1": 1, "ddp": 0}.get(self.row["sharding"], 3)

    def _step(self, step_of: StepOf, checkpointing: CheckpointingMode) -> Throughput:
        row, shape = self.row, self.shape
        together = int(row["gpus_per_sequence"])
        gpu = get_gpu(row["gpu"])
        assert gpu.memory_bytes_per_s is not None
        gpu = replace(
            gpu,
            dense_16bit_flops=gpu.dense_16bit_flops * together,
            memory_bytes_per_s=gpu.memory_bytes_per_s * together,
            link_bytes_per_s=gpu.link_bytes_per_s * together,
        )
        step = self._resolve(step_of, checkpointing)
        steps = step.plan.gradient_accumulation_steps
        per_node = self._ranks_per_node
        gradient_bytes = _GRADIENT_BYTES[row["reduce"]]
        sharding = row["sharding"]
        if sharding == "ZERO3":
            traffic = count_traffic(step)
        elif self._stage == 3:
            scatters = 1 if "no_sync" in sharding else steps
            group = per_node if sharding == "HSDP" else 1
            traffic = fsdp_traffic(
                shape, gathers=2 * steps, scatters=scatters, gradient_bytes=gradient_bytes, group=group
            )
        else:
            elements = shape.num_parameters
            gathered = 2.0 * elements if self._stage else 0.0
            traffic = Traffic(gathered, 2.0 * elements * gradient_bytes, 3 * shape.n_layer)
        throughput = estimate_step(
            step,
            Cluster(gpu, per_node, self._network),
            KernelSettings(
                "flash-1" if row["attention"] == "flash-1" else "flash-2",
                compiled_blocks=row["fused"] == "1",
                loss_chunk_tokens=1 << 30 if row["loss"] == "fused" else None,
            ),
            traffic,
        )
        assert throughput is not None
        return throughput


def published_runs() -> list[PublishedRun]:
    """In the table's order."""
    return [PublishedRun(row) for row in read_rows("published_runs.csv")]
