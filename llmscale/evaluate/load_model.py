"""A trained model and its tokenizer from a checkpoint, in one process, without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from llmscale.checkpoint.load import load_full_weights
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.tokenizers.tokenizer import Tokenizer
from llmscale.errors import CheckpointError
from llmscale.evaluate.trained_checkpoint import open_trained_checkpoint
from llmscale.model.gpt import GPT


@dataclass(frozen=True)
class TrainedModel:
    """A model in eval mode with the tokenizer of the set it was trained on."""

    model: GPT
    tokenizer: Tokenizer
    step: int


def load_trained_model(folder: Path) -> TrainedModel:
    """Load the fp32 master weights of a checkpoint onto this machine's GPU, or its CPU.

    The shape comes from the configuration in the checkpoint, the tokenizer from the data set that it names. Raises
    CheckpointError for a damaged checkpoint, DataError when the set is gone or is another one now.
    """
    trained = open_trained_checkpoint(folder)
    shape, location = trained.shape, trained.location
    weights = load_full_weights(folder)
    # Before a model is built whose size is the checkpoint's word alone.
    if sum(tensor.numel() for tensor in weights.values()) < shape.num_parameters:
        raise CheckpointError(
            f"{folder} holds fewer weights than the {shape.num_parameters:,} of the model in its configuration."
        )
    model = GPT(shape, seed=0)
    _fill(model, weights, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TrainedModel(
        model.to(device).eval(), load_set_tokenizer(location.folder, location.manifest), trained.state.step
    )


def _fill(model: GPT, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Copy flat fp32 tensors into the module's parameters and buffers. Raises CheckpointError unless they are the
    same."""
    own = dict([*model.named_parameters(), *model.named_buffers()])
    for name in sorted(own.keys() ^ weights.keys()):
        what = "lacks" if name in own else "holds"
        raise CheckpointError(f"{folder} {what} '{name}': its tensors and its configuration are of different models.")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.numel() != weights[name].numel():
                raise CheckpointError(
                    f"{folder}: '{name}' has {weights[name].numel()} elements, and {tensor.numel()} by the "
                    "configuration beside it."
                )
            tensor.copy_(weights[name].view_as(tensor))
