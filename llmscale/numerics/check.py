"""Check an engine on this rank: a few steps of the run's own block, every link of each step by itself.

A run is checked in its precision and in fp32. A wrong step is repeated with other settings until one makes the
difference.

Loss and gradient are compared with a plain GPT in fp64 at the weights of the step. Their bound is what rounding
explains: the error of the same plain GPT in the run's type, never anything of the engine, which may have the bug.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmscale.config.deepspeed.resolve import DsConfig
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, gradient_norm, release_engine, set_learning_rate
from llmscale.engine.device_settings import allow_tf32
from llmscale.engine.loss_scale import explain_smallest_scale
from llmscale.engine.process_group import World, is_gpu
from llmscale.engine.random_numbers import seed_step
from llmscale.engine.train_step import PhaseTimer, train_step
from llmscale.engine.zero_shards import refresh_low_precision_weights, weights_to_fill
from llmscale.errors import ConfigError
from llmscale.model.experts import Router
from llmscale.model.gpt import Block as GPTBlock
from llmscale.numerics.block import Block, Case, Share, cut_block, first_weights, global_batch, share_of, with_clipping
from llmscale.numerics.links import (
    DTYPES,
    LINKS,
    UNIT,
    Finding,
    MeanGradients,
    PlainMean,
    Watched,
    first_wrong,
    wrong_alone,
)
from llmscale.numerics.plain import PlainGPT, check_is_plain
from llmscale.numerics.probe import Probe, choose_strides, select
from llmscale.numerics.report import LAST, Pass, Report, Row, Try, as_row, worst_rows
from llmscale.numerics.run_update import RunJudge, WatchedRun, watch_run
from llmscale.planning.compilation import decide_compilation

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Takes the gradient of a weight.
_Add = Callable[[Tensor], None]
#: Bound of `loss` and `gradient` over the rounding of the plain model in the run's type.
_FACTOR = 3.0
#: Unit roundoffs of the types of products.
_UNITS = {"fp32": UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11, "autocast": 2.0**-8}
#: Steps that fp16 may skip until its loss scale fits.
_SKIPS = 40
_ALL_PARTS = frozenset({"engine", "model", "update"})
_PARTS: dict[str, str] = {"loss": "model", "gradient": "model", "update": "update"}


def check_case(case: Case, world: World) -> Pass:
    """Build the case's engine, take its steps, and judge each. Collective. Raises ConfigError."""
    began = time.perf_counter()
    block, findings = compare_case(case, world)
    first = first_wrong(findings)
    rows = worst_rows(findings, LINKS)
    description = _describe(block, case)
    seconds = time.perf_counter() - began
    return Pass(block.resolved.precision, description, rows, seconds, as_row(first) if first else None)


def compare_case(case: Case, world: World) -> tuple[Block, list[Finding]]:
    """Return the block that a case computes, and all comparisons of its steps. Collective. Raises ConfigError."""
    from deepspeed.utils import groups

    block = cut_block(case, world.world_size, on_gpu=is_gpu())
    check_is_plain(block.config.optimizer, block.resolved.shape, block.resolved.loss)
    allow_tf32(block.resolved.precision)
    weights = _Weights(block)
    batch = global_batch(0, block.resolved)
    truth = Gradients(block, weights, world, share_of(world.rank, block.resolved, batch), "fp64")
    block = with_clipping(block, truth.global_norm())
    compiler = None
    config = block.config
    full = block.full
    decision = decide_compilation(config.compile, full, world.device.type, full.total_steps)
    # In fp32 for the arithmetic of a 16-bit run nothing is compiled.
    if case.precision is None and decision.backend:
        compiler = BlockCompiler(decision.backend, config.compile_mode)
    # DeepSpeed refuses hpZ's groups to a second engine of a process.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    engine = build_engine(block.config, block.resolved, compiler)
    with sdpa_kernel(SDPBackend.MATH) if case.math_attention else nullcontext():
        findings = _check_steps(case, block, world, engine, weights, truth, compiler is not None)
    release_engine(engine)
    return block, findings


