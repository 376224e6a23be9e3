"""Records of answers as JSON and as tables, for `estimate` and `plan`. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from llmscale.architecture.shape import GPTShape
from llmscale.memory.breakdown import GIB
from llmscale.terminal.table import Column, output_width, print_fitting, table_lines

#: Headings of a Breakdown's fields.
CATEGORIES = {
    "parameters_bytes": "param",
    "gradients_bytes": "grad",
    "optimizer_bytes": "optim",
    "activations_bytes": "activ",
    "logits_bytes": "logits",
    "buckets_bytes": "comm",
    "temporaries_bytes": "temp",
}
#: Columns of text, which are aligned to the left.
_TEXT = {
    "", "offload", "checkpt", "peak in", "  fits", "moment", "ds_config", "preset", "phase", "by", "GPU", "source",
    "network", "  room",
}  # fmt: skip
#: Columns to leave out of a table that is too wide, the first of these first; whether a row fits, and its rate, stay.
_DROPPED_FIRST = (
    "source", "preset", "peak in", "temp", "comm", "logits", "context", "reserve", "NVMe", "optim", "grad", "param",
    "activ", "host", "loss", "tokens D", "D/N", "layers", "heads", "width", "MFU", "difference", "fillers", "total",
)  # fmt: skip
#: Columns to leave out if no record has anything for them.
_OPTIONAL = {"GPU", "$/h", "ds_config", "fillers", "host", "NVMe", "tok/s", "MFU", "$ per 1B"}
#: Smallest widths of columns that may be cut.
_LEAST = {"source": 20, "ds_config": 16}


def table(
    heads: Mapping[str, str],
    records: Sequence[object],
    *,
    is_marked: Callable[[Any], bool] | None = None,
    group: str = "",
    width: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a table that fits `width`, by default the terminal's: a line for every record.

    `heads`: attribute of a record, such as `strategy.offload`, and its heading. `is_marked`: whether a record has `*`.
    `group`: attribute whose changes leave an empty line.
    """
    cells = [[_cell(path, _value(record, path)) for path in heads] for record in records]
    used = [i for i, name in enumerate(heads.values()) if name not in _OPTIONAL or any(row[i] != "-" for row in cells)]
    lines: list[list[str]] = []
    for i, record in enumerate(records):
        if group and i and _value(record, group) != _value(records[i - 1], group):
            lines.append([])
        lines.append(["*" if is_marked and is_marked(record) else "", *(cells[i][j] for j in used)])
    yield from align(["", *([*heads.values()][j] for j in used)], lines, width)


def _value(record: object, path: str) -> object:
    """Return the attribute at a path such as `strategy.offload`; None where one on the way is None."""
    return reduce(lambda value, name: None if value is None else getattr(value, name), path.split("."), record)


def _cell(path: str, value: object) -> str:
    """Return the text of a value by its type, and by the unit in its name; nothing is `-`."""
    if value is None or value in (0, "", "none"):
        return "-"
    if path.endswith(("_bytes", "_bytes_per_node")):
        return gib(value)  # type: ignore[arg-type]  # by its name
    if path.endswith(("share", "mfu")):
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def align(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Yield the lines of a table of cells that fits `width`; default: the terminal's."""
    order = {name: len(_DROPPED_FIRST) - place for place, name in enumerate(_DROPPED_FIRST)}
    columns = [Column(name, name in _TEXT, order.get(name, 0), _LEAST.get(name, 0)) for name in head]
    return table_lines(columns, rows, width or output_width())


def as_json(value: object) -> object:
    """Return JSON values: of a record its fields, without those that its repr leaves out, and the attributes that it
    names in DERIVED, by the last name of their paths."""
    if is_dataclass(value):
        paths = [field.name for field in fields(value) if field.repr]
        of_shape = ("num_parameters", "active_parameters") if isinstance(value, GPTShape) else ()
        paths += (*of_shape, *getattr(value, "DERIVED", ()))
        return {path.rpartition(".")[2]: as_json(_value(value, path)) for path in paths}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def show(values: object, lines: Iterable[str], *, is_json: bool) -> None:
    """Print an answer: its values as JSON, or its lines."""
    if is_json:
        print(json.dumps(as_json(values), indent=1))
    else:
        print_fitting(lines)


def gib(num_bytes: int) -> str:
    """Format bytes as GiB with one decimal; zero is `-`."""
    if num_bytes == 0:
        return "-"
    return f"{num_bytes / GIB:,.1f}" if num_bytes >= 0.05 * GIB else "0.0"
