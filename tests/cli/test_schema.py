from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, load_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def schema_of(llmscale: Callable) -> Callable[[str], Draft7Validator]:
    def read(kind: str) -> Draft7Validator:
        done = llmscale("schema", kind, torch_free=True)
        assert (done.returncode, done.stderr) == (0, "")
        schema = json.loads(done.stdout)
        Draft7Validator.check_schema(schema)
        return Draft7Validator(schema)

    return read


def shipped_examples(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every YAML example in the documents, with its file."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            file = folder / f"{page.stem}-{number}.yaml"
            file.write_text(text)
            yield page.name, load_settings(file, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), str(file))


def test_the_shipped_examples_are_valid_and_their_mistakes_are_not(
    schema_of: Callable[[str], Draft7Validator], tmp_path: Path
) -> None:
    validators = {"run": schema_of("run"), "mix": schema_of("mix")}
    seen = {"run": 0, "mix": 0}
    examples = [*shipped_examples(tmp_path)]
    base = ROOT / "scripts/bench/learning/scaling_ladder/base.yaml"
    examples.append((base.name, load_settings(base, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES), str(base))))
    for name, example in examples:
        kind = "mix" if "sets" in example else "run"
        seen[kind] += 1
        assert not [error.message for error in validators[kind].iter_errors(example)], name
        assert not validators[kind].is_valid(example | {"modle": "gpt2-124m"}), "a misspelt key"
    assert min(seen.values()) > 0
    run, mix = validators["run"], validators["mix"]
    assert run.is_valid({"lr": "6e-4", "tokens": "10_000_000_000", "n_layer": None})
    assert run.is_valid({"tokens": "10M", "steps": "1,000"})
    assert not run.is_valid({"lr": "3m"})
    for wrong in ({"schedule": "cosin"}, {"seq_len": 0}, {"shuffle": 3}, {"config": "a.yaml"}, {"lr": "fast"}):
        assert not run.is_valid(wrong), wrong
    sets = {"sets": {"web": "data/web"}}
    for wrong in (sets, {**sets, "weights": {"web": -1}}, {**sets, "weights": {"web": 1}, "stages": []}):
        assert not mix.is_valid(wrong), wrong


def test_completion_has_texts_and_values(schema_of: Callable[[str], Draft7Validator]) -> None:
    properties = schema_of("run").schema["properties"]
    assert properties["schedule"]["enum"][:4] == ["cosine", "linear", "constant", "wsd"]
    assert all(entry["description"] for entry in properties.values())
