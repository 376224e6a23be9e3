"""train.py on a rank whose optimizer is wrong if it is rank 1."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from llmscale.train import main


def step_wrongly() -> None:
    """Move the weights by a hundredth more than AdamW does."""
    step = torch.optim.AdamW.step

    def wrong(self: Any, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= 1.01
        result = step(self, closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return result

    torch.optim.AdamW.step = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        step_wrongly()
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
