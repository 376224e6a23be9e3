"""What other tools and people call what llmscale has: the first place where a suggestion for an unknown name is sought.

Data only. Their names are lower case with underscores, without leading dashes; of ours those that are legal where the
unknown one stood are suggested, all of them when there are several.
"""

from __future__ import annotations

from collections.abc import Mapping

#: (our names, theirs), separated by spaces: nanoGPT's, transformers' TrainingArguments', DeepSpeed's, Megatron-LM's,
#: torchtitan's, litgpt's, and plain habit.
_NAMES = (
    # how long
    ("steps tokens", "epochs epoch num_epochs num_train_epochs max_epochs"),
    (
        "steps",
        "max_iters max_iter iters iterations num_iterations train_iters num_steps max_steps train_steps "
        "total_steps training_steps max_train_steps",
    ),
    ("tokens max_new_tokens", "max_tokens"),
    ("tokens", "num_tokens train_tokens training_tokens"),
    # batch
    ("micro_batch_size global_batch_size train_micro_batch_size_per_gpu train_batch_size", "batch_size batch"),
    ("micro_batch_size global_batch_size", "bs"),
    ("micro_batch_size", "local_batch_size mbs device_batch_size train_micro_batch_size_per_gpu"),
    (
        "micro_batch_size train_micro_batch_size_per_gpu",
        "micro_batch microbatch_size per_device_batch_size per_device_train_batch_size per_gpu_train_batch_size",
    ),
    ("global_batch_size", "train_batch_size gbs gradient_accumulation_steps"),
    ("global_batch_tokens train_batch_size", "total_batch_size"),
    (
        "gradient_accumulation_steps global_batch_size",
        "grad_accum grad_accum_steps accumulation_steps gradient_accumulation",
    ),
    # model
    ("model", "model_name model_type model_size preset init_model arch"),
    (
        "seq_len",
        "block_size context context_length context_size context_window ctx_len n_ctx n_positions max_len "
        "max_seq_len max_seq_length max_position_embeddings seq_length seqlen sequence_length",
    ),
    ("seq_len max_new_tokens", "max_length"),
    ("n_layer", "n_layers num_layers layers depth num_hidden_layers"),
    ("n_head", "n_heads heads num_heads num_attention_heads"),
    ("n_embd", "hidden_size hidden_dim d_model dim width embd embed_dim n_embed embedding_size"),
    ("vocab_size", "vocabulary_size vocab n_vocab"),
    ("dropout", "hidden_dropout"),
    ("params", "num_params n_params parameters num_parameters"),
    ("init_from", "pretrained"),
    ("init_from model hf", "model_name_or_path"),
    # optimizer and schedule
    ("lr", "learning_rate max_lr peak_lr base_lr"),
    ("optimizer", "optim"),
    ("schedule", "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_lr"),
    ("warmup_steps", "warmup warmup_iters warmup_ratio lr_warmup_iters lr_warmup_steps num_warmup_steps"),
    ("decay_steps", "lr_decay_iters"),
    ("min_lr_frac", "min_lr min_lr_ratio min_lr_factor"),
    ("weight_decay", "wd"),
    ("beta1", "adam_beta1"),
    ("beta2", "adam_beta2"),
    ("beta1 beta2", "betas"),
    ("eps", "adam_eps adam_epsilon epsilon"),
    ("gradient_clipping", "grad_clip clip_grad clip_grad_norm gradient_clip gradient_clip_val max_norm max_grad_norm"),
    # precision, memory, DeepSpeed
    ("precision", "bf16 fp16 fp32 dtype torch_dtype mixed_precision"),
    ("precision torch_autocast", "amp"),
    ("bf16 precision", "bfloat16"),
    ("fp16 precision", "float16 half"),
    (
        "activation_checkpointing",
        "grad_checkpoint gradient_checkpointing checkpoint_activations recompute recompute_granularity",
    ),
    ("ds", "deepspeed deepspeed_config ds_config"),
    ("zero_optimization ds", "zero"),
    ("ds zero_optimization", "zero_stage"),
    # data
    ("data input", "dataset data_path data_dir dataset_name dataset_path train_file"),
    ("data", "train_data"),
    ("num_workers", "dataloader_num_workers workers"),
    ("workers", "num_workers"),
    ("workers num_workers", "num_proc"),
    ("text_field", "text_column text_key"),
    ("val_fraction hf_split", "val_split"),
    ("val_fraction", "val_frac val_size validation_split"),
    ("shard_mb", "shard_size"),
    ("shard_size shard_mb", "max_shard_size"),
    ("input", "inputs text files"),
    # the loop and its folder
    ("seed", "random_seed manual_seed rng_seed"),
    ("log_every", "log_interval log_freq logging_steps"),
    ("val_every", "eval_every eval_interval eval_steps val_interval"),
    ("val_samples", "eval_iters eval_samples"),
    ("save_every", "save_interval save_freq save_steps checkpoint_every checkpoint_interval ckpt_interval"),
    ("keep_last", "save_total_limit keep_checkpoints"),
    ("to run emit", "out"),
    ("out to run", "out_dir output_dir"),
    ("out to run emit", "output"),
    ("to", "save_directory"),
    ("run", "run_dir run_folder save save_dir checkpoint_dir"),
    ("run wandb_name", "run_name"),
    ("resume", "resume_from resume_from_checkpoint load ckpt"),
    ("wandb", "wandb_log report_to"),
    ("wandb_name", "wandb_run_name"),
    ("overwrite", "force overwrite_output_dir"),
    ("force", "overwrite"),
    # machines
    ("num_gpus", "gpus ngpus n_gpus"),
    ("nproc_per_node", "nprocs num_processes num_procs"),
    ("nproc_per_node num_gpus", "world_size"),
    ("num_gpus slots", "nproc_per_node gpus_per_node"),
    ("slots", "num_gpus"),
    ("num_nodes", "nodes nnodes n_nodes"),
    ("gpu", "card gpu_type gpu_name"),
    ("gpu_memory_gib", "gpu_memory"),
    ("gpu_memory_gib estimate", "memory"),
    ("host_memory_gib", "host_memory cpu_memory"),
    ("bf16_tflops", "tflops"),
    ("interconnect", "network"),
    ("budget_usd", "budget usd"),
    ("price_per_gpu_hour", "price"),
    ("gpu_hours", "hours"),
    ("flops", "compute"),
    ("hostfile", "hosts host_file"),
    ("temperature", "temp"),
    ("top_k", "topk"),
    ("top_p", "topp"),
    ("max_new_tokens", "num_tokens_to_generate"),
    ("max_new_tokens seq_len", "length"),
    # presets
    ("gpt2-124m", "gpt2_small gpt2_117m"),
    ("gpt2-350m", "gpt2_medium gpt2_345m gpt2_355m"),
    ("gpt2-774m", "gpt2_large gpt2_762m"),
    ("gpt2-1.5b", "gpt2_xl gpt2_1.5b gpt2_1558m"),
    ("gpt3-175b", "gpt3 gpt_3"),
    ("gpt2 gpt2-124m", "gpt_2"),
    # tokenizers
    ("gpt2", "openai_community/gpt2 r50k_base"),
    ("bytes", "byte char character byte_level"),
    # GPUs
    ("a100-80gb", "a100"),
    ("h100-80gb", "h100"),
    # subcommands
    ("data", "prepare"),
    ("prepare data", "tokenize tokenise preprocess"),
    ("prepare", "process shard"),
    ("train-tokenizer", "bpe tokenizer"),
    ("doctor verify", "check"),
    ("verify", "validate"),
    ("inspect show", "info"),
    ("inspect", "show"),
    ("show", "inspect"),
    ("list", "ls"),
    ("diff", "compare"),
    ("doctor", "diagnose"),
    ("sample", "generate infer"),
    ("export", "convert zero_to_fp32"),
    ("report", "plot status"),
    ("launch", "train start"),
    ("plan", "cost"),
    ("checkpoint", "checkpoints"),
)

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    other: tuple(ours.split()) for ours, others in _NAMES for other in others.split()
}
