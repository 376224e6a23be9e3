"""`llmscale estimate`: which configurations fit these GPUs, by how much, and how fast they would be."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.architecture.shape import SHAPE_KEYS
from llmscale.cli.flags import (
    ESTIMATED_GPUS,
    LIST,
    PRICE,
    add_asked_flags,
    add_machine_flags,
    add_model_flag,
    add_price,
    add_shape_flags,
    one_for_each,
    read_gpus,
)
from llmscale.config.command_line import FlagContainer, Need, flag, local_path, nonblank, number
from llmscale.config.hardware import INTERCONNECTS
from llmscale.config.run_flags import keys_asked_by, model_keys
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser

_SIZES = tuple(f"--{key.replace('_', '-')}" for key, behaviour in SHAPE_KEYS.items() if behaviour.of_model == "size")
#: Switches that add lines or columns to the text.
_TEXT_KEYS = ("all", "wide", "why", "explain")
_OF_TEXT = tuple(f"--{key}" for key in _TEXT_KEYS)
#: Flags that concern the rows of one model on one kind of GPU.
_OF_ROWS = ("--emit", "--plot", "--dry-run", *_OF_TEXT)
#: Flags, each with the flags that it excludes.
_EXCLUSIVE = (
    ("--max-model", ("--ds", "--hf", *_OF_ROWS, PRICE, "--max-seq-len", *_SIZES)),
    ("--max-seq-len", (*_OF_ROWS, PRICE, "--global-batch-size")),
    ("--hf", ("--model",)),
    ("--module", ("--hf", "--model")),
    ("--ds", ("--emit", "--all")),
    ("--json", _OF_TEXT),
)
#: Flags that `--interconnect list` excludes, because they concern one row for one network.
_OF_ONE_NETWORK = ("--hf", "--max-model", "--max-seq-len", *_OF_ROWS, PRICE)
#: Flags that several values of --gpu exclude, because they concern one GPU.
_OF_ONE_GPU = ("--hf", "--max-model", "--max-seq-len", *_OF_ROWS)
#: Flags of this command without a meaning for a model that is only simulated.
_OF_FORMULAS = ("plot", "dry_run", "all", "why", "explain", "max_model", "max_seq_len", "price_per_gpu_hour")
#: Keys of a run that have one: for --module, and for --hf of a family that llmscale does not train.
_OF_MODULE = ("precision", "global_batch_size", "activation_checkpointing")
_OF_HF_MODULE = ("model", *_OF_MODULE, "micro_batch_size", "seq_len")


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `estimate`."""
    parser = subparsers.add_parser(
        "estimate",
        usage="%(prog)s [FLAGS]",
        description="The ZeRO stage, offload and activation checkpointing to take, at the largest micro-batch that "
        "fits, from closed formulas. Exit status: 0 something fits, 1 nothing fits, 2 wrong flags.",
    )
    group = parser.add_argument_group("model")
    add_model_flag(group)
    add_shape_flags(group)
    text = "transformers config.json, its folder, or a name on the Hub; families that llmscale does not train are "
    flag(group, "--hf PATH|NAME", f"{text}simulated", nonblank)
    text = "function of yours that returns a torch module, such as my_model.py:build; its steps are simulated"
    flag(group, "--module FILE:FUNCTION", text, nonblank)
    text = "function of yours that returns a micro-batch for it: a dict or tuple of tensors"
    flag(group, "--batch FILE:FUNCTION", text, nonblank)
    group = parser.add_argument_group("machines")
    add_machine_flags(group, num_gpus=ESTIMATED_GPUS, num_nodes=1, num_nodes_text="nodes", compares=True)
    text = "memory of one node, for offload; default: not checked"
    flag(group, "--host-memory-gib GIB", text, number(0.01, limits.MAX_HOST_GIB))
    add_price(group, "price, for that of a billion tokens; one for each --gpu")
    _add_run_flags(parser.add_argument_group("run"))
    _add_output_flags(parser.add_argument_group("output"))
    others = [action.dest for action in parser._actions if action.dest not in ("gpu", "help")]
    parser.needs = [
        Need(" ".join(others), f"with --gpu {LIST}", lambda args: args.gpu != [LIST]),
        Need("force nvme_path", "--emit FILE"),
        Need("batch", "--module FILE:FUNCTION"),
        Need("interconnect", "--num-nodes of 2 or more", _compares_nodes),
    ]
    parser.set_defaults(handler=_run)


def _compares_nodes(args: argparse.Namespace) -> bool:
    """Return whether --interconnect matters; an unknown name is refused later, with the legal ones."""
    return args.num_nodes > 1 or args.interconnect not in {network.name for network in INTERCONNECTS}


def _add_run_flags(group: FlagContainer) -> None:
    add_asked_flags(group, "estimate")
    text = "explain these ds_configs, side by side; zero2 and the like are llmscale's own"
    flag(group, "--ds FILE|NAME", text, local_path, nargs="+")
    flag(group, "--nvme-path DIR", "NVMe folder of every node, for --emit", nonblank, "/local_nvme")


