"""Read prompts from a file: one per line, or JSON lines. No torch."""

from __future__ import annotations

import codecs
from pathlib import Path

from llmscale.errors import ConfigError
from llmscale.untrusted.documents import LINE_MAX_BYTES, MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import read_regular


def read_prompts(path: Path, flag: str = "--prompts") -> list[str]:
    r"""Read a text file with a prompt per line, or a .jsonl file of objects with a "prompt".

    Empty lines are skipped; `\r\n` ends a line as `\n` does. `flag` is the flag that named the file. Raises ConfigError
    for a file that cannot be read, has no prompt, or is not UTF-8 text.
    """
    try:
        contents = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    prompts = []
    # Some editors write a byte order mark.
    for number, line in enumerate(contents.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if (line := line.removesuffix(b"\r")).strip():
            where = f"{flag} {path}, line {number}"
            prompts.append(_prompt_of_json(line, where) if path.suffix == ".jsonl" else _text(line, where))
    if not prompts:
        raise ConfigError(f'{flag} {path} holds no prompt. Write one a line, or objects {{"prompt": ...}} in a .jsonl.')
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


def _text(line: bytes, where: str) -> str:
    return check_prompt_text(line.decode(errors="surrogateescape"), where)


def _prompt_of_json(line: bytes, where: str) -> str:
    prompt = parse_json(line, Rules(ConfigError), where).get("prompt")
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} has no text in "prompt". Write objects such as {{"prompt": "Once upon"}}.')
    return check_prompt_text(prompt, where)
