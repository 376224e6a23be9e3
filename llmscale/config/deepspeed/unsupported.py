"""Keys that DeepSpeed 0.19.8 reads and llmscale refuses, each with the reason and what to do instead."""

from __future__ import annotations

_REMOVED = "DeepSpeed removed it in 2026. Delete it."
_OWN_LOOP = "llmscale counts micro-batches itself. Delete it."
_CPU_ADAM = "it needs DeepSpeed's own CPU Adam, llmscale passes torch.optim.AdamW. Delete it."
_QUANTISED = "ranks then exchange rounded numbers, which changes the loss curve. Delete it."
_PARALLELISM = "llmscale is data parallel only (ZeRO). Delete it."
_CHECKPOINT_ONLY = "it configures DeepSpeed's own checkpoints, llmscale writes others. Delete it."
_NO_BUFFERS = "the GPT has no buffers to keep in another type. Delete it."
_DATA = "the order and shape of batches come from llmscale's data feed. Delete it."

#: Dotted path -> why. A path to a section refuses the whole section.
UNSUPPORTED: dict[str, str] = {
    "optimizer": "llmscale builds its own. Delete it and use --optimizer, --lr, --weight-decay, --beta1, "
    "--beta2, --eps.",
    "scheduler": "llmscale sets the learning rate itself. Delete it and use --schedule, --lr, --warmup-steps.",
    "checkpoint": "llmscale writes its own checkpoints, and a 'load_universal' left here makes the next "
    "restart read an old one. Delete it.",
    "datastates_ckpt": _CHECKPOINT_ONLY,
    "bfloat16": "it is the old name of 'bf16'. Rename it.",
    "wandb": "DeepSpeed would start a second wandb run. Delete it and use --wandb.",
    "comet": "metrics are in the run folder's metrics.jsonl. Delete it.",
    "managed_gradient_accumulation": _OWN_LOOP,
    "compile": "llmscale compiles the blocks itself, at every stage. Delete it and use --compile.",
    "autotuning": "use `llmscale estimate` to choose stage, offload and micro-batch. Delete it.",
    "data_efficiency": _DATA,
    "hybrid_engine": "it generates text during RLHF, llmscale pre-trains. Delete it.",
    "weight_quantization": "it is for inference. Delete it.",
    "pipeline": _PARALLELISM,
    "tensor_parallel": _PARALLELISM,
    "expert_parallel": _PARALLELISM,
    "sequence_parallel_size": _PARALLELISM,
    "data_parallel_size": _PARALLELISM,
    "seq_parallel_communication_data_type": _PARALLELISM,
    "use_data_before_expert_parallelism": _PARALLELISM,
    "allgather_size": "it belongs to a format that DeepSpeed gave up. Use zero_optimization.allgather_bucket_size.",
    "nebula": _REMOVED,
    "compression_training": _REMOVED,
    "amp": "DeepSpeed removed Apex AMP in 2026. Use 'bf16', 'fp16' or 'torch_autocast'.",
    "quantize_training": _REMOVED,
    "sparse_gradients": _REMOVED,
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "elasticity": "DeepSpeed removed it in 2026. Delete it: llmscale resumes a run at any legal world size.",
    "graph_harvesting": _REMOVED,
    "curriculum_learning": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
    "zero_optimization.cpu_offload": 'it is deprecated. Write "offload_optimizer": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_param": 'it is deprecated. Write "offload_param": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_use_pin_memory": "it is deprecated. Write 'pin_memory' in the offload section.",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "it is deprecated. Rename it to "
    "'stage3_gather_16bit_weights_on_model_save'.",
    "zero_optimization.legacy_stage1": "DeepSpeed stops with an error when it is true. Delete it.",
    "zero_optimization.elastic_checkpoint": _CHECKPOINT_ONLY,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINT_ONLY,
    "zero_optimization.compute_grad_norm": "llmscale clips by and logs the gradient norm. Delete it.",
    "zero_optimization.zenflow": _CPU_ADAM,
    "zero_optimization.zero_quantized_weights": _QUANTISED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_optimization.zero_quantized_gradients": _QUANTISED,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it is for DeepSpeed's Muon, and "
    "--optimizer muon is llmscale's own. Delete it.",
    "zero_optimization.leaf_module": "it is for mixtures of experts. Delete it.",
    "zero_optimization.offload_optimizer.super_offload": _CPU_ADAM,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _CPU_ADAM,
    "fp16.fp16_master_weights_and_grads": _CPU_ADAM,
    "bf16.bf16_master_weights_and_grads": "checkpoints hold an fp32 master copy of the weights. Delete it.",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 moments. Delete it.",
    "data_types.buffer_dtype": _NO_BUFFERS,
    "data_types.keep_in_fp32_modules": _NO_BUFFERS,
}
