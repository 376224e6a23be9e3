"""The library: parts of a training loop of one's own, and what notebooks and scripts want of runs and datasets.

docs/library.md and docs/api.md describe it. This module stays compatible between versions; all others may change. Every
function raises subclasses of LlmscaleError, whose text is for the user. Torch is imported when a name needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmscale.errors import ConfigError, LlmscaleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from llmscale.checkpoint.checkpoints import Checkpoints, Loaded
    from llmscale.checkpoint.elastic import elastic_checkpoints
    from llmscale.checkpoint.load_deepspeed import load_deepspeed
    from llmscale.checkpoint.module_weights import export_weights, read_weights
    from llmscale.config.deepspeed.schema import Precision
    from llmscale.data.batch_sampler import BatchSampler, batch_sampler
    from llmscale.data.shards.manifest import Manifest
    from llmscale.data.shards.token_shards import TokenShards
    from llmscale.data.stream import Batch, Stream, open_stream
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.engine.initialize import initialize
    from llmscale.engine.process_group import join_world as join_ranks
    from llmscale.engine.random_numbers import seed_step
    from llmscale.evaluate.model_source import ModelSource
    from llmscale.numerics.own_engine import Checked, check_numerics

__all__ = [
    "Batch",
    "BatchSampler",
    "Checked",
    "Checkpoints",
    "Dataset",
    "LlmscaleError",
    "Loaded",
    "Stream",
    "batch_sampler",
    "check_numerics",
    "elastic_checkpoints",
    "estimate",
    "estimate_module",
    "export_weights",
    "initialize",
    "join_ranks",
    "load_deepspeed",
    "load_run",
    "open_dataset",
    "open_stream",
    "read_metrics",
    "read_weights",
    "seed_step",
]
#: Names that need torch, each with its module and its name there.
_WITH_TORCH = {
    "Batch": ("llmscale.data.stream", "Batch"),
    "BatchSampler": ("llmscale.data.batch_sampler", "BatchSampler"),
    "Checked": ("llmscale.numerics.own_engine", "Checked"),
    "Checkpoints": ("llmscale.checkpoint.checkpoints", "Checkpoints"),
    "Loaded": ("llmscale.checkpoint.checkpoints", "Loaded"),
    "Stream": ("llmscale.data.stream", "Stream"),
    "batch_sampler": ("llmscale.data.batch_sampler", "batch_sampler"),
    "check_numerics": ("llmscale.numerics.own_engine", "check_numerics"),
    "elastic_checkpoints": ("llmscale.checkpoint.elastic", "elastic_checkpoints"),
    "export_weights": ("llmscale.checkpoint.module_weights", "export_weights"),
    "initialize": ("llmscale.engine.initialize", "initialize"),
    "join_ranks": ("llmscale.engine.process_group", "join_world"),
    "load_deepspeed": ("llmscale.checkpoint.load_deepspeed", "load_deepspeed"),
    "open_stream": ("llmscale.data.stream", "open_stream"),
    "read_weights": ("llmscale.checkpoint.module_weights", "read_weights"),
    "seed_step": ("llmscale.engine.random_numbers", "seed_step"),
}
#: Flags of `llmscale estimate` that change its answer into another one.
_OTHER_ANSWERS = {
    "hf", "ds", "emit", "force", "plot", "json", "all", "wide", "why", "explain", "dry_run", "max_model", "max_seq_len"
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name that needs torch when it is used."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WITH_TORCH[name]
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Dataset:
    """One split of a prepared dataset. `dataset[i]` are the tokens of sample i, [seq_len + 1]."""

    name: str
    split: str
    manifest: Manifest
    """Description of the whole dataset: vocab_size, seq_len, splits, tokenizer, source."""
    tokenizer: Tokenizer
    """Tokenizer with `encode` and `decode`."""
    shards: TokenShards

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, sample_id: int) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a sample, uint16 or uint32 [seq_len + 1]. Raises IndexError, DataError."""
        import numpy as np

        if not -len(self) <= sample_id < len(self):
            raise IndexError(f"{self.name} has {len(self):,} samples in {self.split}, and no sample {sample_id:,}")
        return self.shards.read(np.array([sample_id % len(self)], np.int64))[0]

    def text(self, sample_id: int) -> str:
        """Return the text of a sample."""
        return self.tokenizer.decode(self[sample_id].tolist())


def load_run(run: str | Path, step: int | None = None) -> ModelSource:
    """Open a run's newest checkpoint, or that of `step`; or a folder of transformers.

    `.load_model()` of the result gives the model, in fp32 and eval mode; `.tokenizer`, `.shape`, `.step` and `.folder`
    need no torch. All bytes of the checkpoint are verified. Raises CheckpointError, ConfigError, DataError.
    """
    from llmscale.error_handling import say
    from llmscale.evaluate.model_source import find_model, open_model

    return open_model(find_model(_folder_of(run), say, step))


