"""Read every small input of a run once, before torch is imported or a GPU is taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from llmscale.architecture.shape import GPTShape
from llmscale.checkpoint.initial_weights import (
    FrozenBase,
    PublishedWeights,
    base_of_checkpoint,
    base_of_published,
    explain_missing,
    find_published_weights,
    open_base,
)
from llmscale.checkpoint.inventory import find_any_checkpoint, find_checkpoints, open_checkpoint
from llmscale.checkpoint.manifest import BEST_NAME, Checkpoint, checkpoints_folder
from llmscale.checkpoint.peft_files import check_adapters, family_beside
from llmscale.checkpoint.remote_run import fetch_run
from llmscale.checkpoint.run_state import RunState, SavedRun, load_run_state, read_saved_run
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
from llmscale.config.resolve import MOST_VOCAB, SetFacts, fitting_vocabulary, resolve_shape, with_ds_keys
from llmscale.config.run_config import RunConfig
from llmscale.config.run_keys import without_effect_under
from llmscale.config.user_paths import check_output_folder, copy_of, read_prompts, shown, url_of
from llmscale.data.mixture import TrainingSets, open_training_sets
from llmscale.data.shards.manifest import MANIFEST_NAME, check_set_matches
from llmscale.errors import CheckpointError, ConfigError, LlmscaleError
from llmscale.evaluate.tasks import TaskFile, load_task_files
from llmscale.terminal.status_line import REPEAT_S, SOON_S
from llmscale.training.run_folder import check_own_files, repeats_last_start
from llmscale.training.stop_request import repeating_launches
from llmscale.untrusted.hub import forgotten_prefix, is_hub_name

#: A trace has some thousand events per step and rank, and somebody wants to open it.
_MAX_PROFILED_STEPS = 50
#: Default steps of --overfit-batch: a healthy model has memorised a batch by then.
_OVERFIT_STEPS = 200
#: Longest context that text is prepared for unless the user gives one.
_LONGEST_FOR_TEXT = 2048
#: Text of a run without --data and --text, which every machine has.
DEMO_TEXT = "python-docs"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a run reads before it is resolved; the same for any number of ranks."""

    config: RunConfig
    """The run's configuration, with the shape of its published model in explicit keys."""
    ds: DsConfig
    sets: TrainingSets
    tasks: tuple[TaskFile, ...] = ()
    """Tasks that the model is evaluated on."""
    prompts: tuple[str, ...] = ()
    """Prompts that sampled text continues."""
    weights: PublishedWeights | None = None
    """Published weights that the run begins with."""
    source: SavedRun | None = None
    """Newest whole checkpoint that the run may begin with, or the named one; its tensors are not hashed yet."""
    resumes: bool = True
    """False when a new run takes nothing but the source's weights."""
    base: FrozenBase | None = None
    """Frozen weights beside the run's adapters."""
    has_checkpoints: bool = False
    """True when the run folder holds a checkpoint of any history and in any state."""
    left_out: str = ""
    """Flag of a restart that has acted already: --resume or --init-from, with its value."""

    @property
    def state(self) -> RunState | None:
        """State of the checkpoint that the run resumes; None for a new run."""
        return self.source.state if self.source and self.resumes else None

    @property
    def steps_of_minutes(self) -> int | None:
        """Steps that an earlier start of the run set for the same --minutes; None without."""
        if self.config.minutes is None or self.state is None or self.state.config.get("minutes") != self.config.minutes:
            return None
        steps = self.state.hyperparameters.get("steps")
        return steps if type(steps) is int else None

    @property
    def is_open(self) -> bool:
        """Return whether --minutes is still to set the steps of the run."""
        return self.config.minutes is not None and self.steps_of_minutes is None

    @property
    def facts(self) -> SetFacts:
        """Properties of the dataset that the run depends on."""
        manifest = self.sets.manifest
        return SetFacts(manifest.vocab_size, manifest.seq_len, self.sets.num_train_samples, manifest.eot_token)

    @cached_property
    def shape(self) -> GPTShape:
        """Shape of the model. Raises ConfigError."""
        return resolve_shape(self.config, self.facts)


def announce_after_s(config: RunConfig) -> float:
    """Return the seconds after which the checks are announced: few if they may wait for other machines.

    Mistakes are usually found sooner, and are then the only line.
    """
    asks_others = "://" in config.data or any(is_published(name) for name in (config.model, config.init_from) if name)
    return SOON_S if asks_others else REPEAT_S


@dataclass(frozen=True)
class PreparedRun:
    """A run whose text is prepared, with what was read to prepare it."""

    config: RunConfig
    ds: DsConfig | None = None
    published: PublishedModel | None = None
    """The published model that --init-from names, else --model."""


