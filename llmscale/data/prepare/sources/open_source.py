"""Open `--input`: files, folders, patterns, stores, Hugging Face datasets, Python's standard library, or several of
these."""

from __future__ import annotations

import glob as globbing
import hashlib
import json
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from llmscale.config.bundled_files import install_command
from llmscale.data.prepare.output_folder import rejected_path
from llmscale.data.prepare.sources.clean_folder import load_clean_manifest, without_removed
from llmscale.data.prepare.sources.file_source import (
    SPLITS_NAME,
    STATE_NAME,
    STDIN,
    ConcatSource,
    FileSource,
    StandardInput,
    open_files,
)
from llmscale.data.prepare.sources.formats import TEXT, format_of
from llmscale.data.prepare.sources.python_docs import PYTHON_DOCS, PythonDocs
from llmscale.data.prepare.sources.remote_files import open_remote
from llmscale.data.prepare.sources.source import (
    HIDDEN,
    NOT_REGULAR,
    Document,
    LocalFile,
    PassedOver,
    Place,
    ReadOptions,
    Record,
    Rejected,
    Source,
    TokenRules,
    lacks_field,
    matches,
    missing_field,
    walk,
)
from llmscale.data.prepare.sources.tokens import INDEX_NAME, LocalMdsFolder, MdsSource
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.data.storage.faults import is_transient
from llmscale.data.storage.schemes import check_not_forgotten, has_pattern, is_url
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.hub import check_data_set, forgotten_prefix, is_offline
from llmscale.untrusted.paths import check_regular
from llmscale.untrusted.terminal import print_visible

HF_PREFIX = "hf:"
#: Pauses between attempts without a record; any record restarts the sequence.
RETRY_PAUSES_S = (1.0, 4.0, 16.0, 60.0)


def check_data_sets(specs: Iterable[str]) -> None:
    """Ask the Hub about each `hf:` input before anything is written. Raises DataError."""
    for spec in specs:
        name = spec.removeprefix(HF_PREFIX).partition(":")[0]
        if spec.startswith(HF_PREFIX) and not os.path.isdir(name):
            check_data_set(name, f"--input {spec}", DataError)


class HuggingFaceSource(Source):
    """One split of a dataset on the Hub or in a local folder, streamed. Places are (number of records read,)."""

    def __init__(self, name: str, options: ReadOptions) -> None:
        self.name = name
        self._split = options.hf_split
        self.passed_over = set()
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
            except Exception as error:  # the client raises many classes: network, missing names, scripts, ...
                summary = (str(error).strip().splitlines() or [type(error).__name__])[0]
                where = f"Cannot read {self.name}, split {self._split}"
                if is_offline() or not is_transient(error) or num_failures == len(RETRY_PAUSES_S):
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

        # Its own retries print a page each.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        dataset, _, config = self.name.removeprefix(HF_PREFIX).partition(":")
        # Older versions of `datasets` could run a script of the dataset.
        records = load_dataset(dataset, config or None, split=self._split, streaming=True, trust_remote_code=False)
        return iter(records.skip(done) if done else records)

    def _document(self, record: dict[str, object], number: int) -> Record:
        field, where = self._options.text_field, f"{self.name}, record {number}"
        try:
            text = self._options.text_of(record)
        except KeyError:
            if number == 0:
                raise missing_field(where, field, record) from None
            reason = lacks_field(field, record)
        else:
            if isinstance(text, str):
                return Document(text, (number + 1,))
            reason = f"the field '{field}' holds {type(text).__name__}, not text"
        return Rejected(where, reason, str(record)[:10_000].encode(errors="replace"), (number + 1,))

    def fingerprint(self) -> str:
        """Hash the names only; a changed copy on the Hub is not noticed."""
        return hashlib.sha256(json.dumps([self.name, self._split, self._options.text_field]).encode()).hexdigest()


