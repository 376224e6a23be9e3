"""Fourth stage: every task writes what is left of its documents, and what was removed; and the parts as one result."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from llmscale.data.clean.clean_manifest import Cleaned
from llmscale.data.clean.cleaned_set import REMOVED_FOLDER, shard_name
from llmscale.data.clean.cluster.looked import read_batches, read_facts
from llmscale.data.clean.cluster.work_files import Verdicts, WorkFiles, load_array, whole_folder
from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.jsonl_files import FileFacts
from llmscale.data.clean.pipeline import Amount, CleanOptions, Pipeline, StepReport
from llmscale.data.prepare.tokenise import ReadPosition

_FACTS_NAME = "facts.json"


@dataclass(frozen=True)
class WriteStage:
    """Tasks by their number; each has the documents of the first stage's task of that number."""

    files: WorkFiles
    options: CleanOptions
    shard_bytes: int

    def __call__(self, task: int) -> int:
        """How many documents are left. Raises DataError, OSError."""
        verdicts = Verdicts.load(self.files.verdicts(task))
        ngrams = counts = None
        if "decontaminate" in self.options.steps:
            ngrams, counts = self.files.load_ngrams(), np.array(load_array(self.files.ngram_counts))
        with (
            whole_folder(self.files.part(task)) as folder,
            closing(
                Pipeline(
                    folder,
                    self.options,
                    self.shard_bytes,
                    verdicts.decide,
                    ngrams,
                    first_number=verdicts.first_number,
                    ngram_counts=counts,
                )
            ) as pipeline,
        ):
            for texts, documents in read_batches(self.files.looked(task)):
                pipeline.add(texts, documents)
            document_files, removed_files = pipeline.finish()
            facts = {
                "taken_in": asdict(pipeline.taken_in),
                "kept": asdict(pipeline.kept),
                "reports": [report.to_record() for report in pipeline.reports],
                "documents": [asdict(file) for file in document_files],
                "removed": [asdict(file) for file in removed_files],
            }
            (folder / _FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")
        return pipeline.kept.documents


def _read_part(files: WorkFiles, task: int) -> Cleaned:
    facts = json.loads((files.part(task) / _FACTS_NAME).read_bytes())
    mark, passed_over = read_facts(files.looked(task))
    return Cleaned(
        Amount(**facts["taken_in"]),
        Amount(**facts["kept"]),
        [StepReport.of_record(record) for record in facts["reports"]],
        mark,
        [FileFacts(**file) for file in facts["documents"]],
        [FileFacts(**file) for file in facts["removed"]],
        passed_over=passed_over,
    )


def join_parts(
    files: WorkFiles, num_tasks: int, folder: Path, options: CleanOptions, ngrams: EvaluationNgrams | None
) -> Cleaned:
    """All parts as one result, with their files in `folder`; killed meanwhile, it can be done again. Raises OSError."""
    (folder / REMOVED_FOLDER).mkdir(parents=True, exist_ok=True)
    taken_in, kept, mark = Amount(), Amount(), ReadPosition()
    reports = [StepReport(step) for step in options.steps]
    passed_over: Counter[str] = Counter()
    documents: list[FileFacts] = []
    removed: list[FileFacts] = []
    for task in range(num_tasks):
        part = _read_part(files, task)
        taken_in.add_all(part.taken_in)
        kept.add_all(part.kept)
        mark = _add_marks(mark, part.mark)
        passed_over.update(part.passed_over)
        for report, more in zip(reports, part.reports, strict=True):
            report.add_all(more)
        for file in part.documents:
            documents.append(replace(file, name=shard_name(len(documents))))
            _move(files.part(task) / file.name, folder / documents[-1].name)
        for file in part.removed:
            if file.records:
                removed.append(replace(file, name=file.name.replace(".", f"-{task:05}.", 1)))
                _move(files.part(task) / REMOVED_FOLDER / file.name, folder / REMOVED_FOLDER / removed[-1].name)
    removed.sort(key=lambda file: file.name)
    num_ignored = 0
    if ngrams is not None:
        num_ignored = int((load_array(files.ngram_counts) > options.max_ngram_documents).sum())
    num_short = ngrams.num_short if ngrams else 0
    return Cleaned(taken_in, kept, reports, mark, documents, removed, num_ignored, num_short, passed_over)


def _add_marks(first: ReadPosition, second: ReadPosition) -> ReadPosition:
    counts = [field.name for field in fields(ReadPosition) if field.name not in ("place", "is_end")]
    return replace(first, is_end=True, **{name: getattr(first, name) + getattr(second, name) for name in counts})


def _move(source: Path, target: Path) -> None:
    if source.exists() or not target.exists():
        os.replace(source, target)
