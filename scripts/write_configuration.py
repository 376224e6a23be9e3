#!/usr/bin/env python3
"""Write docs/configuration.md from the models that check a run's keys, a ds_config's and a mixture's.

usage: write_configuration.py

Run it after a change of a key, and after a merge; tests/test_configuration.py holds the file equal.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from llmscale.cli.schema import mix_schema, run_file_schema  # noqa: E402
from llmscale.config.deepspeed import schema as deepspeed  # noqa: E402
from llmscale.config.run_config import EXCLUSIVE_KEYS  # noqa: E402
from llmscale.config.run_flags import describe_keys, show_default  # noqa: E402
from llmscale.config.run_keys import needs  # noqa: E402

_FAR = 100_000
#: Sign of the keys without effect on a check of one batch.
_DAGGER = "†"
#: End of a meaning that the column of defaults has instead.
_OF_PRESET = "; default: the preset's."
PAGE = REPOSITORY / "docs" / "configuration.md"
_START = """\
# Configuration: every key

Look up here what a key of a run means, which values it takes, and its default. The shortest run file, and its use:

```yaml
# run.yaml
model: gpt2-124m
data: data/mine
```

```
llmscale train --config run.yaml --lr 3e-4
```

Each key is a flag of `llmscale train`, too (`global_batch_size`: `--global-batch-size`). Flags override the run file,
and the file overrides the defaults. A run file is YAML or TOML with the keys of the first tables; a ds_config is
DeepSpeed's JSON, and a mixture a YAML. An unknown key or a wrong value is one error line, before anything is written.
Whole numbers may have commas and a suffix (`1,000,000`, `10M`, `1.4T`), on every command line and in every file.
† marks keys without effect with `--overfit-batch`.

