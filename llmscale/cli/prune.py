"""`llmscale prune RUN --to FOLDER`: a model with 2:4 sparse linear layers, for Hugging Face transformers."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from llmscale.cli import flags
from llmscale.config.command_line import Need, flag, local_path, nonblank
from llmscale.config.hardware import get_gpu
from llmscale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from pathlib import Path

    from llmscale.config.command_line import FlagParser
    from llmscale.config.hardware import GPU
    from llmscale.evaluate.model_source import ModelSource
    from llmscale.evaluate.prune import Pruned
    from llmscale.model.gpt import GPT

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
{mark}
---

# A pruned model

Made with `llmscale prune`: {zeros:,} of the {weights:,} weights of its blocks' linear layers are zero, two of every
four along the inputs (2:4 structured sparsity, chosen by magnitude).
"""


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `prune`."""
    parser = subparsers.add_parser("prune")
    flags.add_run_argument(parser)
    flags.add_step(parser)
    flags.add_loss(parser)
    flag(parser, "--to FOLDER", "folder for AutoModelForCausalLM.from_pretrained", local_path, required=True)
    text = (
        "GPU of `llmscale estimate --gpu list` to prune for; refused if it cannot skip zeros; default: this machine's"
    )
    flag(parser, "--gpu NAME", text, nonblank)
    flag(parser, "--overwrite", "replace an earlier export in FOLDER")
    parser.needs = [*parser.needs, Need("batch_size", "with --val-samples 0", lambda args: args.val_samples)]
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.inventory import use_checkpoint
    from llmscale.evaluate.model_source import find_model
    from llmscale.untrusted.terminal import print_to_stderr

    if args.gpu is None:
        gpu = None
    else:
        gpu = get_gpu(args.gpu, other="")
    find = partial(find_model, args.run, print_to_stderr, args.step)
    return use_checkpoint(find(), find, partial(_prune, args, gpu))


def _prune(args: argparse.Namespace, gpu: GPU | None, folder: Path) -> int:
    """Write a pruned model. Raises CheckpointError, also where the checkpoint is removed meanwhile."""
    from llmscale.checkpoint.hf_write import check_hf_folder
    from llmscale.evaluate.model_source import open_model
    from llmscale.untrusted.terminal import make_visible_line

    check_hf_folder(args.to, folder, overwrite=args.overwrite)
    from llmscale.engine.deepspeed_patches import quiet_libraries
    from llmscale.terminal.progress import count_words, show_progress
    from llmscale.terminal.status_line import show_if_slow

    quiet_libraries()
    with show_progress("Verifying the checkpoint") as verified:
        source = open_model(folder, args.data, verified.add, with_sets=args.val_samples > 0)
    if source.shape.lora_rank:
        raise ConfigError(
            f"{args.run} holds adapters. Merge them first: llmscale export {args.run} --merge --to FOLDER."
        )
    if source.sets is None and args.val_samples:
        raise DataError(source.no_sets)
    # torch is imported after the checks, which answer at once.
    with show_if_slow("importing torch"):
        from llmscale.evaluate.evaluation import losses_on, open_validation_sets
        from llmscale.evaluate.prune import prune_linear_layers

    for_gpu = _check_gpu(gpu)
    sets = open_validation_sets(source, args.val_samples)
    model = source.load_model()
    num_sequences = sum(one.num_samples for one in sets)

    def losses_now(label: str) -> dict[str, float]:
        with show_progress(label, num_sequences, count_words("sequences")) as scored:
            return losses_on(model, sets, args.batch_size, scored.add)

    before = losses_now("Taking the loss before")
    pruned = prune_linear_layers(model, for_gpu=for_gpu)
    after = losses_now("Taking the loss after")
    _write(model, source, pruned, args.to, overwrite=args.overwrite)
    for line in _lines(pruned, before, after):
        print(line)
    print(f"Wrote {make_visible_line(str(args.to))}.")
    return 0


def _check_gpu(named: GPU | None) -> bool:
    """Return whether the model is for a GPU: the named one, else this machine's.

    Raises ConfigError for a GPU without sparse cores.
    """
    from llmscale.engine.device_memory import gpu_capability
    from llmscale.evaluate.prune import check_sparse_cores

    if named is None:
        capability = gpu_capability()
    else:
        capability = named.capability
    if capability is not None:
        check_sparse_cores("this machine's GPU" if named is None else f"--gpu {named.name}", capability)
    return capability is not None


def _write(model: GPT, source: ModelSource, pruned: Pruned, folder: Path, *, overwrite: bool) -> None:
    from llmscale.checkpoint.hf_write import CARD_MARK
    from llmscale.evaluate.export import describe_export, write_model
    from llmscale.evaluate.prune import ModelWeights
    from llmscale.terminal.progress import show_progress

    exported = describe_export(source.shape, source.published, "fp32", 5 * 10**9)
    card = _CARD.format(mark=CARD_MARK, zeros=pruned.num_zeros, weights=pruned.num_weights)
    with show_progress("Writing weights") as written:
        write_model(
            ModelWeights(model),
            exported,
            source.tokenizer,
            folder,
            card=card,
            overwrite=overwrite,
            progress=written.add,
        )


def _lines(pruned: Pruned, before: dict[str, float], after: dict[str, float]) -> list[str]:
    share = pruned.num_zeros / pruned.num_weights
    lines = [
        f"{pruned.num_layers} linear layers, {pruned.num_zeros:,} of {pruned.num_weights:,} weights zero ({share:.1%})"
    ]
    return lines + [f"validation {name} {before[name]:.4f} -> {after[name]:.4f}" for name in before]
