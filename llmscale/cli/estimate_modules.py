"""`llmscale estimate --module` and `--hf` of a family that llmscale does not train: rows that are simulated."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.hf_config import FAMILIES
from llmscale.cli.answers import show, table
from llmscale.cli.estimate_details import simulating
from llmscale.cli.estimate_rows import (
    EXIT_NOTHING_FITS,
    host_words,
    margin_line,
    read_cluster,
    row_heads,
)
from llmscale.cli.flags import given_keys
from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.hardware import GPU, Cluster, usable_precision
from llmscale.config.run_config import RunConfig, build_run_config
from llmscale.config.user_paths import check_output_file, write_output_file
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import GIB, format_size
from llmscale.planning.search import strategy_ds_config
from llmscale.terminal.colour import paint

if TYPE_CHECKING:
    from llmscale.config.deepspeed.schema import Precision
    from llmscale.dry_run.module_rows import ModuleQuestion, ModuleRow, ModuleRows

#: Tokens of a sequence of --hf without --seq-len, where the model has as many positions.
_SEQ_LEN = 2048
#: Columns that a simulated module has not.
_UNKNOWN = {
    "gpu",
    "usd_per_gpu_hour",
    "fit.plan.filler_share",
    "fit.nvme_bytes_per_node",
    "tokens_per_second",
    "mfu",
    "usd_per_billion_tokens",
}


def answer_module(args: argparse.Namespace, gpu: GPU) -> int:
    """Print the rows of --module; return 0 if one fits, else 1."""
    keys = build_run_config(given_keys(args, "estimate"))
    with simulating("--module"):
        from llmscale.dry_run.module import OwnModule
        from llmscale.dry_run.module_rows import ModuleQuestion, micro_steps_of
        from llmscale.dry_run.own_code import call, load_function

        build = load_function("--module", args.module)
        batch = call("--batch", args.batch, load_function("--batch", args.batch))
        module = OwnModule(build, batch, name=f"--module {args.module}", batch_name=f"--batch {args.batch}")
        cluster = read_cluster(args, gpu)
        micro_steps = micro_steps_of(keys.global_batch_size, module.batch_size, cluster.world_size)
        question = ModuleQuestion(module, cluster, micro_steps, recomputing=module.with_checkpointing())
    about = f"{args.module}: {{parameters}} parameters; a micro-batch is what {args.batch} returns"
    return _answer(args, keys, question, about, [])


def answer_hf(args: argparse.Namespace, gpu: GPU, entries: Mapping[str, object], refusal: ConfigError) -> int:
    """Print the rows of transformers' own model of a config.json; return 0 if one fits, else 1.

    Raises `refusal`, why llmscale does not train it, for a model that transformers does not have either.
    """
    keys = build_run_config(given_keys(args, "estimate"))
    with simulating("--hf of a family that llmscale does not train"):
        try:
            from llmscale.dry_run.hf_module import knows, read_hf_module
        except ImportError as error:
            raise ConfigError(f"{refusal} To simulate it install transformers ({error}).") from None
        from llmscale.dry_run.module_rows import ModuleQuestion, micro_steps_of

        if not knows(entries["model_type"]):
            raise refusal
        cluster = read_cluster(args, gpu)
        micro_batch_size = keys.micro_batch_size or 1
        try:
            model = read_hf_module(
                entries,
                f"--hf {args.hf}",
                micro_batch_size=micro_batch_size,
                seq_len=keys.seq_len,
                default_seq_len=_SEQ_LEN,
            )
        except ConfigError as error:
            if entries["model_type"] in FAMILIES:
                raise refusal from error
            raise
        question = ModuleQuestion(
            module=model.module,
            cluster=cluster,
            micro_steps=micro_steps_of(keys.global_batch_size, micro_batch_size, cluster.world_size),
            blocks=model.blocks,
            recomputing=model.recomputing,
            recomputing_blocks=model.recomputing_blocks,
        )
    about = f"{args.hf}: {{parameters}} parameters ({model.model_type}), sequences of {model.seq_len:,}"
    notes = ["The model is transformers' own, with its default attention and its own loss."]
    if model.blocks and model.module.experts > 1:
        notes.append(f"Each of {model.module.experts} experts gets an equal share of the tokens.")
    return _answer(args, keys, question, about, notes)


def _answer(
    args: argparse.Namespace, keys: RunConfig, question: ModuleQuestion, about: str, notes: Sequence[str]
) -> int:
    if args.emit is not None:
        check_output_file("--emit", args.emit, overwrite=args.force)
    with simulating("--module"):
        from llmscale.dry_run.module_rows import find_module_rows

        files = _ds_configs(args, keys.precision, question.cluster.gpu)
        answer = find_module_rows(question, files, keys.activation_checkpointing)
    if args.emit is not None and answer.recommended is not None:
        _emit(args.emit, answer.recommended)
    values = {"gpu": question.cluster.gpu, "world_size": question.cluster.world_size, **answer.values()}
    show(values, _lines(args, question, answer, about, notes), is_json=args.json)
    return 0 if answer.recommended else EXIT_NOTHING_FITS


def _ds_configs(args: argparse.Namespace, precision: Precision | None, gpu: GPU) -> list[tuple[str | None, DsConfig]]:
    """Return the user's ds_configs with their names, else one for each strategy. Raises ConfigError."""
    from llmscale.dry_run.module_rows import strategies_to_simulate

    if not args.ds:
        return [*strategies_to_simulate(usable_precision(precision, gpu))]
    files: list[tuple[str | None, DsConfig]] = []
    for path in args.ds:
        ds = read_ds_config(path).with_flags(precision, None)
        usable_precision(ds.precision, gpu, f"{path}: ")
        files.append((Path(ds.source).name, ds))
    return files


