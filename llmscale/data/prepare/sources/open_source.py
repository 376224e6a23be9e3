"""Open `--input`: files, folders, patterns, stores, Hugging Face datasets, Python's standard library, or several of
these."""

from __future__ import annotations

import ast
import glob as globbing
import hashlib
import io
import json
import logging
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO, cast

from llmscale.config.bundled_files import install_command
from llmscale.data.prepare.conversations import without_nulls
from llmscale.data.prepare.output_folder import rejected_path
from llmscale.data.prepare.sources.clean_folder import MANIFEST_NAME as CLEAN_MANIFEST_NAME
from llmscale.data.prepare.sources.clean_folder import load_clean_manifest, parse_clean_manifest, without_removed
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
from llmscale.data.prepare.sources.source import (
    HIDDEN,
    NOT_REGULAR,
    Document,
    InputFile,
    LocalFile,
    PassedOver,
    Place,
    ReadOptions,
    Record,
    Rejected,
    Source,
    TokenRules,
    document_of,
    matches,
    walk,
)
from llmscale.data.prepare.sources.tokens import INDEX_NAME, MdsSource
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.data.storage.faults import Missing, is_transient
from llmscale.data.storage.objects import Store, StoredObject
from llmscale.data.storage.schemes import check_not_forgotten, folder_of, has_pattern, is_url, path_of
from llmscale.errors import DataError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.hub import check_data_set, forgotten_prefix, is_offline, without_prefix
from llmscale.untrusted.paths import check_regular
from llmscale.untrusted.terminal import print_visible

HF_PREFIX = "hf:"
#: Pauses between attempts without a record; any record restarts the sequence.
RETRY_PAUSES_S = (1.0, 4.0, 16.0, 60.0)
PYTHON_DOCS = "python-docs"
#: Folders without docstrings of the library: installed packages, tests and compiled modules.
_UNDOCUMENTED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
#: Module of the language reference that `help()` shows: one dictionary of texts.
_REFERENCE = "pydoc_data/topics.py"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STDLIB = "python-stdlib"
#: Subfolders of the standard library's folder that do not belong to it.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
#: Its files that are read as text although the user's are not.
_STDLIB_MARKUP = {".html", ".htm", ".xml", ".csv", ".tsv"}
_LEGAL = (
    "a file, a folder, a pattern such as 'crawl/*.jsonl.zst', s3:// or another store's URL, - for stdin, "
    f"{PYTHON_DOCS}, hf:NAME[:CONFIG] or {STDLIB}"
)
#: Bytes per request; while one part is read, the next one is being fetched.
_PART_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20


def check_data_sets(specs: Iterable[str]) -> None:
    """Ask the Hub about each `hf:` input before anything is written. Raises DataError."""
    for spec in specs:
        if not spec.startswith(HF_PREFIX):
            continue
        name = without_prefix(f"--input {spec}", spec, DataError).partition(":")[0]
        if not os.path.isdir(name):
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
                    where = f"{self.name}, record {done}"
                    if self._options.is_chat:
                        record = cast("dict[str, object]", without_nulls(record))
                    document = document_of(record, self._options, where, b"", is_first=done == 0)
                    if isinstance(document, Rejected):
                        document.contents = str(record)[:10_000].encode(errors="replace")
                    done = done + 1
                    num_failures = 0
                    document.place = (done,)
                    yield document
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

    def fingerprint(self) -> str:
        """Hash the names only; a changed copy on the Hub is not noticed."""
        return hashlib.sha256(json.dumps([self.name, self._split, self._options.text_field]).encode()).hexdigest()


class PythonDocs(Source):
    """Every topic of the reference, and for each module of the library its docstrings. Places are (texts given,)."""

    name = PYTHON_DOCS

    def __init__(self) -> None:
        """Find the modules. Raises DataError for a Python without the sources of its library."""
        self.passed_over = set()
        self._root = Path(sysconfig.get_path("stdlib"))
        self._modules = [path for path in walk(self._root, _UNDOCUMENTED)[0] if path.suffix == ".py"]
        if not self._modules:
            raise DataError(f"{PYTHON_DOCS}: {self._root} holds no sources of Python's standard library.")

    @cached_property
    def total_bytes(self) -> int:  # type: ignore[override]  # known once the modules are read
        return sum(len(text.encode()) for text in self._texts)

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        (done,) = start or (0,)
        self.read_bytes = 0
        for number, text in enumerate(self._texts, start=1):
            self.read_bytes += len(text.encode())
            if number > done:
                yield Document(text, (number,))

    def has_fields(self) -> bool:
        return False

    def fingerprint(self) -> str:
        """Hash the modules' names and sizes. Hosts with the same Python have the same text."""
        modules = [[path.relative_to(self._root).as_posix(), path.stat().st_size] for path in self._modules]
        return hashlib.sha256(json.dumps(modules).encode()).hexdigest()

    @cached_property
    def _texts(self) -> list[str]:
        return [text for path in self._modules for text in _read_module(path) if text]


