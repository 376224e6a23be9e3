"""Check the paths, names and prompts that users give. No torch."""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean
from llmscale.untrusted.documents import LINE_MAX_BYTES, MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import in_home, read_regular, unreadable_as
from llmscale.untrusted.terminal import is_visible

_T = TypeVar("_T")
#: Formats of evaluation items in JSON lines (llmscale.evaluate.tasks).
TASK_FORMATS = ("hellaswag", "multiple_choice", "likelihood", "text")
YAML_SUFFIXES = (".yaml", ".yml")
#: Linux's NAME_MAX and PATH_MAX; the latter includes the final zero byte.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4096
#: Kinds of files that cannot be replaced.
_SPECIAL = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
#: Folder of the copies, on a local disk.
COPIES_VARIABLE = "LLMSCALE_RUNS"
_COPIES = "~/.cache/llmscale/runs"
#: Schemes of the stores that have conditional writes.
RUN_SCHEMES = ("s3", "gs", "az", "azure")
#: Longest part of a URL: the copy has files beside the folder with slightly longer names.
_MAX_PART_BYTES = 200


def check_text(text: str) -> str:
    """Return `text` if it is not blank. Raises ValueError, whose text completes a sentence: 'must not be empty'."""
    if not text.strip():
        raise ValueError("must not be empty")
    # Bytes of another encoding arrive as lone surrogates, which file names may contain. Other surrogates are errors.
    try:
        encoded = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair (\\ud800 to \\udfff)") from None
    if not is_visible(encoded.decode(errors="replace")):
        raise ValueError("must not hold control characters or line breaks")
    return text


def checked(check: Callable[[Any], _T], value: object, where: str) -> _T:
    """Return the value that one of these checks returns. Raises ConfigError, which begins with `where`."""
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None


def check_path(value: object) -> Path:
    """Return a legal path on this machine. Raises ValueError like check_text."""
    if not isinstance(value, str | Path):
        raise ValueError("must be a path, as text")
    # Path("") is the current folder.
    text = check_text("" if value == Path() and not isinstance(value, str) else str(value))
    if _has_scheme(text):
        raise ValueError("must be a path on this machine, not a URL")
    if len(os.fsencode(text)) >= _MAX_PATH_BYTES:
        raise ValueError(f"must have less than {_MAX_PATH_BYTES:,} bytes, and has {len(os.fsencode(text)):,}")
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > _MAX_NAME_BYTES:
        raise ValueError(f"must not hold names of more than {_MAX_NAME_BYTES} bytes; one has {longest:,}")
    return Path(text)


def check_path_or_url(text: str) -> str:
    """Return a path, or text that begins with a scheme (s3://, hf:). Raises ValueError like check_path."""
    if not re.match(r"[A-Za-z][\w+.-]*:", check_text(text)):
        check_path(text)
    return text


def check_task_file(text: str) -> str:
    """Return a task that is FORMAT=FILE. Raises ConfigError."""
    name, _, path = text.partition("=")
    legal = ", ".join(f"{known}=FILE.jsonl" for known in TASK_FORMATS)
    if name not in TASK_FORMATS:
        if "=" in text:
            what = f"'{name}' is not a format of items.{did_you_mean(name, TASK_FORMATS)}"
        else:
            what = "it has no format."
        raise ConfigError(f"'{text}' is not a task: {what} Legal: {legal}.")
    try:
        check_path(path)
    except ValueError as error:
        raise ConfigError(f"'{text}' is not a task: its file {error}. Legal: {legal}.") from None
    return text


def check_task(text: str) -> str:
    """Return a task that is FORMAT=FILE, the YAML of one of lm-eval's, or the name of one. Raises ConfigError."""
    if text.endswith(YAML_SUFFIXES) and "=" not in text:
        if not os.path.isfile(text):
            raise ConfigError(f"task {text}: there is no such file. Name a task's YAML, or a task by its name.")
        return text
    is_name = re.fullmatch(r"[\w.()-]+", text) and not text.endswith((".jsonl", ".json")) and not os.path.isfile(text)
    if is_name:
        return text
    return check_task_file(text)


