"""`llmscale export RUN --out FOLDER`: a run's newest weights for Hugging Face transformers."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from llmscale.config import flag_type

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.flag_parser import FlagParser


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `export`."""
    parser = subparsers.add_parser("export")
    parser.add_argument(
        "run", type=flag_type.path, metavar="RUN", help="run folder of train.py, or one checkpoint of it"
    )
    parser.add_argument(
        "--out",
        type=flag_type.path,
        required=True,
        metavar="FOLDER",
        help="for AutoModelForCausalLM.from_pretrained: configuration, weights, tokenizer",
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in FOLDER")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.hf_folder import check_hf_folder
    from llmscale.checkpoint.locate import find_checkpoint
    from llmscale.untrusted.terminal import make_visible_line, print_visible

    checkpoint = find_checkpoint(args.run, lambda line: print_visible(line, file=sys.stderr))
    check_hf_folder(args.out, checkpoint, overwrite=args.overwrite)
    # torch is imported only now: a wrong folder is answered at once.
    from llmscale.checkpoint.hf_weights import import_transformers
    from llmscale.engine.silence_libraries import quiet_libraries
    from llmscale.evaluate.export import export_model
    from llmscale.evaluate.load_model import load_trained_model

    quiet_libraries()
    import_transformers()
    trained = load_trained_model(checkpoint)
    num_weights = export_model(trained, args.out, args.dtype, overwrite=args.overwrite)
    out = make_visible_line(str(args.out))
    print(f"Wrote {out}: {num_weights:,} weights in {args.dtype} of step {trained.step}, and the tokenizer.")
    return 0
