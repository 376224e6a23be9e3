"""Train a model of your own in a loop of your own, and continue it after any end on any ranks at any ZeRO stage:

torchrun --nproc-per-node 2 examples/own_loop.py DATA RUN 2  # the last number is the stage
torchrun --nproc-per-node 3 examples/own_loop.py DATA RUN 3
"""

import contextlib
import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from llmscale import api

data, run, stage = sys.argv[1], sys.argv[2], int(sys.argv[3])
world = api.join_ranks()  # under torchrun, deepspeed, Slurm or alone
stream = api.open_stream(data, global_batch=12, micro_batch=2, seed=1, total_steps=30)
ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": stream.micro_steps,  # follows from the number of ranks
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
}
shape = LlamaConfig(
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    vocab_size=1024,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=ds_config) if stage == 3 else contextlib.nullcontext():
    model = LlamaForCausalLM(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
engine, *_ = api.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config)
checkpoints = api.Checkpoints(engine, run, report=print)
loaded = checkpoints.load()  # the newest undamaged one, verified; None in a new run
first = loaded.step if loaded else 0
for step, batches in enumerate(stream.steps(first), first):
    losses = []
    for batch in batches:
        tokens, labels = batch.tokens.to(world.device), batch.labels.to(world.device)
        loss = engine(input_ids=tokens, labels=labels).loss * batch.weight
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    if world.is_main:
        print(f"step {step + 1} loss {mean.item() / world.world_size:.9f}", flush=True)
    if (step + 1) % 5 == 0:
        checkpoints.save(step + 1)
checkpoints.close()
dist.destroy_process_group()
