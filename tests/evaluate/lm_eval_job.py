"""In a process of its own, for lm-eval's libraries read the environment when they are imported: what lm-eval's Hugging
Face backend and ours answer about an exported model, as JSON. Arguments: folders of models, then `--`, then tasks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmscale.evaluate.lm_eval_tasks import find_tasks, go_offline


def main(models: list[str], specs: list[str]) -> None:
    go_offline()
    import datasets

    # Beside the tasks, not in the user's own cache.
    datasets.config.HF_DATASETS_CACHE = Path("cache")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from llmscale.evaluate.lm_eval_model import LlmscaleLM
    from llmscale.evaluate.model_source import open_model
    from scripts.bench.transformers_package import import_transformers

    import_transformers()
    answers = {}
    tasks = find_tasks(specs, Path("tasks"))
    for folder in models:
        source = open_model(Path(folder), None, lambda count: None)
        ours = LlmscaleLM(source.load_model(), source.tokenizer, batch_size=3)
        theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=2)
        settings = {"task_manager": tasks.manager, "bootstrap_iters": 0, "log_samples": True}
        both = [simple_evaluate(lm, tasks=list(tasks.names), **settings) for lm in (ours, theirs)]
        answers[Path(folder).name] = {
            "samples": [
                {name: [sample["resps"] for sample in samples] for name, samples in actual["samples"].items()}
                for actual in both
            ],
            "results": [actual["results"] for actual in both],
            "run": [[result.task, result.values, result.num_items] for result in tasks.run(ours, None)],
        }
    print(json.dumps(answers, default=float))


if __name__ == "__main__":
    at = sys.argv.index("--")
    main(sys.argv[1:at], sys.argv[at + 1 :])
