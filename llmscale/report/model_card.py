"""Write the README.md of an exported model from its checkpoint and run folder. No torch."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import __version__
from llmscale.checkpoint.hf_write import CARD_MARK
from llmscale.checkpoint.inventory import find_checkpoints, is_of_run
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.config.hf_model import PREFIX, is_published
from llmscale.config.run_config import KEYS, build_run_config
from llmscale.config.run_flags import flag_words
from llmscale.config.run_keys import last_part, needs, publish_keys
from llmscale.data.mixture import TrainingSets
from llmscale.errors import LlmscaleError
from llmscale.report.history import Record, load_history
from llmscale.report.run_facts import given_flags, load_starts
from llmscale.terminal.human_numbers import count_nouns
from llmscale.untrusted.hub import is_hub_name
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from llmscale.evaluate.export import ExportedModel
    from llmscale.evaluate.model_source import TrainedCheckpoint


def build_model_card(model: ExportedModel, trained: TrainedCheckpoint) -> str:
    """Return Markdown with the metadata that the Hugging Face Hub reads, without paths of this machine.

    Losses, versions and the flags that were given come from the run folder that contains the checkpoint, if any. The
    license is left to the publisher.
    """
    run = _find_run(trained)
    how = "pre-trained with llmscale"
    if run.init_from is not None:
        how = f"fine-tuned with llmscale from {_code(name_of_base(run.init_from))}"
    title = f"{_plain(run.name)}, step {trained.manifest.step:,}"
    purpose = f"A `{model.family.architecture}` of {model.num_parameters:,} parameters, {how}."
    return _card("transformers", model.family.model_type, title, purpose, run, model)


def build_adapter_card(model: ExportedModel, trained: TrainedCheckpoint) -> str:
    """Return the card of adapters alone, as `build_model_card` does; their base is named as peft finds it."""
    place = trained.state.base["place"]
    checksum = trained.state.base["checksum"]
    base = name_of_base(place)
    rank = trained.shape.lora_rank
    run = replace(_find_run(trained), init_from=place)
    title = f"{_plain(run.name)}, step {trained.manifest.step:,}: adapters of rank {rank}"
    purpose = (
        f"Adapters of rank {rank} (LoRA) for a `{model.family.architecture}`, fine-tuned with llmscale beside the\n"
        f"frozen weights of {_code(base)} (checksum of its files: {_plain(checksum)}).\n"
        "`PeftModel.from_pretrained(MODEL, FOLDER)` adds them to that model."
    )
    return _card("peft", "lora", title, purpose, run, model)


def name_of_base(place: str) -> str:
    """Return the name of the model beside adapters without paths of this machine: NAME@COMMIT on the Hub, else the last
    part of a folder, or of the run of a checkpoint."""
    name = place.removeprefix(PREFIX)
    if place.startswith(PREFIX) and is_hub_name(name):
        return name
    run, _, _ = name.rpartition(f"/{CHECKPOINTS_NAME}/")
    return last_part(run or name)


@dataclass(frozen=True)
class _TrainedRun:
    """Facts of a card about the run that trained a checkpoint."""

    trained: TrainedCheckpoint
    name: str
    folder: Path | None
    """The run's folder; None for a checkpoint that lies elsewhere."""
    starts: Sequence[Record]
    """Starts before the checkpoint."""
    given: Mapping[str, str] | None
    """Flags of these starts by key, each with its last value; None if they are not known, as beside a run file."""
    init_from: str | None
    """Source of the run's first weights; None for its seed."""


def _find_run(trained: TrainedCheckpoint) -> _TrainedRun:
    folder = trained.folder.resolve().parent.parent
    in_run = is_of_run(trained.folder, folder)
    if in_run:
        starts = load_starts(folder)
    else:
        starts = []
    starts = [start for start in starts if str(start.get("started")) <= trained.manifest.created]
    given = given_flags(starts)
    # A later start may leave the flag out, and the weights are still those.
    init_from = trained.config.init_from or given.get("init_from")
    is_known = bool(given) and "config" not in given
    return _TrainedRun(
        trained=trained,
        name=folder.name if in_run else last_part(trained.config.run),
        folder=folder if in_run else None,
        starts=starts,
        given=given if is_known else None,
        init_from=init_from,
    )


def _card(library: str, tag: str, title: str, purpose: str, run: _TrainedRun, model: ExportedModel) -> str:
    rows = [*_facts(model, run.trained), *_losses(run), *_software(run)]
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"""---
library_name: {library}
pipeline_tag: text-generation
{_origin(run)}tags:
{CARD_MARK}
- {tag}
---

# {title}

{purpose}

| | |
| --- | --- |
{table}

## How it was trained

```
{_command(run)}
```

Where a flag names a folder or a file, only its last part is shown; what has its default, or changes no step, is left
out.
{_conversations(run.trained.sets)}
## License and use

None is stated: whoever publishes these weights adds a `license:` to the lines at the top, and says what the training
data permits.
"""


def _origin(run: _TrainedRun) -> str:
    """Return the lines at the top that name the published model and the data that the Hub may know."""
    lines = ""
    if run.init_from is not None and is_published(run.init_from):
        lines += f"base_model: {json.dumps(_plain(name_of_base(run.init_from)).partition('@')[0])}\n"
    sources = {location.manifest.source for location in run.trained.sets.locations}
    names = sorted(name for source in sources if (name := _hub_dataset(source)))
    if names:
        lines += "datasets:\n" + "".join(f"- {json.dumps(name)}\n" for name in names)
    return lines


