"""`llmscale plan`: what a budget trains, or what a model costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli.flags import (
    PLANNED_GPUS,
    add_asked_flags,
    add_machine_flags,
    add_model_flag,
    add_price,
    add_shape_flags,
)
from llmscale.config.command_line import FlagContainer, Need, flag, local_path, number, quantity, whole_number
from llmscale.errors import ConfigError
from llmscale.report.save_figure import check_plot
from llmscale.suggestions import did_you_mean

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s [FLAGS]",
        description="From one goal, or a model and one goal, to a complete plan, by published scaling laws. Numbers "
        "may have a suffix: 124M, 70B, 1.4T, 300e9. Exit status: 0 planned, 1 the model does not fit the GPUs or does "
        "not finish in --days, 2 wrong flags.",
    )
    _add_goal_flags(parser.add_argument_group("goal, exactly one; or a model and one other"))
    add_shape_flags(parser.add_argument_group("model, beside --model"))
    _add_machine_flags(parser.add_argument_group("machines"))
    _add_run_flags(parser.add_argument_group("run"))
    output = parser.add_argument_group("output")
    flag(output, "--plot FILE", "draw iso-FLOP curves (needs matplotlib)", local_path)
    flag(output, "--json", "print JSON")
    parser.needs = [
        Need(
            "budget_usd gpu_hours price_per_gpu_hour mfu inference_mfu num_gpus num_nodes interconnect pue "
            "loss_chunk_tokens expert_parallel_size serve usd_per_kwh buy_usd_per_gpu years days watts keep_hours",
            "--gpu NAME",
            lambda args: args.gpu or args.gpu_memory_gib or args.bf16_tflops,
        ),
        Need("budget_usd", "--price-per-gpu-hour"),
        Need("inference_mfu", "--inference-tokens"),
        Need("interconnect", "with --num-nodes 1", lambda args: args.num_nodes != 1),
        Need("plot serve buy_usd_per_gpu", "with several GPUs", lambda args: not args.gpu or len(args.gpu) == 1),
        Need("keep_weights", "--keep-hours H"),
        Need("keep_hours", "with --keep-every", lambda args: args.keep_every is None),
        Need("pue", "--gpu NAME"),
        Need("buy_usd_per_gpu", "--usd-per-kwh X"),
        Need("years", "--buy-usd-per-gpu X"),
    ]
    parser.set_defaults(handler=_run)


def _add_goal_flags(group: FlagContainer) -> None:
    flag(group, "--budget-usd X", "money; needs --gpu and --price-per-gpu-hour", quantity(1e-3, 1e15))
    flag(group, "--gpu-hours X", "hours of one GPU; needs --gpu", quantity(1e-6, 1e13))
    flag(group, "--flops C", "training FLOPs, such as 5.76e23", quantity(1, 1e36))
    flag(group, "--pf-days X", "training compute in petaflop/s-days of 8.64e19 FLOPs", quantity(1e-18, 1e16))
    add_model_flag(group)
    flag(group, "--params N", "parameters, such as 7B", quantity(1, 1e16))
    flag(group, "--tokens D", "training tokens, such as 300B", quantity(1, limits.MAX_TOKENS))
    flag(group, "--loss L", "loss in nats per token, on text like MassiveText's", quantity(1e-3, 1e3))


def _add_machine_flags(group: FlagContainer) -> None:
    text = "nodes; default: the fewest that hold the model without offload and finish in time"
    add_machine_flags(group, num_gpus=PLANNED_GPUS, num_nodes=None, num_nodes_text=text, compares=True)
    text = "days in which the run must finish; default: 90, if any number of nodes finishes in them"
    flag(group, "--days X", text, number(1e-3, 36525))
    flag(group, "--mfu F", "fraction of the peak rate; default: estimated", number(1e-4, 1))
    add_price(group, "price, for the cost; one for each --gpu")
    text = "power of a GPU in training, for the energy; one for each --gpu; default: its limit"
    flag(group, "--watts W", text, number(1, 1e5), nargs="+")
    flag(group, "--usd-per-kwh X", "price of electricity, for its cost", quantity(1e-4, 100))
    text = "price of a GPU with its share of host, network and room: buying beside renting"
    flag(group, "--buy-usd-per-gpu X", text, quantity(1, 1e8))
    flag(group, "--years Y", "years until a bought GPU is worth nothing", number(0.1, 50), 4.0)
    flag(group, "--pue X", "power of the data centre over that of its computers; default: 1.2", number(1, 10))


def _add_run_flags(group: FlagContainer) -> None:
    text = "scaling law that decides: besiroglu, hoffmann, or the law.json of `ladder fit`"
    flag(group, "--law NAME|FILE", text, _law, default="besiroglu")
    add_asked_flags(group, "plan")
    text = "keep a checkpoint permanently after every H hours, for the disk and --keep-every of the command"
    flag(group, "--keep-hours H", text, number(0.01, 1e6))
    flag(group, "--keep-weights", "keep of these checkpoints the 16-bit weights alone (`llmscale export`)")
    text = "tokens of a request's prompt and output, such as 1000:250: speed and price of serving"
    flag(group, "--serve IN:OUT", text, _token_pair)
    text = "tokens that the model will serve: gives a smaller model, trained longer"
    flag(group, "--inference-tokens D", text, quantity(1, 1e24))
    flag(group, "--inference-mfu F", "MFU when serving; default: as in training", number(1e-4, 1))


def _law(text: str) -> str | Path:
    """Parse the name of a published law, or the file of another."""
    known = ("besiroglu", "hoffmann")
    if text in known:
        return text
    if "." not in text and "/" not in text:
        raise ConfigError(
            f"--law '{text}' is not known.{did_you_mean(text, known)} Legal: {', '.join(known)}, FILE.json."
        )
    return local_path(text)


def _token_pair(text: str) -> tuple[int, int]:
    tokens = whole_number(1, limits.MAX_SEQ_LEN)
    prompt, _, output = text.partition(":")
    try:
        return tokens(prompt), tokens(output)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be tokens of prompt and output such as 1000:250, not '{text}'"
        ) from None


def _run(args: argparse.Namespace) -> int:
    from llmscale.cli.answers import show
    from llmscale.cli.plan_answers import comparison_lines, draw, plan_lines, read_requests
    from llmscale.planning.run_plan import make_plan

    if args.plot is not None:
        check_plot(args.plot)
    requests = read_requests(args)
    plans = [make_plan(request) for request in requests]
    if len(plans) > 1:
        show({"gpus": plans}, comparison_lines(requests, plans), is_json=args.json)
    else:
        show(plans[0], plan_lines(requests[0], plans[0]), is_json=args.json)
    if args.plot is not None:
        draw(args.plot, requests[0], plans[0])
    runs = [plan.run for plan in plans if plan.run is not None]
    is_planned = not runs or any(run.row and (args.days is None or run.is_in_time) for run in runs)
    return 0 if is_planned else 1
