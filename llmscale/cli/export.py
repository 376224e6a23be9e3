"""`llmscale export RUN --to FOLDER`: a run's weights for Hugging Face transformers."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from llmscale.cli import flags
from llmscale.config.command_line import byte_size, flag, local_path
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from pathlib import Path

    from llmscale.config.command_line import FlagParser
    from llmscale.evaluate.export import ExportedModel
    from llmscale.evaluate.model_source import TrainedCheckpoint
    from llmscale.evaluate.weights import Merged


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `export`."""
    parser = subparsers.add_parser("export")
    flags.add_run_argument(parser, "run folder, or one of its checkpoints")
    flags.add_step(parser)
    flags.add_own_data(parser)
    flags.add_base(parser)
    flag(parser, "--merge", "of a run with --lora-rank, a model with the adapters merged in; default: them, for peft")
    text = "folder for AutoModelForCausalLM.from_pretrained: configuration, weights, tokenizer, model card"
    flag(parser, "--to FOLDER", text, local_path, required=True)
    flag(parser, "--dtype", "type of the weights; fp32 is exact", default="fp32", choices=["fp32", "bf16", "fp16"])
    text = "largest file of weights, such as 5GB (5 * 10^9 bytes) or 512MiB"
    flag(parser, "--shard-size SIZE", text, byte_size, "5GB")
    flag(parser, "--overwrite", "replace an earlier export in FOLDER")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.inventory import find_checkpoint, use_checkpoint
    from llmscale.untrusted.terminal import print_to_stderr

    find = partial(find_checkpoint, args.run, print_to_stderr, step=args.step)
    return use_checkpoint(find(), find, partial(_export, args))


def _export(args: argparse.Namespace, folder: Path) -> int:
    """Write a checkpoint. Raises CheckpointError, also where it is removed meanwhile."""
    from llmscale.checkpoint.hf_write import check_hf_folder
    from llmscale.checkpoint.manifest import read_checkpoint
    from llmscale.untrusted.terminal import make_visible_line

    check_hf_folder(args.to, folder, overwrite=args.overwrite)
    checkpoint = read_checkpoint(folder)
    # torch is imported after the checks, which answer at once.
    from llmscale.terminal.progress import show_progress
    from llmscale.terminal.status_line import show_if_slow

    with show_if_slow("importing torch"):
        from llmscale.evaluate.export import describe_export, write_model
        from llmscale.evaluate.model_source import open_trained_checkpoint
        from llmscale.evaluate.weights import open_stored
        from llmscale.report.model_card import build_model_card

    with show_progress("Verifying the checkpoint", checkpoint.manifest.num_bytes) as verified:
        trained = open_trained_checkpoint(checkpoint.path, verified.add, given=args.data)
    model = describe_export(trained.shape, trained.published, args.dtype, args.shard_size)
    if trained.shape.lora_rank and not args.merge:
        return _export_adapters(args, model, trained)
    weights = _merged(args, trained) if args.merge else open_stored(checkpoint.path, trained.shape, None)
    with show_progress("Writing weights", model.weight_bytes) as written:
        write_model(
            weights,
            model,
            trained.tokenizer,
            args.to,
            card=build_model_card(model, trained),
            overwrite=args.overwrite,
            progress=written.add,
            chat_template=trained.sets.chat_template,
        )
    out = make_visible_line(str(args.to))
    step = trained.state.step
    print(f"Wrote {out}: {model.num_parameters:,} weights in {args.dtype} of step {step}, tokenizer and model card.")
    return 0


def _merged(args: argparse.Namespace, trained: TrainedCheckpoint) -> Merged:
    """Open the weights of a run with adapters. Raises ConfigError for another run, CheckpointError."""
    from llmscale.evaluate.weights import Merged, open_stored
    from llmscale.terminal.progress import show_progress

    with show_progress("Verifying the base") as verified:
        base = trained.open_base(args.base, verified.add)
    if base is None:
        raise ConfigError(f"--merge has no effect: {trained.folder} holds a model, not adapters. Drop it.")
    return Merged(open_stored(trained.folder, trained.shape, base), trained.shape)


def _export_adapters(args: argparse.Namespace, model: ExportedModel, trained: TrainedCheckpoint) -> int:
    """Write the adapters alone. Raises ConfigError for flags of a model."""
    from llmscale.evaluate.export import export_adapters
    from llmscale.report.model_card import build_adapter_card, name_of_base
    from llmscale.untrusted.terminal import make_visible_line

    if args.dtype != "fp32" or args.base is not None:
        raise ConfigError("--dtype and --base have no effect on adapters, which are written in fp32. Add --merge.")
    num_bytes = export_adapters(
        trained.folder,
        trained.shape,
        model.family,
        name_of_base(trained.state.base["place"]),
        args.to,
        card=build_adapter_card(model, trained),
        overwrite=args.overwrite,
    )
    out = make_visible_line(str(args.to))
    rank = trained.shape.lora_rank
    print(
        f"Wrote {out}: adapters of rank {rank} of step {trained.state.step} for peft, {num_bytes:,} bytes, and a card."
    )
    return 0
