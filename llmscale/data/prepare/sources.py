"""Documents from what `--input` names: files, folders, Hugging Face sets, Python's standard library."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from llmscale.data.prepare.read_files import TEXT_SUFFIXES, UndecodableError, kind_of, read_documents
from llmscale.errors import DataError, did_you_mean
from llmscale.untrusted.paths import check_regular

STDLIB = "python-stdlib"
HF_PREFIX = "hf:"
#: Parts of the standard library's folder that are not its own text.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """What the user wrote."""
    total_bytes: int | None = None
    """Bytes that will be read, compressed as they are; None when unknown."""
    left_out: str | None = None
    """What `--input` names and is not read, in one line; None when everything is."""
    num_cut: int = 0
    """Texts that the last pass made several documents of, because they are too long for one."""
    skipped: int = 0
    """Documents that the last pass left out because they could not be decoded."""
    passed_over: Counter[str]
    """Files of the folder that are not read, by suffix."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """The text of every document, in order. Raises DataError for what cannot be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A cheap identity of the contents: equal when nothing has changed."""


class FileSource(Source):
    """Text, JSONL and Parquet files, sorted by path."""

    def __init__(self, name: str, root: Path, files: list[Path], text_field: str, *, skip_undecodable: bool) -> None:
        self.name = name
        self.files = files
        self.passed_over = Counter()
        self._root = root
        self._text_field = text_field
        self._skip_undecodable = skip_undecodable
        self.total_bytes = sum(path.stat().st_size for path in files)

    def documents(self) -> Iterator[str]:
        self.skipped = self.num_cut = 0
        for path in self.files:
            try:
                number = 0
                for number, text in enumerate(read_documents(path, self._text_field), start=1):  # noqa: B007
                    yield text
                self.num_cut += number > 1 and kind_of(path) not in ("jsonl", "parquet")
            except UndecodableError as error:
                if not self._skip_undecodable:
                    raise DataError(
                        f"{error} Convert it to UTF-8, or skip such files with --skip-undecodable."
                    ) from None
                self.skipped += 1

    def fingerprint(self) -> str:
        """Of every file's path below the root, size and time of modification."""
        digest = hashlib.sha256(f"{self._text_field} {self._skip_undecodable}\n".encode())
        for path in self.files:
            status = path.stat()
            name = path.relative_to(self._root).as_posix()
            digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
        return digest.hexdigest()


class HuggingFaceSource(Source):
    """One split of a data set on the Hugging Face hub, or of a local folder, streamed."""

    def __init__(self, name: str, split: str, text_field: str) -> None:
        self.name = name
        self._split = split
        self.passed_over = Counter()
        self._text_field = text_field

    def documents(self) -> Iterator[str]:
        dataset, _, config = self.name.removeprefix(HF_PREFIX).partition(":")
        try:
            from datasets import load_dataset

            # Older versions of the library run a script that comes with the data set.
            records = load_dataset(dataset, config or None, split=self._split, streaming=True, trust_remote_code=False)
            for number, record in enumerate(records):
                text = record.get(self._text_field)
                if not isinstance(text, str):
                    fields = ", ".join(sorted(record)[:20])
                    raise DataError(
                        f"{self.name}, record {number}: no text in the field '{self._text_field}'. "
                        f"Its fields: {fields}; name one with --text-field."
                    )
                yield text
        except DataError:
            raise
        except ImportError:
            raise DataError("hf: needs the `datasets` library: pip install 'llmscale[data]'.") from None
        except Exception as error:  # the hub client raises many kinds: network, missing names, scripts, ...
            summary = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(f"Cannot read {self.name}, split {self._split}: {summary[0]}") from error

    def fingerprint(self) -> str:
        """Of the names alone: whether the hub's copy has changed is not asked."""
        return hashlib.sha256(json.dumps([self.name, self._split, self._text_field]).encode()).hexdigest()


