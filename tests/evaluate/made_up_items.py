"""Items in the formats of published benchmarks, about nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "many",
    "small",
    "models",
    "learn",
    "naïve",
    "你好",
    "it's",
    "42",
]
#: Of a task's YAML, what depends on its kind.
_TASKS = {
    "hella": ("multiple_choice", "hellaswag.jsonl", "{{ctx}}", "{{label}}", 'doc_to_choice: "{{endings}}"'),
    "choice": ("multiple_choice", "choice.jsonl", "{{context}}", "{{label}}", 'doc_to_choice: "{{choices}}"'),
    "likely": ("loglikelihood", "likelihood.jsonl", "{{context}}", "{{continuation}}", ""),
    "rolling": ("loglikelihood_rolling", "text.jsonl", "", "{{text}}", ""),
    "written": (
        "generate_until",
        "likelihood.jsonl",
        "{{context}}",
        "{{continuation}}",
        'generation_kwargs: {until: ["e"], max_gen_toks: 9}',
    ),
    "written_on": (
        "generate_until",
        "text.jsonl",
        "{{text}}",
        "{{text}}",
        "generation_kwargs: {max_gen_toks: 20}",
    ),
}
_METRICS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "loglikelihood": ("acc", "perplexity"),
    "loglikelihood_rolling": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
    "generate_until": ("exact_match",),
}


def write_items(folder: Path, count: int = 9) -> dict[str, Path]:
    """FORMAT.jsonl of each of our formats."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(least, most)))

    records: dict[str, list[dict[str, object]]] = {name: [] for name in ("hellaswag", "choice", "likelihood", "text")}
    for number in range(count):
        # Some contexts are longer than what the model sees, and some end in spaces.
        context = words(2, 6) if number % 3 else words(25, 30)
        label = draw.randrange(4)
        records["hellaswag"].append(
            {"ind": number, "ctx": context, "endings": [words(1, 3) for _ in range(4)], "label": str(label)}
        )
        question = f"Question: {context}\nAnswer:{' ' * (number % 2)}"
        records["choice"].append({"context": question, "choices": [words(1, 2) for _ in range(4)], "label": label})
        # Some continue the context's last word.
        records["likelihood"].append({"context": context, "continuation": " " * (number % 2) + words(1, 1)})
        records["text"].append({"text": words(2, 5) if number % 2 else words(30, 40)})
    paths = {}
    for name, of_name in records.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(record) + "\n" for record in of_name))
    return paths


def write_lm_eval_tasks(folder: Path, items: Path) -> list[str]:
    """YAMLs of tasks on the items in a folder; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, file, text, target, more) in _TASKS.items():
        metrics = "".join(f"  - metric: {metric}\n" for metric in _METRICS[kind])
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    validation: {items / file}\n"
            f"validation_split: validation\noutput_type: {kind}\ndoc_to_text: {json.dumps(text)}\n"
            f"doc_to_target: {json.dumps(target)}\n{more}\nmetric_list:\n{metrics}"
        )
    return list(_TASKS)
