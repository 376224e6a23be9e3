"""`llmscale export RUN --to FOLDER`: a run's weights for Hugging Face transformers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmscale.cli import flags
from llmscale.config.command_line import byte_size, flag, local_path

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.evaluate.export import ExportedModel
    from llmscale.evaluate.model_source import TrainedCheckpoint


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `export`."""
    parser = subparsers.add_parser("export")
    flags.add_run_argument(parser, "run folder, or one of its checkpoints")
    flags.add_step(parser)
    flags.add_own_data(parser)
    text = "folder for AutoModelForCausalLM.from_pretrained: configuration, weights, tokenizer, model card"
    flag(parser, "--to FOLDER", text, local_path, required=True)
    flag(parser, "--dtype", "type of the weights; fp32 is exact", default="fp32", choices=["fp32", "bf16", "fp16"])
    text = "largest file of weights, such as 5GB (5 * 10^9 bytes) or 512MiB"
    flag(parser, "--shard-size SIZE", text, byte_size, "5GB")
    flag(parser, "--overwrite", "replace an earlier export in FOLDER")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.hf_write import check_hf_folder
    from llmscale.checkpoint.inventory import find_checkpoint
    from llmscale.untrusted.terminal import make_visible_line, print_to_stderr

    checkpoint = find_checkpoint(args.run, print_to_stderr, step=args.step)
    check_hf_folder(args.to, checkpoint, overwrite=args.overwrite)
    # torch is imported after the checks, which answer at once.
    from llmscale.terminal.progress import show_progress
    from llmscale.terminal.status_line import show_if_slow

    with show_if_slow("importing torch"):
        from llmscale.checkpoint.manifest import load_manifest
        from llmscale.evaluate.export import describe_export, export_model
        from llmscale.evaluate.model_source import open_trained_checkpoint

    with show_progress("Verifying the checkpoint", load_manifest(checkpoint).num_bytes) as verified:
        trained = open_trained_checkpoint(checkpoint, verified.add, given=args.data)
    model = describe_export(trained.shape, trained.published, args.dtype, args.shard_size)
    with show_progress("Writing weights", model.weight_bytes) as written:
        export_model(
            checkpoint,
            model,
            trained.tokenizer,
            args.to,
            card=_model_card(model, trained),
            overwrite=args.overwrite,
            progress=written.add,
            chat_template=trained.chat_template,
        )
    out = make_visible_line(str(args.to))
    step = trained.state.step
    print(f"Wrote {out}: {model.num_parameters:,} weights in {args.dtype} of step {step}, tokenizer and model card.")
    return 0


def _model_card(model: ExportedModel, trained: TrainedCheckpoint) -> str:
    from llmscale.report.model_card import CardFacts, build_model_card

    facts = CardFacts(
        model_type=model.family.model_type,
        architecture=model.family.architecture,
        dtype=model.dtype,
        num_parameters=model.num_parameters,
        shape=trained.shape,
        checkpoint=trained.manifest,
        config=trained.config,
        data=trained.sets,
    )
    return build_model_card(facts, trained.folder)
