"""Load a trained model from a checkpoint, or from a folder of transformers, in one process, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.hf_read import fill_view, find_weights_files, list_tensors, match_tensors
from llmscale.checkpoint.load import load_full_weights
from llmscale.config.hf_model import PublishedModel
from llmscale.engine.zero_layout import ShardView
from llmscale.errors import CheckpointError
from llmscale.model.gpt import GPT


def load_checkpoint_model(folder: Path, shape: GPTShape) -> GPT:
    """Load the fp32 master weights of a verified checkpoint onto this machine's GPU, or its CPU.

    Raises CheckpointError.
    """
    weights = load_full_weights(folder)
    # Checked before a model is built, because its size is known only from the checkpoint.
    if sum(tensor.numel() for tensor in weights.values()) < shape.num_parameters:
        raise CheckpointError(
            f"{folder} holds fewer weights than the {shape.num_parameters:,} of the model in its configuration."
        )
    model = GPT(shape, seed=0)
    _fill(model, weights, folder)
    return _placed(model)


def load_published_model(published: PublishedModel) -> GPT:
    """Load the model of a transformers folder in fp32.

    Raises CheckpointError for damaged weights, or weights that do not fit config.json.
    """
    assert published.folder is not None
    stored = list_tensors(find_weights_files(published.folder))
    pieces = match_tensors(stored, published.tensors, published.source, published.architecture)
    model = GPT(published.shape, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            fill_view(ShardView(flat, 0, flat.numel()), pieces[name])
    return _placed(model)


def _placed(model: GPT) -> GPT:
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _fill(model: GPT, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Copy flat fp32 tensors into the module's parameters and buffers. Raises CheckpointError unless they are the
    same."""
    own = dict([*model.named_parameters(), *model.named_buffers()])
    sizes, expected = ({name: tensor.numel() for name, tensor in of.items()} for of in (weights, own))
    check_same_model(sizes, expected, folder)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name].view_as(tensor))


def check_same_model(sizes: Mapping[str, int], own: Mapping[str, int], folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint's tensors, their elements by name, are exactly the model's `own`."""
    for name in sorted(own.keys() ^ sizes.keys()):
        what = "lacks" if name in own else "holds"
        raise CheckpointError(
            f"{folder} {what} '{name[:200]}': its tensors and its configuration are of different models."
        )
    for name, elements in own.items():
        if sizes[name] != elements:
            raise CheckpointError(
                f"{folder}: '{name}' has {sizes[name]:,} elements, and {elements:,} by the configuration beside it."
            )
