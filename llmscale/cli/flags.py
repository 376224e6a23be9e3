"""Flags that several subcommands share, and the commands that `estimate` and `plan` print. No torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_type_hints

from llmscale import limits
from llmscale.architecture.shape import GPTShape
from llmscale.config.bundled_files import is_in_checkout
from llmscale.config.command_line import (
    FlagContainer,
    FlagParser,
    Need,
    flag,
    nonblank,
    path_or_url,
    quantity,
    run_place,
    whole_number,
)
from llmscale.config.hardware import GPU, Cluster, custom_gpu, get_gpu
from llmscale.config.run_flags import add_run_flags, flag_words, keys_asked_by, model_keys
from llmscale.errors import ConfigError
from llmscale.terminal.human_numbers import count_nouns

if TYPE_CHECKING:  # pydantic is slow to import, and help does not need it
    from llmscale.config.run_config import RunConfig
    from llmscale.planning.search import Candidate

#: Name that lists all GPUs or networks.
LIST = "list"
#: Flag of the price of a GPU.
PRICE = "--price-per-gpu-hour"
#: GPUs of a node without --num-gpus: `estimate` answers for a machine, `plan` for a cluster.
ESTIMATED_GPUS = 1
PLANNED_GPUS = 8
DEFAULT_INTERCONNECT = "ib-400g"


def add_shape_flags(group: FlagContainer) -> None:
    """Add the flags that change a model's shape."""
    keys = [key for key in model_keys() if key != "model"]
    add_run_flags(group, keys, annotations=get_type_hints(GPTShape), is_asked=True)


def add_model_flag(group: FlagContainer) -> None:
    """Add --model."""
    add_run_flags(group, ["model"], is_asked=True)


def given_keys(args: argparse.Namespace, command: str = "") -> dict[str, object]:
    """Return the model's keys, and the others that `command` takes, that the user gave, unchecked."""
    return {key: value for key in (*model_keys(), *keys_asked_by(command)) if (value := getattr(args, key)) is not None}


def resolve_model(config: RunConfig, seq_len: int | None) -> tuple[RunConfig, GPTShape]:
    """Return the configuration, with the keys of a published model, and its shape.

    Vocabulary and context are the model's own unless they are given. Raises ConfigError.
    """
    from llmscale.config.hf_model import is_published, read_published_model, with_published_shape
    from llmscale.config.presets import get_preset
    from llmscale.config.resolve import SetFacts, resolve_shape

    if is_published(config.model):
        published = read_published_model("--model", config.model, config).shape
        positions = published.seq_len
        vocab_size = published.vocab_size
        config = with_published_shape(config, None)
    else:
        preset = get_preset(config.model)
        positions = preset.seq_len
        vocab_size = preset.vocab_size
    # Only vocabulary and context of the dataset matter: its size would determine the number of steps.
    facts = SetFacts(config.vocab_size or vocab_size, seq_len or positions, num_train_samples=1, eot_token=0)
    return config, resolve_shape(config, facts)


def add_machine_flags(
    group: FlagContainer, *, num_gpus: int, num_nodes: int | None, num_nodes_text: str, compares: bool = False
) -> None:
    """Add the flags of GPUs and nodes, with the default `num_nodes`. The command assumes and names `num_gpus`.

    `compares`: it takes several GPUs.
    """
    text = "a GPU of the table (`llmscale estimate --gpu list`), or of a size: 24gb"
    text = f"{text}; several are compared" if compares else text
    flag(group, "--gpu NAME", text, _name_or_list, nargs="+" if compares else None)
    flag(group, "--gpu-memory-gib GIB", "memory of a GPU not in the table", quantity(0.01, limits.MAX_GPU_GIB))
    flag(group, "--bf16-tflops X", "dense 16-bit rate of that GPU", quantity(0.001, limits.MAX_TFLOPS))
    text = f"GPUs per node; default: {num_gpus}"
    flag(group, "--num-gpus N", text, whole_number(1, limits.MAX_GPUS_PER_NODE))
    flag(group, "--num-nodes N", num_nodes_text, whole_number(1, limits.MAX_NODES), num_nodes)
    text = "network between nodes; `estimate --interconnect list` compares all"
    flag(group, "--interconnect NAME", text, _name_or_list, DEFAULT_INTERCONNECT)


def add_price(group: FlagContainer, text: str) -> None:
    """Add --price-per-gpu-hour, for short --price."""
    flag(group, f"{PRICE}|--price USD", text, quantity(1e-4, 1e6), nargs="+")


def one_for_each(args: argparse.Namespace, flag: str, num_gpus: int) -> list[float | None]:
    """Return the values of a flag that has one for each --gpu, or None for each. Raises ConfigError."""
    values = getattr(args, flag.removeprefix("--").replace("-", "_"))
    if values is not None and len(values) != num_gpus:
        raise ConfigError(
            f"{flag} has {count_nouns(len(values), 'value')} for {count_nouns(num_gpus, 'GPU')}. Give one for each "
            "--gpu."
        )
    return values or [None] * num_gpus


