"""`llmscale sample [RUN] [PROMPT]`: text from a run's newest weights; without a prompt, a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.cli import flags
from llmscale.cli.runs import runs_below
from llmscale.config.command_line import Need, flag, local_path, number, whole_number
from llmscale.error_handling import print_error
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.terminal.colour import is_terminal, paint
from llmscale.untrusted.terminal import make_visible, print_to_stderr

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.evaluate.conversation import Conversation
    from llmscale.evaluate.generate import TextChunk, TokenByPrompt
    from llmscale.evaluate.model_source import ModelSource
    from llmscale.model.gpt import GPT
    from llmscale.terminal.progress import Progress

_MAX_BATCH = 1024
_MAX_TEXTS = 10**6
_NEW_TOKENS = whole_number(0, limits.MAX_SEQ_LEN)
_TEMPERATURE = number(0, 1e6)
_TOP_K = whole_number(1, limits.MAX_VOCAB)
_TOP_P = number(0, 1, above=True)
_SEED = whole_number(0, limits.MAX_SEED - _MAX_TEXTS)
#: Commands of a conversation, each with the setting that it changes and the type of its value.
_SETTINGS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "/temperature": ("temperature", _TEMPERATURE),
    "/top-k": ("top_k", _TOP_K),
    "/top-p": ("top_p", _TOP_P),
    "/tokens": ("max_new_tokens", _NEW_TOKENS),
    "/seed": ("seed", _SEED),
}
#: Begins another conversation, typed or in a pipe.
_NEW = "/new"
_HELP = """\
A line is a prompt, which the model continues; an empty one begins a document.
  /temperature 0.8   0: always the most likely token
  /top-k 50          draw from the K most likely tokens
  /top-p 0.9         draw from the most likely tokens with this total probability
  /tokens 200        tokens to generate
  /seed 1337         seed of the next text; it counts up
  /new               forget the turns of --chat
  /help  /quit       Ctrl-D ends too, Ctrl-C stops a text"""


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `sample`."""
    parser = subparsers.add_parser(
        "sample",
        description="Continue each prompt. Without one, a terminal is a conversation and a pipe has a prompt per line.",
    )
    text = "run folder, checkpoint, or folder of a transformers model; default: the newest run below runs/"
    flags.add_run_argument(parser, text, "?")
    flags.add_step(parser)
    flags.add_own_data(parser)
    flags.add_base(parser)
    parser.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue")
    flag(parser, "--prompt TEXT", "one more text to continue; may be repeated", None, [], action="append")
    text = 'file of further prompts: one per line, or in FILE.jsonl objects with a "prompt"'
    flag(parser, "--prompts FILE", text, local_path)
    flag(parser, "--max-new-tokens N", "tokens to generate; fewer if the text ends", _NEW_TOKENS, 200)
    flag(parser, "--temperature X", "sampling temperature; 0: the most likely token", _TEMPERATURE, 0.8)
    flag(parser, "--top-k K", "draw from the K most likely tokens", _TOP_K, 50)
    flag(parser, "--top-p P", "draw from the most likely tokens with this total probability", _TOP_P)
    flag(parser, "--seed N", "seed of each prompt's first sample; further samples count up from it", _SEED, 1337)
    flag(parser, "--num-samples N", "texts per prompt", whole_number(1, _MAX_TEXTS), 1)
    flag(parser, "--batch-size N", "texts at once; they do not depend on it", whole_number(1, _MAX_BATCH), 8)
    flag(parser, "--no-cache", "do not cache keys and values: the same text with less memory, but slower")
    flag(parser, "--json", "print one JSON object per text")
    text = "prompts are the turns of one conversation, in the chat template of the data that the model was trained on"
    flag(parser, "--chat", text)
    parser.needs = [Need("num_samples batch_size json", "with --chat", lambda args: not args.chat)]
    parser.needs += [Need("top_k top_p", "with --temperature 0", lambda args: args.temperature)]
    parser.set_defaults(handler=_run)


@dataclass(frozen=True)
class _Request:
    prompt: str
    number: int
    """Number of the sample among those of its prompt, from 1."""
    tokens: list[int]
    seed: int


