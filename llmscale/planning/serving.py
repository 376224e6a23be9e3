"""Price of serving a model, and of bought GPUs beside rented ones. No torch.

A GPU that generates is bound by its memory or its arithmetic, whichever takes longer (Pope et al. 2022, "Efficiently
Scaling Transformer Inference", arXiv:2211.05102). For W bytes of weights, B sequences of mean context c and k bytes of
cached keys and values per token, on G GPUs, a step that generates B tokens takes

    max((W + B c k) / (G bandwidth x BANDWIDTH_SHARE), B (2 N + 4 L c d) / (G peak x PROMPT_MFU))

and prompts, whose tokens pass together, take only the second term per token. GPUs serve at full load: at half of it,
prices double. With experts W are the weights that any token of a step uses, with balanced load, and N those that one
uses. Traffic between GPUs, speculative decoding, prefix caches and quantisation are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import GPU
from llmscale.errors import ConfigError

#: Assumed shares of the peak bandwidth in generation, and of the peak FLOP/s for prompts (up to 76 % on TPUs in Pope et
#: al.). Prices are inversely proportional to them.
BANDWIDTH_SHARE = 0.6
PROMPT_MFU = 0.5
#: vLLM's defaults: share of the memory for weights and cache (gpu_memory_utilization), and most sequences at a time.
MEMORY_SHARE = 0.9
MAX_SEQUENCES = 256
_BYTES = 2  # of a 16-bit number
_HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True)
class Serving:
    """Speed of one replica of a model at full load."""

    num_gpus: int
    num_sequences: int
    """Sequences that it generates at a time."""
    prompt_tokens_per_s: float
    """Rate of prompts alone."""
    output_tokens_per_s: float
    """Rate of generation alone, over all sequences."""
    requests_per_s: float
    """Rate of requests, whose prompts and outputs share the GPUs."""
    is_memory_bound: bool
    """True if generation waits for memory, False for arithmetic."""
    usd_per_day: float | None = None
    """Price of a day of the replica; None, as the next two, without the price of a GPU-hour."""
    usd_per_million_prompt_tokens: float | None = None
    usd_per_million_output_tokens: float | None = None

    def with_prices(self, usd_per_gpu_hour: float | None) -> Serving:
        """Return the replica with its prices."""
        if usd_per_gpu_hour is None:
            return self
        usd_per_s = self.num_gpus * usd_per_gpu_hour / 3600
        return replace(
            self,
            usd_per_day=usd_per_s * 86400,
            usd_per_million_prompt_tokens=1e6 * usd_per_s / self.prompt_tokens_per_s,
            usd_per_million_output_tokens=1e6 * usd_per_s / self.output_tokens_per_s,
        )


def estimate_serving(shape: GPTShape, gpu: GPU, gpus_per_node: int, prompt: int, output: int) -> Serving | None:
    """Return the replica of 1, 2, 4, ... GPUs of a node that serves most requests of these tokens per GPU.

    None if the GPU's bandwidth is unknown, or no replica within a node holds the weights and one sequence. Raises
    ConfigError for requests beyond the model's context.
    """
    if prompt + output > shape.seq_len:
        raise ConfigError(
            f"--serve {prompt}:{output} is {prompt + output:,} tokens, and the model's context has {shape.seq_len:,}. "
            f"Give fewer tokens, or plan a model with --seq-len {prompt + output}."
        )
    sizes = [1 << power for power in range(gpus_per_node.bit_length())]
    replicas = [_replica(shape, gpu, num_gpus, prompt, output) for num_gpus in sizes]
    able = [replica for replica in replicas if replica is not None]
    return max(able, key=lambda replica: replica.requests_per_s / replica.num_gpus, default=None)


def _replica(shape: GPTShape, gpu: GPU, num_gpus: int, prompt: int, output: int) -> Serving | None:
    weight_bytes = _BYTES * shape.num_parameters
    # Keys and values of every layer.
    token_bytes = 2 * _BYTES * shape.n_layer * shape.n_kv_head * shape.head_dim
    free_bytes = MEMORY_SHARE * num_gpus * gpu.memory_gib * 2**30 - weight_bytes
    num_sequences = min(MAX_SEQUENCES, int(free_bytes // (token_bytes * (prompt + output))))
    if num_sequences < 1 or gpu.memory_bytes_per_s is None:
        return None
    rate = num_gpus * gpu.dense_16bit_flops * PROMPT_MFU
    prompt_s = _flops_per_token(shape, prompt / 2) / rate
    context = prompt + output / 2
    step_bytes = _BYTES * _read_parameters(shape, num_sequences) + num_sequences * context * token_bytes
    memory_s = step_bytes / (num_gpus * gpu.memory_bytes_per_s * BANDWIDTH_SHARE)
    compute_s = num_sequences * _flops_per_token(shape, context) / rate
    output_s = max(memory_s, compute_s) / num_sequences
    requests_per_s = 1 / (prompt * prompt_s + output * output_s)
    return Serving(num_gpus, num_sequences, 1 / prompt_s, 1 / output_s, requests_per_s, memory_s >= compute_s)


def _read_parameters(shape: GPTShape, num_sequences: int) -> float:
    """Return the parameters that a step reads: of the experts those that any of its tokens uses, with balanced load."""
    if not shape.num_experts:
        return shape.num_parameters
    share = shape.experts_per_token / shape.num_experts
    if share < 1:
        experts = (shape.num_parameters - shape.active_parameters) / (1 - share)
    else:
        experts = 0.0
    return shape.num_parameters - experts * (1 - share) ** num_sequences


def _flops_per_token(shape: GPTShape, context: float) -> float:
    """Return the FLOPs of a token's forward pass: 2 per weight, and 4 per context position, layer and width."""
    return 2 * shape.active_parameters + 4 * shape.n_layer * context * shape.n_head * shape.head_dim


def owning_usd_per_gpu_hour(usd_per_gpu: float, years: float, electricity_usd: float) -> float:
    """Return the price of an hour of a bought GPU that never idles and is worth nothing after `years`."""
    return usd_per_gpu / (years * _HOURS_PER_YEAR) + electricity_usd


def break_even_share(owning_usd: float, electricity_usd: float, rent_usd: float) -> float | None:
    """Return the share of its years that a bought GPU must work to be cheaper than a rented one; None: it never is."""
    share = (owning_usd - electricity_usd) / max(rent_usd - electricity_usd, 1e-9)
    return share if share <= 1 else None
