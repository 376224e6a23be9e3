from __future__ import annotations

import pytest

from llmscale.config.hardware import Cluster, measured_gpu
from llmscale.training.reports import describe_demo, hpz_warnings

A100S, UNKNOWN = (
    Cluster(measured_gpu(name, 80 << 30, (8, 0)), 8, num_nodes=2) for name in ("NVIDIA A100-SXM4-80GB", "A GPU")
)


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "words"),
    [(1, [4], None), (4, [4, 4], None), (2, [4, 4], None), (4, [4], "on one node"), (4, [2, 2], "nodes of 2 ranks")],
)
def test_groups_that_gain_nothing_are_said(group: int, ranks_per_node: list[int], words: str | None) -> None:
    warnings = list(hpz_warnings(group, ranks_per_node))
    assert len(warnings) == (words is not None)
    assert all(words in warning for warning in warnings if words)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (None, "`llmscale estimate --gpu list`"),
        (A100S, "--model gpt3-13b --gpu a100-80gb --num-gpus 8 --num-nodes 2`"),
        (UNKNOWN, "a --model that `llmscale estimate` recommends for these GPUs"),
    ],
)
def test_the_demo_says_what_a_real_run_has(cluster: Cluster | None, words: str) -> None:
    line = describe_demo("tiny-10m", cluster)
    assert "--data FOLDER" in line and "--text FOLDER" in line and words in line