STDLIB = "python-stdlib"
#: Subfolders of the standard library's folder that do not belong to it.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
#: Its files that are read as text although the user's are not.
_STDLIB_MARKUP = {".html", ".htm", ".xml", ".csv", ".tsv"}
_LEGAL = (
    "a file, a folder, a pattern such as 'crawl/*.jsonl.zst', s3:// or another store's URL, - for stdin, "
    f"{PYTHON_DOCS}, hf:NAME[:CONFIG] or {STDLIB}"
)


def open_source(
    *specs: str,
    text_field: str | None = None,
    hf_split: str = "train",
    glob: str | None = None,
    skip_undecodable: bool = False,
    out: Path | str | None = None,
    is_chat: bool = False,
) -> Source:
    """Open the inputs in the order given: each a file, a folder (recursive), a pattern, any of these in a store
    (`s3://`), MDS shards, `-`, `hf:NAME[:CONFIG]`, `python-stdlib` or `python-docs`.

    `glob` selects a folder's files by name or relative path; by default its records, or else its text. Patterns skip
    files in and beside `out`, so that the same command finds the same files again. Raises DataError when there is
    nothing to read, and for a `text_field` when no record has fields.
    """
    if glob is not None and not any(os.path.isdir(spec) or (is_url(spec) and not has_pattern(spec)) for spec in specs):
        raise DataError(
            f"--glob '{glob}' selects files of a folder, but --input {', '.join(specs)} is not a folder. Drop it."
        )
    options = ReadOptions(
        text_field or ("messages" if is_chat else "text"), skip_undecodable, hf_split, is_chat=is_chat
    )
    sources = [_open_one(spec, options, glob, out) for spec in specs]
    if text_field is not None and not any(source.has_fields() for source in sources):
        raise DataError(
            f"--text-field '{text_field}' selects a field of JSON, CSV, Parquet, Arrow, MDS or hf: records, but "
            f"--input {', '.join(specs)} has none. Drop it."
        )
    return sources[0] if len(sources) == 1 else ConcatSource(sources)


def _open_one(spec: str, options: ReadOptions, glob: str | None, out: Path | str | None) -> Source:
    if is_url(spec):
        return open_remote(spec, options, glob, out if isinstance(out, str) else None)
    check_not_forgotten(spec, "--input")
    if spec.startswith(HF_PREFIX):
        saved = Path(spec.removeprefix(HF_PREFIX))
        if any((saved / name).is_file() for name in (SPLITS_NAME, STATE_NAME)):
            return _open_folder(saved, spec, options, glob)
        return HuggingFaceSource(spec, options)
    if spec == STDLIB:
        return _open_stdlib(options)
    if spec == PYTHON_DOCS:
        return PythonDocs()
    if spec == STDIN:
        return FileSource(spec, [StandardInput()], options)
    path = Path(spec)
    if path.is_dir() and (path / INDEX_NAME).is_file() and _is_foreign_mds(path):
        return MdsSource(spec, LocalMdsFolder(path), options)
    if path.is_dir():
        return _open_folder(path, spec, options, glob)
    if globbing.has_magic(spec) and not os.path.lexists(spec):
        return _open_pattern(spec, options, out if isinstance(out, Path) else None)
    _check_file(path, spec)
    return FileSource(spec, [LocalFile(path, path.parent)], options)


def _open_stdlib(options: ReadOptions) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files, _, _ = walk(root, _STDLIB_EXCLUDED)
    known = [LocalFile(path, root) for path in files if path.suffix in TEXT.suffixes | _STDLIB_MARKUP]
    return FileSource(STDLIB, known, ReadOptions(options.text_field, skip_undecodable=True, is_plain=True))


def _open_folder(path: Path, spec: str, options: ReadOptions, glob: str | None) -> Source:
    regular, others, hidden = walk(path)
    regular = without_removed(regular, path, _is_cleaned)

    def is_wanted(file: Path) -> bool:
        relative = file.relative_to(path)
        return matches(relative, glob) if glob is not None else format_of(relative) is not None

    _refuse_shards([file for file in regular if is_wanted(file)], spec)
    irregular = [other for other in others if other.is_dir() or is_wanted(other)]
    passed_over = {PassedOver(NOT_REGULAR, str(other.relative_to(path))) for other in irregular}
    if glob is None:
        passed_over |= {PassedOver(HIDDEN, str(file.relative_to(path))) for file in hidden}
    return open_files(spec, [LocalFile(file, path) for file in regular], options, glob, passed_over)


