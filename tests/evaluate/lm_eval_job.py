"""What lm-eval answers about exported models, as JSON. Arguments: folders of models, then `--`, then tasks.

In a process of its own, for lm-eval's libraries read the environment when they are imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmscale.evaluate.lm_eval_tasks import find_tasks, go_offline, open_lm


def main(models: list[str], specs: list[str]) -> None:
    go_offline()
    import datasets

    # Beside the tasks, not in the user's own cache.
    datasets.config.HF_DATASETS_CACHE = Path("cache")
    from lm_eval import simple_evaluate

    from llmscale.evaluate.model_source import open_model

    answers = {}
    tasks = find_tasks(specs, Path("tasks"))
    for folder in models:
        source = open_model(Path(folder), None, lambda count: None)
        lm = open_lm(Path(folder), source.shape.seq_len, 3)
        settings = {"task_manager": tasks.manager, "bootstrap_iters": 0, "log_samples": True}
        logged = simple_evaluate(lm, tasks=list(tasks.names), **settings)
        answers[Path(folder).name] = {
            "samples": {
                name: [(sample["arguments"], sample["resps"]) for sample in samples]
                for name, samples in logged["samples"].items()
            },
            "results": logged["results"],
            "run": [[result.task, result.values, result.num_items] for result in tasks.run(lm, None)],
        }
    print(json.dumps(answers, default=float))


if __name__ == "__main__":
    at = sys.argv.index("--")
    main(sys.argv[1:at], sys.argv[at + 1 :])
