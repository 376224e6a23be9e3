"""The flags that say which GPUs: those of `estimate` and `plan`."""

from __future__ import annotations

import argparse

from llmscale.config import flag_type, limits

#: In place of a name: all there are.
LIST = "list"
DEFAULT_INTERCONNECT = "ib-400g"


def add_machine_flags(
    group: argparse._ArgumentGroup, *, num_gpus: int, num_nodes: int | None, num_nodes_default: str
) -> None:
    """`num_gpus` and `num_nodes` are the defaults; `num_nodes_default` is what the help says of the second."""
    group.add_argument(
        "--gpu", type=_name_or_list, metavar="NAME", help="a GPU of the table (`llmscale estimate --gpu list`)"
    )
    group.add_argument(
        "--gpu-memory-gib",
        type=flag_type.quantity(0.01, limits.MAX_GPU_GIB),
        metavar="GIB",
        help="of a GPU that is not in the table",
    )
    group.add_argument(
        "--bf16-tflops", type=flag_type.quantity(0.001, limits.MAX_TFLOPS), metavar="X", help="its dense 16-bit rate"
    )
    group.add_argument(
        "--num-gpus",
        type=flag_type.whole(1, limits.MAX_GPUS_PER_NODE),
        default=num_gpus,
        metavar="N",
        help=f"GPUs per node (default: {num_gpus})",
    )
    group.add_argument(
        "--num-nodes",
        type=flag_type.whole(1, limits.MAX_NODES),
        default=num_nodes,
        metavar="N",
        help=f"nodes (default: {num_nodes_default})",
    )
    group.add_argument(
        "--interconnect",
        type=_name_or_list,
        default=DEFAULT_INTERCONNECT,
        metavar="NAME",
        help=f"between nodes (default: {DEFAULT_INTERCONNECT}); `estimate --interconnect list` compares all",
    )


def _name_or_list(text: str) -> str:
    """As every name, in any case."""
    return LIST if text.lower() == LIST else flag_type.name(text)
