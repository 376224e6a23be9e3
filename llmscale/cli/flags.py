"""Flags that several subcommands share, and the commands that `estimate` and `plan` print. No torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_type_hints

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config import limits
from llmscale.config.bundled_files import is_in_checkout
from llmscale.config.command_line import (
    FlagContainer,
    FlagParser,
    Need,
    flag,
    nonblank,
    number,
    path_or_url,
    quantity,
    run_place,
    whole_number,
)
from llmscale.config.optimizers import ADAMW, MODELLED_NAMES
from llmscale.config.run_flags import add_run_flags

if TYPE_CHECKING:  # pydantic is slow to import, and help does not need it
    from llmscale.config.run_config import RunConfig
    from llmscale.planning.search import Candidate, Machines

#: Keys of a run that describe the computation, without the sizes that the dataset determines.
MODEL_KEYS = (*SHAPE_KEYS, "document_mask")
#: Every key that changes a model's shape; a printed command repeats those that the user gave.
_GIVEN_KEYS = ("model", *MODEL_KEYS, "vocab_size", "seq_len")
#: Name that lists all GPUs or networks.
LIST = "list"
DEFAULT_INTERCONNECT = "ib-400g"
_MODEL_TEXTS = {
    "model": "preset (tiny-1m ... gpt3-175b, llama3-8b, qwen3-4b, ...), or hf:FOLDER or hf:NAME; the flags of the "
    "model override it",
    "seq_len": "tokens per sequence; default: the model's",
    "vocab_size": "size of the tokenizer's vocabulary; default: the published model's",
}


def add_shape_flags(group: FlagContainer) -> None:
    """Add the flags that change a model's shape."""
    hints = get_type_hints(GPTShape)
    types = {"seq_len": int, "vocab_size": int, **{key: hints.get(key, bool) for key in MODEL_KEYS}}
    add_run_flags(group, types, texts=_MODEL_TEXTS)


def add_model_flag(group: FlagContainer) -> None:
    """Add --model."""
    add_run_flags(group, {"model": str}, texts=_MODEL_TEXTS)


