"""Contents of input files."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping

import pyarrow
from pyarrow import parquet


def json_lines(texts: Iterable[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def tar_of(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    contents = io.BytesIO()
    with tarfile.open(fileobj=contents, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return contents.getvalue()


def parquet_of(table: pyarrow.Table | dict[str, list[object]], row_group_size: int = 70) -> bytes:
    contents = io.BytesIO()
    table = pyarrow.table(table) if isinstance(table, dict) else table
    parquet.write_table(table, contents, row_group_size=row_group_size)
    return contents.getvalue()