def open_source(
    spec: str,
    *,
    text_field: str = "text",
    hf_split: str = "train",
    glob: str | None = None,
    skip_undecodable: bool = False,
) -> Source:
    """The source that `--input` names: `hf:NAME[:CONFIG]`, `python-stdlib`, a file or a folder (recursive).

    `glob` chooses among a folder's files by name or relative path; without it, those with a known suffix are
    taken. Raises DataError when there is nothing to read.
    """
    if glob is not None and (spec.startswith(HF_PREFIX) or spec == STDLIB or os.path.isfile(spec)):
        raise DataError(f"--glob '{glob}' chooses among the files of a folder, and --input {spec} is none. Drop it.")
    if spec.startswith(HF_PREFIX):
        return HuggingFaceSource(spec, hf_split, text_field)
    if spec == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in _walk(root)[0] if not _STDLIB_EXCLUDED.intersection(path.relative_to(root).parts)]
        known = [path for path in files if path.suffix in TEXT_SUFFIXES]
        return FileSource(spec, root, known, text_field, skip_undecodable=True)
    path = Path(spec)
    if not path.is_dir():
        _check_file(path, spec)
        return FileSource(spec, path.parent, [path], text_field, skip_undecodable=skip_undecodable)
    found, others = _walk(path)
    files = [file for file in found if _is_wanted(file.relative_to(path), glob)]
    left_out = [file for file in others if file.is_dir() or _is_wanted(file.relative_to(path), glob)]
    note = _describe_left_out(path, left_out)
    if not files:
        wanted = (
            f"match --glob '{glob}'"
            if glob
            else "have a known suffix (.txt, .md, .jsonl, .parquet, .py, ...; .gz, .zst)"
        )
        raise DataError(f"--input {spec}: none of its files {wanted}.{f' {note}' if note else ''}")
    _refuse_shards(files, spec)
    source = FileSource(spec, path, files, text_field, skip_undecodable=skip_undecodable)
    source.left_out = note
    if glob is None:
        source.passed_over = Counter(file.suffix or file.name for file in set(found) - set(files))
    return source


def check_apart(spec: str, out: Path) -> None:
    """Refuse an `--out` that lies in `--input` or around it: the next run would read what this one wrote, and
    `--overwrite` would delete the text. Raises DataError."""
    if spec.startswith(HF_PREFIX):
        return
    # os.path, because Path.resolve raises where links form a loop.
    source = Path(os.path.realpath(sysconfig.get_path("stdlib") if spec == STDLIB else spec))
    place = Path(os.path.realpath(out))
    if source == place or source in place.parents or place in source.parents:
        raise DataError(
            f"--out {out} and --input {spec} lie within each other ({place} and {source}). Choose an --out beside the "
            "text."
        )


def _check_file(path: Path, spec: str) -> None:
    """Raises DataError for what is no file of text."""
    try:
        check_regular(path, follow_links=True)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"--input {spec} does not exist.{did_you_mean(spec, [STDLIB])} "
            f"Legal: a file, a folder, hf:NAME[:CONFIG] or {STDLIB}."
        ) from None
    except OSError as error:
        raise DataError(f"--input {spec} cannot be read: {error.strerror}.") from None
    _refuse_shards([path], spec)


def _refuse_shards(files: list[Path], spec: str) -> None:
    """A prepared set is tokens; its index and manifest, which are JSON, would pass for text. Raises DataError."""
    folders = {path.parent for path in files if path.suffix == ".json" or ".mds" in path.suffixes}
    for folder in sorted(folders):
        if next(folder.glob("*.mds*"), None) is not None or next(folder.glob("*/*.mds*"), None) is not None:
            raise DataError(
                f"--input {spec}: {folder} holds MDS shards, which are tokens or records of another program, not text. "
                "Give the text that they were made from, or choose among the files with --glob."
            )


def _walk(root: Path) -> tuple[list[Path], list[Path]]:
    """All regular files below, in the order of their paths, and what is neither a file nor a folder of this tree: links
    that lead out of it or to a folder, FIFOs, sockets, devices. Hidden ones count for neither."""
    files, others = [], []
    inside = os.path.realpath(root)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in [*names, *subfolders]:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.is_symlink() and (path.is_dir() or not Path(os.path.realpath(path)).is_relative_to(inside)):
                others.append(path)
            elif path.is_file():
                files.append(path)
            elif not path.is_dir():
                others.append(path)
    return sorted(files), sorted(others)


def _describe_left_out(root: Path, paths: list[Path]) -> str | None:
    if not paths:
        return None
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"Left out: {paths[0].relative_to(root)}{more}, no regular file of this folder (a link out of it or to a "
        "folder, a pipe, a device). Copy with `cp -rL` what should be read."
    )


def _is_wanted(relative: Path, glob: str | None) -> bool:
    if glob is not None:
        return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)
    return kind_of(relative) is not None