def _describe(block: Block, case: Case) -> str:
    resolved = block.resolved
    full = block.full
    plan = resolved.plan
    if resolved.ds_config["gradient_clipping"]:
        clip = ", clipping at half of the first norm"
    else:
        clip = ""
    fillers = f", {block.fillers} of them a filler" if block.fillers else ""
    return (
        f"{resolved.precision}: {resolved.shape.n_layer} of {full.shape.n_layer} layers, width {full.shape.n_embd}, "
        f"vocabulary {resolved.shape.vocab_size:,}, {plan.ranks.world_size} x {plan.gradient_accumulation_steps} "
        f"micro-batches of {plan.micro_batch_size} x {plan.seq_len} tokens{fillers}{clip}, {case.steps} steps"
    )


def _check_steps(
    case: Case,
    block: Block,
    world: World,
    engine: DeepSpeedEngine,
    weights: _Weights,
    truth: Gradients,
    is_compiled: bool,
) -> list[Finding]:
    resolved = block.resolved
    findings = []
    weights.load_into(engine)
    complete = frozenset(name for name, stride in weights.strides.items() if stride == 1)
    watched = watch_run(block.config, resolved, world.control, weights.strides, complete)
    probe = Probe(engine, weights.strides, graphs=GPTBlock if is_compiled else None)
    judge = RunJudge(watched, probe, steps_counted=0)
    for step in range(case.steps):
        share = share_of(world.rank, resolved, global_batch(step, resolved))
        if step:
            weights.read_from(engine, watched)
            truth = Gradients(block, weights, world, share, "fp64")
        loss = _take_step(block, world, engine, probe, share, step)
        near = Gradients(block, weights, world, share, resolved.precision, probe.scale)
        comparison = _Comparison(watched, truth, near, probe.starts)
        means = MeanGradients(watched, probe)
        links = judge.judge(step, block.lr, gradient_norm(engine), comparison.seen(means))
        findings += [*comparison.findings(step), _compare_losses(step, watched, loss, truth, near), *links]
    probe.close()
    return findings


def _take_step(block: Block, world: World, engine: DeepSpeedEngine, probe: Probe, share: Share, step: int) -> Tensor:
    """Take one step, again with the same data while fp16 skips it, and return this rank's loss."""
    loss = torch.zeros(())
    for _ in range(_SKIPS):
        probe.reset()
        skipped = engine.skipped_steps
        seed_step(block.config.seed, step, world.rank)
        set_learning_rate(engine, block.resolved.optimizer, block.lr)
        with explain_smallest_scale(step):
            timer = PhaseTimer(world.device)
            loss = train_step(engine, share.micro_batches, world.device, timer, weights=share.weights)
        if engine.skipped_steps == skipped:
            break
    return loss