def given_keys(args: argparse.Namespace, keys: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the model's keys, and those in `keys`, that the user gave, unchecked."""
    return {key: value for key in (*_GIVEN_KEYS, *keys) if (value := getattr(args, key)) is not None}


def resolve_model(config: RunConfig, seq_len: int | None) -> tuple[RunConfig, GPTShape]:
    """Return the configuration, with the keys of a published model, and its shape.

    Vocabulary and context are the model's own unless they are given. Raises ConfigError.
    """
    from llmscale.config.hf_model import is_published, read_published_model, with_published_shape
    from llmscale.config.presets import get_preset
    from llmscale.config.resolve import SetFacts, resolve_shape

    if is_published(config.model):
        published = read_published_model("--model", config.model).shape
        positions, vocab_size = published.seq_len, published.vocab_size
        config = with_published_shape(config, None)
    else:
        preset = get_preset(config.model)
        positions, vocab_size = preset.seq_len, preset.vocab_size
    # Only vocabulary and context of the dataset matter: its size would determine the number of steps.
    facts = SetFacts(config.vocab_size or vocab_size, seq_len or positions, num_train_samples=1, eot_token=0)
    return config, resolve_shape(config, facts)


def add_machine_flags(group: FlagContainer, *, num_gpus: int, num_nodes: int | None, num_nodes_text: str) -> None:
    """Add the flags of GPUs and nodes, with the defaults `num_gpus` and `num_nodes`."""
    flag(group, "--gpu NAME", "a GPU of the table (`llmscale estimate --gpu list`)", _name_or_list)
    flag(group, "--gpu-memory-gib GIB", "memory of a GPU not in the table", quantity(0.01, limits.MAX_GPU_GIB))
    flag(group, "--bf16-tflops X", "dense 16-bit rate of that GPU", quantity(0.001, limits.MAX_TFLOPS))
    flag(group, "--num-gpus N", "GPUs per node", whole_number(1, limits.MAX_GPUS_PER_NODE), num_gpus)
    flag(group, "--num-nodes N", num_nodes_text, whole_number(1, limits.MAX_NODES), num_nodes)
    text = "network between nodes; `estimate --interconnect list` compares all"
    flag(group, "--interconnect NAME", text, _name_or_list, DEFAULT_INTERCONNECT)


def _name_or_list(text: str) -> str:
    """Parse a name; `list` is accepted in any case."""
    return LIST if text.lower() == LIST else nonblank(text)


def add_optimizer_flags(group: FlagContainer) -> None:
    """Add the flags outside the ds_config that memory depends on."""
    flag(group, "--optimizer", f"optimizer; default: {ADAMW.name}", choices=MODELLED_NAMES)
    add_run_flags(group, {"loss_chunk_tokens": int})


def add_run_argument(
    parser: FlagParser, text: str = "run folder, checkpoint, or folder of a transformers model"
) -> None:
    """Add RUN."""
    parser.add_argument("run", type=run_place, metavar="RUN", help=text)


def add_step(parser: FlagParser) -> None:
    """Add --step."""
    flag(
        parser, "--step N", "the run's checkpoint of this step; default: the newest", whole_number(0, limits.MAX_STEPS)
    )


def add_own_data(parser: FlagParser) -> None:
    """Add --data, for a run whose dataset has a URL."""
    text = "the run's dataset, if it has a URL: a URL found only in the checkpoint is not contacted"
    flag(parser, "--data URL", text, path_or_url)


def add_loss(parser: FlagParser) -> None:
    """Add --data, --val-samples and --batch-size."""
    parser.needs = [Need("data", "with --val-samples 0", lambda args: args.val_samples)]
    flag(parser, "--data FOLDER|URL", "dataset for the validation loss; default: the run's own", path_or_url)
    text = "sequences for the loss, spread over the split; of a mixture, each dataset in proportion; 0: no loss"
    flag(parser, "--val-samples N", text, whole_number(0, limits.MAX_SAMPLES), 256)
    text = "sequences at once; results do not depend on it"
    flag(parser, "--batch-size N", text, whole_number(1, limits.MAX_BATCH), 8)


def add_timeout(parser: FlagContainer, name: str, text: str, default: float, lowest: float = 0.001) -> None:
    """Add a flag for a number of seconds."""
    flag(parser, f"{name} S", text, number(lowest, limits.MAX_SECONDS), default)


def train_command(ds: str, fit: Candidate, keys: Mapping[str, object]) -> str:
    """Return the command that trains with the ds_config `ds` and the settings of `fit`.

    `keys` are further keys of the run. Without vocabulary and context among them, the dataset determines these.
    """
    words = [*launcher_words(fit.machines, in_checkout=is_in_checkout()), "--ds", ds]
    for key, value in keys.items():
        words += flag_words(key, value)
    words += flag_words("global_batch_size", fit.plan.global_batch_size)
    words += flag_words("micro_batch_size", fit.plan.micro_batch_size)
    if fit.plan.ranks.sequence_parallel_size > 1:
        words += flag_words("sequence_parallel_size", fit.plan.ranks.sequence_parallel_size)
    if fit.plan.ranks.expert_parallel_size > 1:
        words += flag_words("expert_parallel_size", fit.plan.ranks.expert_parallel_size)
    # DeepSpeed has a section for `full`, but none for `selective`.
    if fit.strategy.checkpointing != fit.ds.checkpointing:
        words += flag_words("activation_checkpointing", fit.strategy.checkpointing)
    return shlex.join(words)


def launcher_words(machines: Machines, *, in_checkout: bool) -> list[str]:
    """Return the words that start the ranks: deepspeed in a checkout, otherwise llmscale."""
    if in_checkout:
        where = ["--hostfile", "HOSTFILE"] if machines.num_nodes > 1 else ["--num_gpus", str(machines.gpus_per_node)]
        return ["deepspeed", *where, "llmscale/train.py"]
    if machines.num_nodes > 1:
        return ["llmscale", "launch", "--hostfile", "HOSTFILE", "--"]
    return ["llmscale", "train", "--num-gpus", str(machines.gpus_per_node)]


def describe_data(shape: GPTShape, keys: Mapping[str, object]) -> str:
    """Return a note on the data that the command with `keys` needs."""
    most = "at most " if "vocab_size" in keys else ""
    return f"(on data prepared with --seq-len {shape.seq_len} and a tokenizer of {most}{shape.vocab_size:,} tokens)"


def describe_flags(keys: Mapping[str, object]) -> str:
    """Return keys as flags: `--model gpt2-124m --norm rmsnorm`."""
    return shlex.join(word for key, value in keys.items() for word in flag_words(key, value))


def flag_words(key: str, value: object) -> list[str]:
    """Return `--key value` in train.py's spelling."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", ",".join(value)]
    return [f"--{name}", str(value)]
