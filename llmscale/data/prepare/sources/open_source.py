"""What `--input` names: files, folders, globs, Hugging Face sets, Python's standard library; one or several of them."""

from __future__ import annotations

import glob as globbing
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path, PurePath

from llmscale.data.prepare.output_folder import rejected_path
from llmscale.data.prepare.sources.clean_folder import load_clean_manifest, without_removed
from llmscale.data.prepare.sources.file_source import FileSource
from llmscale.data.prepare.sources.formats import TEXT, format_of
from llmscale.data.prepare.sources.hugging_face import HF_PREFIX, HuggingFaceSource
from llmscale.data.prepare.sources.input_files import LocalFile, describe_left_out, matches, walk
from llmscale.data.prepare.sources.mds import INDEX_NAME, LocalMdsFolder, MdsSource
from llmscale.data.prepare.sources.remote_files import has_pattern, open_remote
from llmscale.data.prepare.sources.several import SeveralSources
from llmscale.data.prepare.sources.source import ReadOptions, Source
from llmscale.data.prepare.sources.stdin import STDIN, StandardInput
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.data.storage.schemes import check_not_forgotten, is_url
from llmscale.errors import DataError, did_you_mean
from llmscale.untrusted.hub import forgotten_prefix
from llmscale.untrusted.paths import check_regular

STDLIB = "python-stdlib"
#: Parts of the standard library's folder that are not its own text.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
_LEGAL = (
    "a file, a folder, a pattern such as 'crawl/*.jsonl.zst', s3:// or another store's URL, - for stdin, "
    f"hf:NAME[:CONFIG] or {STDLIB}"
)


def open_source(
    *specs: str,
    text_field: str | None = None,
    hf_split: str = "train",
    glob: str | None = None,
    skip_undecodable: bool = False,
    out: Path | str | None = None,
) -> Source:
    """The source that one or several `--input` name, in the order given: each a file, a folder (recursive), a pattern,
    any of these in a store (`s3://`), MDS shards, `-`, `hf:NAME[:CONFIG]` or `python-stdlib`.

    `glob` chooses among folders' files by name or relative path; without it, those with a known suffix are taken.
    What is written to `out`, a folder or a URL, and beside it matches no pattern, so that the same command finds the
    same files when it is given again. Raises DataError when there is nothing to read, and for a `text_field` that no
    record of the input can have.
    """
    if glob is not None and not any(os.path.isdir(spec) or (is_url(spec) and not has_pattern(spec)) for spec in specs):
        raise DataError(
            f"--glob '{glob}' chooses among the files of a folder, and --input {', '.join(specs)} is none. Drop it."
        )
    options = ReadOptions(text_field or "text", skip_undecodable)
    sources = [_open_one(spec, options, hf_split, glob, out) for spec in specs]
    if text_field is not None and not any(source.has_fields() for source in sources):
        raise DataError(
            f"--text-field '{text_field}' chooses a field of JSON, Parquet, MDS or hf: records, and --input "
            f"{', '.join(specs)} has none. Drop it."
        )
    return sources[0] if len(sources) == 1 else SeveralSources(sources)


def _open_one(spec: str, options: ReadOptions, hf_split: str, glob: str | None, out: Path | str | None) -> Source:
    if is_url(spec):
        return open_remote(spec, options, glob, out if isinstance(out, str) else None)
    check_not_forgotten(spec, "--input")
    if spec.startswith(HF_PREFIX):
        return HuggingFaceSource(spec, hf_split, options)
    if spec == STDLIB:
        return _open_stdlib(options)
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
    files = [path for path in walk(root)[0] if not _STDLIB_EXCLUDED.intersection(path.relative_to(root).parts)]
    known = [LocalFile(path, root) for path in files if path.suffix in TEXT.suffixes]
    return FileSource(STDLIB, known, ReadOptions(options.text_field, skip_undecodable=True, is_plain=True))


def _open_folder(path: Path, spec: str, options: ReadOptions, glob: str | None) -> Source:
    found, others = walk(path)
    found = without_removed(found, path, _is_cleaned)

    def is_wanted(file: Path) -> bool:
        relative = file.relative_to(path)
        return matches(relative, glob) if glob is not None else _is_read_unasked(relative)

    files = [file for file in found if is_wanted(file)]
    note = describe_left_out(path, [file for file in others if file.is_dir() or is_wanted(file)])
    if not files:
        wanted = (
            f"match --glob '{glob}'"
            if glob
            else "have a known suffix (.txt, .md, .jsonl, .parquet, .py, ...; .gz, .zst)"
        )
        raise DataError(f"--input {spec}: none of its files {wanted}.{f' {note}' if note else ''}")
    _refuse_shards(files, spec)
    source = FileSource(spec, [LocalFile(file, path) for file in files], options)
    source.left_out = note
    if glob is None:
        source.passed_over.update(file.suffix or file.name for file in set(found) - set(files))
    return source


