"""A module with what our GPT does not have, and an engine of DeepSpeed around it. Imports nothing of llmscale.

It has tied weights, buffers that move (one of integers), one that is not saved, a frozen layer, a parameter of one
element and sizes that no number of ranks divides. The optimizer has three unnamed groups, and the learning rate a
schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

VOCABULARY = 23
WIDTH = 6
HIDDEN = 11
POSITIONS = 5
#: Sequences in a step, which 1, 2, 3 and 6 ranks divide.
GLOBAL_BATCH = 6


class Norm(nn.Module):
    """BatchNorm's buffers, in any type: torch's own refuses bf16 weights beside fp32 statistics on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(hidden.mean((0, 1)).to(self.running_mean.dtype), 0.1)
            self.num_batches_tracked += 1
        centred = hidden - hidden.mean((0, 1))
        return centred / (hidden.var((0, 1), unbiased=False) + 1e-5).sqrt() * self.weight + self.bias


class Awkward(nn.Module):
    """`has_outsider`: a trainable parameter that the optimizer does not get."""

    def __init__(self, *, has_outsider: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = Norm()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", torch.arange(POSITIONS).float(), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool)))
        self.frozen.requires_grad_(False)
        if has_outsider:
            self.outsider = nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        mask = self.mask.to(hidden.dtype)
        mixed = mask / mask.sum(1, keepdim=True)
        hidden = hidden + mixed @ self.down(torch.tanh(self.frozen(torch.tanh(self.up(hidden))))) * self.gain
        if hasattr(self, "outsider"):
            hidden = hidden + self.outsider
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


def parameter_groups(net: Awkward) -> list[dict[str, Any]]:
    """Three groups without names, each with settings of its own."""
    named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]

    def those(*parts: str) -> list[nn.Parameter]:
        return [parameter for name, parameter in named if name.startswith(parts)]

    return [
        {"params": those("up", "down"), "lr": 2e-2, "weight_decay": 0.1},
        {"params": those("norm", "gain"), "lr": 1e-2, "weight_decay": 0.0},
        {"params": those("embedding"), "lr": 1e-2, "weight_decay": 0.01},
    ]


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
}


def ds_config(stage: int, precision: str, ranks: int, **sections: Any) -> dict[str, Any]:
    """Return a ds_config of six sequences a step; `sections` are merged into it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // ranks,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
        if stage:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    for name, values in sections.items():
        config[name] = {**config[name], **values} if isinstance(config.get(name), dict) else values
    return config


def build_engine(
    stage: int,
    precision: str = "fp32",
    *,
    optimizer: str = "adamw",
    seed: int = 0,
    has_outsider: bool = False,
    **sections: Any,
) -> DeepSpeedEngine:
    """Build an engine as a script of its own does. Collective. Another `seed`: what a load leaves out stays visible."""
    import deepspeed

    config = ds_config(stage, precision, dist.get_world_size(), **sections)
    torch.manual_seed(seed)
    place = deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext()
    with place:
        net = Awkward(has_outsider=has_outsider)
    made = OPTIMIZERS[optimizer](parameter_groups(net))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=10)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=made, lr_scheduler=schedule, config=config, dist_init_required=False
    )
    return engine


def train(engine: DeepSpeedEngine, first: int, last: int) -> list[float]:
    """Train steps `first` to `last` - 1; return the loss of each, over all ranks. Collective."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        batch = torch.randint(VOCABULARY, (GLOBAL_BATCH, POSITIONS + 1), generator=generator)
        rows = batch.split(GLOBAL_BATCH // dist.get_world_size())[dist.get_rank()]
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            loss = engine(row[None, :-1], row[None, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / GLOBAL_BATCH)
    return losses
