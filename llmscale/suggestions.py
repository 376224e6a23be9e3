"""Messages about wrong values, and suggestions for unknown names: other tools' names first, then similar spellings."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

#: Our names, and other tools' names for them, in lower case with underscores. From nanoGPT, transformers'
#: TrainingArguments, DeepSpeed, Megatron-LM, torchtitan, litgpt, and plain habit.
_NAMES = """
# how long
steps tokens: epochs epoch num_epochs num_train_epochs max_epochs
steps: max_iters max_iter iters iterations num_iterations train_iters num_steps max_steps train_steps total_steps
steps: training_steps max_train_steps
tokens max_new_tokens: max_tokens
tokens: num_tokens train_tokens training_tokens
# batch
micro_batch_size global_batch_size train_micro_batch_size_per_gpu train_batch_size: batch_size batch
micro_batch_size global_batch_size: bs
micro_batch_size: local_batch_size mbs device_batch_size train_micro_batch_size_per_gpu
micro_batch_size train_micro_batch_size_per_gpu: micro_batch microbatch_size per_device_batch_size
micro_batch_size train_micro_batch_size_per_gpu: per_device_train_batch_size per_gpu_train_batch_size
train_micro_batch_size_per_gpu: micro_batch_size train_micro_batch_size_per_device
global_batch_size: train_batch_size gbs gradient_accumulation_steps
global_batch_tokens train_batch_size: total_batch_size
gradient_accumulation_steps global_batch_size: grad_accum grad_accum_steps accumulation_steps gradient_accumulation
# model
model: model_name model_type model_size preset init_model arch
seq_len: block_size context context_length context_size context_window ctx_len n_ctx n_positions max_len max_seq_len
seq_len: max_seq_length max_position_embeddings seq_length seqlen sequence_length
seq_len max_new_tokens: max_length
n_layer: n_layers num_layers layers depth num_hidden_layers
n_head: n_heads heads num_heads num_attention_heads
n_embd: hidden_size hidden_dim d_model dim width embd embed_dim n_embed embedding_size
vocab_size: vocabulary_size vocab n_vocab
n_kv_head: num_key_value_heads num_kv_heads n_kv_heads kv_heads num_query_groups n_query_groups
head_dim: head_size d_head kv_channels
mlp_width: intermediate_size ffn_dim ffn_hidden_size mlp_hidden_size n_inner d_ff
num_experts: num_local_experts n_routed_experts moe_num_experts n_experts experts
experts_per_token: num_experts_per_tok moe_top_k moe_k moe_router_topk
expert_width: moe_intermediate_size moe_ffn_hidden_size
dense_layers: first_k_dense_replace
balance_loss: router_aux_loss_coef aux_loss_alpha moe_aux_loss_coeff load_balancing_loss
activation: hidden_act activation_function activation_fn act
gated_mlp: swiglu geglu glu gated
norm: rmsnorm norm_type normalization layer_norm_type
norm_eps: rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon
norm_placement: post_norm norm_order
qk_norm: qk_layernorm
positions: position_embedding_type rope rotary
rope_theta: rope_base rotary_base rotary_emb_base theta
tied: tie_word_embeddings tie_embeddings tie_weights weight_tying untie_embeddings_and_output_weights
bias: use_bias add_bias_linear disable_bias_linear
attention_bias: qkv_bias add_qkv_bias attn_bias
sliding_window: window window_size attention_window
window_pattern: layer_types sliding_window_pattern local_attn_pattern attention_types
dropout: hidden_dropout
document_mask: reset_attention_mask reset_position_ids
params: num_params n_params parameters num_parameters
init_from: pretrained
init_from model hf: model_name_or_path
# optimizer and schedule
lr: learning_rate max_lr peak_lr base_lr
optimizer: optim
schedule: lr_schedule lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_lr
warmup_steps: warmup warmup_iters warmup_ratio lr_warmup_iters lr_warmup_steps num_warmup_steps
decay_steps: lr_decay_iters
min_lr_frac: min_lr min_lr_ratio min_lr_factor
weight_decay: wd
beta1: adam_beta1
beta2: adam_beta2
beta1 beta2: betas
eps: adam_eps adam_epsilon epsilon
gradient_clipping: grad_clip clip_grad clip_grad_norm gradient_clip gradient_clip_val max_norm max_grad_norm
# precision, memory, DeepSpeed
precision: bf16 fp16 fp32 dtype torch_dtype mixed_precision
precision torch_autocast: amp
bf16 precision: bfloat16
fp16 precision: float16 half
activation_checkpointing: grad_checkpoint gradient_checkpointing checkpoint_activations recompute recompute_granularity
ds: deepspeed deepspeed_config ds_config
zero_optimization ds: zero
ds zero_optimization: zero_stage
# data
data input: dataset data_path data_dir dataset_name dataset_path train_file
data: train_data
num_workers: dataloader_num_workers workers
workers: num_workers
workers num_workers: num_proc
text_field: text_column text_key
val_fraction hf_split: val_split
val_fraction: val_frac val_size validation_split
shard_mb: shard_size
shard_size shard_mb: max_shard_size
input: inputs text files
# the loop and its folder
seed: random_seed manual_seed rng_seed
log_every: log_interval log_freq logging_steps
val_every: eval_interval eval_steps val_interval
val_samples: eval_iters eval_samples
save_every: save_interval save_freq save_steps checkpoint_every checkpoint_interval ckpt_interval
keep_last: save_total_limit keep_checkpoints
to run emit: out
out to run: out_dir output_dir
out to run emit: output
to: save_directory
run: run_dir run_folder save save_dir checkpoint_dir
run wandb_name: run_name
resume: resume_from resume_from_checkpoint load ckpt
wandb: wandb_log report_to
wandb_name: wandb_run_name
overwrite: force overwrite_output_dir
force: overwrite
# machines
num_gpus: gpus ngpus n_gpus
nproc_per_node: nprocs num_processes num_procs
nproc_per_node num_gpus: world_size
num_gpus slots: nproc_per_node gpus_per_node
slots: num_gpus
num_nodes: nodes nnodes n_nodes
gpu: card gpu_type gpu_name
gpu_memory_gib: gpu_memory
gpu_memory_gib estimate: memory
host_memory_gib: host_memory cpu_memory
bf16_tflops: tflops
interconnect: network
budget_usd: budget usd
gpu_hours: hours
flops: compute
hostfile: hosts host_file
temperature: temp
top_k: topk
top_p: topp
max_new_tokens: num_tokens_to_generate
max_new_tokens seq_len: length
# presets
gpt2-124m: gpt2_small gpt2_117m
gpt2-350m: gpt2_medium gpt2_345m gpt2_355m
gpt2-774m: gpt2_large gpt2_762m
gpt2-1.5b: gpt2_xl gpt2_1.5b gpt2_1558m
gpt3-175b: gpt3 gpt_3
gpt2 gpt2-124m: gpt_2
llama3-1b: llama_3.2_1b llama3.2_1b
llama3-3b: llama_3.2_3b llama3.2_3b
llama3-8b: llama_3_8b llama_3.1_8b llama3.1_8b
llama3-70b: llama_3_70b llama_3.1_70b llama3.1_70b
# tokenizers
gpt2: openai_community/gpt2 r50k_base
bytes: byte char character byte_level
# GPUs
a100-80gb: a100
h100-80gb: h100
# subcommands
data: prepare
prepare data: tokenize tokenise preprocess
prepare: process shard
train-tokenizer: bpe tokenizer
doctor verify: check
verify: validate
inspect show: info
inspect: show
show: inspect
list: ls
diff: compare
doctor: diagnose
sample: generate infer
export: convert zero_to_fp32
report: plot
runs report: status
runs: ps jobs history
completion: completions autocomplete
launch: train start
plan: cost
checkpoint: checkpoints
"""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    other: tuple(ours.split())
    for ours, _, others in (line.partition(": ") for line in _NAMES.splitlines() if line and not line.startswith("#"))
    for other in others.split()
}


def shown(value: object, most: int = 80) -> str:
    """Return the beginning of a value's repr, at most `most` characters, whatever it holds.

    Only a few entries of a list or mapping are visited: in YAML one list may be in another many times over.
    """
    if isinstance(value, str):
        text = repr(value[:most])
        is_cut = len(value) > most
    else:
        bounded = reprlib.Repr()
        bounded.maxlist = bounded.maxtuple = bounded.maxdict = bounded.maxset = bounded.maxfrozenset = 4
        bounded.maxstring = bounded.maxother = bounded.maxlong = most
        bounded.maxlevel = 3
        try:
            text = bounded.repr(value)
        except ValueError:
            # Python refuses to write integers of more than 4,300 digits.
            text = "a very long number"
        is_cut = len(text) > most
    if is_cut:
        return f"{text[:most]}..."
    return text


def describe_invalid(name: str, detail: ErrorDetails, show: Callable[[object], str] = shown) -> str:
    """Return one of pydantic's errors as a sentence: name, value, rule, and the closest legal word if one was misspelt.

    `show` formats the value.
    """
    value = detail["input"]
    kind = detail["type"]
    hint = ""
    rule = detail["msg"].lower().replace("input should", "must")
    if kind == "value_error":
        rule = str(detail["ctx"]["error"])
    elif kind == "model_type":
        rule = "must be an object {...}"
    elif kind == "dict_type":
        rule = "must be a mapping of names to values"
    elif kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"{name} = {show(value)}: {rule}.{hint}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the names in `known` that `word` probably means, or an empty string."""
    meant = names_meant(word, known)
    if meant:
        return f" Did you mean {' or '.join(map(repr, meant))}?"
    return ""


