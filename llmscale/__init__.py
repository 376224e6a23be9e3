"""llmscale: train a GPT under DeepSpeed ZeRO, from one CPU to many nodes, and never lose a sample."""

__version__ = "0.3.0"