def _name_or_list(text: str) -> str:
    """Parse a name; `list` is accepted in any case."""
    if text.lower() == LIST:
        return LIST
    return nonblank(text)


def add_asked_flags(group: FlagContainer, command: str) -> None:
    """Add the keys of a run that `command` takes, besides the model's."""
    for key in keys_asked_by(command):
        add_run_flags(group, [key], is_asked=True)


def add_run_argument(
    parser: FlagParser,
    text: str = "run folder, checkpoint, or folder of a transformers model",
    nargs: Literal["?"] | None = None,
) -> None:
    """Add RUN; with `nargs` "?" it may be left out."""
    parser.add_argument("run", type=run_place, nargs=nargs, metavar="RUN", help=text)


def add_step(parser: FlagParser) -> None:
    """Add --step."""
    flag(
        parser, "--step N", "the run's checkpoint of this step; default: the newest", whole_number(0, limits.MAX_STEPS)
    )


def add_base(parser: FlagParser) -> None:
    """Add --base."""
    text = "place of the weights beside the adapters of a run with --lora-rank, if they have moved: a run or hf:FOLDER"
    flag(parser, "--base PLACE", text, nonblank)


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


def read_gpus(args: argparse.Namespace) -> list[GPU]:
    """Return the GPUs of --gpu, each once, or the one that other flags describe. Raises ConfigError."""
    described = [args.gpu_memory_gib, args.bf16_tflops]
    if args.gpu is not None:
        if any(value is not None for value in described):
            raise ConfigError(
                "--gpu names a GPU of the table, --gpu-memory-gib and --bf16-tflops one that is not in it."
            )
        names = [args.gpu] if isinstance(args.gpu, str) else args.gpu
        return [*dict.fromkeys(get_gpu(name) for name in names)]
    if None in described:
        raise ConfigError(
            "which GPU? Give --gpu NAME (--gpu list shows the table), or --gpu-memory-gib and --bf16-tflops for a GPU "
            "that is not in it."
        )
    return [custom_gpu(args.gpu_memory_gib, args.bf16_tflops)]


def train_command(ds: str, fit: Candidate, keys: Mapping[str, object]) -> str:
    """Return the command that trains with the ds_config `ds` and the settings of `fit`.

    `keys` are the keys of the run that the user set, of which `fit` overrides some. Without vocabulary and context
    among them, the dataset determines these.
    """
    plan = fit.plan
    ranks = fit.plan.ranks
    checkpointing = fit.step.checkpointing
    of_row = {
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "sequence_parallel_size": ranks.sequence_parallel_size if ranks.sequence_parallel_size > 1 else None,
        "expert_parallel_size": ranks.expert_parallel_size if ranks.expert_parallel_size > 1 else None,
        # DeepSpeed has a section for `full`, but none for `selective`.
        "activation_checkpointing": checkpointing if checkpointing != fit.ds.checkpointing else None,
    }
    given = {key: value for key, value in keys.items() if key not in of_row} | of_row
    if given.get("lora_rank"):
        # Adapters train beside weights: a published model's, or those of some run of this shape.
        is_base = str(given["model"]).startswith("hf:")
        given = {"init_from": given.pop("model") if is_base else "RUN"} | given
    launcher = shlex.join(_launcher_words(fit.cluster))
    return f"{launcher} --ds {shlex.quote(ds)} {describe_flags(given)}"


def _launcher_words(cluster: Cluster) -> list[str]:
    """Return the words that start the ranks: deepspeed in a checkout, otherwise llmscale."""
    if is_in_checkout():
        if cluster.num_nodes > 1:
            where = ["--hostfile", "HOSTFILE"]
        else:
            where = ["--num_gpus", str(cluster.gpus_per_node)]
        return ["deepspeed", *where, "llmscale/train.py"]
    if cluster.num_nodes > 1:
        return ["llmscale", "launch", "--hostfile", "HOSTFILE", "--"]
    return ["llmscale", "train", "--num-gpus", str(cluster.gpus_per_node)]


def describe_data(shape: GPTShape, keys: Mapping[str, object]) -> str:
    """Return a note on the data that the command with `keys` needs."""
    most = "at most " if "vocab_size" in keys else ""
    return f"on data prepared with --seq-len {shape.seq_len} and a tokenizer of {most}{shape.vocab_size:,} tokens"


def describe_flags(keys: Mapping[str, object]) -> str:
    """Return keys as flags: `--model gpt2-124m --norm rmsnorm`."""
    return shlex.join(word for key, value in keys.items() if value is not None for word in flag_words(key, value))