def _add_output_flags(group: FlagContainer) -> None:
    flag(group, "--emit FILE", "write the recommended ds_config", local_path)
    flag(group, "--force", "let --emit overwrite")
    flag(group, "--max-model", "find the largest model of its family that fits; default family: GPT-3")
    flag(group, "--max-seq-len", "find the longest sequence that fits, by GPUs that divide it")
    flag(group, "--dry-run", "simulate the recommended row, or --ds, with the real DeepSpeed: about a minute")
    flag(group, "--plot FILE", "draw the rows as stacked bars (needs matplotlib)", local_path)
    flag(group, "--all", "show every row, not only those to choose between")
    flag(group, "--wide", "show all columns: what a GPU's total consists of, and the moment of the peak")
    flag(group, "--why", "show what the numbers rest on, and what is assumed")
    flag(group, "--explain", "show the known formula of activations beside this one, and what is saved of it")
    flag(group, "--json", "print JSON")


def _run(args: argparse.Namespace) -> int:
    if args.gpu == [LIST]:
        from llmscale.cli.estimate_answers import gpu_lines
        from llmscale.terminal.table import print_fitting

        print_fitting(gpu_lines())
        return 0
    _check_combination(args)
    from llmscale.cli import estimate_answers as answers

    gpus = read_gpus(args)
    prices = one_for_each(args, PRICE, len(gpus))
    if args.module is not None:
        from llmscale.cli.estimate_modules import answer_module

        if args.batch is None:
            raise ConfigError(
                f"--module {args.module} needs --batch FILE:FUNCTION, which returns a micro-batch for it."
            )
        _check_simulated(args, f"--module {args.module}", "its rows are simulated", _OF_MODULE)
        return answer_module(args, gpus[0])
    if args.hf is not None:
        from llmscale.architecture.hf_config import check_is_trained, find_config
        from llmscale.config.hf_model import PREFIX
        from llmscale.untrusted.hub import without_prefix

        args.hf = without_prefix(f"--hf {args.hf}", args.hf, ConfigError)
        source = f"--hf {args.hf}"
        entries = find_config(args.hf, source).entries
        try:
            check_is_trained(entries, source)
        except ConfigError as error:
            from llmscale.cli.estimate_modules import answer_hf

            if not isinstance(entries.get("model_type"), str):
                raise
            why = "llmscale does not train this model, and its rows are simulated"
            _check_simulated(args, source, why, _OF_HF_MODULE)
            return answer_hf(args, gpus[0], entries, error)
        args.model = f"{PREFIX}{args.hf}"
    if len(gpus) > 1:
        return answers.answer_gpus(args, gpus, prices)
    if args.max_model:
        return answers.answer_largest(args, gpus[0])
    if args.max_seq_len:
        return answers.answer_longest(args, gpus[0])
    return (answers.answer_networks if args.interconnect == LIST else answers.answer_rows)(args, gpus[0])


def _check_combination(args: argparse.Namespace) -> None:
    given: list[tuple[str, tuple[str, ...]]] = [(name, others) for name, others in _EXCLUSIVE if _is_given(args, name)]
    if args.interconnect == LIST:
        given.append((f"--interconnect {LIST}", _OF_ONE_NETWORK))
    if args.gpu and len(args.gpu) > 1:
        if LIST in args.gpu:
            raise ConfigError(f"--gpu {LIST} shows the table, and compares nothing. Drop it, or the other GPUs.")
        given.append((f"--gpu {' '.join(args.gpu)}", _OF_ONE_GPU))
    for name, others in given:
        for other in others:
            if _is_given(args, other):
                raise ConfigError(f"{name} and {other} exclude each other. Drop one of them.")
    if not (args.model or args.hf or args.module or args.max_model):
        raise ConfigError(
            "which model? Give --model PRESET (such as gpt2-1.5b), --hf for transformers', or --module for yours."
        )


def _is_given(args: argparse.Namespace, name: str) -> bool:
    return getattr(args, name.removeprefix("--").replace("-", "_")) not in (None, False)


def _check_simulated(args: argparse.Namespace, what: str, why: str, legal: tuple[str, ...]) -> None:
    """Raise ConfigError for a flag that a simulated model does not have."""
    for key in (*_OF_FORMULAS, *keys_asked_by("estimate"), *model_keys()):
        name = f"--{key.replace('_', '-')}"
        if key not in legal and _is_given(args, name):
            raise ConfigError(f"{name} has no effect with {what}: {why}. Drop {name}.")
    if args.activation_checkpointing == "selective":
        raise ConfigError(
            f"--activation-checkpointing selective is llmscale's own, and not of {what}. Use full or none."
        )
    if args.interconnect == LIST:
        raise ConfigError(f"--interconnect {LIST} has no effect with {what}: no speed is known. Drop it.")
