"""Read and check every input of a run before torch is imported or a GPU is taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from llmscale.checkpoint.initial_weights import PublishedWeights, find_published_weights
from llmscale.checkpoint.inventory import find_any_checkpoint, find_checkpoint, list_checkpoints
from llmscale.checkpoint.manifest import BEST_NAME, checkpoints_folder
from llmscale.checkpoint.remote_run import fetch_run
from llmscale.checkpoint.run_state import load_run_state
from llmscale.config.command_line import parse_step_range
from llmscale.config.deepspeed.resolve import DsConfig, read_ds_config
from llmscale.config.hf_model import (
    PublishedModel,
    is_published,
    read_published_model,
    with_published_shape,
    with_saved_shape,
)
from llmscale.config.optimizers import get_optimizer
from llmscale.config.presets import get_preset
from llmscale.config.resolve import ResolvedRun, SetFacts, resolve_run
from llmscale.config.run_config import RunConfig
from llmscale.config.run_urls import copy_of, shown, url_of
from llmscale.config.user_paths import check_output_folder, read_prompts
from llmscale.data.mixture import TrainingSets, open_training_sets
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, check_set_matches
from llmscale.errors import CheckpointError, ConfigError
from llmscale.evaluate.tasks import TaskFile, load_task_files
from llmscale.planning.compilation import EAGER, Compilation
from llmscale.terminal.status_line import REPEAT_S, SOON_S
from llmscale.untrusted.hub import forgotten_prefix

#: A trace has some thousand events per step and rank, and somebody wants to open it.
_MAX_PROFILED_STEPS = 50
#: Default steps of --overfit-batch: a healthy model has memorised a batch by then.
_OVERFIT_STEPS = 200


@dataclass(frozen=True)
class PreparedRun:
    """A run whose inputs were all found and fit together."""

    config: RunConfig
    sets: TrainingSets
    resolved: ResolvedRun
    """The resolved run, for GPUs until `on_cpu` is called."""
    weights: PublishedWeights | None = None
    """Published weights that the run begins with."""
    tasks: tuple[TaskFile, ...] = ()
    """Tasks that the model is evaluated on."""
    prompts: tuple[str, ...] = ()
    """Prompts that sampled text continues."""
    compilation: Compilation = EAGER
    """How blocks are compiled; decided once the device is known."""

    def on_cpu(self, *, has_bf16: bool = True) -> PreparedRun:
        """Return the run for a CPU, with or without bf16 arithmetic."""
        return replace(self, resolved=self.resolved.on_cpu(has_bf16=has_bf16))

    def identity(self, stream: Mapping[str, object]) -> dict[str, object]:
        """Return everything that a checkpoint and the run that resumes it must share.

        See run_config.CHANGES_THAT_BREAK. `stream` describes the order of samples.
        """
        plan = self.resolved.plan
        grows = f", from {plan.ramp.first} over {plan.ramp.samples} samples" if plan.ramp else ""
        return {
            "global_batch_size": f"{plan.global_batch_size}{grows}" if grows else plan.global_batch_size,
            "seq_len": self.resolved.plan.seq_len,
            "data": self.sets.fingerprint,
            # Compared only when another run begins from these weights; on resume the fingerprint covers it.
            "vocab_size": self.sets.manifest.vocab_size,
            "tokenizer_sha256": self.sets.manifest.tokenizer_sha256,
            "seed": self.config.seed,
            **stream,
        }


def announce_after_s(config: RunConfig) -> float:
    """Return the seconds after which the checks are announced: few if they may wait for other machines.

    Mistakes are usually found sooner, and are then the only line.
    """
    asks_others = "://" in config.data or any(is_published(name) for name in (config.model, config.init_from) if name)
    return SOON_S if asks_others else REPEAT_S


def prepare_run(config: RunConfig, world_size: int) -> PreparedRun:
    """Read and check everything a run needs. Raises ConfigError, DataError or CheckpointError; writes nothing."""
    config = fetch_runs(config)
    if config.overfit_batch is not None:
        config = _as_overfit_check(config, config.overfit_batch, world_size)
    ds = _check_settings(config)
    sets = open_training_sets(config.data, config.data_cache)
    manifest = sets.manifest
    facts = SetFacts(manifest.vocab_size, manifest.seq_len, sets.num_train_samples, manifest.eot_token)
    tasks = _load_tasks(config)
    prompts = (
        (config.sample_prompt,)
        if config.sample_prompts is None
        else tuple(read_prompts(config.sample_prompts, "--sample-prompts"))
    )
    _check_nvme_paths(ds)
    _check_run_folder(config)
    config, model = with_published_model(config)
    resolved = resolve_run(config, ds, facts, world_size)
    weights = None
    if model is not None:
        weights = find_published_weights(model, resolved.shape, sets.first)
    elif config.init_from is not None:
        _check_same_tokenizer(manifest, config, config.init_from)
    return PreparedRun(config, sets, resolved, weights, tasks, prompts)


def _check_settings(config: RunConfig) -> DsConfig:
    """Check what needs neither data nor a run folder, and return the ds_config. Raises ConfigError."""
    ds = read_ds_config(config.ds)
    get_optimizer(config.optimizer).check_stage(ds.zero_stage)
    for steps in config.skip_steps:
        parse_skip(steps)
    if config.profile is not None:
        parse_profiled(config.profile)
    return ds


#: Longest context that text is prepared for unless the user gives one.
_LONGEST_FOR_TEXT = 2048


def with_prepared_text(config: RunConfig, *, may_prepare: bool = True) -> RunConfig:
    """Return the configuration with the dataset of --text as its data; the first start prepares it into the cache.

    Raises ConfigError, before text is read; DataError, also unless this process `may_prepare` what is not prepared.
    """
    if config.text is None:
        return config
    from llmscale.data.prepare.text_cache import DEFAULT_CACHE, TextRequest  # slow to import

    _check_settings(config)
    flag, name = ("--init-from", config.init_from) if config.init_from else ("--model", config.model)
    published = read_published_model(flag, name) if is_published(name) else None
    if config.init_from and not (published or config.tokenizer):
        raise ConfigError(
            f"--init-from {config.init_from} needs text with its own tokens, and --text would train other ones. Name "
            "that run's tokenizer with --tokenizer."
        )
    context = published.shape.seq_len if published else get_preset(config.model).seq_len
    request = TextRequest(
        text=config.text,
        tokenizer=config.tokenizer or (name if published else None),
        seq_len=config.seq_len or min(context, _LONGEST_FOR_TEXT),
        cache=config.data_cache or DEFAULT_CACHE,
    )
    return config.model_copy(update={"data": str(request.open(may_prepare=may_prepare)), "data_cache": None})


def _as_overfit_check(config: RunConfig, batch: int, world_size: int) -> RunConfig:
    """Return the configuration with every other key that --overfit-batch decides. Raises ConfigError."""
    if batch < world_size:
        raise ConfigError(f"--overfit-batch {batch} has fewer samples than there are ranks: give {world_size} or more.")
    decided: dict[str, object] = {"global_batch_size": batch, "batch_ramp_from": None, "batch_ramp_tokens": None}
    decided |= {"seq_len_ramp_from": None, "seq_len_ramp_tokens": None}
    decided |= {"val_every": 0, "save_every": 0, "resume": "none"}
    steps = config.steps or (None if config.tokens else _OVERFIT_STEPS)
    return config.model_copy(update={**decided, "steps": steps})


def fetch_runs(config: RunConfig) -> RunConfig:
    """Bring the copies of the run, and of those that it begins from, up to date if they are in a store.

    Returns the configuration with a checkpoint of the run itself in the copy that the run is written to; `best` is one.
    Raises LlmscaleError.
    """
    if config.resume == BEST_NAME:
        config = config.model_copy(update={"resume": str(checkpoints_folder(config.run) / BEST_NAME)})
    own, resumed = url_of(config.run), url_of(Path(config.resume))
    if own and resumed and f"{resumed}/".startswith(f"{own}/"):
        config = config.model_copy(update={"resume": str(copy_of(resumed, "train"))})
    for path in (config.run, *(Path(name) for name in (config.resume, config.init_from) if name)):
        fetch_run(path)
    return config


def parse_skip(text: str) -> tuple[int, int]:
    """Parse A:B of --skip-steps. Raises ConfigError."""
    return parse_step_range("--skip-steps", text, "the batches are left out")


def parse_profiled(text: str) -> tuple[int, int]:
    """Parse A:B of --profile. Raises ConfigError."""
    return parse_step_range("--profile", text, "a trace is written", _MAX_PROFILED_STEPS)


def with_published_model(config: RunConfig) -> tuple[RunConfig, PublishedModel | None]:
    """Return the configuration with the shape of the published model, and the model whose weights a new run loads.

    The published model is the one that the configuration names, or that the run began with. Raises ConfigError,
    CheckpointError.
    """
    if config.init_from is not None and is_published(config.init_from):
        model = read_published_model("--init-from", config.init_from)
        return with_published_shape(config, model), model
    for folder in candidate_checkpoints(config):
        try:
            saved = load_run_state(folder).config
        except CheckpointError:
            # Skipped or explained later, where all checkpoints are verified.
            continue
        return with_saved_shape(config, saved, str(folder)) or with_published_shape(config, None), None
    return with_published_shape(config, None), None


def _load_tasks(config: RunConfig) -> tuple[TaskFile, ...]:
    """Load the tasks of --eval-tasks if the run evaluates. Raises ConfigError, DataError."""
    if not config.eval_every:
        return ()
    if not config.eval_tasks:
        raise ConfigError(
            f"eval_every is {config.eval_every} and eval_tasks names nothing to evaluate on. Name items with "
            "--eval-tasks, such as hellaswag=FILE.jsonl."
        )
    return load_task_files(config.eval_tasks)


def candidate_checkpoints(config: RunConfig) -> list[Path]:
    """Return the checkpoints that the run may begin with, newest first, not verified. Raises CheckpointError."""
    if config.init_from is not None:
        return [] if is_published(config.init_from) else [find_checkpoint(Path(config.init_from))]
    if config.resume == "auto":
        return list_checkpoints(config.run)
    return [] if config.resume == "none" else [find_checkpoint(Path(config.resume))]


def _check_same_tokenizer(manifest: Manifest, config: RunConfig, init_from: str) -> None:
    """Raise DataError unless the other run's weights were trained with the dataset's tokenizer and seq_len."""
    state = load_run_state(find_checkpoint(Path(init_from)))
    check_set_matches(
        manifest,
        config.data,
        vocab_size=cast("int", state.identity["vocab_size"]),
        seq_len=cast("int", state.identity["seq_len"]),
        tokenizer_sha256=cast("str", state.identity["tokenizer_sha256"]),
    )


def _check_nvme_paths(ds: DsConfig) -> None:
    """Raise ConfigError if this node lacks the ds_config's NVMe folder; DeepSpeed would notice late."""
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(ds.keys.zero, name)
        if offload is None or offload.device != "nvme":
            continue
        if not os.access(offload.nvme_path, os.W_OK):
            raise ConfigError(
                f"{ds.source}: {name}.nvme_path {offload.nvme_path} is not a writable folder on this host. Create it "
                "on a local NVMe disk of every node, or name another in a copy of the file."
            )


