"""`llmscale plan`: what a budget trains, or what a model costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the real imports wait until the command runs: other subcommands' --help must not wait for them
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="what a budget trains, or what a model costs: size, tokens, steps, hours, money, disk",
        description="From one goal, or a model and one goal, to a whole plan, by published scaling laws. Numbers may "
        "have a suffix: 124M, 70B, 1.4T, 300e9. Exit status: 0 planned, 1 the model fits the GPUs in no way, 2 the "
        "question was wrong.",
    )
    _add_goal_arguments(parser.add_argument_group("goal, exactly one; or a model and one other"))
    _add_gpu_arguments(parser.add_argument_group("machines"))
    _add_run_arguments(parser.add_argument_group("run"))
    output = parser.add_argument_group("what to show")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw iso-FLOP curves (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run)


def _add_goal_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--budget-usd", type=_quantity, metavar="X", help="money; needs --gpu and --price-per-gpu-hour")
    group.add_argument("--gpu-hours", type=_quantity, metavar="X", help="hours of one GPU; needs --gpu")
    group.add_argument("--flops", type=_quantity, metavar="C", help="training FLOPs, such as 5.76e23")
    group.add_argument("--pf-days", type=_quantity, metavar="X", help="the same in petaflop/s-days of 8.64e19 FLOPs")
    group.add_argument("--model", metavar="PRESET", help="tiny-1m ... gpt3-175b")
    group.add_argument("--params", type=_quantity, metavar="N", help="parameters, such as 7B")
    group.add_argument("--tokens", type=_quantity, metavar="D", help="training tokens, such as 300B")
    group.add_argument("--loss", type=_quantity, metavar="L", help="nats per token, on text like MassiveText's")


def _add_gpu_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpu", metavar="NAME", help="a card of the table (`llmscale estimate --gpu list`)")
    group.add_argument("--gpu-memory-gib", type=_quantity, metavar="GIB", help="of a card that is not in the table")
    group.add_argument("--bf16-tflops", type=_quantity, metavar="X", help="its dense 16-bit rate")
    group.add_argument("--num-gpus", type=_count, default=8, metavar="N", help="GPUs per node (default: 8)")
    group.add_argument(
        "--num-nodes", type=_count, metavar="N", help="nodes (default: as few as hold the model without offload)"
    )
    group.add_argument("--interconnect", default="ib-400g", metavar="NAME", help="between nodes (default: ib-400g)")
    group.add_argument("--mfu", type=_share, metavar="F", help="fraction of the peak rate (default: estimated)")
    group.add_argument("--price-per-gpu-hour", type=_quantity, metavar="USD", help="for the cost")
    group.add_argument(
        "--pue", type=_pue, metavar="X", help="power of the data centre over that of its computers (default: 1.2)"
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--law", choices=["besiroglu", "hoffmann"], default="besiroglu", help="that decides (default: %(default)s)"
    )
    group.add_argument(
        "--seq-len", type=_count, metavar="T", help="tokens per sequence (default: the preset's, or 2048)"
    )
    group.add_argument(
        "--vocab-size", type=_count, default=50257, metavar="V", help="of the tokenizer (default: GPT-2's 50257)"
    )
    group.add_argument(
        "--global-batch-size", type=_count, metavar="B", help="sequences per step (default: the nearest preset's)"
    )
    group.add_argument(
        "--inference-tokens", type=_quantity, metavar="D", help="tokens the model will serve: smaller, trained longer"
    )
    group.add_argument("--inference-mfu", type=_share, metavar="F", help="when serving (default: as in training)")
    group.add_argument("--keep-last", type=_count, default=2, metavar="N", help="checkpoints, as in train.py")
    group.add_argument(
        "--keep-every", type=_count_or_zero, default=0, metavar="N", help="steps, as in train.py (default: none)"
    )


def _run(args: argparse.Namespace) -> int:
    from llmscale.cli import plan_output, plan_request
    from llmscale.planning.run_plan import make_plan

    question, terms = plan_request.read_question(args)
    plan = make_plan(question)
    if args.json:
        print(plan_output.to_json(question, plan, terms))
    else:
        for line in plan_output.plan_lines(question, plan, terms):
            print(line)
    if args.plot is not None:
        plan_output.draw(args.plot, question, plan)
    nothing_fits = plan.placement is not None and plan.placement.row is None
    return 1 if nothing_fits else 0


def _checked(convert: Callable[[str], float], legal: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """For argparse: a number, or one line that says what it must be."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = float("nan")
        if not legal(value):
            raise argparse.ArgumentTypeError(f"must be {what}, not '{text}'")
        return value

    return parse


def _quantity(text: str) -> float:
    from llmscale.config.quantity import parse_quantity

    what = "a number above 0 such as 5.76e23, 70B or 1.4T"
    return _checked(parse_quantity, lambda value: value > 0, what)(text)


def _count(text: str) -> int:
    return int(_checked(int, lambda value: value >= 1, "a whole number of at least 1")(text))


def _count_or_zero(text: str) -> int:
    return int(_checked(int, lambda value: value >= 0, "a whole number of at least 0")(text))


def _share(text: str) -> float:
    return _checked(float, lambda value: 0 < value <= 1, "a fraction above 0 and at most 1")(text)


def _pue(text: str) -> float:
    return _checked(float, lambda value: 1 <= value < float("inf"), "a number of at least 1")(text)
