"""Write the README.md of an exported model from its checkpoint and run folder. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import __version__
from llmscale.checkpoint.hf_write import CARD_MARK
from llmscale.checkpoint.inventory import find_checkpoints, is_of_run
from llmscale.checkpoint.manifest import CheckpointManifest
from llmscale.config.run_config import KEYS, RunConfig, build_run_config
from llmscale.config.run_flags import flag_words
from llmscale.config.run_keys import last_part, needs, publish_keys
from llmscale.data.mixture import TrainingSets
from llmscale.errors import LlmscaleError
from llmscale.report.history import load_history
from llmscale.report.run_facts import load_starts
from llmscale.terminal.human_numbers import count_nouns
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from llmscale.evaluate.export import ExportedModel
    from llmscale.evaluate.model_source import TrainedCheckpoint


def build_model_card(model: ExportedModel, trained: TrainedCheckpoint) -> str:
    """Return Markdown with the metadata that the Hugging Face Hub reads, without paths of this machine.

    Losses and versions come from the run folder that contains the checkpoint, if any. The license is left to the
    publisher.
    """
    run = trained.folder.resolve().parent.parent
    in_run, manifest = is_of_run(trained.folder, run), trained.manifest
    name = run.name if in_run else last_part(trained.config.run)
    rows = [*_facts(model, trained), *(_losses(run, manifest) if in_run else []), *_software(run, manifest, in_run)]
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
{CARD_MARK}
- {model.family.model_type}
---

# {_plain(name)}, step {manifest.step:,}

A `{model.family.architecture}` of {model.num_parameters:,} parameters, pre-trained with llmscale.

| | |
| --- | --- |
{table}

## How it was trained

```
{_command(trained.config)}
```

Where a flag names a folder or a file, only its last part is shown; what has its default, or changes no step, is left
out.
{_conversations(trained.sets)}
## License and use

None is stated: whoever publishes these weights adds a `license:` to the lines at the top, and says what the training
data permits.
"""


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
    shape, config, sets, manifest = trained.shape, trained.config, trained.sets, trained.manifest
    num_tokens = sum(location.manifest.splits["train"].num_tokens for location in sets.locations)
    name = _code(last_part(config.model))
    yield "model", f"{name}: {shape.n_layer} layers, width {shape.n_embd}, {shape.n_head} heads"
    active = f", of which a token uses {shape.active_parameters:,}" if shape.num_experts else ""
    yield "parameters", f"{model.num_parameters:,}{active}, in {model.dtype}"
    yield "context", f"{shape.seq_len:,} tokens"
    yield "vocabulary", f"{shape.vocab_size:,} tokens, tokenizer {_code(last_part(sets.manifest.tokenizer))}"
    source = _code(last_part(config.text or config.data))
    yield "data", f"{source}, {num_tokens:,} tokens, fingerprint {_code(sets.fingerprint)}"
    yield "trained on", f"{manifest.tokens_seen:,} tokens in {manifest.step:,} steps"
    ranks = count_nouns(manifest.world_size, "rank")
    yield "trained in", f"{_code(manifest.precision)} on {ranks}, ZeRO stage {manifest.zero_stage}"


def _losses(run: Path, checkpoint: CheckpointManifest) -> Iterable[tuple[str, str]]:
    """Yield the last losses before the checkpoint, nats per token; none if the log is of another history."""
    try:
        if not find_checkpoints(run).history.includes(checkpoint.history.number, checkpoint.step):
            return
        history = load_history(run)
    except LlmscaleError:
        return
    for what, losses in (("training loss", history.train), ("validation loss", history.validation)):
        steps = [step for step, loss in losses.items() if step <= checkpoint.step and math.isfinite(loss)]
        if steps:
            yield what, f"{losses[max(steps)]:.4f} nats per token at step {max(steps):,}"


def _software(run: Path, manifest: CheckpointManifest, in_run: bool) -> Iterable[tuple[str, str]]:
    starts = load_starts(run) if in_run else []
    start = next((one for one in reversed(starts) if str(one.get("started")) <= manifest.created), {})
    versions = start.get("versions")
    if isinstance(versions, Mapping):
        known = {"llmscale": start.get("llmscale"), **{name: versions.get(name) for name in ("torch", "deepspeed")}}
        software = ", ".join(f"{name} {_plain(str(version))}" for name, version in known.items() if version)
        yield "trained with", software
    if isinstance(start.get("commit"), str):
        yield "commit", _code(str(start["commit"])) + (", with changed files" if start.get("dirty") is True else "")
    yield "exported with", f"llmscale {__version__}"


def _command(config: RunConfig) -> str:
    """Return the command that trains such a run, which `train` accepts, with everything that another person needs."""
    of_preset = build_run_config({"model": config.model}).model_dump(mode="json")
    values = config.model_dump(mode="json", exclude_none=True)
    keys = {key: value for key, value in values.items() if key == "model" or value != of_preset[key]}
    keys = publish_keys({key: value for key, value in keys.items() if KEYS[key].resume != "free"})
    alone = build_run_config(keys)
    without_effect = {need.keys for need in needs() if need.is_met and not need.is_met(alone)}
    words = [word for key, value in keys.items() if key not in without_effect for word in flag_words(key, value)]
    return make_visible_line(shlex.join(["llmscale", "train", *words]))


def _plain(text: str) -> str:
    """Remove characters that Markdown or a terminal would interpret."""
    return "".join(letter for letter in make_visible_line(text) if letter not in "`|<>[]*\\#")


def _code(text: str) -> str:
    return f"`{_plain(text)}`"
