"""The largest plausible values of a model's keys. Larger values are typing errors."""

from __future__ import annotations

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
#: Tokens per optimizer step.
MAX_BATCH_TOKENS = 1 << 40
#: Factors of a learning rate, or of the scores of experts.
MAX_FACTOR = 1e6
