"""What GPT-2 and GPT-3 reached on HellaSwag's 10,042 validation items without examples (zero-shot). No torch.

GPT-2: llm.c, completion style, whose numbers `acc` and `acc_tokens` of `llmscale eval --tasks hellaswag=...` are; for
124M and 1558M both, from the heading of dev/data/hellaswag.py; for the other two the one per token, from
dev/vislog.ipynb. GPT-3: Brown et al. 2020, table H.1, column "zero-shot", as printed; the paper chooses the ending of
the highest likelihood per token (section 2.4), from a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LLM_C = "llm.c"
_GPT3 = "Brown et al. 2020, table H.1"
#: Models whose sizes differ by less are compared.
_NEAR_FRAC = 0.1


@dataclass(frozen=True)
class PublishedResult:
    """Of one published model on HellaSwag."""

    model: str
    num_parameters: float
    values: Mapping[str, float]
    """By the names that our own results have."""
    source: str


HELLASWAG = (
    PublishedResult("GPT-2 124M", 124_439_808, {"acc": 0.2859, "acc_tokens": 0.2955}, _LLM_C),
    PublishedResult("GPT-2 355M", 354_823_168, {"acc_tokens": 0.375224}, _LLM_C),
    PublishedResult("GPT-2 774M", 774_030_080, {"acc_tokens": 0.431986}, _LLM_C),
    PublishedResult("GPT-2 1558M", 1_557_611_200, {"acc": 0.3842, "acc_tokens": 0.4893}, _LLM_C),
    PublishedResult("GPT-3 125M", 125e6, {"acc_tokens": 0.337}, _GPT3),
    PublishedResult("GPT-3 350M", 350e6, {"acc_tokens": 0.436}, _GPT3),
    PublishedResult("GPT-3 760M", 760e6, {"acc_tokens": 0.510}, _GPT3),
    PublishedResult("GPT-3 1.3B", 1.3e9, {"acc_tokens": 0.547}, _GPT3),
    PublishedResult("GPT-3 2.7B", 2.7e9, {"acc_tokens": 0.628}, _GPT3),
    PublishedResult("GPT-3 6.7B", 6.7e9, {"acc_tokens": 0.674}, _GPT3),
    PublishedResult("GPT-3 13B", 13e9, {"acc_tokens": 0.709}, _GPT3),
    PublishedResult("GPT-3 175B", 175e9, {"acc_tokens": 0.789}, _GPT3),
)


def comparable_results(num_parameters: int) -> list[PublishedResult]:
    """Those of models that have about as many parameters; none for most sizes."""
    return [
        result
        for result in HELLASWAG
        if abs(num_parameters - result.num_parameters) <= _NEAR_FRAC * result.num_parameters
    ]
