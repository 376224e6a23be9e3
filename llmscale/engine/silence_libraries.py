"""Silence four messages of the libraries that tell a user nothing they could act on, and only those. No torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def quiet_libraries() -> None:
    """Call it before DeepSpeed is imported.

    - torch 2.13 deprecates two collectives that DeepSpeed 0.19 still calls; both work.
    - torch.distributed.checkpoint says that it loads in a single process, which is what was asked for.
    - torch.compile says of selective checkpointing that it must not contain in-place operators; a block has none.
    - DeepSpeed says on every rank of a CPU machine that it found no GPU; train.py prints the device it uses. The choice
      stays DeepSpeed's: setting DS_ACCELERATOR instead would need its whole detection of vendors again.
    """
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        category=FutureWarning,
    )
    warnings.filterwarnings(
        "ignore",
        message=r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
        category=UserWarning,
    )
    # DeepSpeed's own name of its logger; a filter outlives the level that DeepSpeed sets at import.
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    known = ("Setting accelerator to CPU.", "Detected that context_fn is passed to torch.utils.checkpoint")
    return not record.getMessage().strip().startswith(known)


@contextmanager
def without_memory_prints() -> Iterator[None]:
    """DeepSpeed's BF16_Optimizer prints the memory at six points while it is built, and cannot be told not to."""
    from deepspeed.runtime import bf16_optimizer

    see_memory_usage = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = see_memory_usage
