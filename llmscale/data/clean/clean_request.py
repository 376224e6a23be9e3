"""What was asked of `data clean`, and whether a folder answers it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.clean.cleaned_set import load_clean_manifest, request_of
from llmscale.data.clean.decontaminate import EvaluationNgrams
from llmscale.data.clean.pipeline import CleanOptions
from llmscale.data.prepare.sources.source import Source
from llmscale.errors import DataError


@dataclass(frozen=True)
class CleanJob:
    """All that decides what is done, wherever it is done."""

    source: Source
    out: Path
    options: CleanOptions
    request: dict[str, object]
    ngrams: EvaluationNgrams | None
    """Of evaluation text, where the step decontaminate is among the options'."""
    shard_bytes: int
    overwrite: bool
    max_rejected: int


def describe_request(source: Source, options: CleanOptions, shard_bytes: int) -> dict[str, object]:
    """What makes one result equal to another, by the flag that sets it. Raises DataError."""
    request: dict[str, object] = {
        "--input": source.name,
        "contents of --input": source.fingerprint()[:16],
        "--steps": ",".join(options.steps),
        "--shard-mb": shard_bytes / (1 << 20),
    }
    if options.decontaminate:
        request["--decontaminate"] = ", ".join(map(str, options.decontaminate))
        request["contents of --decontaminate"] = _hash_files(options.decontaminate)
    if options.tokenizer is not None:
        request["--tokenizer"] = options.tokenizer.spec
        request["contents of --tokenizer"] = options.tokenizer.load().sha256[:16]
    for step in options.steps:
        request |= options.settings_of(step)
    return request


def _hash_files(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def is_already_there(out: Path, request: dict[str, object], *, overwrite: bool) -> bool:
    """Whether `out` answers the request. Raises DataError when it holds anything else."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = load_clean_manifest(out)
    if manifest is None:
        raise DataError(
            f"{out} exists and was not written by `llmscale data clean`, so it will not be replaced. Choose another "
            "--out."
        )
    if overwrite:
        return False
    there = request_of(manifest)
    names = ("--input", "--decontaminate", "--tokenizer")  # where equal contents lie does not matter
    different = [
        f"{key} {there.get(key)!r} there, {request.get(key)!r} now"
        for key in {**there, **request}
        if key not in names and there.get(key) != request.get(key)
    ]
    if different:
        raise DataError(
            f"{out} already holds text cleaned differently: {'; '.join(different)}. Replace it with --overwrite, or "
            "choose another --out."
        )
    return True
