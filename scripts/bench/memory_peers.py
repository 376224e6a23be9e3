"""What other estimators say about a cell of memory_grid.py, in bytes per GPU; None where they have no answer."""

from __future__ import annotations

from memory_cells import Cell

from llmscale.architecture.shape import GPTShape

#: torch's names of our precisions, as accelerate spells them.
ACCELERATE_PRECISIONS = {"fp32": "float32", "autocast": "bfloat16", "bf16": "bfloat16", "fp16": "float16"}


def deepspeed_bytes(cell: Cell, shape: GPTShape) -> int | None:
    """DeepSpeed's estimate_zero{2,3}_model_states_mem_needs: stages 2 and 3 in 16 bit, model states alone."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if cell.zero_stage == 2:
        _, gpu_bytes = estimate_zero2_model_states_mem_needs(
            shape.num_parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=cell.offload != "none"
        )
        return gpu_bytes
    if cell.zero_stage == 3:
        _, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            shape.num_parameters,
            shape.padded_vocab_size * shape.n_embd,
            num_gpus_per_node=1,
            num_nodes=1,
            cpu_offload=cell.offload != "none",
            cpu_offload_params=cell.offload == "parameters",
        )
        return gpu_bytes
    return None


def cookbook_bytes(cell: Cell, shape: GPTShape) -> int:
    """EleutherAI cookbook, calc/calc_transformer_mem.py, with its defaults, for one GPU (no communication then).

    It counts the embedding twice (untied), fp32 gradients, Adam's 12 bytes, and activations by Korthikanti et al. with
    attention scores; it knows no offload, no logits, and with checkpointing keeps 34 s b h in every layer.
    """
    h, layers, tokens = shape.n_embd, shape.n_layer, cell.micro_batch_size * shape.seq_len
    parameters = 2 * shape.vocab_size * h + h * shape.seq_len + 8 * h * layers + 2 * h + 12 * layers * h * h
    low = 4 if cell.precision == "fp32" else 2
    per_token = (16 * 2 + 2) * h * layers
    if cell.checkpointing == "none":
        per_token += (2 * 2 + 1) * shape.n_head * shape.seq_len * layers
    return parameters * (low + 4 + 12) + tokens * per_token


def accelerate_bytes(cell: Cell, shape: GPTShape) -> int:
    """`accelerate estimate-memory`, "Training using Adam" at batch size 1: weights, gradients and moments."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(4 * shape.num_parameters, ACCELERATE_PRECISIONS[cell.precision]).values())