def _is_read_unasked(path: PurePath) -> bool:
    kind = format_of(path)
    return kind is not None and kind.in_folders


def _is_cleaned(folder: PurePath) -> bool:
    return load_clean_manifest(Path(folder)) is not None


def _is_foreign_mds(folder: Path) -> bool:
    """Whether it holds MDS shards that `llmscale data prepare` did not write."""
    is_prepared = any((place / MANIFEST_NAME).exists() for place in (folder, folder.parent))
    return not is_prepared and next(folder.glob("*.mds*"), None) is not None


def _open_pattern(spec: str, options: ReadOptions, out: Path | None) -> Source:
    """The files that match, sorted; `**` goes into folders."""
    files = [Path(name) for name in sorted(globbing.glob(spec, recursive=True)) if os.path.isfile(name)]
    if out is not None:
        files = [file for file in files if not _is_written_to(out, file)]
    if not files:
        raise DataError(f"--input {spec}: no file matches. Legal: {_LEGAL}.")
    files = without_removed(files, _before_pattern(Path(spec)), _is_cleaned)
    if not files:
        raise DataError(f"--input {spec}: what matches is what `data clean` removed, or says of it. Name its folder.")
    _refuse_shards(files, spec)
    root = Path(os.path.commonpath([file.parent for file in files]))
    return FileSource(spec, [LocalFile(file, root) for file in files], options)


def _is_written_to(out: Path, file: Path) -> bool:
    """Whether it is what a command writes that writes `out`."""
    ours, place = Path(os.path.realpath(out)), Path(os.path.realpath(file))
    return ours in place.parents or place == rejected_path(ours)


def _before_pattern(path: Path) -> Path:
    """What stands before the first part with a pattern."""
    return next(folder for folder in path.parents if not globbing.has_magic(str(folder)))


def check_apart(specs: Sequence[str], out: Path | str) -> None:
    """Refuse an `--out`, a folder or a URL, that lies in an `--input` or around it: the next run would read what this
    one wrote, and `--overwrite` would delete the text. Raises DataError."""
    for spec in specs:
        if is_url(spec) and isinstance(out, str):
            ours, theirs = f"{out.rstrip('/')}/", f"{spec.rstrip('/')}/"
            if ours.startswith(theirs) or theirs.startswith(ours):
                raise DataError(
                    f"--out {out} and --input {spec} lie within each other. Choose an --out beside the text."
                )
        if is_url(spec) or isinstance(out, str) or spec.startswith(HF_PREFIX) or spec == STDIN:
            continue
        # os.path, because Path.resolve raises where links form a loop.
        source = Path(os.path.realpath(sysconfig.get_path("stdlib") if spec == STDLIB else spec))
        place = Path(os.path.realpath(out))
        if source == place or source in place.parents or place in source.parents:
            raise DataError(
                f"--out {out} and --input {spec} lie within each other ({place} and {source}). Choose an --out beside "
                "the text."
            )


def _check_file(path: Path, spec: str) -> None:
    """Raises DataError for what is no file of text."""
    try:
        check_regular(path, follow_links=True)
    except (FileNotFoundError, NotADirectoryError):
        hint = forgotten_prefix(spec) or did_you_mean(spec, [STDLIB])
        raise DataError(f"--input {spec} does not exist.{hint} Legal: {_LEGAL}.") from None
    except OSError as error:
        raise DataError(f"--input {spec} cannot be read: {error.strerror}.") from None
    _refuse_shards([path], spec)


def _refuse_shards(files: list[Path], spec: str) -> None:
    """A prepared set is tokens; its index and manifest, which are JSON, would pass for text. Raises DataError."""
    folders = {path.parent for path in files if path.suffix == ".json" or ".mds" in path.suffixes}
    for folder in sorted(folders):
        if next(folder.glob("*.mds*"), None) is not None or next(folder.glob("*/*.mds*"), None) is not None:
            raise DataError(
                f"--input {spec}: {folder} holds MDS shards, not text. Of a prepared set give the text that it was "
                "made from, of another program's shards the folder of their index.json, or choose files with --glob."
            )
