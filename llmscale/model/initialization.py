"""GPT-2's initial weights, the same numbers for a seed at every ZeRO stage, precision and device.

`deepspeed.zero.Init` cuts a module's parameters into shards as soon as that module's constructor returns, and
makes new tensors in the training precision. Weights are therefore drawn inside the constructor of the module
that owns them, in fp32 on the CPU, and only then rounded to the parameter's own type.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

#: Standard deviation of every weight matrix and embedding (Radford et al. 2019, and OpenAI's code).
INIT_STD = 0.02

#: Numbers drawn from one seed. A core draws 10^8 a second, 29 minutes for GPT-3 175B, so large tensors are
#: drawn in pieces on all threads; pieces also keep the fp32 memory on top of the weights to 64 MiB a thread.
CHUNK_ELEMENTS = 2**24


def residual_std(n_layer: int) -> float:
    """Standard deviation of the projections that end in the residual stream.

    Each of the n_layer blocks adds two of them, so 1/sqrt(2 n_layer) keeps the variance of their sum that of
    one (Radford et al. 2019, section 2.3).
    """
    return INIT_STD / math.sqrt(2 * n_layer)


def fill_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Overwrite `parameter` with numbers from N(0, std^2), whatever the number of threads.

    `generator` gives the seed of each piece. Parameters on the meta device, and fake ones, hold nothing and are left
    alone.
    """
    if parameter.is_meta or isinstance(parameter, FakeTensor):
        return
    pieces = parameter.detach().view(-1).split(CHUNK_ELEMENTS)
    seeds = [int(torch.randint(2**63 - 1, (1,), generator=generator)) for _ in pieces]
    stds = [std] * len(pieces)
    if len(pieces) == 1:
        _fill_piece(pieces[0], stds[0], seeds[0])
        return
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(_fill_piece, pieces, stds, seeds))


def _fill_piece(piece: Tensor, std: float, seed: int) -> None:
    # Not empty().normal_(): zero.Init replaces torch.empty by one that ignores the wanted dtype, and a
    # draw in bf16 is another sequence than one in fp32.
    generator = torch.Generator().manual_seed(seed)
    size = (piece.numel(),)
    piece.copy_(torch.normal(0.0, std, size, generator=generator, dtype=torch.float32, device="cpu"))