def _read_module(path: Path) -> Iterator[str]:
    """Yield a module's docstrings as one text, or the topics of the reference; nothing for one that cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    if path.as_posix().endswith(_REFERENCE):
        topics = next(node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)))
        if topics is not None:
            yield from dict.fromkeys(map(_without_tables, ast.literal_eval(topics).values()))
        return
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    yield "\n\n".join(filter(None, docstrings))


def _without_tables(text: str) -> str:
    """Return a text without the rows and rules of its tables, and without underlining."""
    return "\n".join(line for line in text.split("\n") if not re.match(r"\s*([|+]|[-=*~^\"' ]+$)", line))


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
    if len(sources) == 1:
        source = sources[0]
    else:
        source = ConcatSource(sources)
    if text_field is not None and not source.has_fields():
        raise DataError(
            f"--text-field '{text_field}' selects a field of JSON, CSV, Parquet, Arrow, MDS or hf: records, but "
            f"--input {', '.join(specs)} has none. Drop it."
        )
    return source


def _open_one(spec: str, options: ReadOptions, glob: str | None, out: Path | str | None) -> Source:
    if is_url(spec):
        return _open_remote(spec, options, glob, out if isinstance(out, str) else None)
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
    if path.is_dir():
        return _open_folder(path, spec, options, glob)
    if globbing.has_magic(spec) and not os.path.lexists(spec):
        return _open_pattern(spec, options, out if isinstance(out, Path) else None)
    _check_file(path, spec)
    return _open_named(spec, [LocalFile(path, path.parent)], options)


def _open_stdlib(options: ReadOptions) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files, _, _ = walk(root, _STDLIB_EXCLUDED)
    known = [LocalFile(path, root) for path in files if path.suffix in TEXT.suffixes | _STDLIB_MARKUP]
    return FileSource(STDLIB, known, ReadOptions(options.text_field, skip_undecodable=True, is_plain=True))


def _open_folder(path: Path, spec: str, options: ReadOptions, glob: str | None) -> Source:
    is_prepared = any((place / MANIFEST_NAME).exists() for place in (path, path.parent))
    if (path / INDEX_NAME).is_file() and not is_prepared and next(path.glob("*.mds*"), None) is not None:
        return MdsSource(spec, {file.name: LocalFile(file, path) for file in path.iterdir() if file.is_file()}, options)
    regular, others, hidden = walk(path)
    irregular = [other.relative_to(path) for other in others]
    passed_over = {
        PassedOver(NOT_REGULAR, str(name)) for name in irregular if (path / name).is_dir() or _is_wanted(name, glob)
    }
    if glob is None:
        passed_over |= {PassedOver(HIDDEN, str(file.relative_to(path))) for file in hidden}
    files = [LocalFile(file, path) for file in without_removed(regular, path, _is_cleaned)]
    _refuse_shards([file for file in files if _is_wanted(PurePath(file.relative), glob)], _holds_shards, spec)
    return open_files(spec, files, options, glob, passed_over)


def _is_wanted(path: PurePath, glob: str | None) -> bool:
    if glob is not None:
        return matches(path, glob)
    return format_of(path) is not None


def _is_cleaned(folder: PurePath) -> bool:
    return load_clean_manifest(Path(folder)) is not None


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
    root = Path(os.path.commonpath([file.parent for file in files]))
    return _open_named(spec, [LocalFile(file, root) for file in files], options)


def _open_named(spec: str, files: Sequence[LocalFile], options: ReadOptions) -> Source:
    _refuse_shards(files, _holds_shards, spec)
    return FileSource(spec, files, options)


def _refuse_shards(files: Sequence[InputFile], holds_shards: Callable[[str], bool], spec: str) -> None:
    """Refuse MDS shards, whose JSON index and manifest would be read as text. Raises DataError.

    `holds_shards` tells whether a folder, or one in it, has shards.
    """
    names = [file.name for file in files if file.name.endswith(".json") or ".mds" in PurePath(file.name).suffixes]
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        if holds_shards(folder):
            raise DataError(
                f"--input {spec}: {folder} holds MDS shards, not text. For a prepared dataset give its original text, "
                "for another program's shards the folder of their index.json, or select files with --glob."
            )


def _holds_shards(folder: str) -> bool:
    return any(next(Path(folder).glob(pattern), None) is not None for pattern in ("*.mds*", "*/*.mds*"))


def check_apart(specs: Sequence[str], out: Path | str) -> None:
    """Refuse an `--out` inside or around an `--input`: the next run would read this one's output, and `--overwrite`
    would delete the text. Raises DataError."""
    for spec in specs:
        if is_url(spec) and isinstance(out, str):
            ours = f"{out.rstrip('/')}/"
            theirs = f"{spec.rstrip('/')}/"
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


def _open_remote(spec: str, options: ReadOptions, glob: str | None, out: str | None) -> Source:
    """Open an object, those that match a pattern and are not below `out`, MDS shards, or all files of known formats
    below a name. Raises DataError."""
    store = Store(spec, for_reading=True)
    root = folder_of(spec)
    objects = store.list_objects(spec)
    if out is not None and has_pattern(spec):
        objects = [stored for stored in objects if not stored.url.startswith(f"{out.rstrip('/')}/")]
    if not objects:
        raise DataError(f"--input {spec}: nothing has that name. Patterns: * within a name, ** across /.")
    folders = {stored.url.rpartition("/")[0] for stored in objects if ".mds" in PurePosixPath(stored.path).suffixes}
    around = folders | {folder.rpartition("/")[0] for folder in folders}
    if [stored.path for stored in objects] == [path_of(spec)]:
        if glob is not None:
            raise DataError(f"--glob '{glob}' selects objects below a name, but {spec} is one object. Drop it.")
        file = RemoteFile(store, objects[0], root.rpartition("/")[0])
        _refuse_shards([file], around.__contains__, spec)
        return FileSource(spec, [file], options)
    if not has_pattern(spec) and spec.rstrip("/") in folders:
        beside = [stored for stored in objects if stored.url.rpartition("/")[0] == spec.rstrip("/")]
        files = {stored.url.rpartition("/")[2]: RemoteFile(store, stored, root) for stored in beside}
        above = spec.rstrip("/").rpartition("/")[0]
        is_prepared = MANIFEST_NAME in files or (path_of(above) and store.list_objects(f"{above}/{MANIFEST_NAME}"))
        if INDEX_NAME in files and not is_prepared:
            return MdsSource(spec, files, options)
    by_path = {PurePosixPath(stored.path): RemoteFile(store, stored, root) for stored in objects}
    hidden = {path: part for path, file in by_path.items() if (part := _hidden_part(PurePosixPath(file.relative)))}
    is_cleaned = partial(_is_cleaned_in_store, store, spec.partition("://")[0])
    visible = without_removed([path for path in by_path if path not in hidden], PurePosixPath(root), is_cleaned)
    chosen = [by_path[path] for path in visible]
    if has_pattern(spec):
        _refuse_shards(chosen, around.__contains__, spec)
        return FileSource(spec, chosen, options)
    wanted = [file for file in chosen if _is_wanted(PurePosixPath(file.relative), glob)]
    _refuse_shards(wanted, around.__contains__, spec)
    passed_over = {PassedOver(HIDDEN, str(part)) for part in hidden.values() if glob is None}
    return open_files(spec, chosen, options, glob, passed_over)


def _is_cleaned_in_store(store: Store, scheme: str, folder: PurePath) -> bool:
    url = f"{scheme}://{folder}/{CLEAN_MANIFEST_NAME}"
    try:
        return parse_clean_manifest(store.read_small(url), url) is not None
    except Missing:
        return False


def _hidden_part(path: PurePosixPath) -> PurePosixPath | None:
    """Return the path of the first hidden name, or None."""
    return next((part for part in reversed((path, *path.parents)) if part.name.startswith(".")), None)


class RemoteFile(InputFile):
    """An object of a store."""

    is_remote = True

    def __init__(self, store: Store, stored: StoredObject, root: str) -> None:
        """`root` is the folder in the store that the user named."""
        self._store = store
        self._stored = stored
        self.name = stored.url
        self.relative = stored.path.removeprefix(root).lstrip("/")
        self.size_bytes = stored.size_bytes
        self.version = stored.version

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Parts(self._store, self._stored), _BUFFER_BYTES)


class _Parts(io.RawIOBase):
    """An object, read in parts with one part read ahead. Reading raises DataError once it has changed."""

    def __init__(self, store: Store, stored: StoredObject) -> None:
        self._store = store
        self._stored = stored
        self._size_bytes = stored.size_bytes
        self._stop = threading.Event()
        self._place = 0
        self._begin = 0
        self._part = b""
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}[whence])
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._place >= self._size_bytes:
            return 0
        if not self._begin <= self._place < self._begin + len(self._part):
            self._begin, self._part = self._place, self._fetch(self._place)
        first = self._place - self._begin
        data = memoryview(self._part)[first : first + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _fetch(self, begin: int) -> bytes:
        ahead = self._ahead
        self._ahead = None
        is_next = begin == self._begin + len(self._part) or begin == 0
        if ahead is not None and ahead[0] == begin:
            part = ahead[1].result()
        else:
            part = self._read_part(begin)
        end = begin + len(part)
        if is_next and end < self._size_bytes:
            self._ahead = end, self._read_ahead(end)
        return part

    def _read_ahead(self, begin: int) -> Future[bytes]:
        part: Future[bytes] = Future()

        def read() -> None:
            try:
                part.set_result(self._read_part(begin))
            except BaseException as error:
                part.set_exception(error)

        # A daemon thread: a process would wait at its end for a pool's thread, during pauses between attempts.
        threading.Thread(target=read, name="fetch", daemon=True).start()
        return part

    def _read_part(self, begin: int) -> bytes:
        end = min(begin + _PART_BYTES, self._size_bytes)
        return self._store.read(self._stored.url, begin, end, version=self._stored.version, stop=self._stop)

    def close(self) -> None:
        self._stop.set()
        self._part = b""
        super().close()
