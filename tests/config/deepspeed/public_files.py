"""ds_configs with the keys of public ones, each with something that the others lack: taken at once, or refused."""

from __future__ import annotations

from typing import Any

A = "auto"
_BATCH: dict[str, Any] = {
    "train_batch_size": A,
    "train_micro_batch_size_per_gpu": A,
    "gradient_accumulation_steps": A,
    "gradient_clipping": A,
}
_FP16_AUTO = {
    "enabled": A,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_ADAMW_AUTO = {"type": "AdamW", "params": {"lr": A, "betas": A, "eps": A, "weight_decay": A}}
_WARMUP_AUTO = {"type": "WarmupLR", "params": {"warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A}}
_CPU = {"device": "cpu", "pin_memory": True}
_NONE = {"device": "none", "pin_memory": True}
_ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": A,
    "stage3_prefetch_bucket_size": A,
    "stage3_param_persistence_threshold": A,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_OLD_ZERO3 = {
    **{key: value for key, value in _ZERO3.items() if not key.endswith("model_save")},
    "stage3_gather_fp16_weights_on_model_save": True,
}
_LOG = {"steps_per_print": 2000, "wall_clock_breakdown": False}
_NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}
_CHECKPOINTING = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}


def _adam(kind: str = "Adam", **params: object) -> dict[str, object]:
    return {"type": kind, "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, **params}}


def _warmup(kind: str = "WarmupLR", **params: object) -> dict[str, object]:
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 100}
    return {"type": kind, "params": {**warmup, **params}}


TAKEN: dict[str, dict[str, Any]] = {
    # Hugging Face: documentation and tests
    "hf_zero3_offload": {
        **_BATCH,
        "fp16": _FP16_AUTO,
        "bf16": {"enabled": A},
        "optimizer": _ADAMW_AUTO,
        "scheduler": {"type": "WarmupDecayLR", "params": {**_WARMUP_AUTO["params"], "total_num_steps": A}},  # type: ignore[dict-item]
        "zero_optimization": {**_ZERO3, "offload_optimizer": _CPU, "offload_param": _CPU},
        **_LOG,
    },
    "hf_amp_auto": {**_BATCH, "amp": {"enabled": A, "opt_level": A}, "zero_optimization": _ZERO2},
    "hf_infinity": {
        **_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {
            **_ZERO3,
            "offload_optimizer": _NVME,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "accelerate": {
        "train_micro_batch_size_per_gpu": A,
        "bf16": {"enabled": A},
        "zero_optimization": {
            "stage": A,
            "overlap_comm": A,
            "offload_optimizer": {"device": A, "pin_memory": A},
            "offload_param": {"device": A, "nvme_path": A},
            "stage3_gather_16bit_weights_on_model_save": A,
        },
        "gradient_clipping": A,
        "steps_per_print": A,
    },
    # Alpaca, FastChat, LLaMA-Factory, axolotl, open-instruct, TRL
    "axolotl_zero1": {
        **_BATCH,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": True},
        "fp16": {**_FP16_AUTO, "auto_cast": False},
        "compile": {"disable": False, "backend": "inductor"},
        "wall_clock_breakdown": False,
    },
    "axolotl_zero3_bf16": {
        **_BATCH,
        "zero_optimization": {**_ZERO3, "sub_group_size": 0, "reduce_bucket_size": A},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": False, "opt_level": "O2"},
    },
    "dolly": {
        **_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {**_OLD_ZERO3, "round_robin_gradients": True},
        "optimizer": _ADAMW_AUTO,
        "scheduler": _WARMUP_AUTO,
    },
    # DeepSpeedExamples and DeepSpeed's tutorials
    "megatron_gpt2_tutorial": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "fp16": {**_FP16, "loss_scale_window": 1000},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True, "overlap_comm": True},
        "activation_checkpointing": _CHECKPOINTING,
        "wall_clock_breakdown": False,
    },
    "cifar": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": _adam(lr=0.001, betas=[0.8, 0.999], weight_decay=3e-7),
        "scheduler": _warmup(warmup_max_lr=0.001, warmup_num_steps=1000),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {**_FP16, "fp16_master_weights_and_grads": False, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {**_ZERO2, "stage": 0, "allgather_bucket_size": 50000000, "cpu_offload": False},
    },
    "chat_actor": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
            "zero_quantized_nontrainable_weights": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
        },
        "tensorboard": {"enabled": False, "output_path": "step3/ds_tensorboard_logs/", "job_name": "actor"},
    },
    "bing_bert_true": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 32,
        "steps_per_print": 1000,
        "prescale_gradients": False,
        "optimizer": _adam(bias_correction=True, max_grad_norm=1.0),
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
        "zero_optimization": True,
        "allgather_size": 500000000,
        "sparse_attention": {"mode": "dense", "block": 16},
    },
    "flops_profiler_tutorial": {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    },
    "monitor_tutorial": {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": True, "team": "my_team", "group": "my_group", "project": "my_project"},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
    },
    "comms_logger": {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1},
        "comms_logger": {
            "enabled": True,
            "verbose": False,
            "prof_all": False,
            "debug": False,
            "prof_ops": ["all_reduce"],
        },
    },
    "autotuning_tutorial": {
        "train_micro_batch_size_per_gpu": A,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "autotuning": {"enabled": True, "fast": False, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}},
    },
    "data_efficiency_off": {
        "train_batch_size": 256,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": False, "curriculum_learning": {"enabled": False}},
            "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 24}},
        },
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 64},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "eigenvalue": {"enabled": False, "verbose": True},
    },
    # Megatron-DeepSpeed, BLOOM, GPT-NeoX
    "megatron_deepspeed": {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 0, "elastic_checkpoint": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {**_FP16, "initial_scale_power": 11},
        "bf16": {"enabled": False},
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": False,
    },
    "megatron_bfloat16": {
        "train_batch_size": 256,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "float32"},
    },
    "zeropp_hpz": {
        "train_batch_size": 256,
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "overlap_comm": True,
            "mics_shard_size": -1,
        },
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
    },
    "wenet": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 100,
        "gradient_clipping": 5,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**_ZERO2, "offload_optimizer": _NONE, "load_from_fp32_weights": True},
    },
    "short_names": {
        "train_batch_size": 16,
        "_comment": "names of DeepSpeed's classes",
        "zero_optimization": {
            "stage": 3,
            "max_live_parameters": 1e8,
            "max_reuse_distance": 1e8,
            "prefetch_bucket_size": 5e7,
            "param_persistence_threshold": 1e5,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
    },
    "cosine": {
        "train_batch_size": 128,
        "zero_optimization": {"_comment": "ZeRO-2", "stage": 2},
        "bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "moe": {"enabled": False, "ep_size": 1},
        "optimizer": _adam("FusedAdam", adam_w_mode=True),
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": 10000,
                "warmup_num_steps": 500,
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
            },
        },
        "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
    },
}

