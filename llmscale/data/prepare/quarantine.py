"""Records that are no documents: counted, kept in a file, and too many of them are an error."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llmscale.data.prepare.sources.source import Rejected
from llmscale.errors import DataError

#: Of each record, how much is kept.
_KEPT_BYTES = 1 << 20


def rejected_path(out: Path) -> Path:
    """The file of records that are no documents, beside the set."""
    return out.parent / f"{out.name}.rejected.jsonl"


class Quarantine:
    """A file of JSON lines: where a record stood, why it is none, and its bytes (not UTF-8 as \\x..)."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self.num_records = self.size_bytes = 0
        self._most = most

    def go_on(self, size_bytes: int, num_records: int) -> None:
        """Keep what an interrupted run has put there; what is behind is cut off, and an empty file removed.

        Raises DataError when it was allowed more than this one.
        """
        if num_records > self._most:
            raise DataError(
                f"{self.path} holds {num_records:,} records that were set aside before the interruption, more than "
                f"--max-rejected {self._most}. To go on, give --max-rejected {num_records} or more."
            )
        self.size_bytes, self.num_records = size_bytes, num_records
        if size_bytes:
            os.truncate(self.path, size_bytes)
        else:
            self.path.unlink(missing_ok=True)

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Raises DataError beyond the limit, OSError."""
        if not rejected:
            return
        allowed = rejected[: self._most - self.num_records]
        if allowed:
            with open(self.path, "ab") as file:
                for record in allowed:
                    file.write(_line(record))
                file.flush()
                os.fsync(file.fileno())
                self.size_bytes = file.tell()
            self.num_records += len(allowed)
        if len(allowed) < len(rejected):
            raise TooManyRejected(rejected[len(allowed)], self._most)


class TooManyRejected(DataError):
    """More records are none than may be."""

    def __init__(self, first: Rejected, most: int) -> None:
        remedy = f"To set such records aside and go on, give --max-rejected {max(100, 10 * most)}"
        count = f" {most:,} were set aside before it, as many as may be." if most else ""
        super().__init__(f"{first.describe()}{count} {remedy}.")


def _line(record: Rejected) -> bytes:
    kept = record.contents[:_KEPT_BYTES].rstrip(b"\r\n").decode(errors="backslashreplace")
    return json.dumps({"where": record.where, "reason": record.reason, "contents": kept}).encode() + b"\n"
