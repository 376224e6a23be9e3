"""The train.py command that runs a row, for the last line of `estimate` and `plan`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from llmscale.architecture.shape import GPTShape
from llmscale.config.shipped import is_in_checkout
from llmscale.planning.search import Candidate, Machines


def train_command(ds: str, fit: Candidate, keys: Mapping[str, object]) -> str:
    """With the ds_config `ds` on the row's machines. `keys` are those of the run that neither it nor the row says; a
    vocabulary and a context that are not among them come from the data set."""
    words = [*launcher_words(fit.machines, in_checkout=is_in_checkout()), "--ds", ds]
    for key, value in keys.items():
        words += flag_words(key, value)
    words += flag_words("global_batch_size", fit.plan.global_batch_size)
    words += flag_words("micro_batch_size", fit.plan.micro_batch_size)
    # What the file does not say by itself: DeepSpeed has a section that means `full`, and none for `selective`.
    if fit.strategy.checkpointing != fit.ds.checkpointing:
        words += flag_words("activation_checkpointing", fit.strategy.checkpointing)
    return shlex.join(words)


def launcher_words(machines: Machines, *, in_checkout: bool) -> list[str]:
    """What starts the ranks: DeepSpeed's launcher, which needs the path of train.py; without a checkout, llmscale's."""
    if in_checkout:
        where = ["--hostfile", "HOSTFILE"] if machines.num_nodes > 1 else ["--num_gpus", str(machines.gpus_per_node)]
        return ["deepspeed", *where, "llmscale/train.py"]
    if machines.num_nodes > 1:
        return ["llmscale", "launch", "--hostfile", "HOSTFILE", "--"]
    return ["llmscale", "train", "--num-gpus", str(machines.gpus_per_node)]


def data_words(shape: GPTShape, keys: Mapping[str, object]) -> str:
    """What the command with `keys` takes for granted."""
    most = "at most " if "vocab_size" in keys else ""
    return f"(on data prepared with --seq-len {shape.seq_len} and a tokenizer of {most}{shape.vocab_size:,} tokens)"


def model_words(keys: Mapping[str, object]) -> str:
    """The flags of a model: `--model gpt2-124m --norm rmsnorm`."""
    return shlex.join(word for key, value in keys.items() for word in flag_words(key, value)) or "this model"


def flag_words(key: str, value: object) -> list[str]:
    """`--key value` in train.py's spelling."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]
