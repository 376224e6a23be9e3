"""A module that is no GPT, with what a GPT of llmscale has not, and its engine at any stage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 50
WIDTH = 16
LENGTH = 8


class Norm(nn.Module):
    """Batch norm's buffers, in any type: torch's own refuses bf16 weights beside fp32 statistics on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("num_batches", torch.tensor(0))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(hidden.mean((0, 1)).to(self.running_mean.dtype), 0.1)
            self.num_batches += 1
        centred = hidden - hidden.mean((0, 1))
        return centred / (hidden.var((0, 1), unbiased=False) + 1e-5).sqrt() * self.weight + self.bias


class Net(nn.Module):
    """Tied weights, buffers that move (one an int64), a buffer that no state dict has, a frozen layer, a parameter of
    one element, one that the optimizer does not get, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = Norm()
        self.up = nn.Linear(WIDTH, 33)  # 33: no rank's share ends where a parameter does
        self.frozen = nn.Linear(33, 33)
        self.down = nn.Linear(33, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.left_out = nn.Parameter(torch.ones(5))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(LENGTH).float(), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        mask = self.mask.to(hidden.dtype)
        inner = torch.tanh(self.frozen(torch.tanh(self.up(hidden))))
        hidden = hidden + (mask / mask.sum(1, keepdim=True)) @ self.down(inner) * self.gain + 0 * self.left_out.sum()
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


class NetWithout(Net):
    """`down` without a bias: another model."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(33, WIDTH, bias=False)


class NetTurned(Net):
    """A frozen weight of as many elements in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.weight = nn.Parameter(torch.zeros(11, 99), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.embedding(tokens).float().sum()


def divide(net: nn.Module) -> list[dict[str, Any]]:
    """Three groups without names, with learning rates of their own. The frozen layer is in one, `left_out` is not."""
    named = [(name.replace("_orig_mod.", ""), param) for name, param in net.named_parameters()]
    members = [[param for name, param in named if name.startswith(start)] for start in _GROUPS]
    return [
        {"params": members[0], "lr": 2e-2, "weight_decay": 0.1},
        {"params": members[1], "lr": 1e-2, "weight_decay": 0.0},
        {"params": members[2], "lr": 1e-2},
    ]


_GROUPS = (("up", "down", "frozen", "unused"), ("norm", "gain"), ("embedding",))
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}


def ds_config_of(stage: int, precision: str, *, offload: bool, samples: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": samples // int(os.environ["WORLD_SIZE"]),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "bf16" and stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build(
    stage: int,
    precision: str = "fp32",
    *,
    optimizer: str = "adamw",
    offload: bool = False,
    samples: int = 6,
    seed: int = 0,
    kind: Callable[[], nn.Module] = Net,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    groups: Callable[[nn.Module], list[dict[str, Any]]] = divide,
) -> Any:
    """Build an engine by api.initialize. A step has `samples`, one a micro-batch: a multiple of the ranks."""
    import deepspeed

    from llmscale import api

    config = ds_config_of(stage, precision, offload=offload, samples=samples)
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        net = kind()
    made = OPTIMIZERS[optimizer](groups(net))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=10)
    engine, *_ = api.initialize(model=wrap(net), optimizer=made, lr_scheduler=schedule, config=config)
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    """Take the steps from `first` up to, not including, `last`; return their losses over all ranks."""
    rank, ranks, samples = dist.get_rank(), dist.get_world_size(), engine.train_batch_size()
    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 + step)
        rows = torch.randint(VOCAB, (samples, LENGTH + 1), generator=draw).split(samples // ranks)[rank]
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            loss = engine(row[None, :-1], row[None, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / samples)
    return losses
