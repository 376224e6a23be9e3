"""`llmscale sample RUN "prompt"`: text from a run's newest weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.cli import flags
from llmscale.config.command_line import Need, flag, local_path, number, whole_number
from llmscale.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from llmscale.config.command_line import FlagParser
    from llmscale.data.tokenizers.tokenizer import Tokenizer
    from llmscale.evaluate.generate import SamplingSettings, TextChunk, TokenByPrompt
    from llmscale.model.gpt import GPT
    from llmscale.terminal.progress import Progress

_MAX_BATCH = 1024
_MAX_TEXTS = 10**6


def add_parser(subparsers: _SubParsersAction[FlagParser]) -> None:
    """Add `sample`."""
    parser = subparsers.add_parser("sample")
    flags.add_run_argument(parser)
    flags.add_own_data(parser)
    flags.add_base(parser)
    parser.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue")
    flag(parser, "--prompt TEXT", "one more text to continue; may be repeated", None, [], action="append")
    text = 'file of further prompts: one per line, or in FILE.jsonl objects with a "prompt"'
    flag(parser, "--prompts FILE", text, local_path)
    text = "tokens to generate; fewer if the text ends"
    flag(parser, "--max-new-tokens N", text, whole_number(0, limits.MAX_SEQ_LEN), 200)
    flag(parser, "--temperature X", "sampling temperature; 0: the most likely token", number(0, 1e6), 0.8)
    flag(parser, "--top-k K", "draw from the K most likely tokens", whole_number(1, limits.MAX_VOCAB), 50)
    text = "draw from the most likely tokens with this total probability"
    flag(parser, "--top-p P", text, number(0, 1, above=True))
    text = "seed of each prompt's first sample; further samples count up from it"
    flag(parser, "--seed N", text, whole_number(0, limits.MAX_SEED - _MAX_TEXTS), 1337)
    flag(parser, "--num-samples N", "texts per prompt", whole_number(1, _MAX_TEXTS), 1)
    flag(parser, "--batch-size N", "texts at once; they do not depend on it", whole_number(1, _MAX_BATCH), 8)
    flag(parser, "--no-cache", "do not cache keys and values: the same text with less memory, but slower")
    flag(parser, "--json", "print one JSON object per text")
    parser.needs = [Need("top_k top_p", "with --temperature 0", lambda args: args.temperature)]
    parser.set_defaults(handler=_run)


@dataclass(frozen=True)
class _Request:
    prompt: str
    number: int
    """Number of the sample among those of its prompt, from 1."""
    tokens: list[int]
    seed: int


def _run(args: argparse.Namespace) -> int:
    from llmscale.evaluate.model_source import find_model, open_model
    from llmscale.terminal.progress import count_words, show_progress
    from llmscale.terminal.status_line import show_if_slow
    from llmscale.untrusted.terminal import print_to_stderr

    prompts = _prompts(args)
    folder = find_model(args.run, print_to_stderr)
    from llmscale.engine.deepspeed_patches import quiet_libraries

    with show_if_slow("importing torch"):
        from llmscale.evaluate.generate import SamplingSettings, check_memory, check_prompt, encode_prompt

    quiet_libraries()
    settings = SamplingSettings(args.max_new_tokens, args.temperature, args.top_k, args.top_p)
    with show_if_slow("loading the weights"):
        source = open_model(folder, args.data, base=args.base)
        model, shape = source.load_model(), source.shape
    tokens_of = [encode_prompt(source.tokenizer, prompt) for prompt in prompts]
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
    # A single text shows its own progress.
    streams = len(requests) == 1 and not args.json
    with show_progress("Sampling", len(requests) * args.max_new_tokens, count_words("tokens")) as progress:
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            if streams:
                _stream(_generate(model, source.tokenizer, batch, settings, args), batch[0])
            else:
                chunks = _generate(model, source.tokenizer, batch, settings, args, progress)
                _write(chunks, batch, args, start + 1, progress)
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, then those of the file."""
    from llmscale.config.user_paths import check_prompt_text, read_prompts

    given = [*([] if args.text is None else [args.text]), *args.prompt]
    prompts = [check_prompt_text(text, "the prompt") for text in given]
    if args.prompts is not None:
        prompts += read_prompts(args.prompts)
    if not prompts:
        raise ConfigError('no prompt given. Name one after the run ("" begins a document), or use --prompts FILE.')
    if len(prompts) * args.num_samples > _MAX_TEXTS:
        raise ConfigError(
            f"{len(prompts):,} prompts with {args.num_samples:,} samples each are "
            f"{len(prompts) * args.num_samples:,} texts. At most {_MAX_TEXTS:,} are generated at once."
        )
    return prompts


def _generate(
    model: GPT,
    tokenizer: Tokenizer,
    batch: Sequence[_Request],
    settings: SamplingSettings,
    args: argparse.Namespace,
    progress: Progress | None = None,
) -> Iterator[TextChunk]:
    from llmscale.evaluate.generate import generate_text

    def counted(tokens: TokenByPrompt) -> TokenByPrompt:
        if progress is not None:
            progress.add(len(tokens))
        return tokens

    return generate_text(
        model,
        tokenizer,
        [request.tokens for request in batch],
        settings,
        seeds=[request.seed for request in batch],
        use_cache=not args.no_cache,
        agree=counted,
    )


def _stream(chunks: Iterator[TextChunk], request: _Request) -> None:
    """Print a single text while it is generated."""
    from llmscale.untrusted.terminal import make_visible

    sys.stdout.write(make_visible(request.prompt))
    for chunk in chunks:
        sys.stdout.write(make_visible(chunk.text))
        sys.stdout.flush()
    print()


def _write(
    chunks: Iterator[TextChunk], batch: Sequence[_Request], args: argparse.Namespace, first: int, progress: Progress
) -> None:
    """Print several texts in the order of the prompts, each once all earlier ones are complete."""
    from llmscale.untrusted.terminal import make_visible

    texts, ends, next_number = [""] * len(batch), [""] * len(batch), 0
    for chunk in chunks:
        texts[chunk.number] += chunk.text
        ends[chunk.number] = chunk.ended_by or ""
        while next_number < len(batch) and ends[next_number]:
            request, text = batch[next_number], texts[next_number]
            progress.clear()
            if args.json:
                print(_as_json(request, text, ends[next_number]), flush=True)
            else:
                print(f"--- {first + next_number} ---\n{make_visible(request.prompt + text)}", flush=True)
            next_number += 1


def _as_json(request: _Request, text: str, ended_by: str) -> str:
    return json.dumps(
        {"prompt": request.prompt, "sample": request.number, "seed": request.seed, "text": text, "ended_by": ended_by}
    )
