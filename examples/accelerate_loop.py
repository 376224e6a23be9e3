"""Train by accelerate, and continue after any end on any ranks at any ZeRO stage:

deepspeed --num_gpus 2 examples/accelerate_loop.py OUT 2  # the last number is the stage
deepspeed --num_gpus 3 examples/accelerate_loop.py OUT 3
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin

from llmscale import api

out, stage = Path(sys.argv[1]), int(sys.argv[2])
accumulation = 6 // int(os.environ.get("WORLD_SIZE", "1"))  # 6 micro-batches a step on any ranks
ds_config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
accelerator = Accelerator(
    gradient_accumulation_steps=accumulation, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config)
)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(144, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1)), batch_size=2)
engine, optimizer, data = accelerator.prepare(model, optimizer, data)
saved = sorted(out.glob("step-*"), key=lambda folder: int(folder.name[5:]))
with api.elastic_checkpoints():
    if saved:
        accelerator.load_state(str(saved[-1]))
    first = engine.global_steps
    for number, (rows, targets) in enumerate(accelerator.skip_first_batches(data, first * accumulation), 1):
        with accelerator.accumulate(engine):
            accelerator.backward((engine(rows).squeeze(1) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if number % (3 * accumulation) == 0:
            accelerator.save_state(str(out / f"step-{first + number // accumulation}"))