def read_inputs(run: RunConfig | PreparedRun, arguments: Sequence[str] | None = None) -> Inputs:
    """Read each small file of a run once, and check what needs no number of ranks.

    `arguments` are train.py's, if this process has others. Raises ConfigError, DataError or CheckpointError; writes
    nothing.
    """
    if not isinstance(run, PreparedRun):
        run = PreparedRun(run)
    config = run.config
    left_out = ""
    launches = repeating_launches(os.environ)
    if launches and repeats_last_start(fetch_run(config.run), launches, arguments):
        config, left_out = _without_used_flags(config)
    config = fetch_runs(config)
    if config.overfit_batch is not None:
        config = _as_overfit_check(config)
    ds = run.ds or read_ds_config(config.ds)
    config = with_ds_keys(config, ds)
    _check_settings(config, ds)
    sets = open_training_sets(config.data, config.data_cache)
    config = _with_document_mask(config, sets)
    tasks = _load_tasks(config)
    prompts = (
        (config.sample_prompt,)
        if config.sample_prompts is None
        else tuple(read_prompts(config.sample_prompts, "--sample-prompts"))
    )
    _check_nvme_paths(ds)
    config, place = _without_place_of_base(config)
    has_checkpoints = _check_run_folder(config)
    config, model, source = read_origin(config, run.published)
    if config.init_from is None and source is not None:
        config = _with_saved_batch(config, ds, source.state)
    inputs = Inputs(
        config=config,
        ds=ds,
        sets=sets,
        tasks=tasks,
        prompts=prompts,
        source=source,
        resumes=config.init_from is None,
        has_checkpoints=has_checkpoints,
        left_out=left_out,
    )
    if config.lora_from is not None:
        check_adapters(config.lora_from, inputs.shape, family_beside(inputs.shape, model))
    if model is not None:
        weights = find_published_weights(model, inputs.shape, sets.first)
        return replace(inputs, weights=weights, base=base_of_published(weights) if config.lora_rank else None)
    if config.lora_rank and source is not None:
        inputs = _with_base(inputs, source, place, run.published)
    if config.init_from is not None:
        # A damaged state says here what is wrong with it.
        if source:
            state = source.state
        else:
            state = load_run_state(open_named("--init-from", config.init_from).path)
        _check_same_tokenizer(inputs, state)
    return inputs


def _with_document_mask(config: RunConfig, sets: TrainingSets) -> RunConfig:
    """Return the configuration with a document mask if the datasets need one. Raises ConfigError."""
    is_masked = sets.masks_documents(config.document_mask)
    if config.document_mask and not is_masked:
        raise ConfigError(
            f"{config.data} has one conversation a row, which may hold end-of-text tokens, so no document mask can be "
            "used with it. Leave out --document-mask."
        )
    if is_masked:
        return config.model_copy(update={"document_mask": is_masked})
    return config


