"""`llmscale schema`: JSON schemas of a run file and of a mixture, with which editors complete and check them."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmscale.config.command_line import FlagParser

#: The newest dialect that common editors know.
_DIALECT = "http://json-schema.org/draft-07/schema#"
#: Numbers that are text in YAML, for one of its versions or for all: 10_000_000, 6e-4, 1,000; whole ones have suffixes.
_NUMBER_AS_TEXT = r"^[0-9][0-9_,]*(\.[0-9]*)?([eE][+-]?[0-9]+)?{suffix}$"
_SUFFIX = "[kKmMbBgGtT]?"


def add_parser(subparsers: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `schema`."""
    parser = subparsers.add_parser("schema")
    text = "run: the file of train's --config; mix: the YAML of several datasets, for train's --data"
    parser.add_argument("kind", choices=["run", "mix"], metavar="run|mix", help=text)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    print(json.dumps(run_file_schema() if args.kind == "run" else mix_schema(), indent=2))
    return 0


def run_file_schema() -> dict[str, Any]:
    """Return the JSON schema of a run file, from RunConfig and the texts of its keys."""
    from llmscale.config.run_config import RunConfig
    from llmscale.config.run_flags import describe_keys

    schema = RunConfig.model_json_schema()
    texts = describe_keys()
    for key, entry in schema["properties"].items():
        entry["description"] = " ".join(texts[key].text.split())
    schema["description"] = schema["description"].partition("\n")[0]
    # A run file cannot name another one.
    del schema["properties"]["config"]
    return _finish(schema, "llmscale run file")


def mix_schema() -> dict[str, Any]:
    """Return the JSON schema of a mixture's YAML."""
    from llmscale.data.mixture import MixFile

    return _finish(MixFile.model_json_schema(), "llmscale mixture of datasets")


def _finish(schema: dict[str, Any], title: str) -> dict[str, Any]:
    _simplify(schema)
    return {"$schema": _DIALECT, "title": title, **schema}


def _simplify(entry: Any) -> None:
    """Remove pydantic's titles and null defaults from a schema, and accept numbers that YAML reads as text."""
    if isinstance(entry, list):
        for inner in entry:
            _simplify(inner)
    elif isinstance(entry, dict):
        if isinstance(entry.get("title"), str):
            del entry["title"]
        if "default" in entry and entry["default"] is None:
            del entry["default"]
        if entry.get("type") in ("integer", "number"):
            suffix = _SUFFIX if entry["type"] == "integer" else ""
            entry |= {"type": [entry["type"], "string"], "pattern": _NUMBER_AS_TEXT.replace("{suffix}", suffix)}
        for inner in entry.values():
            _simplify(inner)