class _Weights:
    """Complete weights of the block in fp32, as the engine's master weights are."""

    def __init__(self, block: Block) -> None:
        tensors = block.resolved.tensors
        self.trained = {tensor.name: tuple(tensor.parameter.shape) for tensor in tensors.trainable}
        frozen = {tensor.name: tuple(tensor.parameter.shape) for tensor in tensors.frozen_tensors}
        elements = {name: math.prod(shape) for name, shape in self.trained.items()}
        self.strides = choose_strides(elements, block.resolved.plan.gradient_accumulation_steps + 6)
        """Distances n by parameter: every n-th element is compared."""
        seed = block.config.seed
        shape = block.resolved.shape
        self.values = first_weights(self.trained, seed) | first_weights(frozen, seed + 1)
        self.biases: list[Tensor] = []
        if shape.router_bias:
            sparse = [layer for layer in range(shape.n_layer) if shape.is_sparse(layer)]
            self.biases = [torch.zeros(shape.num_experts) for _ in sparse]

    def load_into(self, engine: DeepSpeedEngine) -> None:
        """Give the engine these weights, at any stage. Collective."""
        for views in weights_to_fill(engine):
            for name, view in views.items():
                if name in self.values:
                    flat = self.values[name].view(-1)
                    view.local.copy_(flat[view.start : view.start + view.local.numel()])
        refresh_low_precision_weights(engine)

    def read_from(self, engine: DeepSpeedEngine, watched: Watched) -> None:
        """Take over the engine's master weights, and its routers' biases, whose rule is a sign. Collective."""
        if watched.facts.zero_stage:
            for name in self.trained:
                self.values[name].zero_()
        for views in weights_to_fill(engine):
            for name, view in views.items():
                if name in self.trained:
                    self.values[name].view(-1)[view.start : view.start + view.local.numel()] = view.local.cpu()
        if watched.facts.zero_stage:
            for name in self.trained:
                watched.sum(self.values[name])
        routers = (module for module in engine.module.modules() if isinstance(module, Router))
        for bias, router in zip(self.biases, routers, strict=False):
            bias.copy_(router.get_buffer("bias"))


class _Cast(torch.autograd.Function):
    """Casts a weight for its use, and hands its gradient over instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, weight: Tensor, cast: Callable[[Tensor], Tensor], add: _Add) -> Tensor:
        ctx.add = add
        return cast(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.add(gradient)
        return None, None, None, None


class _CastWeights(Mapping[str, Tensor]):
    """Weights that are cast where they are used: a block of an 8B model takes 1.7 GB in fp64."""

    def __init__(
        self, values: Mapping[str, Tensor], cast: Callable[[Tensor], Tensor], adds: Mapping[str, _Add]
    ) -> None:
        """adds: by trained weight, what gets its gradients."""
        self._values = values
        self._cast = cast
        self._adds = adds
        self._anchor = torch.zeros((), requires_grad=True)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adds:
            return self._cast(self._values[name])
        weight: Tensor = _Cast.apply(self._anchor, self._values[name], self._cast, self._adds[name])
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Gradients:
    """Gradients, of the elements that are compared, and losses of the plain model on this rank's share.

    In fp64 or in the run's precision. A gradient is freed once it is added, before the next one exists.
    """

    def __init__(
        self, block: Block, weights: _Weights, world: World, share: Share, precision: str, scale: float = 1.0
    ) -> None:
        resolved = block.resolved
        device = world.device
        low = DTYPES[resolved.precision]
        dtype = torch.float64 if precision == "fp64" else DTYPES[precision]
        plan = resolved.plan
        self._group = world.control
        self._world_size = world.world_size
        self._strides = weights.strides
        self.sums: dict[str, Tensor] = {}
        """Summands of the mean over all ranks."""
        biases = [bias.to(device) for bias in weights.biases]
        losses = []
        # In the engine's order: a mean over micro-batches, scaled, so that fp16 has the same range; ranks divide last.
        # Fillers do not count, and ranks that divide sequences have one share of the data together.
        ranks = plan.ranks.data_parallel_size
        factor = ranks * plan.micro_batch_size / plan.global_batch_size * scale
        for name, shape in weights.trained.items():
            self.sums[name] = torch.zeros(-(-math.prod(shape) // weights.strides[name]), dtype=torch.float64)
        adds = {name: partial(self._add, name, scale * ranks) for name in weights.trained}

        def cast(value: Tensor) -> Tensor:
            """Cast to what the engine computes with, then to the plain model's type."""
            return value.to(low).to(device, dtype, copy=True)

        values = _CastWeights(weights.values, cast, adds)
        for tokens in share.to_verify:
            model = PlainGPT(values, resolved.shape, resolved.loss, biases)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
                each, loss = model.losses(tokens.to(device))
            (loss * factor).backward()
            losses.append(each.detach().double().cpu().view(-1))
        if losses:
            self.losses = torch.cat(losses)
        else:
            self.losses = torch.zeros(0, dtype=torch.float64)

    def _add(self, name: str, divisor: float, gradient: Tensor) -> None:
        """Add the gradient of one use of a weight in a micro-batch."""
        self.sums[name] += select(gradient, 0, self._strides[name])[0].cpu().double() / divisor

    def global_norm(self) -> float:
        """Return the norm of the gradient over all ranks, as far as the compared elements tell it. Collective."""
        return math.sqrt(sum(self._strides[name] * float(self.mean(name).square().sum()) for name in self.sums))

    def mean(self, name: str) -> Tensor:
        """Return the compared elements of a parameter's gradient over all ranks. Collective."""
        total = self.sums[name].clone()
        if self._world_size > 1:
            torch.distributed.all_reduce(total, group=self._group)
        return total