def _without_place_of_base(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return the configuration without --init-from if that says where the base of a run's saved adapters is; and it."""
    if not config.lora_rank or config.init_from is None or not find_any_checkpoint(config.run):
        return config, None
    return config.model_copy(update={"init_from": None}), config.init_from


def _with_base(inputs: Inputs, source: SavedRun, place: str | None, published: PublishedModel | None) -> Inputs:
    """Return the inputs with the weights beside the adapters: at `place`, or where the checkpoint found them.

    Raises CheckpointError, DataError.
    """
    if not inputs.resumes:
        return replace(inputs, base=base_of_checkpoint(source))
    place = place or source.state.base.get("place")
    if place is None:
        raise CheckpointError(f"{source.path} holds adapters and does not say beside which weights. Name another one.")
    try:
        if not is_published(place):
            return replace(inputs, base=open_base(place))
        is_read = published is not None and published.source == f"--init-from {place}"
        if published and is_read:
            model = published
        else:
            model = read_published_model("--init-from", place, inputs.config)
    except LlmscaleError as error:
        raise explain_missing(place, source.path, error) from None
    weights = find_published_weights(model, inputs.shape, inputs.sets.first)
    return replace(inputs, weights=weights, base=base_of_published(weights))


def _without_used_flags(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the configuration of a restart, and the flag that it leaves out.

    --resume PATH, --init-from and --lora-from say where a launch begins: once it has checkpoints of its own, it
    continues from them.
    """
    if config.init_from is not None:
        named = f"--init-from {config.init_from}"
    else:
        named = f"--resume {config.resume}"
    update: dict[str, object] = {"resume": "auto", "init_from": None}
    if config.lora_rank and config.init_from is not None:
        if config.lora_from is None:
            return config, ""
        # --init-from also names the base of the run's own checkpoints.
        named = f"--lora-from {config.lora_from}"
        update = {"lora_from": None}
    if named == "--resume auto" or not find_checkpoints(config.run).current:
        return config, ""
    return config.model_copy(update=update), named


def _check_settings(config: RunConfig, ds: DsConfig) -> None:
    """Check what needs neither data nor a run folder. Raises ConfigError."""
    get_optimizer(config.optimizer).check_stage(ds.zero_stage)
    for steps in config.skip_steps:
        parse_skip(steps)
    if config.profile is not None:
        parse_profiled(config.profile)


def _with_demo(config: RunConfig) -> RunConfig:
    """Return the configuration with the demo as its text if it names no data, and the default set does not exist.

    A run that begins with another run's weights needs that run's tokens, and gets no demo.
    """
    names_data = config.text is not None or "data" in config.model_fields_set or os.path.lexists(config.data)
    if names_data or (config.init_from is not None and not is_published(config.init_from)):
        return config
    return config.model_copy(update={"text": DEMO_TEXT})


def with_prepared_text(config: RunConfig, *, may_prepare: bool = True) -> PreparedRun:
    """Return the run with the dataset of --text, or of the demo, as its data.

    The first start prepares it into the cache. Raises ConfigError or CheckpointError, before text is read; DataError,
    also unless this process `may_prepare` what is not prepared.
    """
    config = _with_demo(config)
    if config.text is None:
        return PreparedRun(config)
    from llmscale.data.prepare.text_cache import DEFAULT_CACHE, TextRequest  # slow to import

    ds = read_ds_config(config.ds)
    _check_settings(with_ds_keys(config, ds), ds)
    check_output_folder("--run", config.run)
    flag, name = ("--init-from", config.init_from) if config.init_from else ("--model", config.model)
    if is_published(name):
        published = read_published_model(flag, name, config)
    else:
        published = None
    if config.init_from and not (published or config.tokenizer):
        raise ConfigError(
            f"--init-from {config.init_from} needs text with its own tokens, and --text would train other ones. Name "
            "that run's tokenizer with --tokenizer."
        )
    if published:
        context = published.shape.seq_len
    else:
        context = get_preset(config.model).seq_len
    shaped, of_run = (config, None) if published else _shape_of_run(config)
    seq_len = config.seq_len or of_run or min(context, _LONGEST_FOR_TEXT)
    tokenizer = config.tokenizer or (name if published else None)
    request = TextRequest(
        text=config.text,
        tokenizer=tokenizer,
        seq_len=seq_len,
        cache=config.data_cache or DEFAULT_CACHE,
        skip_undecodable=config.skip_undecodable,
        most_vocab=MOST_VOCAB if tokenizer else fitting_vocabulary(shaped, seq_len),
    )
    update = {"data": str(request.open(may_prepare=may_prepare)), "data_cache": None}
    return PreparedRun(config.model_copy(update=update), ds, published)


def _shape_of_run(config: RunConfig) -> tuple[RunConfig, int | None]:
    """Return the configuration with the model of the run that it continues or begins with, and that run's context.

    The user may name another model, and a published one has its own context: then None. Raises ConfigError,
    CheckpointError.
    """
    if "model" not in config.model_fields_set:
        _, saved, shaped = _find_origin(fetch_runs(config))
        if saved is not None and shaped is not None and not is_published(shaped.model):
            seq_len = saved.state.identity.get("seq_len")
            return shaped, seq_len if type(seq_len) is int else None
    return config, None


def _as_overfit_check(config: RunConfig) -> RunConfig:
    """Return the configuration with the values of the keys that --overfit-batch leaves without effect."""
    steps = config.steps or (None if config.tokens else _OVERFIT_STEPS)
    decided = {**without_effect_under("overfit_batch"), "global_batch_size": config.overfit_batch, "steps": steps}
    return config.model_copy(update=decided)


def fetch_runs(config: RunConfig) -> RunConfig:
    """Bring the copies of the run, and of those that it begins from, up to date if they are in a store.

    Returns the configuration with a checkpoint of the run itself in the copy that the run is written to; `best` is one.
    Raises LlmscaleError.
    """
    if config.resume == BEST_NAME:
        config = config.model_copy(update={"resume": str(checkpoints_folder(config.run) / BEST_NAME)})
    own = url_of(config.run)
    resumed = url_of(Path(config.resume))
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


def read_origin(
    config: RunConfig, published: PublishedModel | None
) -> tuple[RunConfig, PublishedModel | None, SavedRun | None]:
    """Return the configuration with the shape of the published model that it names or began with; the model whose
    weights a new run loads; and the checkpoint that the run begins with. `published` is as in PreparedRun.

    Raises ConfigError, CheckpointError.
    """
    if config.init_from is not None and is_published(config.init_from):
        model = published or read_published_model("--init-from", config.init_from, config)
        return with_published_shape(config, model), model, None
    source, _, shaped = _find_origin(config)
    return shaped or with_published_shape(config, None, published), None, source


def _find_origin(config: RunConfig) -> tuple[SavedRun | None, SavedRun | None, RunConfig | None]:
    """Return the checkpoint that a run begins with; the same, or a damaged one; and the configuration with its model.

    None for the last if the user names a model. Raises ConfigError, CheckpointError.
    """
    candidates = _candidates(config)
    # A damaged one is skipped or explained by `confirm_start`.
    source = _first_readable(candidates, read_saved_run)
    # Without a whole one the run is refused in the end, with the shape that it had.
    saved = source or _first_readable(
        candidates, lambda one: SavedRun(one.path, one.manifest, load_run_state(one.path))
    )
    return source, saved, with_saved_shape(config, saved.state.config, str(saved.path)) if saved else None


def _with_saved_batch(config: RunConfig, ds: DsConfig, state: RunState) -> RunConfig:
    """Return a resumed run's configuration with the global batch that it has, unless a flag or the ds_config gives one.

    The default depends on the number of ranks and on the version.
    """
    saved = str(state.identity.get("global_batch_size", "")).partition(",")[0]
    is_given = config.global_batch_size or config.global_batch_tokens or isinstance(ds.keys.train_batch_size, int)
    if is_given or not saved.isdecimal():
        return config
    return config.model_copy(update={"global_batch_size": int(saved)})


def _first_readable(candidates: Iterable[Checkpoint], read: Callable[[Checkpoint], SavedRun]) -> SavedRun | None:
    for checkpoint in candidates:
        with suppress(CheckpointError):
            return read(checkpoint)
    return None


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


def _candidates(config: RunConfig) -> list[Checkpoint]:
    """Return the checkpoints that the run may begin with, newest first, not verified. Raises CheckpointError."""
    if config.init_from is None and config.resume in ("auto", "none"):
        if config.resume == "auto":
            return find_checkpoints(config.run).current
        return []
    flag, path = ("--init-from", config.init_from) if config.init_from else ("--resume", config.resume)
    return [open_named(flag, path)]


def open_named(flag: str, path: str, report: Callable[[str], None] = lambda line: None) -> Checkpoint:
    """Read the checkpoint that `FLAG PATH` names, as `open_checkpoint` does. Raises CheckpointError."""
    try:
        return open_checkpoint(Path(path), report)
    except CheckpointError as error:
        if (Path(path) / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{flag} {path}: {error} Name another checkpoint.") from None
        raise


def _check_same_tokenizer(inputs: Inputs, state: RunState) -> None:
    """Raise DataError unless the other run's weights have the dataset's tokenizer, and its learned positions."""
    manifest = inputs.sets.manifest
    is_rotary = inputs.shape.positions == "rotary"
    check_set_matches(
        manifest,
        inputs.config.data,
        vocab_size=cast("int", state.identity["vocab_size"]),
        seq_len=manifest.seq_len if is_rotary else cast("int", state.identity["seq_len"]),
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


def _check_run_folder(config: RunConfig) -> bool:
    """Return whether the run folder holds checkpoints.

    Raises ConfigError for a start that would overwrite another run or write through a link, or whose flags contradict
    each other.
    """
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
    if config.lora_rank and not (existing or config.init_from or config.resume not in ("auto", "none")):
        raise ConfigError(
            "--lora-rank trains adapters beside weights that are there. Name these with --init-from: a run, or hf:NAME."
        )
    if config.lora_from and (existing or config.resume not in ("auto", "none")):
        raise ConfigError(
            f"--lora-from {config.lora_from} begins a new run, and {shown(config.run)} continues with the adapters of "
            "a checkpoint. Leave the flag out, or name another --run folder."
        )
    if config.init_from and config.resume not in ("auto", "none"):
        raise ConfigError("--init-from starts at step 0 and --resume PATH continues: give one of them.")
    named = config.init_from
    if named and not is_published(named) and is_hub_name(named) and not os.path.lexists(named):
        hint = forgotten_prefix(named) or (
            f" Name a run folder, one of its checkpoints/step-*, or a published model, such as hf:{named}."
        )
        raise ConfigError(f"--init-from {named} does not exist.{hint}")
    check_own_files(config.run)
    return existing is not None


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
