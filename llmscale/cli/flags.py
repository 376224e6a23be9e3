"""The flags that say which model: those of `estimate` and `plan`, and what they mean together. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, get_type_hints

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape
from llmscale.config import flag_type, limits
from llmscale.config.flag_parser import FlagParser, Need
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.config.optimizers import ADAMW, MODELLED_NAMES

if TYPE_CHECKING:  # pydantic takes longer to import than everything else, and other subcommands' --help must not wait
    from llmscale.config.run_config import RunConfig

#: What of a RunConfig says what is computed, beside the sizes that the data set decides.
MODEL_KEYS = (*SHAPE_KEYS, "document_mask")
#: All that changes a model's shape: what a printed command must repeat of what the user gave.
_GIVEN_KEYS = ("model", *MODEL_KEYS, "vocab_size", "seq_len")

#: Those that are numbers, within the bounds that train.py has, so that all flags of a command err in the same words.
_NUMBERS: dict[str, Callable[[str], float]] = {
    "n_layer": flag_type.whole(1, limits.MAX_LAYERS),
    **dict.fromkeys(("n_head", "n_kv_head"), flag_type.whole(1, limits.MAX_HEADS)),
    **dict.fromkeys(("n_embd", "head_dim", "mlp_width"), flag_type.whole(1, limits.MAX_WIDTH)),
    "sliding_window": flag_type.whole(0, limits.MAX_SEQ_LEN),
    "dropout": flag_type.number(0, 1, below=True),
    "norm_eps": flag_type.number(0, 1, above=True),
    "rope_theta": flag_type.number(0, limits.MAX_ROPE_THETA, above=True),
}


def add_shape_flags(group: argparse._ArgumentGroup) -> None:
    """Every key of a shape, as train.py has it, and the sizes that a data set would say."""
    group.add_argument(
        "--seq-len",
        type=flag_type.whole(1, limits.MAX_SEQ_LEN),
        metavar="T",
        help="tokens per sequence (default: the model's)",
    )
    group.add_argument(
        "--vocab-size",
        type=flag_type.whole(1, limits.MAX_VOCAB),
        metavar="V",
        help="of the data set's tokenizer (default: the model's published one)",
    )
    types = get_type_hints(GPTShape)
    for key in MODEL_KEYS:
        flag, text = f"--{key.replace('_', '-')}", "as in train.py (default: the model's)"
        if types.get(key, bool) in (bool, bool | None):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = _NUMBERS.get(key, flag_type.name)
            group.add_argument(flag, type=kind, metavar=key.rpartition("_")[2].upper(), help=text)


def given_model(args: argparse.Namespace) -> dict[str, object]:
    """What the user said of the model, in the keys of train.py."""
    return {key: getattr(args, key) for key in _GIVEN_KEYS if getattr(args, key) is not None}


def resolve_model(config: RunConfig, seq_len: int | None) -> tuple[RunConfig, GPTShape]:
    """The run's configuration, a published model's keys in it, and its shape. Vocabulary and context are the model's
    own where they were not given. Raises ConfigError."""
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
    # Of the data set only vocabulary and context matter: its size would decide the number of steps.
    facts = SetFacts(config.vocab_size or vocab_size, seq_len or positions, num_train_samples=1, eot_token=0)
    return config, resolve_shape(config, facts)


#: In place of a name: all there are.
LIST = "list"
DEFAULT_INTERCONNECT = "ib-400g"


def add_machine_flags(
    group: argparse._ArgumentGroup, *, num_gpus: int, num_nodes: int | None, num_nodes_default: str
) -> None:
    """`num_gpus` and `num_nodes` are the defaults; `num_nodes_default` is what the help says of the second."""
    group.add_argument(
        "--gpu", type=_name_or_list, metavar="NAME", help="a GPU of the table (`llmscale estimate --gpu list`)"
    )
    group.add_argument(
        "--gpu-memory-gib",
        type=flag_type.quantity(0.01, limits.MAX_GPU_GIB),
        metavar="GIB",
        help="of a GPU that is not in the table",
    )
    group.add_argument(
        "--bf16-tflops", type=flag_type.quantity(0.001, limits.MAX_TFLOPS), metavar="X", help="its dense 16-bit rate"
    )
    group.add_argument(
        "--num-gpus",
        type=flag_type.whole(1, limits.MAX_GPUS_PER_NODE),
        default=num_gpus,
        metavar="N",
        help=f"GPUs per node (default: {num_gpus})",
    )
    group.add_argument(
        "--num-nodes",
        type=flag_type.whole(1, limits.MAX_NODES),
        default=num_nodes,
        metavar="N",
        help=f"nodes (default: {num_nodes_default})",
    )
    group.add_argument(
        "--interconnect",
        type=_name_or_list,
        default=DEFAULT_INTERCONNECT,
        metavar="NAME",
        help=f"between nodes (default: {DEFAULT_INTERCONNECT}); `estimate --interconnect list` compares all",
    )


def _name_or_list(text: str) -> str:
    """As every name, in any case."""
    return LIST if text.lower() == LIST else flag_type.name(text)


def add_run_flags(group: argparse._ArgumentGroup) -> None:
    """What decides memory and is no matter of the ds_config."""
    group.add_argument("--optimizer", choices=MODELLED_NAMES, help=f"default: {ADAMW.name}")
    group.add_argument(
        "--loss-chunk-tokens",
        type=flag_type.whole(1, limits.MAX_BATCH_TOKENS),
        metavar="N",
        help=f"tokens whose logits exist at a time (default {CHUNK_TOKENS:,}, as train.py's)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """RUN and --step."""
    parser.add_argument(
        "run",
        type=flag_type.path,
        metavar="RUN",
        help="run folder of train.py, one checkpoint of it, or a folder of transformers",
    )
    parser.add_argument(
        "--step",
        type=flag_type.whole(0, limits.MAX_STEPS),
        default=None,
        help="the run's checkpoint of this step (default: its newest)",
    )


def add_own_data(parser: argparse.ArgumentParser) -> None:
    """--data, for a run whose set is at an address."""
    parser.add_argument(
        "--data",
        type=flag_type.path_or_url,
        metavar="URL",
        help="the run's data set, where that is at an address: one that only the checkpoint names is not asked",
    )


def add_loss(parser: FlagParser) -> None:
    """Add --data, --val-samples and --batch-size."""
    parser.needs = [Need("data", "with --val-samples 0", lambda args: args.val_samples)]
    parser.add_argument(
        "--data",
        type=flag_type.path_or_url,
        metavar="SET",
        help="prepared set whose validation split the loss is taken on (default: the run's own)",
    )
    parser.add_argument(
        "--val-samples",
        type=flag_type.whole(0, limits.MAX_SAMPLES),
        default=256,
        help="sequences that the loss is taken on, spread over the split, of a mix each set its part of the run; 0: no "
        "loss (default %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=flag_type.whole(1, limits.MAX_BATCH),
        default=8,
        help="sequences at once; results do not depend on it (default %(default)s)",
    )
