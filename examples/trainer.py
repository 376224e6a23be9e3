"""Train by the Trainer of transformers, and continue after any end on any ranks at any ZeRO stage:

deepspeed --num_gpus 2 examples/trainer.py OUT 2  # the last number is the stage
deepspeed --num_gpus 3 examples/trainer.py OUT 3
"""

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from llmscale import api

out, stage = Path(sys.argv[1]), int(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Numbers(torch.utils.data.Dataset):
    """Sequences in which every second number repeats the one before it."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.randint(200, (8,), generator=torch.Generator().manual_seed(index)).repeat_interleave(2)
        return {"input_ids": numbers, "labels": numbers}


settings = TrainingArguments(
    str(out),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=6 // ranks,  # the product stays 12 sequences a step
    max_steps=12,
    save_steps=4,
    logging_steps=1,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=3,
    lr_scheduler_type="cosine",
    seed=1,
    report_to=[],
    disable_tqdm=True,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
shape = LlamaConfig(
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    vocab_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
torch.manual_seed(0)
trainer = Trainer(model=LlamaForCausalLM(shape), args=settings, train_dataset=Numbers())
with api.elastic_checkpoints():
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