def _run(args: argparse.Namespace) -> int:
    from llmscale.checkpoint.inventory import use_checkpoint
    from llmscale.evaluate.model_source import find_model, open_model
    from llmscale.terminal.status_line import show_if_slow

    prompts = _prompts(args)
    find = partial(find_model, args.run or _newest_run(), print_to_stderr, args.step)
    folder = find()
    from llmscale.engine.deepspeed_patches import quiet_libraries

    with show_if_slow("importing torch"):
        from llmscale.evaluate.generate import encode_prompt

    def load(folder: Path) -> tuple[ModelSource, GPT]:
        source = open_model(folder, args.data, base=args.base)
        return source, source.load_model()

    quiet_libraries()
    with show_if_slow("loading the weights"):
        source, model = use_checkpoint(folder, find, load)
        sampler = _Sampler(model, source.tokenizer, partial(encode_prompt, source.tokenizer), args)
        if args.chat:
            from llmscale.evaluate.conversation import Conversation

            seq_len = source.shape.seq_len
            for_answer = min(args.max_new_tokens, seq_len // 2)
            talk = Conversation(source.tokenizer, source.chat_template, seq_len - for_answer)
            sampler = replace(sampler, encode=talk.ask, conversation=talk)
    if prompts:
        sampler.write(prompts)
    else:
        print_to_stderr(
            f"{source.folder}: {source.shape.num_parameters:,} parameters. Type a text to continue, or /help."
        )
        _converse(sampler, args)
    return 0


def _newest_run(folder: Path = Path("runs")) -> Path:
    """Return the newest run with a checkpoint, and print its name. Raises ConfigError unless there is one."""
    runs = [run for run in (runs_below(folder) if folder.is_dir() else []) if list_checkpoints(run.path)]
    running = [run for run in runs if run.state == "running"]
    if not runs:
        raise ConfigError(
            f"no RUN given, and no run below {folder.resolve()} has a checkpoint. Name a run folder, a checkpoint or a "
            "folder of a transformers model."
        )
    if len(running) > 1:
        names = ", ".join(str(run.path) for run in running[:5])
        raise ConfigError(f"no RUN given, and {len(running)} runs are running: {names}. Name one.")
    print_to_stderr(f"{runs[0].path}, the newest of {len(runs)} below {folder}" if len(runs) > 1 else f"{runs[0].path}")
    return runs[0].path


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, then those of the file, or else those of a pipe.

    Without any the list is empty on a terminal, which begins a conversation. Raises ConfigError elsewhere.
    """
    from llmscale.config.user_paths import check_prompt_text, parse_prompts, read_prompts

    prompts = [check_prompt_text(text, "the prompt") for text in (args.text, *args.prompt) if text is not None]
    if args.prompts is not None:
        prompts += read_prompts(args.prompts)
    if not prompts and sys.stdin is not None and not is_terminal(sys.stdin):
        prompts = parse_prompts(sys.stdin.buffer.read(), "stdin")
    if not prompts and (args.json or not (is_terminal(sys.stdin) and is_terminal(sys.stdout))):
        raise ConfigError('no prompt given. Name one after the run ("" begins a document), or use --prompts FILE.')
    if len(prompts) * args.num_samples > _MAX_TEXTS:
        raise ConfigError(
            f"{len(prompts):,} prompts with {args.num_samples:,} samples each are "
            f"{len(prompts) * args.num_samples:,} texts. At most {_MAX_TEXTS:,} are generated at once."
        )
    return prompts


def _converse(sampler: _Sampler, args: argparse.Namespace) -> None:
    """Continue each line that the user types, until /quit or the end of the input."""
    from llmscale.config.user_paths import check_prompt_text

    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to edit a line
    while True:
        try:
            line = input("> ")
            if line.strip() == "/quit":
                return
            if line.strip() == _NEW and sampler.conversation is not None:
                sampler.conversation.forget()
            elif line.startswith("/"):
                _change_setting(args, line)
            else:
                sampler.write([check_prompt_text(line, "the line")])
                args.seed += args.num_samples
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except LlmscaleError as error:
            print_error(str(error))


def _change_setting(args: argparse.Namespace, line: str) -> None:
    """Carry out a command of a conversation. Raises ConfigError for an unknown one and for an illegal value."""
    command, _, value = line.strip().partition(" ")
    if command == "/help":
        print(_HELP)
        return
    if command not in _SETTINGS:
        raise ConfigError(f"{command} is not a command: /help, /quit or {', '.join(_SETTINGS)}.")
    name, parse = _SETTINGS[command]
    try:
        setattr(args, name, parse(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{command} {error}.") from None


@dataclass(frozen=True)
class _Sampler:
    """A loaded model that continues prompts as the flags say."""

    model: GPT
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    """Function from a user's text to the token ids that the model continues."""
    args: argparse.Namespace
    conversation: Conversation | None = None
    """The conversation of --chat, of which prompts are turns."""

    def write(self, prompts: Sequence[str]) -> None:
        """Print the texts that continue the prompts. Raises ConfigError for prompts that do not fit the model."""
        from llmscale.evaluate.generate import check_memory, check_prompt
        from llmscale.terminal.progress import count_words, show_progress

        args = self.args
        shape = self.model.shape
        if self.conversation is not None and len(prompts) > 1:
            for prompt in prompts:
                print(_marked_prompt(f"> {prompt}"))
                if prompt.strip() == _NEW:
                    self.conversation.forget()
                else:
                    self.write([prompt])
            return
        tokens_of = [self.encode(prompt) for prompt in prompts]
        for place, tokens in enumerate(tokens_of, start=1):
            check_prompt(shape, tokens, f"prompt {place}" if len(prompts) > 1 else "the prompt")
        requests = [
            _Request(prompt, index + 1, tokens, args.seed + index)
            for prompt, tokens in zip(prompts, tokens_of, strict=True)
            for index in range(args.num_samples)
        ]
        batch_size = min(args.batch_size, len(requests))
        longest = max(map(len, tokens_of))
        check_memory(shape, batch_size, longest, args.max_new_tokens, use_cache=not args.no_cache)
        if self.conversation is not None:
            _stream(self.conversation.answer(self._generate(requests)))
            return
        if len(requests) == 1 and not args.json:  # a single text shows its own progress
            sys.stdout.write(_marked_prompt(requests[0].prompt))
            _stream(chunk.text for chunk in self._generate(requests))
            return
        with show_progress("Sampling", len(requests) * args.max_new_tokens, count_words("tokens")) as progress:
            for start in range(0, len(requests), batch_size):
                batch = requests[start : start + batch_size]
                _write(self._generate(batch, progress), batch, args, start + 1, progress)

    def _generate(self, batch: Sequence[_Request], progress: Progress | None = None) -> Iterator[TextChunk]:
        from llmscale.evaluate.generate import SamplingSettings, generate_text

        def counted(tokens: TokenByPrompt) -> TokenByPrompt:
            if progress is not None:
                progress.add(len(tokens))
            return tokens

        args = self.args
        return generate_text(
            self.model,
            self.tokenizer,
            [request.tokens for request in batch],
            SamplingSettings(args.max_new_tokens, args.temperature, args.top_k, args.top_p),
            seeds=[request.seed for request in batch],
            use_cache=not args.no_cache,
            agree=counted,
        )


def _stream(texts: Iterable[str]) -> None:
    """Print a single text while it is generated."""
    for text in texts:
        print(_coloured_text(text), end="", flush=True)
    print()


def _marked_prompt(prompt: str) -> str:
    return paint(make_visible(prompt), "bold", sys.stdout)


def _coloured_text(text: str) -> str:
    return paint(make_visible(text), "green", sys.stdout)


def _write(
    chunks: Iterator[TextChunk], batch: Sequence[_Request], args: argparse.Namespace, first: int, progress: Progress
) -> None:
    """Print several texts in the order of the prompts, each once all earlier ones are complete."""
    texts = [""] * len(batch)
    ends = [""] * len(batch)
    next_number = 0
    for chunk in chunks:
        texts[chunk.number] += chunk.text
        ends[chunk.number] = chunk.ended_by or ""
        while next_number < len(batch) and ends[next_number]:
            request = batch[next_number]
            text = texts[next_number]
            progress.clear()
            if args.json:
                values = {"prompt": request.prompt, "sample": request.number, "seed": request.seed}
                print(json.dumps({**values, "text": text, "ended_by": ends[next_number]}), flush=True)
            else:
                print(f"--- {first + next_number} ---")
                print(_marked_prompt(request.prompt) + _coloured_text(text), flush=True)
            next_number += 1
