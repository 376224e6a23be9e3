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
nevertheless where it can be expressed.
"""