def _compare_losses(step: int, watched: Watched, loss: Tensor, truth: Gradients, near: Gradients) -> Finding:
    """Compare the mean loss over all tokens; rounding explains its mean and, token by token, its noise. Collective."""
    errors = near.losses - truth.losses
    numbers = [loss.detach().cpu().double(), truth.losses.sum(), errors.sum(), errors.square().sum()]
    numbers.append(torch.tensor(float(len(errors)), dtype=torch.float64))
    total = watched.sum(torch.stack(numbers))
    count = float(total[4])
    engine = float(total[0]) / watched.size
    plain = float(total[1]) / count
    spread = math.sqrt(float(total[3]) / count / count)
    bound = _FACTOR * (abs(float(total[2])) / count + spread) + 2 * UNIT * plain
    return Finding(step, "loss", "all", abs(engine - plain), bound, f"{engine:.6f} for {plain:.6f}")


def _pool_of(name: str) -> str:
    """Return a parameter's name without the number of its block."""
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


class _Comparison:
    """Compares the engine's mean gradients with the plain model's, while a judge asks for one after the other."""

    def __init__(self, watched: WatchedRun, truth: Gradients, near: Gradients, starts: Mapping[str, int]) -> None:
        self._watched = watched
        self._truth = truth
        self._near = near
        ranks = watched.resolved.plan.ranks
        self._is_divided = ranks.sequence_parallel_size > 1 or ranks.expert_parallel_size > 1
        self._numbers: list[Tensor] = []
        """By parameter: squares of the error, of the plain model's own, and of the truth; product with the truth."""
        self._own: list[Tensor] = []
        """By parameter: square of the error of this rank's summand."""

    def seen(self, means: MeanGradients) -> Callable[[str], PlainMean]:
        """Return a function that reduces a parameter's gradients, and compares them on the way."""

        def mean_of(name: str) -> PlainMean:
            plain = means.of(name)
            truth = self._truth.mean(name)
            near = self._near.mean(name)
            mean = plain.mean
            pairs = ((mean - truth, mean - truth), (near - truth, near - truth), (truth, truth), (mean, truth))
            self._numbers.append(torch.stack([(a * b).sum() for a, b in pairs] + [(mean * mean).sum()]))
            self._own.append((plain.own - self._truth.sums[name]).square().sum())
            return plain

        return mean_of

    def findings(self, step: int) -> list[Finding]:
        """Return the comparisons of all parameters. Collective."""
        watched = self._watched
        error, rounding, size, product, square = torch.stack(self._numbers).T
        counts = torch.tensor([watched.selected(name) for name in watched.shapes], dtype=torch.float64)
        typical = float(size.sum() / counts.sum()) ** 0.5
        # Gradients that are zero but for rounding (biases of keys, unused experts) are measured by a typical one.
        sizes = size.sqrt() + 1e-3 * typical * counts.sqrt()
        pooled: dict[str, float] = {}
        for index, name in enumerate(watched.shapes):
            share = float(rounding[index].sqrt() / sizes[index])
            pooled[_pool_of(name)] = max(pooled.get(_pool_of(name), 0.0), share)
        note = _common_factor(float(product.sum()), float(size.sum()), float(square.sum()))
        plan = watched.resolved.plan
        # A kernel may add up the tokens of a micro-batch one after the other, in fp32.
        serial = 0.5 * UNIT * math.sqrt(plan.micro_batch_size * plan.seq_len)
        unit = _UNITS[watched.resolved.precision]
        bounds = torch.tensor([_FACTOR * (pooled[_pool_of(name)] + unit / 2) + serial for name in watched.shapes])
        shares = watched.gather(torch.stack(self._own)).sqrt() / sizes / bounds
        if self._is_divided:
            rank = None
        else:
            rank = wrong_alone(shares)
        return [
            Finding(step, "gradient", name, float(difference), float(bound), note, rank)
            for name, difference, bound in zip(watched.shapes, error.sqrt() / sizes, bounds, strict=True)
        ]