def _is_cleaned(folder: PurePath) -> bool:
    return load_clean_manifest(Path(folder)) is not None


def _is_foreign_mds(folder: Path) -> bool:
    """Return whether a folder holds MDS shards that `llmscale data prepare` did not write."""
    is_prepared = any((place / MANIFEST_NAME).exists() for place in (folder, folder.parent))
    return not is_prepared and next(folder.glob("*.mds*"), None) is not None


def _open_pattern(spec: str, options: ReadOptions, out: Path | None) -> Source:
    """Open the matching files, sorted; `**` descends into folders."""
    files = [Path(name) for name in sorted(globbing.glob(spec, recursive=True)) if os.path.isfile(name)]
    if out is not None:
        ours = Path(os.path.realpath(out))
        places = [Path(os.path.realpath(file)) for file in files]
        is_ours = [ours in place.parents or place == rejected_path(ours) for place in places]
        files = [file for file, written_here in zip(files, is_ours, strict=True) if not written_here]
    if not files:
        raise DataError(f"--input {spec}: no file matches. Legal: {_LEGAL}.")
    above = next(folder for folder in Path(spec).parents if not globbing.has_magic(str(folder)))
    files = without_removed(files, above, _is_cleaned)
    if not files:
        raise DataError(f"--input {spec}: only files that `data clean` removed match. Name its folder.")
    _refuse_shards(files, spec)
    root = Path(os.path.commonpath([file.parent for file in files]))
    return FileSource(spec, [LocalFile(file, root) for file in files], options)


def check_apart(specs: Sequence[str], out: Path | str) -> None:
    """Refuse an `--out` inside or around an `--input`: the next run would read this one's output, and `--overwrite`
    would delete the text. Raises DataError."""
    for spec in specs:
        if is_url(spec) and isinstance(out, str):
            ours, theirs = f"{out.rstrip('/')}/", f"{spec.rstrip('/')}/"
            if ours.startswith(theirs) or theirs.startswith(ours):
                raise DataError(
                    f"--out {out} and --input {spec} are inside one another. Choose an --out beside the text."
                )
        if is_url(spec) or isinstance(out, str) or spec.startswith(HF_PREFIX) or spec == STDIN:
            continue
        # os.path.realpath, because Path.resolve raises on a loop of links.
        source = Path(os.path.realpath(sysconfig.get_path("stdlib") if spec in (STDLIB, PYTHON_DOCS) else spec))
        place = Path(os.path.realpath(out))
        if source == place or source in place.parents or place in source.parents:
            raise DataError(
                f"--out {out} and --input {spec} are inside one another ({place} and {source}). Choose an --out beside "
                "the text."
            )


def _check_file(path: Path, spec: str) -> None:
    """Raise DataError unless the path is a readable text file."""
    try:
        check_regular(path, follow_links=True)
    except (FileNotFoundError, NotADirectoryError):
        hint = forgotten_prefix(spec) or did_you_mean(spec, [STDLIB, PYTHON_DOCS])
        raise DataError(f"--input {spec} does not exist.{hint} Legal: {_LEGAL}.") from None
    except OSError as error:
        raise DataError(f"--input {spec} cannot be read: {error.strerror}.") from None
    _refuse_shards([path], spec)


def _refuse_shards(files: list[Path], spec: str) -> None:
    """Refuse MDS shards, whose JSON index and manifest would be read as text. Raises DataError."""
    folders = {path.parent for path in files if path.suffix == ".json" or ".mds" in path.suffixes}
    for folder in sorted(folders):
        if next(folder.glob("*.mds*"), None) is not None or next(folder.glob("*/*.mds*"), None) is not None:
            raise DataError(
                f"--input {spec}: {folder} holds MDS shards, not text. For a prepared dataset give its original text, "
                "for another program's shards the folder of their index.json, or select files with --glob."
            )
