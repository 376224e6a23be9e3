"""The row that `llmscale estimate` stars can be trained: the real engine finishes its dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.cli.estimate_rows import find_rows, read_request
from llmscale.cli.flags import read_gpus
from llmscale.cli.main import build_parser
from llmscale.config.presets import PRESETS
from llmscale.config.resolve import ResolvedStep
from llmscale.dry_run.engine import dry_run
from tests.conftest import words

#: (GPUs of a node, nodes).
MACHINES = ((1, 1), (8, 1), (8, 8))
GPU = "h100-80gb"
#: Blocks of a model whose dry run takes seconds.
MOST_BLOCKS = 5
#: Chunks of its loss.
CHUNKS = 4
#: DeepSpeed's thresholds in elements, which act on a model by its size.
THRESHOLDS = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "reduce_bucket_size",
    "allgather_bucket_size",
)


def find_starred(model: str, seq_len: int, gpus: int, nodes: int) -> ResolvedStep | None:
    """Return the step of the starred row; None where nothing fits."""
    command = f"estimate --model {model} --gpu {GPU} --num-gpus {gpus} --num-nodes {nodes} --seq-len {seq_len}"
    args = build_parser(words(command)).parse_args(words(command))
    row = find_rows(read_request(args, read_gpus(args)[0])).ranking.recommended
    return None if row is None else row.fit.step


def shorten(step: ResolvedStep) -> ResolvedStep:
    """Return the step of a model of fewer blocks, with thresholds that are to it what they were to the whole.

    The loss has few chunks: each takes as long to simulate as a block.
    """
    tokens = -(-step.plan.tokens_per_forward // CHUNKS)
    step = replace(step, loss=replace(step.loss, chunk_tokens=max(tokens, step.loss.chunk_tokens)))
    blocks = step.shape.n_layer
    if blocks <= MOST_BLOCKS:
        return step
    short = step.changed(shape=step.shape.changed({"n_layer": MOST_BLOCKS}))
    zero = dict(short.engine_config.zero.model_dump(mode="json", exclude_unset=True))
    scaled = {key: zero[key] * MOST_BLOCKS // blocks // 2 * 2 for key in THRESHOLDS if key in zero}
    return replace(short, ds_config={**short.ds_config, "zero_optimization": {**zero, **scaled}})


@pytest.mark.slow
@pytest.mark.parametrize("is_long", [False, True], ids=["default", "long"])
@pytest.mark.parametrize("machines", MACHINES, ids=["1-gpu", "8-gpus", "64-gpus"])
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.usefixtures("libraries_are_frozen")
def test_starred_rows_finish_their_dry_run(model: str, machines: tuple[int, int], is_long: bool) -> None:
    own = PRESETS[model].seq_len
    step = find_starred(model, max(32_768, 4 * own) if is_long else own, *machines)
    if step is None:
        pytest.skip("nothing fits")
    done = dry_run(shorten(step))
    assert done.step.total_bytes > 0