An editor completes and checks a run file or a mixture by its JSON schema: `llmscale schema run > run.schema.json`, and
`llmscale schema mix` for mixtures. With yaml-language-server (Red Hat's YAML extension of VS Code, Neovim, Emacs) the
file's first line is `# yaml-language-server: $schema=run.schema.json`; in TOML (taplo, Even Better TOML) it is
`#:schema ./run.schema.json`.

<!-- Written by scripts/write_configuration.py from the models that check the keys; edit those. -->
"""
_DS = """\
## ds_config

The JSON for `--ds`; `ds_configs/` has one for each ZeRO stage, and files of Hugging Face, Megatron-DeepSpeed and the
like are read ([ds_configs](../ds_configs/README.md#your-own-file)). Other keys of DeepSpeed are refused, all at once,
because a run could not honour them. `"auto"` is resolved from the run. An absent section is off. Sizes are in elements.
An `optimizer` or `scheduler` block means DeepSpeed's defaults for what it leaves out, and its learning rates.
A key without a meaning, its default in brackets, is in [DeepSpeed's reference](https://www.deepspeed.ai/docs/config-json/).
"""
_MIX = """\
## Mixture

The YAML for `--data` that mixes several datasets ([data.md](data.md)).
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    properties, sections = run_file_schema()["properties"], {}
    for key, documented in describe_keys().items():
        if key in properties:
            sections.setdefault(documented.section, []).append(_run_row(key, properties[key]))
    mix = mix_schema()
    parts = [_START, "## Run file\n"]
    parts += [f"### {section[0].upper()}{section[1:]}\n\n{_table(rows)}" for section, rows in sections.items()]
    parts += [_DS, *_ds_sections(deepspeed.DsFile.model_json_schema(mode="serialization"), _ds_texts())]
    parts += [_MIX, _table([_mix_row(*item) for item in mix["properties"].items()])]
    parts.append("Each of `stages`:\n")
    parts.append(_table([_mix_row(*item) for item in mix["$defs"]["MixFileStage"]["properties"].items()]))
    return "\n".join(parts)


def _mix_row(key: str, entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return key, _values(entry), "", entry["description"]


def _ds_sections(file: Mapping[str, Any], texts: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield a table for the top level and for every section, named by its keys."""
    waiting = [("", "DsFile")]
    while waiting:
        path, name = waiting.pop(0)
        model = file["$defs"][name] if path else file
        rows = []
        for key, entry in model["properties"].items():
            rows.append((key, _values(entry), _default(entry), texts.get((name, key), "")))
            inner = [part["$ref"].rpartition("/")[2] for part in [entry, *entry.get("anyOf", ())] if "$ref" in part]
            waiting += [(f"{path}.{key}" if path else key, section) for section in inner]
        yield f"### `{path}`\n" if path else "### Top level\n"
        if path and "description" in model:
            yield f"{model['description']}\n"
        yield from _ds_rows(rows)


def _ds_rows(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a table of the keys with a meaning, and a sentence with the others and their defaults or values."""
    explained = [row for row in rows if row[3]]
    others = [
        f"`{key}` ({default or values})" if default or values.startswith("`") else f"`{key}`"
        for key, values, default, text in rows
        if not text and values != "section"
    ]
    if explained:
        yield _table(explained)
    if others:
        yield f"{'Also' if explained else 'Keys'}: {', '.join(others)}.\n"


def _run_row(key: str, entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a key of a run, with the other keys on which its effect depends."""
    notes = [
        (_DAGGER if need.other == "with --overfit-batch" else f"No effect {need.other.replace('--', '`--', 1)}`.")
        if need.other.startswith("with ")
        else f"Needs `{need.other}`."
        for need in needs()
        if key in need.keys.split()
    ]
    twins = [other for pair in EXCLUSIVE_KEYS if key in pair for other in pair if other != key]
    notes += [f"Excludes {' and '.join(f'`{other}`' for other in twins)}."] if twins else []
    text, default = entry["description"], _default(entry)
    if text.endswith(_OF_PRESET):
        text, default = f"{text.removesuffix(_OF_PRESET)}.", "preset's"
    return key, _values(entry), default, " ".join([text, *notes])


def _default(entry: Mapping[str, Any]) -> str:
    default = entry.get("default")
    text = str(default).lower() if isinstance(default, bool) else show_default(default)
    return "" if default in (None, "", []) else f"`{text}`"


def _values(entry: Mapping[str, Any]) -> str:
    """Return the legal values of an entry of a JSON schema, in words."""
    if "anyOf" in entry:
        alternatives = [_values(inner) for inner in entry["anyOf"] if inner.get("type") != "null"]
        return " or ".join(dict.fromkeys(alternatives))
    if "$ref" in entry:
        return "section"
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum", [entry.get("const")]))
    kind = entry.get("type", "")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return ("integer" if kind == "integer" else "number") + _bounds(entry)
    if kind == "array":
        return f"list of {_values(entry.get('items', {}))}"
    if kind == "object":
        return "mapping of names to " + _values(next(iter(entry.get("patternProperties", {"": {}}).values())))
    return {"boolean": "`true`, `false`", "string": "path" if entry.get("format") == "path" else "text"}.get(kind, "")


def _bounds(entry: Mapping[str, Any]) -> str:
    """Return the bounds; an upper one only where somebody could meet it."""
    above, least, below = entry.get("exclusiveMinimum"), entry.get("minimum"), entry.get("exclusiveMaximum")
    most = entry["maximum"] if entry.get("maximum", _FAR) < _FAR else None
    if least is not None and most is not None and below is None:
        return f" {least:g} to {most:,.6g}"
    bounds = [f">{above:g}"] if above is not None else [f"≥{least:g}"] if least is not None else []
    bounds += [f"<{below:g}"] if below is not None else []
    bounds += [f"≤{most:,.6g}"] if most is not None else []
    return "".join(f" {bound}" for bound in bounds)


def _ds_texts() -> dict[tuple[str, str], str]:
    """Return the docstrings below the keys of a ds_config, by class and key."""
    texts = {}
    for definition in ast.parse(inspect.getsource(deepspeed)).body:
        if not isinstance(definition, ast.ClassDef):
            continue
        for key, text in pairwise(definition.body):
            if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr):
                value = ast.literal_eval(text.value)
                texts[definition.name, key.target.id] = " ".join(inspect.cleandoc(value).split())
    return texts


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    return "\n".join(_table_lines(rows)) + "\n"


def _table_lines(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a table, without columns that are empty in every row."""
    cells = [("key", "values", "default", "meaning")]
    cells += [(f"`{key}`", values, default, " ".join(text.split())) for key, values, default, text in rows]
    columns = [place for place in range(4) if any(row[place] for row in cells[1:])]
    for number, row in enumerate(cells):
        yield "| " + " | ".join(row[place].replace("|", "\\|") for place in columns) + " |"
        if number == 0:
            yield "| " + " | ".join("---" for _ in columns) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(REPOSITORY)}")
