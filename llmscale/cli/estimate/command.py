"""`llmscale estimate`: what fits these GPUs, by how much, and how fast it would be."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmscale.cli.flags import LIST, MODEL_KEYS, add_machine_flags, add_run_flags, add_shape_flags
from llmscale.cli.quick_answer import quick_answer
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import Need
from llmscale.config.interconnect import INTERCONNECTS
from llmscale.errors import ConfigError

if TYPE_CHECKING:  # the real imports wait until the command runs: other subcommands' --help must not wait for them
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `estimate`."""
    parser = subparsers.add_parser(
        "estimate",
        description="Every ZeRO stage, offload and activation checkpointing at the largest micro-batch that fits, from "
        "closed formulas, at once. Exit status: 0 something fits, 1 nothing does, 2 the question was wrong.",
    )
    _add_model_arguments(parser.add_argument_group("model"))
    _add_machine_arguments(parser.add_argument_group("machines"))
    _add_run_arguments(parser.add_argument_group("run"))
    _add_output_arguments(parser.add_argument_group("what to show"))
    others = [action.dest for action in parser._actions if action.dest not in ("gpu", "help")]
    parser.needs = [
        Need(" ".join(others), f"with --gpu {LIST}", lambda args: args.gpu != LIST),
        Need("force nvme_path", "--emit FILE"),
        Need("interconnect", "--num-nodes of 2 or more", _compares_nodes),
    ]
    parser.set_defaults(handler=_run)


def _compares_nodes(args: argparse.Namespace) -> bool:
    """Return whether --interconnect matters; an unknown name is refused later, with the legal ones."""
    return args.num_nodes > 1 or args.interconnect not in {network.name for network in INTERCONNECTS}


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        type=flag_type.name,
        metavar="PRESET",
        help="tiny-1m ... gpt3-175b, llama3-8b, qwen3-4b, ..., or hf:FOLDER or hf:NAME; the flags below override it",
    )
    add_shape_flags(group)
    group.add_argument(
        "--hf",
        type=flag_type.name,
        metavar="PATH|NAME",
        help="a transformers config.json, its folder, or a name on the Hub; of families that are not llmscale's, model "
        "states only",
    )


def _add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    add_machine_flags(group, num_gpus=1, num_nodes=1, num_nodes_default="1")
    group.add_argument(
        "--host-memory-gib",
        type=flag_type.number(0.01, limits.MAX_HOST_GIB),
        metavar="GIB",
        help="of one node, for offload (default: not checked)",
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--global-batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        metavar="B",
        help="sequences per step over all GPUs (default: the preset's)",
    )
    group.add_argument(
        "--micro-batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        metavar="B",
        help="sequences per GPU and forward (default: the largest that fits)",
    )
    group.add_argument(
        "--precision", metavar="NAME", help="bf16, fp16, fp32 or autocast (default: the ds_config's, else bf16; "
        "fp16 on a GPU without it)",
    )  # fmt: skip
    add_run_flags(group)
    group.add_argument(
        "--activation-checkpointing", metavar="MODE", help="none, selective or full only (default: all of them)"
    )
    group.add_argument(
        "--ds",
        type=flag_type.path,
        nargs="+",
        metavar="FILE|NAME",
        help="explain these ds_configs, side by side; zero2 and the like are llmscale's own",
    )
    group.add_argument(
        "--nvme-path", type=flag_type.name, default="/local_nvme", metavar="DIR", help="of every node, for --emit"
    )


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--emit", type=flag_type.path, metavar="FILE", help="write the recommended ds_config")
    group.add_argument("--force", action="store_true", help="let --emit overwrite")
    group.add_argument(
        "--max-model", action="store_true", help="the largest model of its family that fits (default: GPT-3's)"
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="simulate the recommended row, or --ds, with the real DeepSpeed: a minute",
    )
    group.add_argument(
        "--plot", type=flag_type.path, metavar="FILE", help="draw the rows as stacked bars (needs matplotlib)"
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    if args.gpu == LIST:
        return _print_gpus()
    _check_combination(args)
    if args.dry_run:
        return _answer(args)
    with quick_answer():
        return _answer(args)


def _answer(args: argparse.Namespace) -> int:
    if args.hf is not None:
        from llmscale.architecture.hf_config import load_hf_model
        from llmscale.config.hf_model import PREFIX

        model = load_hf_model(args.hf)
        if model is not None:
            _check_states_only(args)
            from llmscale.cli.estimate import hugging_face

            return hugging_face.run(args, model)
        args.model = f"{PREFIX}{args.hf}"
    if args.max_model:
        from llmscale.cli.estimate.max_model import run
    elif args.interconnect == LIST:
        from llmscale.cli.estimate.links import run
    else:
        from llmscale.cli.estimate.rows import run
    return run(args)


def _print_gpus() -> int:
    from llmscale.cli.estimate.table import gpu_lines
    from llmscale.terminal.table import print_fitting

    print_fitting(gpu_lines())
    return 0


#: Flags that say what to show, of which some exclude others.
#: What --max-model is asked for.
_SIZES = ("--n-layer", "--n-head", "--n-embd", "--head-dim", "--n-kv-head", "--mlp-width")
_EXCLUSIVE = (
    ("--max-model", ("--ds", "--hf", "--emit", "--plot", "--dry-run", *_SIZES)),
    ("--hf", ("--model",)),
    ("--ds", ("--emit",)),
)
#: What is about one row of one network.
_OF_ONE_NETWORK = ("--hf", "--max-model", "--emit", "--plot", "--dry-run")
#: What has no meaning where only the states of a model are known.
_OF_OUR_MODEL = (
    "--ds",
    "--emit",
    "--plot",
    "--dry-run",
    "--micro-batch-size",
    "--activation-checkpointing",
    "--loss-chunk-tokens",
    "--optimizer",
    "--seq-len",
)


def _check_combination(args: argparse.Namespace) -> None:
    given: list[tuple[str, tuple[str, ...]]] = [(flag, others) for flag, others in _EXCLUSIVE if _is_given(args, flag)]
    if args.interconnect == LIST:
        given.append((f"--interconnect {LIST}", _OF_ONE_NETWORK))
    for flag, others in given:
        for other in others:
            if _is_given(args, other):
                raise ConfigError(f"{flag} and {other} exclude each other. Drop one of them.")
    if not (args.model or args.hf or args.max_model):
        raise ConfigError("which model? Give --model PRESET (such as gpt2-1.5b), or --hf for one of transformers'.")


def _is_given(args: argparse.Namespace, flag: str) -> bool:
    return getattr(args, flag.removeprefix("--").replace("-", "_")) not in (None, False)


def _check_states_only(args: argparse.Namespace) -> None:
    keys = (f"--{key.replace('_', '-')}" for key in ("vocab_size", *MODEL_KEYS))
    for flag in (*_OF_OUR_MODEL, *keys):
        if _is_given(args, flag):
            raise ConfigError(
                f"{flag} says nothing of --hf {args.hf}, which is of no family that llmscale trains: of it only the "
                f"model states are known. Drop {flag}."
            )
