"""FLOPs of training and inference, and the units that papers count them in. No torch.

The rule of thumb C = 6 N D: each parameter takes part in one multiply-accumulate (2 FLOPs) per token in the forward
pass and in two in the backward pass. N is the model's parameters, attention's own FLOPs (12 L h s per token, which
`GPTShape.flops_per_token` counts) and recomputation are not in it.
"""

from __future__ import annotations

#: A petaflop/s for a day (Kaplan et al. 2020, OpenAI's unit).
PF_DAY_FLOPS = 1e15 * 86_400


def training_flops(num_parameters: float, tokens: float) -> float:
    """6 N D: forward and backward."""
    return 6 * num_parameters * tokens


def inference_flops(num_parameters: float, tokens: float) -> float:
    """2 N D: forward only, without the attention over the context."""
    return 2 * num_parameters * tokens


def affordable_tokens(flops: float, num_parameters: float) -> float:
    """Tokens that a budget trains a model of that size on."""
    return flops / (6 * num_parameters)
