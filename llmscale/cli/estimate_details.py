"""Details of rows: what their numbers rest on, activations by the known formula, moments, the dry run.

Torch is imported only for the dry run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.cli.answers import CATEGORIES, align, gib
from llmscale.cli.estimate_rows import RowsAnswer, host_words, margin_line
from llmscale.config.bundled_files import install_command
from llmscale.config.hardware import Cluster
from llmscale.config.resolve import ResolvedStep
from llmscale.errors import ConfigError
from llmscale.memory.activations import estimate_activations
from llmscale.memory.breakdown import GIB, Breakdown, format_size
from llmscale.memory.estimate import CONTEXT_BYTES, PHASES, RESERVED_PER_ALLOCATED, estimate_memory, step_activations
from llmscale.memory.layers import loss
from llmscale.planning.recommend import RankedConfig
from llmscale.planning.search import Candidate
from llmscale.planning.step_time import RATE_ERROR

if TYPE_CHECKING:  # a plain estimate does not wait for what only --dry-run needs
    from llmscale.dry_run.simulate import DryRun

#: Bytes of a complete logit at the peak of an unchunked loss: logits, copy and softmax in fp32, and their gradients.
_WHOLE_LOGIT_BYTES = 12


def detail_lines(answer: RowsAnswer, args: argparse.Namespace, dry_runs: list[Comparison]) -> Iterator[str]:
    """Yield what was asked for beside the rows."""
    rows = answer.ranking.configs
    fit = answer.ranking.nearest.fit
    if fit.step.shape.num_experts:
        yield from _load_lines(fit)
    if args.why:
        yield ""
        yield from _why_lines(rows, fit.cluster)
    if args.explain:
        yield ""
        yield from _explain_lines(fit)
    for row in rows:
        if row.ds_config is not None:
            yield from _moment_lines(row)
    for dry_run in dry_runs:
        yield ""
        yield from _comparison_lines(dry_run)


def _load_lines(fit: Candidate) -> Iterator[str]:
    """Yield what an uneven load of the experts changes."""
    size = fit.plan.ranks.expert_parallel_size
    if size == 1:
        yield "experts: an uneven load does not change these bytes, because one GPU computes all of them."
        return
    worst = estimate_memory(fit.step, fit.cluster.gpu.capability, worst_load=True)
    spare = fit.cluster.gpu_bytes - worst.total_bytes
    verdict = f"{spare / GIB:.1f} free" if spare >= 0 else f"{-spare / GIB:,.1f} over"
    yield (
        f"experts: each group of {size} GPUs divides them, and the rows assume equal loads. If all tokens of a group "
        f"went to one GPU's experts, {fit.strategy.describe()} would take {gib(worst.total_bytes)} GiB, {verdict}."
    )


def _why_lines(rows: Sequence[RankedConfig], cluster: Cluster) -> Iterator[str]:
    """Yield what the numbers rest on, and what is assumed."""
    yield (
        f"Two parts of total are assumed, not measured: {RESERVED_PER_ALLOCATED - 1:.0%} that the allocator holds "
        f"beyond the tensors, and {format_size(CONTEXT_BYTES)} for CUDA, its libraries and NCCL. The tensors are "
        "DeepSpeed's and the model's, by formulas (docs/memory.md)."
    )
    yield (
        "activ counts blocks that run eagerly; compiled ones (train's --compile) keep no more, and at stage 3 gather a "
        "block at a time."
    )
    fits = [row.fit for row in rows]
    types = {fit.step.engine_config.grad_accum_dtype for fit in fits if fit.plan.gradient_accumulation_steps > 1}
    if types:
        yield (
            f"gradients of several micro-steps are summed in {' or '.join(sorted(types))}, counted in grad and comm "
            "(data_types.grad_accum_dtype of the ds_config)."
        )
    if any(fit.plan.filler_share for fit in fits):
        yield "fillers: work beyond that of the batch, which does not divide over the GPUs; counted in tok/s and MFU."
    yield margin_line()
    if any(fit.host_bytes_per_node for fit in fits):
        yield f"host is for what is offloaded; {host_words(cluster)}."
    copies = sorted(fit.save_bytes_per_node for fit in fits)
    if copies:
        least = format_size(copies[0])
        most = format_size(copies[-1])
        size = least if least == most else f"{least} to {most}"
        yield f"a save takes {size} of each node's memory beside host, for the copy that is written in the background."
    rates = [row.throughput for row in rows if row.throughput]
    if rates:
        gains = sorted(f"{rate.compiled_tokens_per_second / rate.tokens_per_second:.2f}" for rate in rates)
        gain = gains[0] if gains[0] == gains[-1] else f"{gains[0]} to {gains[-1]}"
        yield f"tok/s of all GPUs together and MFU are estimated: {RATE_ERROR}."
        yield (
            f"tok/s is that of eager blocks. Compiled ones (train's --compile) are estimated at {gain} times as much, "
            "from torchtitan's published speeds and, at stage 3, from what they gather."
        )


def _explain_lines(fit: Candidate) -> Iterator[str]:
    """Yield the known formula of activations beside ours."""
    plan = fit.plan
    shape = fit.step.shape
    yield (
        f"Activations of micro-batch b = {plan.micro_batch_size}, s = {shape.seq_len:,} tokens, width h = "
        f"{shape.n_embd}, a = {shape.n_head} heads, {shape.n_layer} layers, {fit.step.precision}, in GiB. By "
        "Korthikanti et al. 2022 a layer saves s b h (34 + 5 a s / h) bytes in 16 bit, twice that in fp32:"
    )
    for mark, num_bytes, words in explain_activations(fit.step, fit.cluster.gpu.capability):
        yield f"{mark} {num_bytes / GIB:8,.1f}  {words}"
    peak = fit.estimate.peak
    others = peak.total_bytes - peak.activations_bytes - peak.logits_bytes
    yield (
        f"Beside them {gib(others)} of parameters, gradients, states and buffers at the peak "
        f"({fit.estimate.peak_moment}), where {gib(peak.total_bytes)} are allocated."
    )


def explain_activations(
    step: ResolvedStep, capability: ComputeCapability | None = None
) -> Iterator[tuple[str, float, str]]:
    """Yield the terms of the known formula, of what a run saves of them, and their sums: (mark of a sum, bytes, words).

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
    equation 2: a layer saves s b h (34 + 5 a s / h) bytes in 16 bit, for a micro-batch of b sequences of s tokens,
    width h and a heads.
    """
    ours = step_activations(step, capability)
    p = ours.p
    shape = step.shape
    unit = shape.n_layer * p.width / 2
    stream = unit * 34 * p.tokens * shape.n_embd
    scores = unit * 5 * shape.n_head * p.tokens * shape.seq_len
    logits = float(_WHOLE_LOGIT_BYTES * p.tokens * shape.padded_vocab_size)
    yield " ", stream, "34 s b h for every layer: inputs of matrix products, norms, GELU and dropout masks"
    yield " ", scores, "5 a s^2 b for every layer: attention's scores, their softmax and its dropout"
    yield " ", logits, "12 s b V: logits of the vocabulary, their softmax and gradients"
    yield "=", stream + scores + logits, "a naive loop needs"
    uncheckpointed = estimate_activations(p, "none").saved[-1]
    chunked = loss(p).forward
    yield " ", -scores, f"attention by the {p.kernel.replace('_padded', '')} kernel keeps no scores"
    yield " ", uncheckpointed - stream, "our layers keep other tensors than the formula counts"
    yield " ", chunked - logits, f"the loss in chunks of {step.loss.chunk_tokens:,} tokens"
    if ours.saved[-1] != uncheckpointed:
        yield " ", ours.saved[-1] - uncheckpointed, f"{step.checkpointing} checkpointing recomputes"
    yield "=", ours.saved[-1] + chunked, "what is left"


def _moment_lines(row: RankedConfig) -> Iterator[str]:
    """Yield one ds_config, moment by moment, in GiB; `*` marks the peak."""
    fit = row.fit
    estimate = row.fit.estimate
    state_bytes = fit.step.stored_optimizer.state_bytes_per_weight(fit.step.shape.architecture)
    yield ""
    yield (
        f"{row.ds_config}: {fit.strategy.describe()}, {fit.step.precision}, gradients summed in "
        f"{fit.step.engine_config.grad_accum_dtype}, {state_bytes:.3g} bytes of master weight and states a parameter; "
        f"{fit.plan.describe()}"
    )
    for warning in (*fit.ds.warnings, *fit.ds.batch_notices(fit.plan)):
        yield f"  warning: {warning}"
    moments = [
        ["*" if name == estimate.peak_moment else "", name, *_breakdown_cells(moment), gib(moment.total_bytes)]
        for name, moment in estimate.moments.items()
    ]
    yield from align(["", "moment", *CATEGORIES.values(), "allocated"], moments)


def _breakdown_cells(breakdown: Breakdown) -> list[str]:
    """Return the cells below CATEGORIES."""
    return [gib(getattr(breakdown, name)) for name in CATEGORIES]


@dataclass(frozen=True)
class Comparison:
    """A row of `llmscale estimate` with its dry run."""

    DERIVED: ClassVar = ("fit.strategy.zero_stage", "dry_run.seconds", "dry_run.resident", "phases")

    fit: Candidate = field(repr=False)
    dry_run: DryRun = field(repr=False)

    @property
    def phases(self) -> dict[str, dict[str, Breakdown]]:
        """Return the peaks of each phase by their source."""
        return {
            phase: {"dry_run": getattr(self.dry_run, phase), "closed_form": self.fit.estimate.phase(phase)}
            for phase in PHASES
        }


@contextlib.contextmanager
def simulating(flag: str) -> Iterator[None]:
    """Import DeepSpeed for a simulation, and keep the answer's output free of other prints.

    Raises ConfigError where DeepSpeed or torch is not installed.
    """
    # DeepSpeed's logger writes to stdout, where the answer goes. Warnings are about fake tensors and old names.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from llmscale.engine.deepspeed_patches import quiet_libraries

            quiet_libraries()
            import deepspeed  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{flag} needs {error.name}: `{install_command('train')}`.") from None
        yield


def compare_with_dry_run(fit: Candidate) -> Comparison:
    """Run the real engine on fake tensors. Raises ConfigError without torch or DeepSpeed, and for NVMe offload."""
    with simulating("--dry-run"):
        from llmscale.dry_run.engine import dry_run

        return Comparison(fit, dry_run(fit.step, fit.cluster.gpu.capability))


def dry_run_rows(answer: RowsAnswer) -> list[Comparison]:
    """Dry-run every file; without files, the recommended row, or the one that misses least."""
    ranking = answer.ranking
    return [compare_with_dry_run(fit) for fit in (ranking.fits if answer.request.names else [ranking.nearest.fit])]


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield both breakdowns of each phase, in GiB."""
    fit = comparison.fit
    yield (
        f"dry run: {fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size}; the real DeepSpeed engine on "
        f"fake tensors as rank 0 of {fit.plan.ranks.world_size}, {comparison.dry_run.seconds:.0f} s"
    )
    cells: list[list[str]] = []
    for phase, peaks in comparison.phases.items():
        counted, calculated = peaks.values()
        difference = f"{calculated.total_bytes / counted.total_bytes - 1:+.1%}"
        cells.append([phase, "dry run", *_breakdown_cells(counted), gib(counted.total_bytes), ""])
        cells.append(["", "closed form", *_breakdown_cells(calculated), gib(calculated.total_bytes), difference])
    yield from align(["phase", "by", *CATEGORIES.values(), "allocated", "difference"], cells)