def estimate(model: str, *, gpu: str, num_gpus: int = 1, num_nodes: int = 1, **keys: object) -> dict[str, Any]:
    """Return what `llmscale estimate --json` prints: memory and speed of every configuration, and the one to take.

    `keys` are further flags of that command by their names: seq_len, precision, global_batch_size, host_memory_gib,
    interconnect. Raises ConfigError.
    """
    from llmscale.cli.answers import as_json
    from llmscale.cli.estimate_rows import find_rows, read_request
    from llmscale.cli.flags import read_gpus
    from llmscale.cli.main import build_parser
    from llmscale.config.run_flags import flag_words

    if refused := _OTHER_ANSWERS & keys.keys():
        raise ConfigError(f"estimate() does not take {min(refused)}. Use `llmscale estimate` for it.")
    words = ["estimate", "--json"]
    given = {"model": model, "gpu": gpu, "num_gpus": num_gpus, "num_nodes": num_nodes, **keys}
    for key, value in given.items():
        words += flag_words(key, value)
    args = build_parser(words).parse_args(words)
    answer: Any = as_json(find_rows(read_request(args, read_gpus(args)[0])).values())
    return dict(answer)


def estimate_module(
    build: Callable[[], nn.Module],
    example_batch: Mapping[str, Any] | Sequence[Any],
    *,
    gpu: str,
    num_gpus: int = 1,
    num_nodes: int = 1,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    precision: Precision | None = None,
    global_batch_size: int | None = None,
    host_memory_gib: float | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> dict[str, Any]:
    """Return what `llmscale estimate --module --json` prints: the memory of a module's steps, simulated.

    `build` makes the module, of which nothing is allocated; of the batch, a dict or a tuple, shapes and types count.
    Without `ds_config` every ZeRO stage and offload is a row. `loss` takes the module's output: without it that is the
    loss, has `.loss`, or begins with it. Without `optimizer` it is AdamW. Raises ConfigError.
    """
    from llmscale.cli.answers import as_json
    from llmscale.cli.estimate_details import simulating
    from llmscale.cli.flags import DEFAULT_INTERCONNECT
    from llmscale.config.hardware import Cluster, get_gpu, get_interconnect
    from llmscale.memory.breakdown import GIB

    with simulating("estimate_module"):
        from llmscale.dry_run.module import OwnModule
        from llmscale.dry_run.module_rows import ask_for_module

        module = OwnModule(build, example_batch, optimizer, loss)
        if host_memory_gib is None:
            host_bytes = None
        else:
            host_bytes = int(host_memory_gib * GIB)
        cluster = Cluster(get_gpu(gpu), num_gpus, get_interconnect(DEFAULT_INTERCONNECT), num_nodes, host_bytes)
        answer = ask_for_module(module, cluster, ds_config, precision, global_batch_size)
    values: Any = as_json(answer.values())
    return dict(values)


def open_dataset(data: str | Path, split: str = "train", cache: Path | None = None) -> Dataset:
    """Open a dataset made by `llmscale data prepare`, a folder or a URL. Raises DataError.

    Shards of a URL are fetched into `cache` when they are read.
    """
    from llmscale.data.shards.cache import fetch_tokenizer, open_set
    from llmscale.data.shards.token_shards import TokenShards
    from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer

    location = open_set(str(data), cache)
    fetch_tokenizer(location)
    tokenizer = load_set_tokenizer(location.folder, location.manifest)
    return Dataset(location.name, split, location.manifest, tokenizer, TokenShards(location, split))


def read_metrics(run: str | Path, kind: str = "train") -> dict[str, NDArray[np.float64]]:
    """Return a run's metrics as columns by name, ascending by `step`; NaN where nothing was measured.

    `kind`: train (loss, lr, grad_norm, tokens_seen, tokens_per_second, mfu, ...) or validation (loss). Steps that a
    restart discarded are left out. `pandas.DataFrame` takes the result. Raises ConfigError.
    """
    import numpy as np

    from llmscale.report.history import load_history

    history = load_history(_folder_of(run))
    if kind == "validation":
        losses = history.validation
        return {"step": np.array([*losses], np.float64), "loss": np.array([*losses.values()], np.float64)}
    if kind != "train":
        raise ConfigError(f"kind = {kind!r}: must be train or validation.")
    columns = {"step": history.steps.steps, **history.steps.values}
    return {name: np.array(column, np.float64) for name, column in columns.items()}


def _folder_of(run: str | Path) -> Path:
    """Return the folder of a run, after fetching the copy of a URL. Raises ConfigError."""
    from llmscale.checkpoint.remote_run import fetch_run
    from llmscale.config.user_paths import check_other_run, checked, url_of

    folder = checked(check_other_run, run, f"run = {str(run)[:200]!r}")
    if url_of(folder):
        fetch_run(folder)
    return folder
