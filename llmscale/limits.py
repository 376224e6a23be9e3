"""Units of settings, and the largest plausible values of each. No torch.

Larger values are typing errors; they would overflow, take hours or fill the memory. A key of a run takes its type from
here (`run_flags.describe_keys` reads this file); its declaration may add bounds.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Le, Lt

# model

#: Transformer blocks; DeepNet (Wang et al. 2022) has 1,000.
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
#: Experts of a block, as many as are read from a config.json; Kimi K2 has 384.
MAX_EXPERTS = 1 << 12
#: Residual stream; GPT-4-sized models are below 2^15.
MAX_WIDTH = 1 << 20
#: Tokens per sequence.
MAX_SEQ_LEN = 1 << 24
MAX_VOCAB = 1 << 24
MAX_ROPE_THETA = 1e15
#: Rank of an adapter; LoRA papers end at some hundred.
MAX_RANK = 1 << 14
#: Factors of a learning rate, or of the scores of experts.
MAX_FACTOR = 1e6

Blocks = Annotated[int, Le(MAX_LAYERS)]
Heads = Annotated[int, Le(MAX_HEADS)]
Experts = Annotated[int, Le(MAX_EXPERTS)]
Width = Annotated[int, Le(MAX_WIDTH)]
Positions = Annotated[int, Le(MAX_SEQ_LEN)]
Rank = Annotated[int, Le(MAX_RANK)]
TokenIds = Annotated[int, Le(MAX_VOCAB)]
Wavelength = Annotated[float, Le(MAX_ROPE_THETA)]
Factor = Annotated[float, Le(MAX_FACTOR)]
Fraction = Annotated[float, Le(1)]
BelowOne = Annotated[float, Lt(1.0)]

# batch, data and schedule

#: Sequences per optimizer step.
MAX_BATCH = 1 << 30
#: Tokens per optimizer step.
MAX_BATCH_TOKENS = 1 << 40
#: Optimizer steps.
MAX_STEPS = 10**10
#: Training tokens; all the text of the world is below 10^16.
MAX_TOKENS = 10**17
#: Samples of a dataset.
MAX_SAMPLES = 1 << 40
MAX_SEED = 2**63 - 1
#: Loading or tokenising processes.
MAX_WORKERS = 1024

Sequences = Annotated[int, Le(MAX_BATCH)]
BatchTokens = Annotated[int, Le(MAX_BATCH_TOKENS)]
Steps = Annotated[int, Le(MAX_STEPS)]
Tokens = Annotated[int, Le(MAX_TOKENS)]
Samples = Annotated[int, Le(MAX_SAMPLES)]
Seed = Annotated[int, Le(MAX_SEED)]
Processes = Annotated[int, Le(MAX_WORKERS)]

# optimizer and loss

#: The range of fp32; a rate that is merely bad shows in the loss.
MAX_LEARNING_RATE = 1e38
MAX_WEIGHT_DECAY = 100.0
#: Weights of losses beside the cross-entropy.
MAX_Z_LOSS = 1.0
#: Practically no clipping.
MAX_CLIPPING = 1e9

LearningRate = Annotated[float, Le(MAX_LEARNING_RATE)]
WeightDecay = Annotated[float, Le(MAX_WEIGHT_DECAY)]
LossWeight = Annotated[float, Le(MAX_Z_LOSS)]
GradientNorm = Annotated[float, Le(MAX_CLIPPING)]

# machines, disks and time

#: Ranks of a job; GPUs of a node; nodes.
MAX_RANKS = 1 << 20
MAX_GPUS_PER_NODE = 1024
MAX_NODES = 1 << 16
#: Memory of a GPU, host memory of a node, and size of a cache, in GiB.
MAX_GPU_GIB = 1 << 14
MAX_HOST_GIB = 1 << 20
MAX_CACHE_GIB = 1 << 30
MAX_TFLOPS = 1e6
MAX_CHECKPOINTS = 10**6
MAX_MINUTES = 366 * 24 * 60
#: Ten years.
MAX_SECONDS = 10 * 366 * 86400

Nodes = Annotated[int, Le(MAX_NODES)]
CacheGib = Annotated[float, Le(MAX_CACHE_GIB)]
Checkpoints = Annotated[int, Le(MAX_CHECKPOINTS)]
Minutes = Annotated[float, Le(MAX_MINUTES)]
Seconds = Annotated[float, Le(MAX_SECONDS)]