def _check_run_folder(config: RunConfig) -> None:
    """Raise ConfigError for a start that would overwrite another run, or whose flags contradict each other."""
    check_output_folder("--run", config.run)
    # os.path, because Path.resolve raises on a loop of links.
    is_root = os.path.realpath(config.run) == "/"
    if is_root or os.path.isfile(config.run / MANIFEST_NAME):
        kind = "the root of all folders" if is_root else "a prepared set or a checkpoint"
        raise ConfigError(f"--run {config.run} is {kind}; name a folder for the run alone.")
    existing = find_any_checkpoint(config.run)
    if existing and (config.resume == "none" or config.init_from):
        flag = "--resume none" if config.resume == "none" else "--init-from"
        flag = "--overfit-batch" if config.overfit_batch is not None else flag
        raise ConfigError(
            f"{flag} begins a new run, but {checkpoints_folder(config.run)} already holds {existing.name}. "
            "Name another --run folder, or drop the flag to continue."
        )
    if config.keep_zeros and not (existing or config.init_from or config.resume not in ("auto", "none")):
        raise ConfigError(
            "--keep-zeros has no zeros to keep in a model that begins at random. Name a pruned one with --init-from "
            "(llmscale prune RUN --to FOLDER writes one), or leave the flag out."
        )
    if config.init_from and config.resume not in ("auto", "none"):
        raise ConfigError("--init-from starts at step 0 and --resume PATH continues: give one of them.")
    # A missing checkpoint is reported before anything is built.
    if config.init_from and not is_published(config.init_from):
        if hint := forgotten_prefix(config.init_from):
            raise ConfigError(f"--init-from {config.init_from} does not exist.{hint}")
        find_checkpoint(Path(config.init_from))
    elif config.resume not in ("auto", "none"):
        find_checkpoint(Path(config.resume))


def as_plain(config: RunConfig) -> dict[str, object]:
    """Return the configuration as JSON values; the path of the data is absolute, to be valid in any working folder."""
    data = config.data.removeprefix("file://")
    values = {
        **config.model_dump(mode="json"),
        "run": shown(config.run),
        **{name: url for name in ("resume", "init_from") if (url := url_of(Path(getattr(config, name) or "")))},
        "data": data if "://" in data else str(Path(data).absolute()),
    }
    return cast("dict[str, object]", values)
