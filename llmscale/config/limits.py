"""The largest plausible values of settings. No torch.

Larger values are typing errors; they would overflow, take hours or fill the memory.
"""

from __future__ import annotations

from llmscale.architecture.limits import MAX_BATCH_TOKENS as MAX_BATCH_TOKENS
from llmscale.architecture.limits import MAX_EXPERTS as MAX_EXPERTS
from llmscale.architecture.limits import MAX_FACTOR as MAX_LEARNING_RATE_FACTOR  # noqa: F401
from llmscale.architecture.limits import MAX_HEADS as MAX_HEADS
from llmscale.architecture.limits import MAX_LAYERS as MAX_LAYERS
from llmscale.architecture.limits import MAX_SEQ_LEN as MAX_SEQ_LEN
from llmscale.architecture.limits import MAX_VOCAB as MAX_VOCAB
from llmscale.architecture.limits import MAX_WIDTH as MAX_WIDTH

#: Sequences per optimizer step.
MAX_BATCH = 1 << 30
#: Optimizer steps.
MAX_STEPS = 10**10
#: Training tokens; all the text of the world is below 10^16.
MAX_TOKENS = 10**17
MAX_SEED = 2**63 - 1
#: Ranks of a job; GPUs of a node; nodes.
MAX_RANKS = 1 << 20
MAX_GPUS_PER_NODE = 1024
MAX_NODES = 1 << 16
#: Loading or tokenising processes.
MAX_WORKERS = 1024
#: The range of fp32; a rate that is merely bad shows in the loss.
MAX_LEARNING_RATE = 1e38
MAX_WEIGHT_DECAY = 100.0
#: Weights of losses beside the cross-entropy.
MAX_Z_LOSS = 1.0
#: Practically no clipping.
MAX_CLIPPING = 1e9
MAX_MINUTES = 366 * 24 * 60
MAX_CHECKPOINTS = 10**6
#: Samples of a dataset.
MAX_SAMPLES = 1 << 40
#: Memory of a GPU, host memory of a node, and size of a cache, in GiB.
MAX_GPU_GIB = 1 << 14
MAX_HOST_GIB = 1 << 20
MAX_CACHE_GIB = 1 << 30
MAX_TFLOPS = 1e6
#: Ten years.
MAX_SECONDS = 10 * 366 * 86400
