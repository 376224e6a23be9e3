"""Data sets of the Hugging Face Hub, streamed; a connection that breaks is opened again where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from llmscale.config.bundled_files import install_command
from llmscale.data.prepare.sources.source import (
    Document,
    Place,
    ReadOptions,
    Record,
    Rejected,
    Source,
    TokenRules,
    lacks_field,
    missing_field,
)
from llmscale.data.storage.faults import may_pass
from llmscale.errors import DataError
from llmscale.untrusted.hub import check_data_set, is_offline
from llmscale.untrusted.terminal import print_visible

HF_PREFIX = "hf:"
#: Pauses between tries in which no record came; any record begins them anew.
RETRY_PAUSES_S = (1.0, 4.0, 16.0, 60.0)


def check_data_sets(specs: Iterable[str]) -> None:
    """Ask the Hub for each `hf:` set among the inputs, before anything is written. Raises DataError."""
    for spec in specs:
        name = spec.removeprefix(HF_PREFIX).partition(":")[0]
        if spec.startswith(HF_PREFIX) and not os.path.isdir(name):
            check_data_set(name, f"--input {spec}", DataError)


class HuggingFaceSource(Source):
    """One split of a data set on the Hub, or of a local folder. Places are (records,), how many were read."""

    def __init__(self, name: str, split: str, options: ReadOptions) -> None:
        self.name = name
        self._split = split
        self.passed_over = Counter()
        self._options = options

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        (done,) = start or (0,)
        num_failures = 0
        while True:
            try:
                for record in self._open(done):
                    yield self._document(record, done)
                    done, num_failures = done + 1, 0
                return
            except DataError:
                raise
            except ImportError:
                raise DataError(f"hf: needs the `datasets` library: `{install_command('data')}`.") from None
            except Exception as error:  # the hub client raises many kinds: network, missing names, scripts, ...
                summary = (str(error).strip().splitlines() or [type(error).__name__])[0]
                where = f"Cannot read {self.name}, split {self._split}"
                if is_offline() or not may_pass(error) or num_failures == len(RETRY_PAUSES_S):
                    raise DataError(f"{where}: {summary}") from error
                pause_s = RETRY_PAUSES_S[num_failures]
                num_failures += 1
                print_visible(
                    f"{where}, record {done}: {summary[:200]}. Trying again in {pause_s:g} s "
                    f"({num_failures} of {len(RETRY_PAUSES_S)}).",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(pause_s)

    def _open(self, done: int) -> Iterator[dict[str, object]]:
        from datasets import load_dataset

        # Its own retries are not ours, and print a page each.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        dataset, _, config = self.name.removeprefix(HF_PREFIX).partition(":")
        # Older versions of the library run a script that comes with the data set.
        records = load_dataset(dataset, config or None, split=self._split, streaming=True, trust_remote_code=False)
        return iter(records.skip(done) if done else records)

    def _document(self, record: dict[str, object], number: int) -> Record:
        field, where = self._options.text_field, f"{self.name}, record {number}"
        text = record.get(field)
        if isinstance(text, str):
            return Document(text, (number + 1,))
        if field not in record and number == 0:
            raise missing_field(where, field, list(record))
        reason = (
            f"the field '{field}' holds {type(text).__name__}, not text"
            if field in record
            else lacks_field(field, list(record))
        )
        return Rejected(where, reason, str(record)[:10_000].encode(errors="replace"), (number + 1,))

    def fingerprint(self) -> str:
        """Of the names alone: whether the hub's copy has changed is not asked."""
        return hashlib.sha256(json.dumps([self.name, self._split, self._options.text_field]).encode()).hexdigest()