def names_meant(word: str, known: Iterable[str]) -> list[str]:
    """Return the names in `known` that `word`, which a caller has refused, probably means.

    Tried in this order: the same name in other letters (GPT2-124M, --n_layer); other tools' names for it (all that
    are in `known`); a name that begins with the word and a separator (h100 is h100-80gb, not h200); a name one edit
    away; a name that begins with the word; a similar name; a name with which the word begins. Never `word` itself.
    """
    names = {_plain(name): name for name in reversed(list(known)) if _plain(name)}
    plain = _plain(word)
    if plain in names or not plain:
        nearest = [plain] if plain else []
    else:
        others = [_plain(name) for name in OTHER_NAMES.get(plain, ())]
        nearest = [name for name in others if name in names] or _nearest(plain, list(reversed(names)))
    return [names[name] for name in nearest if names[name] != word]


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _nearest(plain: str, names: list[str]) -> list[str]:
    long_enough = [name for name in names if min(len(plain), len(name)) > 1]
    # 0.75: two letters of four changed places (fats, fast); "epochs" and "eps" have 0.67.
    nearest = (
        [name for name in long_enough if name.startswith(f"{plain}_")]
        or [name for name in long_enough if _is_one_edit(plain, name)]
        or [name for name in long_enough if name.startswith(plain)]
        or difflib.get_close_matches(plain, names, n=1, cutoff=0.75)
        or sorted((name for name in long_enough if plain.startswith(f"{name}_")), key=len, reverse=True)
    )
    return nearest[:1]


def _is_one_edit(word: str, name: str) -> bool:
    """Return whether inserting, deleting or replacing one letter, or swapping two neighbours, makes them equal."""
    differing = (at for at, (one, other) in enumerate(zip(word, name, strict=False)) if one != other)
    same = next(differing, min(len(word), len(name)))
    ours = word[same:]
    theirs = name[same:]
    swapped = ours[1::-1] + ours[2:]
    return swapped == theirs or ours[1:] == theirs[1:] or ours[1:] == theirs or ours == theirs[1:]
