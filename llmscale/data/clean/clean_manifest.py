"""What was done to the text: for the manifest, and for whoever asked for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import llmscale
from llmscale.data.clean.cleaned_set import FORMAT, FORMAT_VERSION, MANIFEST_NAME
from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.jsonl_files import FileFacts
from llmscale.data.clean.pipeline import Amount, CleanOptions, StepReport
from llmscale.data.prepare.tokenise import ReadPosition
from llmscale.errors import DataError


@dataclass(frozen=True)
class Cleaned:
    """What became of a source."""

    taken_in: Amount
    kept: Amount
    reports: list[StepReport]
    mark: ReadPosition
    """Behind the last record, with what of them was no document."""
    documents: Sequence[FileFacts] = ()
    """Files of what is left."""
    removed: Sequence[FileFacts] = ()
    """Files of what was removed."""
    num_ignored_ngrams: int = 0
    """Of evaluation text, found in too many documents."""
    num_short_items: int = 0
    """Of evaluation text, with too few words to be looked for."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Files that other machines met and did not read, by suffix."""
    reused: bool = False
    """The folder was there already and nothing was done."""

    def check_anything_left(self, name: str) -> None:
        """Raises DataError when nothing is left of the source of that name."""
        if self.kept.documents:
            return
        if not self.taken_in.documents:
            raise DataError(f"{name} has no text.")
        worst = max(self.reports, key=lambda report: report.removed.documents)
        rules = ", ".join(f"{rule} {count:,}" for rule, count in worst.rules.most_common(3))
        raise DataError(
            f"{name}: nothing is left of {self.taken_in.documents:,} documents. The step {worst.step} took "
            f"{worst.removed.documents:,} of them ({rules}). Leave it out of --steps, or change its settings."
        )


def write_manifest(
    folder: Path,
    cleaned: Cleaned,
    options: CleanOptions,
    request: Mapping[str, object],
    ngrams: EvaluationNgrams | None,
    more: Mapping[str, object],
) -> None:
    """Everything that was done, and the files that it made. `more` is said besides. Raises OSError."""
    mark = cleaned.mark

    def describe(amount: Amount) -> dict[str, object]:
        facts = asdict(amount)
        return facts if options.tokenizer else {name: value for name, value in facts.items() if name != "tokens"}

    manifest: dict[str, object] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "llmscale": llmscale.__version__,
        "packages": {name: version_of(name) for name in ("rensa", "py3langid")},
        **more,
        "request": request,
        "taken_in": {
            **describe(cleaned.taken_in),
            "empty": mark.num_empty,
            "rejected": mark.num_rejected,
            "skipped": mark.num_skipped,
            "cut": mark.num_cut,
        },
        "kept": describe(cleaned.kept),
        "steps": [
            {
                "step": report.step,
                "settings": options.settings_of(report.step),
                "taken_in": describe(report.taken_in),
                "removed": describe(report.removed),
                "documents_changed": report.num_changed,
                "rules": dict(sorted(report.rules.items())),
            }
            for report in cleaned.reports
        ],
        "documents": [asdict(facts) for facts in cleaned.documents],
        "removed": [asdict(facts) for facts in cleaned.removed],
    }
    if ngrams is not None:
        manifest["evaluation_text"] = {
            "ngrams": len(ngrams.hashes),
            "items": len(ngrams.labels),
            "items_too_short": ngrams.num_short,
            "ngrams_ignored": cleaned.num_ignored_ngrams,
        }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
