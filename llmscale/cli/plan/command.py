"""`llmscale plan`: what a budget trains, or what a model costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmscale.cli.flags import add_machine_flags, add_run_flags, add_shape_flags
from llmscale.cli.quick_answer import quick_answer
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import Need
from llmscale.report.save_figure import check_plot

if TYPE_CHECKING:  # the real imports wait until the command runs: other subcommands' --help must not wait for them
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan",
        description="From one goal, or a model and one goal, to a whole plan, by published scaling laws. Numbers may "
        "have a suffix: 124M, 70B, 1.4T, 300e9. Exit status: 0 planned, 1 the model fits the GPUs in no way, 2 the "
        "question was wrong.",
    )
    _add_goal_arguments(parser.add_argument_group("goal, exactly one; or a model and one other"))
    add_shape_flags(parser.add_argument_group("model, beside --model"))
    _add_gpu_arguments(parser.add_argument_group("machines"))
    _add_run_arguments(parser.add_argument_group("run"))
    output = parser.add_argument_group("what to show")
    output.add_argument("--plot", type=flag_type.path, metavar="FILE", help="draw iso-FLOP curves (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="print JSON")
    parser.needs = [
        Need(
            "budget_usd gpu_hours price_per_gpu_hour mfu inference_mfu num_gpus num_nodes interconnect pue "
            "loss_chunk_tokens",
            "--gpu NAME",
            lambda args: args.gpu or args.gpu_memory_gib or args.bf16_tflops,
        ),
        Need("budget_usd", "--price-per-gpu-hour"),
        Need("inference_mfu", "--inference-tokens"),
        Need("interconnect", "with --num-nodes 1", lambda args: args.num_nodes != 1),
        Need("pue", "--gpu NAME"),
    ]
    parser.set_defaults(handler=_run)


def _add_goal_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--budget-usd",
        type=flag_type.quantity(1e-3, 1e15),
        metavar="X",
        help="money; needs --gpu and --price-per-gpu-hour",
    )
    group.add_argument(
        "--gpu-hours", type=flag_type.quantity(1e-6, 1e13), metavar="X", help="hours of one GPU; needs --gpu"
    )
    group.add_argument("--flops", type=flag_type.quantity(1, 1e36), metavar="C", help="training FLOPs, such as 5.76e23")
    group.add_argument(
        "--pf-days",
        type=flag_type.quantity(1e-18, 1e16),
        metavar="X",
        help="the same in petaflop/s-days of 8.64e19 FLOPs",
    )
    group.add_argument(
        "--model",
        type=flag_type.name,
        metavar="PRESET",
        help="tiny-1m ... gpt3-175b, llama3-8b, qwen3-4b, ..., or hf:FOLDER or hf:NAME; the model flags override it",
    )
    group.add_argument("--params", type=flag_type.quantity(1, 1e16), metavar="N", help="parameters, such as 7B")
    group.add_argument(
        "--tokens", type=flag_type.quantity(1, limits.MAX_TOKENS), metavar="D", help="training tokens, such as 300B"
    )
    group.add_argument(
        "--loss", type=flag_type.quantity(1e-3, 1e3), metavar="L", help="nats per token, on text like MassiveText's"
    )


def _add_gpu_arguments(group: argparse._ArgumentGroup) -> None:
    add_machine_flags(group, num_gpus=8, num_nodes=None, num_nodes_default="as few as hold the model without offload")
    group.add_argument(
        "--mfu", type=flag_type.number(1e-4, 1), metavar="F", help="fraction of the peak rate (default: estimated)"
    )
    group.add_argument("--price-per-gpu-hour", type=flag_type.quantity(1e-4, 1e6), metavar="USD", help="for the cost")
    group.add_argument(
        "--pue",
        type=flag_type.number(1, 10),
        metavar="X",
        help="power of the data centre over that of its computers (default: 1.2)",
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--law", choices=["besiroglu", "hoffmann"], default="besiroglu", help="that decides (default: %(default)s)"
    )
    group.add_argument(
        "--global-batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        metavar="B",
        help="sequences per step (default: the nearest preset's)",
    )
    add_run_flags(group)
    group.add_argument(
        "--inference-tokens",
        type=flag_type.quantity(1, 1e24),
        metavar="D",
        help="tokens the model will serve: smaller, trained longer",
    )
    group.add_argument(
        "--inference-mfu", type=flag_type.number(1e-4, 1), metavar="F", help="when serving (default: as in training)"
    )
    group.add_argument(
        "--keep-last",
        type=flag_type.whole(1, limits.MAX_CHECKPOINTS),
        default=2,
        metavar="N",
        help="checkpoints, as in train.py",
    )
    group.add_argument(
        "--keep-every",
        type=flag_type.whole(0, limits.MAX_STEPS),
        default=0,
        metavar="N",
        help="steps, as in train.py (default: none)",
    )


def _run(args: argparse.Namespace) -> int:
    with quick_answer():
        return _answer(args)


def _answer(args: argparse.Namespace) -> int:
    from llmscale.cli.plan import output as plan_output
    from llmscale.cli.plan import request as plan_request
    from llmscale.cli.train_command import model_words
    from llmscale.dry_run.on_demand import with_recordings
    from llmscale.planning.run_plan import make_plan

    if args.plot is not None:
        check_plot(args.plot)
    request = plan_request.read_request(args)
    plan = with_recordings(lambda: make_plan(request), model_words(request.given))
    if args.json:
        print(plan_output.to_json(request, plan))
    else:
        for line in plan_output.plan_lines(request, plan, is_pue_given=args.pue is not None):
            print(line)
    if args.plot is not None:
        plan_output.draw(args.plot, request, plan)
    nothing_fits = plan.placement is not None and plan.placement.row is None
    return 1 if nothing_fits else 0