def check_output_file(flag: str, path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for an output file that cannot be written, before anything is computed."""
    named = f"{flag} {path}"
    if os.path.isdir(path):
        raise ConfigError(f"{named} is a folder; name a file.")
    if os.path.islink(path) and not os.path.exists(path):
        raise ConfigError(f"{named} is a symbolic link to nothing; name a file.")
    if _check_place(named, path) != path.parent:
        raise ConfigError(f"{named}: the folder {path.parent} does not exist.")
    if os.path.exists(path):
        kind = _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind:
            raise ConfigError(f"{named} is {kind}; name a file.")
        if not overwrite:
            raise ConfigError(f"{named} exists already. Name another file, or overwrite it with --force.")


def check_output_folder(flag: str, path: Path) -> None:
    """Raise ConfigError for an output folder that cannot be created or replaced."""
    _check_place(f"{flag} {path}", path / "_" if os.path.lexists(path) else path)


def _check_place(named: str, path: Path) -> Path:
    """Return the nearest existing folder above `path`. Raises ConfigError if it is not writable; creates nothing."""
    place = path.parent
    while not os.path.lexists(place):
        place = place.parent
    if not os.path.isdir(place):
        what = "a file" if os.path.exists(place) else "a symbolic link to nothing"
        raise ConfigError(f"{named}: {place} is {what}; name a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{named}: {place} may not be written to; name a folder elsewhere.")
    return place


def write_output_file(flag: str, path: Path, content: str | bytes) -> None:
    """Write the file that `flag` names, atomically. Raises ConfigError."""
    # Slow to import, and most commands write nothing.
    from llmscale.files.atomic_write import write_output

    try:
        write_output(path, content)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {path} cannot be written: {why}. Name another file.") from None


def read_prompts(path: Path, flag: str = "--prompts") -> list[str]:
    r"""Read a text file with a prompt per line, or a .jsonl file of objects with a "prompt"; see parse_prompts.

    `flag` is the flag that named the file. Raises ConfigError for a file that cannot be read or has no prompt.
    """
    with unreadable_as(ConfigError, f"{flag} {path}"):
        contents = read_regular(path, MAX_BYTES)
    prompts = parse_prompts(contents, f"{flag} {path}", is_json=path.suffix == ".jsonl")
    if not prompts:
        raise ConfigError(f'{flag} {path} holds no prompt. Write one a line, or objects {{"prompt": ...}} in a .jsonl.')
    return prompts


def parse_prompts(contents: bytes, source: str, *, is_json: bool = False) -> list[str]:
    r"""Return the prompt of each line.

    Empty lines are skipped; `\r\n` ends a line as `\n` does. Raises ConfigError, which names the `source`, for text
    that is not UTF-8.
    """
    prompts = []
    # Some editors write a byte order mark.
    for number, line in enumerate(contents.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if (line := line.removesuffix(b"\r")).strip():
            where = f"{source}, line {number}"
            if is_json:
                text = _json_prompt(line, where)
            else:
                text = line.decode(errors="surrogateescape")
            prompts.append(check_prompt_text(text, where))
    return prompts


def check_prompt_text(text: str, where: str) -> str:
    """Return the text. Raises ConfigError for NUL characters, text that is not UTF-8, or text that is too long."""
    if len(text) > LINE_MAX_BYTES:
        raise ConfigError(f"{where} has {len(text):,} characters; at most {LINE_MAX_BYTES:,} are read. Cut it.")
    if "\0" in text:
        raise ConfigError(f"{where} holds a NUL character. Remove it.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} is not UTF-8 text. Convert it.") from None
    return text


def _json_prompt(line: bytes, where: str) -> str:
    prompt = parse_json(line, Rules(ConfigError), where).get("prompt")
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} has no text in "prompt". Write objects such as {{"prompt": "Once upon"}}.')
    return prompt


Kind = Literal["train", "view"]


def copies_folder() -> Path:
    """Return the folder of the copies."""
    return Path(os.path.abspath(in_home(os.environ.get(COPIES_VARIABLE) or _COPIES)))


def copy_of(url: str, kind: Kind) -> Path:
    """Return the folder of the copy of a run or of one of its checkpoints. Raises ValueError, whose text completes a
    sentence, for a URL that cannot hold a run."""
    scheme, _, path = check_text(url).partition("://")
    parts = path.rstrip("/").split("/")
    is_legal = scheme in RUN_SCHEMES and len(parts) >= 2 and not any(part in ("", ".", "..") for part in parts)
    if not is_legal or set("?#*[]\\@") & set(url) or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        legal = ", ".join(f"{name}://BUCKET/NAME" for name in RUN_SCHEMES[:3])
        raise ValueError(f"must be a path, or a run in a store: {legal}, without ? # * [ ] @")
    return copies_folder() / kind / scheme / "/".join(parts)


def url_of(path: Path) -> str | None:
    """Return the URL of which `path` is the copy; None for any other path."""
    place = Path(os.path.abspath(path))
    folder = copies_folder()
    if place.is_relative_to(folder):
        parts = place.relative_to(folder).parts
    else:
        parts = ()
    if len(parts) >= 4 and parts[1] in RUN_SCHEMES:
        return f"{parts[1]}://{'/'.join(parts[2:])}"
    return None


def is_view(path: Path) -> bool:
    """Return whether `path` is in a copy that commands read."""
    return Path(os.path.abspath(path)).is_relative_to(copies_folder() / "view")


def shown(path: Path) -> str:
    """Return a run's name for messages: its URL, or its path."""
    return url_of(path) or str(path)


def _has_scheme(value: object) -> bool:
    return isinstance(value, str) and re.match(r"[A-Za-z][\w+.-]*://", value) is not None


def check_own_run(value: object) -> Path:
    """Return the folder of the run to train: a path, or the copy of a URL. Raises ValueError like check_path."""
    if _has_scheme(value):
        return copy_of(str(value), "train")
    return check_path(value)


def check_other_run(value: object) -> Path:
    """Return the folder of a run to read: a path, or the copy of a URL. Raises ValueError like check_path."""
    if _has_scheme(value):
        return copy_of(str(value), "view")
    return check_path(value)


def check_other_run_or_name(text: str) -> str:
    """Return a path, the copy of a URL, a word, or a published model's name (hf:). Raises ValueError."""
    if _has_scheme(text):
        return str(copy_of(text, "view"))
    check_path(text)
    return text
