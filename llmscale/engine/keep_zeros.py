"""Pruned weights that stay pruned: no gradient reaches a weight of the blocks' linear layers that is zero.

Nothing else is needed. Where the gradient is zero in every step AdamW's two averages are, hence its update; its decay
multiplies the weight. So the mask is the weights themselves, whatever ZeRO does to them, kept nowhere: at stage 3
they are gathered while their gradient is made. (Adafactor's update is zero there too; Muon's, orthogonalised, is not.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmscale.errors import MachineError
from llmscale.model.gpt import GPT


def keep_zeros(model: GPT) -> None:
    """From now on weights of the blocks' linear layers that are zero stay so. Before `deepspeed.initialize`."""
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            _keep_zeros_of(layer.weight)


def _keep_zeros_of(weight: Tensor) -> None:
    def without_zeros(gradient: Tensor) -> Tensor:
        if weight.shape != gradient.shape:
            raise MachineError("keep_zeros: DeepSpeed has released a weight before its gradient was made.")
        return torch.where(weight == 0, torch.zeros((), dtype=gradient.dtype, device=gradient.device), gradient)

    weight.register_hook(without_zeros)