def _common_factor(product: float, size: float, square: float) -> str:
    """Return a note if all gradients are the true ones times a factor, up to a fifth of it."""
    factor = product / size if size else 1.0
    if factor:
        rest = math.sqrt(max(0.0, square / factor**2 - 2 * product / factor + size))
    else:
        rest = math.inf
    is_common = abs(factor - 1) > 0.02 and rest < 0.2 * abs(factor - 1) * math.sqrt(size)
    return f"all gradients x {factor:.4g}" if is_common else ""


_Change = Callable[[Case], Case]


def _with_keys(**keys: object) -> _Change:
    return lambda case: replace(case, config=case.config.model_copy(update=keys))


def undivided(case: Case) -> Case:
    """Return the case with complete sequences and experts on every rank."""
    if case.config.sequence_parallel_size == case.config.expert_parallel_size == 1:
        return case
    size = {"global_batch_size": None, "global_batch_tokens": None}
    return _with_keys(sequence_parallel_size=1, expert_parallel_size=1, **size)(case)


def _with_zero(**keys: object) -> _Change:
    """Return a change of keys of zero_optimization."""

    def change(case: Case) -> Case:
        zero = case.ds.keys.zero
        if zero.stage == 0 or all(getattr(zero, key) == value for key, value in keys.items()):
            return case
        return replace(case, ds=_with_ds(case.ds, zero_optimization=zero.model_copy(update=keys)))

    return change


def _with_ds(ds: DsConfig, **keys: Any) -> DsConfig:
    return replace(ds, keys=ds.keys.model_copy(update=keys))


def _without_overlap(case: Case) -> Case:
    zero = case.ds.keys.zero
    overlaps = zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm
    if overlaps:
        return _with_zero(overlap_comm=False)(case)
    return case


def _in_fp32(case: Case) -> Case:
    if case.ds.keys.communication_data_type == "fp32" or case.chosen_precision == "fp32":
        return case
    return replace(case, ds=_with_ds(case.ds, communication_data_type="fp32"))


