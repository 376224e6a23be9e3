"""Find, check and run lm-eval's tasks from YAML on this machine, without the network. No torch before they run.

The model is lm-eval's own Hugging Face one (lm_eval/models/huggingface.py).
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.config.user_paths import YAML_SUFFIXES
from llmscale.errors import ConfigError
from llmscale.evaluate.tasks import FORMATS, TaskResult

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from llmscale.data.prepare.chat_template import ChatTemplate

#: Variables that datasets, huggingface_hub, transformers and evaluate read when they are imported.
_OFFLINE = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
_QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
_NEAREST = 3
#: Name of a task in its YAML.
_NAME = re.compile(r"^task: *[\"']?([\w.()-]+)", re.MULTILINE)


@dataclass(frozen=True)
class LmEvalTasks:
    """Tasks whose data is on this machine."""

    manager: TaskManager
    names: tuple[str, ...]
    """Names that the user gave."""
    result_names: tuple[str, ...]
    """Names of the results, by task and group."""

    def run(self, lm: HFLM, limit: int | None, *, chat: bool = False) -> list[TaskResult]:
        """Run the tasks with at most `limit` items each, as conversations if `chat`.

        Raises ConfigError for items that do not fit the model's positions or have no tokens.
        """
        from lm_eval import evaluator

        # It would ask git about this folder, which may be in no repository, and pip about every package.
        for name in ("get_git_commit_hash", "add_env_info"):
            setattr(evaluator, name, lambda *_: None)
        try:
            results = evaluator.simple_evaluate(
                lm,
                tasks=list(self.names),
                task_manager=self.manager,
                limit=limit,
                log_samples=False,
                # Bootstrapped standard errors take minutes and process pools.
                bootstrap_iters=0,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        except AssertionError as error:  # how lm-eval refuses lengths
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"lm-eval cannot compute an item of {', '.join(self.names)} with a model that sees {lm.max_length:,} "
                f"tokens: {' '.join(str(error).split()) or f'not `{frame.line}`'}. Leave out items that are longer or "
                "have no tokens, and give fewer max_gen_toks in the task's generation_kwargs."
            ) from None
        counts = results["n-samples"]
        return [
            TaskResult(name, _numbers(values), counts[name]["effective"] if name in counts else 0)
            for name, values in results["results"].items()
        ]


def open_lm(folder: Path, seq_len: int, batch_size: int, template: ChatTemplate | None = None) -> HFLM:
    """Load a folder of transformers in fp32 onto this machine's first GPU, or its CPU, as lm-eval's model.

    It sees `seq_len` tokens. Conversations have the `template`, and the end of a turn ends generated text.
    """
    from llmscale.evaluate.transformers_package import import_transformers

    import_transformers()
    import torch
    from lm_eval.models.huggingface import HFLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = HFLM(str(folder), device=device, dtype="float32", batch_size=batch_size, max_length=seq_len)
    if template is not None:
        lm.tokenizer.chat_template = template.source
        # Decoded text has no special tokens, in which the end of a turn would be found.
        ends = lm.tokenizer.encode(template.end_of_turn, add_special_tokens=False)
        if len(ends) == 1:
            lm.model.generation_config.eos_token_id = [lm.tokenizer.eos_token_id, *ends]
        lm.generate_until = partial(_generate_turns, lm.generate_until, template.end_of_turn)
    return lm


def _generate_turns(
    generate: Callable[..., list[str]], end: str, requests: Sequence[Instance], **options: bool
) -> list[str]:
    """Generate with the end of a turn among the stops of every request."""
    ended = []
    for request in requests:
        context, settings = request.args
        stops = settings.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        ended.append(replace(request, arguments=(context, {**settings, "until": [*stops, end]})))
    return generate(ended, **options)


def find_tasks(specs: Sequence[str], task_folder: Path | None, limit: int | None = None) -> LmEvalTasks:
    """Find the tasks that `specs` name: YAML files, tasks in `task_folder`, or lm-eval's own with cached data.

    As in lm-eval, a YAML may run Python from its folder (`!function`). Call `go_offline` before. Raises ConfigError for
    an unknown task, with the nearest names, for one that cannot be loaded, and for the first of at most `limit`
    documents that does not fit the task.
    """
    if task_folder is not None and not task_folder.is_dir():
        raise ConfigError(f"--task-folder {task_folder} is not a folder. Name the one that holds the tasks' YAMLs.")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            f"task '{specs[0]}' needs lm-eval: `{install_command('eval')}`. Without it: "
            f"{', '.join(f'{name}=FILE.jsonl' for name in FORMATS)}."
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=task_folder, include_defaults=False)
    own = {spec for spec in specs if not _is_yaml(spec) and spec not in manager.task_index}
    if own:
        _check_mentioned(own, task_folder)
        # lm-eval's own 14,000 tasks take half a minute to parse.
        manager = TaskManager(include_path=task_folder)
    result_names: list[str] = []
    for spec in specs:
        result_names += _check_task(manager, spec, task_folder, limit)
    return LmEvalTasks(manager, tuple(specs), tuple(result_names))


def go_offline() -> None:
    """Turn off the libraries' network access and progress bars. Call it before any of them is imported."""
    for name in _OFFLINE:
        os.environ[name] = "1"
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def _is_yaml(spec: str) -> bool:
    return spec.endswith(YAML_SUFFIXES)