REFUSED: dict[str, dict[str, Any]] = {
    "curriculum_tutorial": {
        "train_batch_size": 4096,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8},
        },
        "monitoring": {"enabled": True},
    },
    "onebit_adam": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False}},
        "fp16": {"enabled": True},
        "amp": {"enabled": True, "opt_level": "O1"},
    },
    "lamb_one_cycle": {
        "train_batch_size": 32768,
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
        "fp16": {"enabled": True, "loss_scale": 0},
        "zero_optimization": {"stage": 1},
    },
    "zeropp": {
        "train_batch_size": 256,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 1,
            "zero_quantized_gradients": True,
        },
        "bf16": {"enabled": True},
    },
    "elastic": {
        "train_batch_size": A,
        "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
    },
    "random_ltd": {
        "train_batch_size": 256,
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": {"min_difficulty": 64}}},
            },
            "data_routing": {"enabled": True, "random_ltd": {"enabled": True, "total_layer_num": 24}},
        },
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    },
    "typing_errors": {
        "train_batch_size": "16",
        "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5e8, "contiguous_gradients": "true"},
        "fp16": {"enabled": True, "loss_scale": -1},
        "bf16": {"enabled": True},
        "gradient_cliping": 1.0,
    },
    "no_stage": {"train_batch_size": 16, "zero_optimization": {"overlap_comm": True}, "fp16": {"loss_scale": 0}},
}