def _with_fp32_states(case: Case) -> Case:
    bf16 = case.ds.keys.bf16
    if bf16 is None or not case.ds.keys.has_bf16_states:
        return case
    off = {"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
    return replace(case, ds=_with_ds(case.ds, bf16=bf16.model_copy(update=off)))


def _another_stage(case: Case) -> Case:
    """Return the case at stage 2, or at 0 or 3 if it is at 1 or 2; with nothing else of its section."""
    stage = case.ds.zero_stage
    in_16bit = case.chosen_precision == "fp16" or case.ds.keys.has_bf16_states
    needs_shards = case.config.expert_parallel_size > 1 or in_16bit
    if stage in (0, 3):
        other = 2
    elif needs_shards:
        other = 3
    else:
        other = 0
    zero = type(case.ds.keys.zero).model_validate({"stage": other})
    return replace(case, ds=_with_ds(case.ds, zero_optimization=zero))


def _without_compiler(case: Case) -> Case:
    if case.config.compile == "auto" and not is_gpu():
        return case
    return _with_keys(compile="off")(case)


def _without_checkpointing(case: Case) -> Case:
    if (case.config.activation_checkpointing or case.ds.checkpointing) == "none":
        return case
    return _with_keys(activation_checkpointing="none")(case)


def _with_math_attention(case: Case) -> Case:
    return replace(_with_keys(attention_kernel="sdpa")(case), math_attention=True)


def _with_plain_loss(case: Case) -> Case:
    return replace(_with_keys(loss_kernel="torch")(case), one_chunk=True)


def _with_fp32(case: Case) -> Case:
    if case.chosen_precision == "fp32":
        return case
    return replace(case, precision="fp32")


#: Settings with their change and the parts that it can tell about, the likeliest and cheapest first.
_CHANGES: dict[str, tuple[_Change, Collection[str]]] = {
    "overlap_comm off": (_without_overlap, ("engine",)),
    "gradient accumulation 1": (lambda case: replace(case, micro_steps=1), ("engine", "model")),
    "offload off": (_with_zero(offload_optimizer=None, offload_param=None), ("engine", "update")),
    "reduce_scatter off": (_with_zero(reduce_scatter=False), ("engine",)),
    "communication in fp32": (_in_fp32, ("engine",)),
    "bf16_optimizer_states off": (_with_fp32_states, ("engine", "update")),
    "--compile off": (_without_compiler, ("model",)),
    "--activation-checkpointing none": (_without_checkpointing, ("model",)),
    "attention by torch's math kernel": (_with_math_attention, ("model",)),
    "--loss-kernel torch, one chunk": (_with_plain_loss, ("model",)),
    "sequences and experts undivided": (undivided, ("engine", "model")),
    "--optimizer adamw": (_with_keys(optimizer="adamw"), ("update",)),
    "another ZeRO stage": (_another_stage, _ALL_PARTS),
    "--precision fp32": (_with_fp32, _ALL_PARTS),
}


def changed_cases(case: Case, link: str, ranks: int) -> Iterator[tuple[str, Case]]:
    """Yield each setting to try for a wrong link with its case, but not the last ones where one rank goes first."""
    part = _PARTS.get(link, "engine")
    for setting, (change, parts) in _CHANGES.items():
        is_for_one_rank = setting in LAST and ranks > 1 and part != "model"
        if part in parts and not is_for_one_rank:
            yield setting, change(case)


def check_run(case: Case, world: World, tries: tuple[str, ...] | None) -> Report:
    """Check a run in its own precision and in fp32, and try other settings for the first wrong one. Collective."""
    checked = [(case, check_case(case, world))]
    if checked[0][1].precision != "fp32":
        # Another size of vocabulary, without padding.
        in_fp32 = replace(case, precision="fp32", vocab_size=1024)
        checked.insert(0, (in_fp32, check_case(in_fp32, world)))
    passes = tuple(done for _, done in checked)
    for of_case, done in checked:
        if done.first_wrong is not None:
            return Report(passes, _try_settings(of_case, done.first_wrong, world, tries))
    return Report(passes)


def _try_settings(case: Case, first: Row, world: World, tries: tuple[str, ...] | None) -> tuple[Try, ...]:
    """Repeat a case with other settings until one is right, up to its first wrong step. Collective."""
    case = replace(case, steps=first.step)
    if tries is None:
        cases = dict(changed_cases(case, first.link, world.world_size))
    else:
        cases = {setting: _CHANGES[setting][0](case) for setting in tries}
    done: list[Try] = []
    for setting, changed in cases.items():
        if changed == case:
            continue
        try:
            again = check_case(changed, world)
        except ConfigError:
            continue  # the run cannot have it
        done.append(Try(setting, "wrong" if again.first_wrong else "right"))
        if done[-1].verdict == "right":
            break
    return tuple(done)
