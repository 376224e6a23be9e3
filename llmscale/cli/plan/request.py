"""From the arguments of `llmscale plan` to a request. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from llmscale.architecture.shape import GPTShape
from llmscale.cli.estimate.request import read_gpu
from llmscale.cli.flags import given_model, resolve_model
from llmscale.config.arguments import build_run_config
from llmscale.config.hf_model import default_preset
from llmscale.config.interconnect import get_interconnect
from llmscale.config.optimizers import get_optimizer
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.run_plan import DEFAULT_PUE, ChosenModel, Goal, GPUs, PlanRequest
from llmscale.planning.scaling import BESIROGLU, HOFFMANN, PF_DAY_FLOPS, suggest_shape

_LAWS = {"besiroglu": BESIROGLU, "hoffmann": HOFFMANN}
_MODELS = ("--model", "--params")
_OTHERS = ("--budget-usd", "--gpu-hours", "--flops", "--pf-days", "--tokens", "--loss")
#: Of the model flags those that need no --model.
_OF_ANY_MODEL = ("vocab_size", "seq_len")
#: What train.py takes too, beside the model and the batch.
_RUN_KEYS = ("optimizer", "loss_chunk_tokens")
_DEFAULT_SEQ_LEN = 2048
#: Whose vocabulary a model has that no one named.
_SIZED_LIKE = "gpt3-125m"


def read_request(args: argparse.Namespace) -> PlanRequest:
    """Raises ConfigError for whatever cannot be."""
    _check_goals(args)
    given = given_model(args)
    chosen = _read_chosen_model(args, given)
    shape = chosen.shape if chosen else _read_size(args)
    run_keys = {key: getattr(args, key) for key in _RUN_KEYS if getattr(args, key) is not None}
    config = build_run_config(dict(run_keys))
    return PlanRequest(
        goal=_read_goal(args, shape),
        shape=shape,
        chosen=chosen,
        given=given,
        given_of_run={key: getattr(config, key) for key in run_keys},
        optimizer=get_optimizer(config.optimizer),
        loss_chunk_tokens=config.loss_chunk_tokens,
        law=_LAWS[args.law],
        vocab_size=_vocab_size(args),
        seq_len=shape.seq_len if shape else args.seq_len or _DEFAULT_SEQ_LEN,
        global_batch_size=args.global_batch_size,
        gpus=_read_gpus(args),
        inference_tokens=args.inference_tokens or 0.0,
        inference_mfu=args.inference_mfu,
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        usd_per_gpu_hour=args.price_per_gpu_hour,
        pue=args.pue or DEFAULT_PUE,
    )


def _given(args: argparse.Namespace, flags: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]


def _check_goals(args: argparse.Namespace) -> None:
    models, others = _given(args, _MODELS), _given(args, _OTHERS)
    for flags in (models, others):
        if len(flags) > 1:
            raise ConfigError(f"{' and '.join(flags)} are two goals that contradict each other. Give one of them.")
    if not models and not others:
        raise ConfigError(
            f"plan for what? Give one of {', '.join((*_OTHERS, *_MODELS))}, or a model and one of the others."
        )


def _has_gpu(args: argparse.Namespace) -> bool:
    return bool(_given(args, ("--gpu", "--gpu-memory-gib", "--bf16-tflops")))


def _read_gpus(args: argparse.Namespace) -> GPUs | None:
    if not _has_gpu(args):
        return None
    network = get_interconnect(args.interconnect)
    return GPUs(read_gpu(args), args.num_gpus, args.num_nodes, network, args.mfu)


def _read_chosen_model(args: argparse.Namespace, given: Mapping[str, object]) -> ChosenModel | None:
    """The model that --model names, changed by the flags of the model."""
    if args.model is None:
        others = [key for key in given if key not in _OF_ANY_MODEL]
        if others:
            flag = f"--{others[0].replace('_', '-')}"
            raise ConfigError(f"{flag} changes a model: it needs --model PRESET.")
        return None
    config, shape = resolve_model(build_run_config(dict(given)), args.seq_len)
    return ChosenModel(shape, default_preset(config))


def _read_size(args: argparse.Namespace) -> GPTShape | None:
    if args.params is not None:
        return suggest_shape(args.params, _vocab_size(args), args.seq_len or _DEFAULT_SEQ_LEN)
    return None


def _vocab_size(args: argparse.Namespace) -> int:
    """Of a model that the plan chooses."""
    return args.vocab_size or PRESETS[_SIZED_LIKE].vocab_size


def _read_goal(args: argparse.Namespace, shape: GPTShape | None) -> Goal:
    if args.budget_usd is not None:
        return Goal("gpu_hours", args.budget_usd / args.price_per_gpu_hour)
    if args.gpu_hours is not None:
        return Goal("gpu_hours", args.gpu_hours)
    if args.pf_days is not None:
        return Goal("flops", args.pf_days * PF_DAY_FLOPS)
    if args.flops is not None:
        return Goal("flops", args.flops)
    if args.tokens is not None:
        return Goal("tokens", args.tokens)
    if args.loss is not None:
        return Goal("loss", args.loss)
    if shape is None:
        raise ConfigError("plan for what? Give a goal.")
    return Goal("parameters", float(shape.num_parameters))
