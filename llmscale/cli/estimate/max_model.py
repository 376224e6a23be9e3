"""`llmscale estimate --max-model`: the largest GPT that each strategy can train."""

from __future__ import annotations

import argparse
import json

from llmscale.cli.estimate.as_json import largest_models_as_list, search_as_dict
from llmscale.cli.estimate.request import read_request
from llmscale.cli.estimate.rows import EXIT_NOTHING_FITS
from llmscale.cli.estimate.table import largest_model_lines
from llmscale.cli.train_command import model_words
from llmscale.dry_run.on_demand import with_recordings
from llmscale.planning.scaling import GPT3, scaling_family
from llmscale.planning.search import find_largest_models
from llmscale.terminal.table import print_fitting


def run(args: argparse.Namespace) -> int:
    """0 when something fits, 1 when nothing does."""
    request = read_request(args)
    search, job = request.search, request.search.job
    model = None if args.model is None else str(args.model)
    family = scaling_family(model)
    models = with_recordings(lambda: find_largest_models(search, family), model_words(request.model_keys))
    if args.json:
        values = search_as_dict(search) | {"largest_models": largest_models_as_list(models)}
        del values["shape"]
        print(json.dumps(values, indent=1))
    else:
        said = [
            f"{_what(model)} that fits {request.machines_in_words}, {search.precision}: sequences of "
            f"{job.shape.seq_len:,}, vocabulary {job.shape.vocab_size:,}, micro-batch {job.micro_batch_size or 1}",
            *("", *largest_model_lines(models), ""),
        ]
        host = "checked" if job.machines.host_bytes else "not checked: --host-memory-gib"
        fit = next((model.fit for model in models if model.fit), None)
        if fit is not None and fit.plan.gradient_accumulation_steps > 1:
            said.append(
                f"global batch {job.global_batch_size:,}: {fit.plan.gradient_accumulation_steps} micro-steps, whose "
                f"gradients are summed in {fit.step.engine_config.grad_accum_dtype}."
            )
        said += [
            _shapes_line(model, family),
            f"total: GiB of one GPU; host and NVMe: GiB of one node, {host}.",
            "preset: the largest one that is not larger. What only just fits leaves no room for a larger micro-batch.",
        ]
        print_fitting(said)
    return 0 if any(model.shape for model in models) else EXIT_NOTHING_FITS


def _what(model: str | None) -> str:
    return "The largest GPT" if model is None else f"The largest model like {model}"


def _shapes_line(model: str | None, family: str) -> str:
    """Whose table the sizes are from."""
    if family != GPT3:
        return (
            f"Shapes: the {family} presets, and between them depth, heads and MLP as functions of the width; beyond "
            "the widest in proportion to it."
        )
    whose = "" if model is None or model.startswith("gpt3-") else f"; blocks are {model}'s"
    return f"Shapes: GPT-3's table, and between its points depth as a function of the width{whose}."
