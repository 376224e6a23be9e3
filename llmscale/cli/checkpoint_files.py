"""`llmscale checkpoint import|export|reshard`: checkpoints of DeepSpeed's and of llmscale's as others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.command_line import flag, local_path, run_place
from llmscale.errors import ConfigError
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser

_STAGES = (0, 1, 2, 3)
_MAX_RANKS = 1_000_000
_DEEPSPEEDS = "folder that save_checkpoint of DeepSpeed was given, or one of a tag in it"


def add_actions(actions: _SubParsersAction[FlagParser]) -> None:
    """Add `import`, `export` and `reshard`."""
    text = "write a checkpoint of DeepSpeed as llmscale's, verified from then on"
    action = actions.add_parser(
        "import", help=text, description=text, example="llmscale checkpoint import out/ --to runs/mine"
    )
    action.add_argument("folder", type=local_path, metavar="DIR", help=_DEEPSPEEDS)
    flag(action, "--to RUN", "folder of the new checkpoints", local_path, required=True)
    _add_tag(action)
    action.set_defaults(handler=_import)

    text = "write a loop's own checkpoint, or DeepSpeed's, as a universal one of DeepSpeed or as safetensors"
    example = "llmscale checkpoint export runs/mine --as safetensors --to weights"
    action = actions.add_parser("export", help=text, description=text, example=example)
    action.add_argument("run", type=run_place, metavar="RUN", help=f"folder of a loop's checkpoints, or {_DEEPSPEEDS}")
    flag(action, "--as KIND", "what is written", choices=["universal", "safetensors"], dest="kind", required=True)
    flag(action, "--to FOLDER", "new folder", local_path, required=True)
    flag(action, "--step N", "step of the checkpoint; default: the newest", int)
    _add_tag(action)
    text = "type of safetensors' weights; default: as they are stored, which is the optimizer's fp32"
    flag(action, "--dtype", text, choices=["fp32", "bf16", "fp16"])
    action.set_defaults(handler=_export)

    text = "write a checkpoint as DeepSpeed itself would have on other ranks at another ZeRO stage"
    example = "llmscale checkpoint reshard out/ --ranks 16 --stage 3 --to out-16"
    action = actions.add_parser("reshard", help=text, description=text, example=example)
    action.add_argument("run", type=run_place, metavar="DIR", help=f"{_DEEPSPEEDS}, or a loop's own checkpoints")
    flag(action, "--ranks N", "ranks that will load it", int, required=True)
    flag(action, "--stage S", "ZeRO stage that will load it: 0, 1, 2 or 3", int, required=True)
    flag(action, "--to FOLDER", "new folder, for load_checkpoint", local_path, required=True)
    flag(action, "--step N", "step of the checkpoint; default: the newest", int)
    _add_tag(action)
    action.set_defaults(handler=_reshard)


def _add_tag(action: FlagParser) -> None:
    flag(
        action, "--tag TAG", "folder of DeepSpeed's checkpoint, such as global_step100; default: that in `latest`", str
    )


def _import(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.convert import import_deepspeed

    imported = import_deepspeed(args.folder, args.to, args.tag)
    print_visible(f"Wrote {imported.path}, verified. api.Checkpoints(engine, {str(args.to)!r}).load() continues it.")
    if imported.left_out:
        print_visible(f"Left out of client_state, as they are not plain values: {', '.join(imported.left_out)}.")
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.kind == "universal" and args.dtype is not None:
        raise ConfigError("--dtype has no effect on --as universal, which holds the optimizer's own types. Drop it.")
    from llmscale.checkpoint.convert import open_portable
    from llmscale.checkpoint.deepspeed_write import write_universal
    from llmscale.checkpoint.module_weights import write_weights
    from llmscale.checkpoint.portable import ReadableWeights

    source = open_portable(args.run, tag=args.tag, step=args.step)
    if args.kind == "universal":
        place = write_universal(source, args.to)
        print_visible(
            f'Wrote {place}. DeepSpeed continues it with "checkpoint": {{"load_universal": true}} at stages 1 and 2.'
        )
    else:
        paths = write_weights(args.to, source.engine_state, ReadableWeights(source), args.dtype)
        print_visible(f"Wrote {_count(paths)} of step {source.step} to {args.to}.")
    return 0


def _reshard(args: argparse.Namespace) -> int:
    if args.stage not in _STAGES:
        raise ConfigError(f"--stage {args.stage}: must be one of {', '.join(map(str, _STAGES))}.")
    if not 1 <= args.ranks <= _MAX_RANKS:
        raise ConfigError(f"--ranks {args.ranks}: must be from 1 to {_MAX_RANKS:,}.")
    from llmscale.checkpoint.convert import open_portable
    from llmscale.checkpoint.deepspeed_write import write_native

    source = open_portable(args.run, tag=args.tag, step=args.step)
    place = write_native(source, args.to, ranks=args.ranks, stage=args.stage)
    print_visible(
        f"Wrote {place} for {args.ranks} ranks at ZeRO stage {args.stage}: load_checkpoint({str(args.to)!r}) of "
        "DeepSpeed continues it with the same ds_config but for the stage."
    )
    return 0


def _count(paths: list[Path]) -> str:
    if len(paths) == 1:
        return paths[0].name
    return f"{len(paths)} files"
