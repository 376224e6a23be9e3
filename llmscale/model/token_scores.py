"""How likely a linear head finds each of given tokens, some positions at a time: no whole logits ever exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def score_tokens(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk_tokens: int) -> Tensor:
    """Of every target its log-probability in nats, and 1 where it is the likeliest token, else 0: [batch, t, 2], fp32.

    x: [batch, t, n_embd]; weight: [rows, n_embd], of which those from `vocab_size` on are padding without logits;
    targets: ids [batch, t]. Without gradients. Of equally likely tokens the first is the likeliest. The logits of
    `chunk_tokens` positions are in memory at a time, as in a validation (model/loss.py), whose arithmetic this is.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    flat, of_flat = x.flatten(0, -2), targets.flatten()
    scores = torch.empty(len(flat), 2, dtype=torch.float32, device=x.device)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight_cast = weight.to(dtype)
        for start in range(0, len(flat), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            target = of_flat[chunk]
            logits = torch.mm(flat[chunk].to(dtype), weight_cast.t())
            logits[:, vocab_size:] = -torch.inf
            scores[chunk, 1] = (logits.argmax(1) == target).float()
            log_probs = F.log_softmax(logits, 1, dtype=torch.float32)
            scores[chunk, 0] = log_probs.gather(1, target[:, None])[:, 0]
    return scores.view(*targets.shape, 2)