def _emit(path: Path, row: ModuleRow) -> None:
    """Write the row's ds_config atomically. Raises ConfigError."""
    fit = row.fit
    config = strategy_ds_config(fit.strategy, fit.precision)
    # Recomputation is the module's own.
    config.pop("activation_checkpointing", None)
    config |= {
        "train_micro_batch_size_per_gpu": fit.micro_batch_size,
        "gradient_accumulation_steps": fit.micro_steps,
    }
    write_output_file("--emit", path, json.dumps(config, indent=2) + "\n")


def _lines(
    args: argparse.Namespace, question: ModuleQuestion, answer: ModuleRows, about: str, notes: Sequence[str]
) -> Iterator[str]:
    cluster = question.cluster
    rows = answer.rows
    precisions = " and ".join(sorted({row.fit.precision for row in rows}))
    yield about.format(parameters=f"{rows[0].fit.num_parameters:,}")
    yield f"on {cluster.in_words(f'{cluster.gpu.name} ({cluster.gpu.memory_gib:g} GiB)')}, {precisions}"
    yield ""
    yield from _choice_lines(answer, cluster)
    heads = {path: head for path, head in row_heads(wide=args.wide).items() if path not in _UNKNOWN}
    yield from table(heads, rows, is_marked=lambda row: row is answer.recommended)
    yield ""
    yield (
        "GiB per GPU at the peak, host per node; batch: micro-batch x accumulation. Each row is a simulation of "
        "DeepSpeed's own engine around this module, with DeepSpeed's defaults for what a ds_config does not say; the "
        "optimizer is AdamW. Code that reads values of tensors reads zeros."
    )
    yield from notes
    if question.blocks and not all(row.fit.is_complete for row in rows):
        sizes = sorted({size for stage in (0, 3) for size in question.blocks.sizes(stage) or ()})
        yield (
            f"Simulated were {', '.join(map(str, sizes))} of {question.blocks.count} blocks; the rest is extrapolated "
            "linearly from what one more takes."
        )
    if args.global_batch_size is None:
        yield "Gradients of several micro-steps are assumed (--global-batch-size says how many)."
    yield margin_line()
    if any(row.fit.host_bytes_per_node for row in rows):
        yield f"Host memory is {host_words(cluster)}."


def _choice_lines(answer: ModuleRows, cluster: Cluster) -> Iterator[str]:
    row = answer.recommended
    if row is None or answer.recommendation is None:
        nearest = max(answer.rows, key=lambda row: row.fit.spare_bytes)
        missing = format_size(-nearest.fit.spare_bytes)
        if nearest.fit.spare_bytes >= 0:
            missing = f"{format_size(-(nearest.fit.host_spare_bytes or 0))} of host memory per node"
        yield f"Nothing fits. The row that misses least needs {missing} more: {_describe(nearest)}."
        yield ""
        return
    memory = f"{row.fit.estimate.total_bytes / GIB:.1f} of {cluster.gpu_bytes / GIB:.1f} GiB"
    choice = f"* {_describe(row)}, micro-batch {row.batch}: {memory}, {row.fit.verdict.strip()}"
    yield paint(choice, "green", sys.stdout)
    why = answer.recommendation.why
    yield f"  {why[0].upper()}{why[1:]}"
    yield ""


def _describe(row: ModuleRow) -> str:
    """Return a row's strategy in words, without what the module may do by itself."""
    words = row.strategy.describe().removesuffix(", no recomputation")
    return f"{row.ds_config}: {words}" if row.ds_config else words