def _check_mentioned(names: set[str], task_folder: Path | None) -> None:
    """Raise ConfigError for a name that no file of lm-eval's tasks mentions: a search takes seconds, parsing more."""
    import lm_eval.tasks

    left = set(names)
    known = set[str]()
    for path in Path(lm_eval.tasks.__file__).parent.rglob("*"):
        if left and path.suffix != ".pyc" and path.is_file():
            text = path.read_text(errors="replace")
            left = {name for name in left if name not in text}
            known.update(_NAME.findall(text))
    for name in sorted(left):
        raise ConfigError(_unknown(sorted(known), name, task_folder))


def _check_task(manager: TaskManager, spec: str, task_folder: Path | None, limit: int | None) -> list[str]:
    """Load a task; return the names of its results."""
    if not _is_yaml(spec) and spec not in manager.task_index:
        raise ConfigError(_unknown(manager.all_tasks, spec, task_folder))
    try:
        loaded = manager.load([spec])
    except Exception as error:  # a task's code, its YAML or `datasets` raise many kinds
        raise ConfigError(
            f"task {spec} cannot be loaded: {_reason(error)} Nothing is fetched from the network: a task's data must "
            "be files that its YAML names (dataset_path: json, dataset_kwargs: data_files), or be in the cache of "
            "`datasets`."
        ) from None
    for name, task in loaded["tasks"].items():
        _check_documents(name, task, limit)
    return [*loaded["tasks"], *loaded["groups"]]


def _check_documents(name: str, task: Task, limit: int | None) -> None:
    """Build a task's requests, as lm-eval does again when it runs. Raises ConfigError."""
    construct = task.construct_requests
    count = 0

    def construct_counting(doc: object, *args: object, **kwargs: object) -> object:
        nonlocal count
        made = construct(doc, *args, **kwargs)
        if task.get_config("doc_to_target") is not None:
            task.doc_to_target(doc)
        count += 1
        return made

    task.construct_requests = construct_counting
    try:
        task.build_all_requests(limit=limit)
    except Exception as error:  # as above
        raise ConfigError(
            f"task {name}: document {count}, counted from 0, does not fit the task: {_reason(error)} Does it have "
            "the fields that the task's YAML names?"
        ) from None
    finally:
        task.construct_requests = construct


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _unknown(known: Sequence[str], spec: str, task_folder: Path | None) -> str:
    near = difflib.get_close_matches(spec, known, n=_NEAREST, cutoff=0.6)
    if near:
        hint = f" Nearest: {', '.join(near)}."
    else:
        hint = ""
    where = f"among {len(known):,} tasks" + (f", those of {task_folder} included" if task_folder else "")
    return (
        f"task '{spec}' is not {where}.{hint} Legal: a task of lm-eval's or of --task-folder, a task's YAML, or "
        f"{', '.join(f'{name}=FILE.jsonl' for name in FORMATS)}."
    )


def _numbers(values: dict[str, object]) -> dict[str, float]:
    """Return metrics by name: `acc,none` becomes acc, a metric with another filter keeps both names."""
    numbers = {}
    for key, value in values.items():
        metric, _, name = key.partition(",")
        if name and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
            numbers[metric if name == "none" else f"{metric} ({name})"] = float(value)
    return numbers