def _hub_dataset(source: str) -> str | None:
    """Return the name on the Hub of a dataset that `data prepare --input hf:NAME:CONFIG` read; None for others."""
    name = source.removeprefix(PREFIX).partition(":")[0]
    return name if source.startswith(PREFIX) and is_hub_name(name) else None


def _conversations(data: TrainingSets) -> str:
    """Return the section of a model that was trained on conversations: their template, indented as code."""
    if data.chat_template is None:
        return ""
    code = "\n".join(f"    {line}" for line in map(make_visible_line, data.chat_template.splitlines()))
    return f"""
## Conversations

Its last data were conversations in this chat template, which the tokenizer has too (`apply_chat_template`):

{code}
"""


def _facts(model: ExportedModel, trained: TrainedCheckpoint) -> Iterable[tuple[str, str]]:
    shape = trained.shape
    config = trained.config
    sets = trained.sets
    manifest = trained.manifest
    num_tokens = sum(location.manifest.splits["train"].num_tokens for location in sets.locations)
    name = _code(last_part(config.model))
    yield "model", f"{name}: {shape.n_layer} layers, width {shape.n_embd}, {shape.n_head} heads"
    if shape.num_experts:
        active = f", of which a token uses {shape.active_parameters:,}"
    else:
        active = ""
    yield "parameters", f"{model.num_parameters:,}{active}, in {model.dtype}"
    yield "context", f"{shape.seq_len:,} tokens"
    yield "vocabulary", f"{shape.vocab_size:,} tokens, tokenizer {_code(last_part(sets.manifest.tokenizer))}"
    source = _code(last_part(config.text or config.data))
    made_of = ", ".join(dict.fromkeys(_code(last_part(location.manifest.source)) for location in sets.locations))
    chats = [location.manifest.chat for location in sets.locations if location.manifest.chat is not None]
    if chats:
        targets = f", of which {sum(chat.num_targets['train'] for chat in chats):,} are targets"
    else:
        targets = ""
    yield "data", f"{source}, made of {made_of}: {num_tokens:,} tokens{targets}"
    yield "fingerprint of the data", _code(sets.fingerprint)
    yield "trained on", f"{manifest.tokens_seen:,} tokens in {manifest.step:,} steps"
    ranks = count_nouns(manifest.world_size, "rank")
    yield "trained in", f"{_code(manifest.precision)} on {ranks}, ZeRO stage {manifest.zero_stage}"


def _losses(run: _TrainedRun) -> Iterable[tuple[str, str]]:
    """Yield the last losses before the checkpoint; none if the log is of another history."""
    checkpoint = run.trained.manifest
    folder = run.folder
    if folder is None:
        return
    try:
        if not find_checkpoints(folder).history.includes(checkpoint.history.number, checkpoint.step):
            return
        history = load_history(folder)
    except LlmscaleError:
        return
    has_targets = any(location.manifest.chat for location in run.trained.sets.locations)
    unit = "nats per target token" if has_targets else "nats per token"
    for what, losses in (("training loss", history.train), ("validation loss", history.validation)):
        steps = [step for step, loss in losses.items() if step <= checkpoint.step and math.isfinite(loss)]
        if steps:
            yield what, f"{losses[max(steps)]:.4f} {unit} at step {max(steps):,}"


def _software(run: _TrainedRun) -> Iterable[tuple[str, str]]:
    start = run.starts[-1] if run.starts else {}
    versions = start.get("versions")
    if isinstance(versions, Mapping):
        known = {"llmscale": start.get("llmscale"), **{name: versions.get(name) for name in ("torch", "deepspeed")}}
        software = ", ".join(f"{name} {_plain(str(version))}" for name, version in known.items() if version)
        yield "trained with", software
    if isinstance(start.get("commit"), str):
        yield "commit", _code(str(start["commit"])) + (", with changed files" if start.get("dirty") is True else "")
    yield "exported with", f"llmscale {__version__}"


def _command(run: _TrainedRun) -> str:
    """Return the command that trains such a run, which `train` accepts, with everything that another person needs.

    It has the flags that were given; where these are not known, those whose values no default explains.
    """
    config = run.trained.config
    published = run.trained.published
    implied = build_run_config({"model": config.model}).model_dump(mode="json")
    if published is not None:
        implied |= published.keys
    values = config.model_dump(mode="json", exclude_none=True)
    if run.init_from is not None:
        values["init_from"] = run.init_from
        # The weights name the model.
        implied["model"] = config.model if is_published(config.model) else None
    else:
        implied["model"] = None
    keys = {key: value for key, value in values.items() if value != implied[key]}
    if run.given is not None:
        keys = {key: value for key, value in keys.items() if key in run.given or key == "model"}
    keys = publish_keys({key: value for key, value in keys.items() if KEYS[key].resume != "free"})
    alone = build_run_config({**keys, "model": keys.get("model", config.model)})
    without_effect = {need.keys for need in needs() if need.is_met and not need.is_met(alone)}
    words = [word for key, value in keys.items() if key not in without_effect for word in flag_words(key, value)]
    return make_visible_line(shlex.join(["llmscale", "train", *words]))


def _plain(text: str) -> str:
    """Remove characters that Markdown or a terminal would interpret."""
    return "".join(letter for letter in make_visible_line(text) if letter not in "`|<>[]*\\#")


def _code(text: str) -> str:
    return f"`{_plain(text)}`"
