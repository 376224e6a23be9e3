"""`llmscale data prepare` and `train-tokenizer`, and the flags for reading text, which `clean` has too."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale import limits
from llmscale.config.command_line import FlagParser, Need, flag, local_path, nonblank, number, path_or_url, whole_number
from llmscale.config.user_paths import check_output_folder
from llmscale.errors import ConfigError
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.table import output_width, wrap_line
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:  # imported when a command runs: --help must not load torch
    from collections.abc import Iterator

    from llmscale.data.prepare.chat import ChatSettings
    from llmscale.data.prepare.output_folder import Destination
    from llmscale.data.prepare.prepare_set import Prepared
    from llmscale.data.prepare.sources.source import PassedOver, Source
    from llmscale.data.shards.manifest import Manifest
    from llmscale.data.tokenizers.tokenizer import Tokenizer

TOKENIZER_METAVAR = "gpt2|bytes|FILE.tiktoken|FOLDER|NAME"


def _may_have_splits(args: argparse.Namespace) -> bool:
    return any(spec.startswith("hf:") or "://" in spec or Path(spec).is_dir() for spec in args.input)


def add_input_flags(parser: FlagParser) -> None:
    """Add --input and the flags for reading it."""
    parser.needs = [
        Need("hf_split", "an --input hf:NAME or a folder of save_to_disk", _may_have_splits),
    ]
    parser.add_argument(
        "--input",
        type=path_or_url,
        required=True,
        action="append",
        metavar="PATH|PATTERN|URL|-|hf:NAME[:CONFIG]|python-stdlib",
        help="text (one document a file), .jsonl, .csv, .tsv, .parquet, .arrow or a .tar of them, also "
        ".gz/.zst/.bz2/.xz; a folder (also of save_to_disk), or a "
        "pattern such as 'crawl/*.jsonl.zst' or 's3://bucket/crawl/*.jsonl.zst' (gs, az, "
        "hf://datasets/); tokens: .bin of nanoGPT or llm.c, .npy, or a folder of MDS shards; stdin; a Hugging "
        "Face dataset; or this Python's standard library: its sources, or (python-docs) its documentation alone. May "
        "be repeated; inputs are read in this order",
    )
    text = "field or column with the text, in records of any format; page.text is a field within a field; default: text"
    flag(parser, "--text-field NAME", text, nonblank)
    flag(parser, "--hf-split NAME", "split of a hf: dataset, or of a folder of save_to_disk", nonblank, "train")
    flag(parser, "--glob PATTERN", "files to read from a folder, for example '*.py'", nonblank)
    flag(parser, "--skip-undecodable", "skip and count texts that are not UTF-8")


def add_max_rejected(parser: FlagParser) -> None:
    """Add --max-rejected."""
    text = "malformed records (not JSON, not UTF-8, without text, too long) to set aside in OUT.rejected.jsonl; 0: fail"
    flag(parser, "--max-rejected N", f"{text} at the first one", whole_number(0, 10**12), 0)


def add_prepare(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `prepare` to `llmscale data`."""
    example = "llmscale data prepare --input 'texts/*.txt' --out data/mine"
    parser = commands.add_parser("prepare", help="tokenise text into MDS shards with a manifest", example=example)
    add_input_flags(parser)
    text = "folder of the dataset, or s3://BUCKET/PATH (gs, az, hf://datasets/ORGANISATION/NAME), to which complete "
    flag(parser, "--out DIR|URL", f"{text}shards are uploaded", path_or_url, required=True)
    text = "folder in which a dataset for a URL is prepared; needs space for the tokens once while they are shuffled; "
    flag(parser, "--work-dir DIR", f"{text}default: ~/.cache/llmscale/prepare", local_path)
    text = "FOLDER holds a model's tokenizer.json, for example to continue its pre-training; NAME is a model on the "
    text += "Hugging Face Hub, ORGANISATION/NAME[@REVISION]; characters: those of the text, and bytes for all others"
    flag(parser, "--tokenizer gpt2|bytes|characters|FILE|FOLDER|NAME", text, path_or_url, "gpt2")
    text = "the model's token that ends a document, for example '<|end_of_text|>'; default: as its files specify"
    flag(parser, "--eot-token TEXT", text, nonblank)
    flag(parser, "--parse-special-tokens", "encode special tokens that are written in a text as such; default: as text")
    flag(parser, "--seq-len T", "context length in tokens", whole_number(1, limits.MAX_SEQ_LEN), 1024)
    flag(parser, "--val-fraction F", "fraction of documents for validation", number(0, 0.5), 0.01)
    text = "seed of the choice of validation documents and of the shuffle"
    flag(parser, "--seed N", text, whole_number(0, limits.MAX_SEED), 0)
    flag(parser, "--no-shuffle", "keep training windows in the order of the text; default: shards are random samples")
    flag(parser, "--shard-mb MIB", "largest shard in MiB", whole_number(1, 4095), 64)
    text = "stream: windows of the text as a whole; best-fit: rows that start at a document and are filled with others "
    text += "that fit, without the ends of some; pad: one conversation a row; default: stream, with --chat best-fit"
    flag(parser, "--packing", text, choices=["stream", "best-fit", "pad"])
    text = "records are conversations: messages of role and content, prompt and completion, ShareGPT's conversations, "
    flag(parser, "--chat", f"{text}Alpaca's instructions; the tokens of the assistant's turns are the targets")
    text = "targets: the assistant's turns with their ends, or all tokens"
    flag(parser, "--train-on", text, default="assistant", choices=["assistant", "all"])
    flag(parser, "--chat-template FILE", "Jinja template; default: the tokenizer's own, else a simple one", local_path)
    text = "token that ends the assistant's turns, for a template that ends them with none"
    flag(parser, "--end-of-turn TOKEN", text, nonblank)
    flag(parser, "--truncate", "cut conversations that are longer than a row; default: leave them out")
    flag(parser, "--compression", "compress the shards; default: not", default="", choices=["zstd"])
    flag(parser, "--workers N", "tokenising threads; default: one per core", whole_number(1, limits.MAX_WORKERS))
    text = "encoder: gigatoken, the tokenizer's own library (reference), or gigatoken if its tokens are the same (auto)"
    flag(parser, "--encoder", text, default="auto", choices=["auto", "gigatoken", "reference"])
    add_max_rejected(parser)
    flag(parser, "--overwrite", "replace a dataset that was prepared differently")
    parser.needs = [
        *parser.needs,
        Need("work_dir", "an --out that is a URL", lambda args: "://" in args.out),
        Need("train_on chat_template truncate end_of_turn", "--chat", lambda args: args.chat),
        Need("seed", "with --no-shuffle and --val-fraction 0", lambda args: not args.no_shuffle or args.val_fraction),
    ]
    parser.set_defaults(handler=_prepare)


def add_train_tokenizer(commands: argparse._SubParsersAction[FlagParser]) -> None:
    """Add `train-tokenizer` to `llmscale data`."""
    example = "llmscale data train-tokenizer --input 'texts/*.txt' --out tokenizers/mine"
    parser = commands.add_parser("train-tokenizer", help="train a byte-level BPE tokenizer on text", example=example)
    add_input_flags(parser)
    flag(parser, "--out DIR", "folder of the tokenizer", local_path, required=True)
    flag(parser, "--vocab-size N", "tokens to learn", whole_number(257, limits.MAX_VOCAB), 32768)
    parser.set_defaults(handler=_train_tokenizer)


def open_source_of(args: argparse.Namespace) -> Source:
    """Open the inputs, and print which files are not read. Raises DataError, also if --out is among them."""
    from llmscale.data.prepare.sources.open_source import check_apart, check_data_sets, open_source
    from llmscale.data.prepare.sources.source import describe_passed_over

    check_apart(args.input, args.out)
    source = open_source(
        *args.input,
        text_field=args.text_field,
        hf_split=args.hf_split,
        glob=args.glob,
        skip_undecodable=args.skip_undecodable,
        out=args.out,
        is_chat=getattr(args, "chat", False),
    )
    check_data_sets(args.input)
    for line in describe_passed_over(source.passed_over):
        print_visible(line, file=sys.stderr)
    return source


def _prepare(args: argparse.Namespace) -> int:
    from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
    from llmscale.data.tokenizers.hugging_face import HuggingFaceTokenizer

    args.out = _check_out(args)
    source = open_source_of(args)
    already_listed = set(source.passed_over)
    tokenizer = _open_tokenizer(args, source)
    chat = _chat_settings(args, tokenizer)
    options = PrepareOptions(
        seq_len=args.seq_len,
        val_fraction=args.val_fraction,
        seed=args.seed,
        shuffle=not args.no_shuffle,
        shard_bytes=args.shard_mb << 20,
        compression=args.compression,
        packing=args.packing or ("best-fit" if args.chat else "stream"),
        parse_special=args.parse_special_tokens,
        chat=chat,
    )
    destination = _open_destination(args)
    start_s = time.monotonic()
    prepared = prepare(
        source,
        destination,
        tokenizer,
        options,
        num_workers=args.workers,
        encoder=args.encoder,
        max_rejected=args.max_rejected,
    )
    elapsed_s = time.monotonic() - start_s
    print_manifest(prepared.manifest, str(args.out))
    if prepared.reused:
        print_visible("Already prepared: nothing to do.")
    else:
        num_tokens = sum(split.num_tokens for split in prepared.manifest.splits.values())
        print_visible(f"Prepared in {elapsed_s:.1f} s, {num_tokens / elapsed_s:,.0f} tokens/s.")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            print_visible(tokenizer.describe_ends(), file=sys.stderr)
        unread = source.passed_over - already_listed
        for line in _describe_choices(prepared, unread, destination.beside, args.val_fraction):
            print_visible(line, file=sys.stderr)
    return 0


def _open_tokenizer(args: argparse.Namespace, source: Source) -> Tokenizer:
    """Return the tokenizer of --tokenizer, or the one of the source's characters. Raises DataError."""
    from llmscale.data.tokenizers.load_tokenizer import CHARACTERS, check_end_of_text, load_tokenizer
    from llmscale.data.tokenizers.train_tokenizer import make_character_tokenizer

    eot_token = args.eot_token or ""
    parses = args.parse_special_tokens or args.chat
    if args.tokenizer != CHARACTERS:
        return load_tokenizer(args.tokenizer, eot_token=eot_token, parse_special=parses)
    check_end_of_text(CHARACTERS, eot_token)
    return make_character_tokenizer(source, parse_special=parses)


def _chat_settings(args: argparse.Namespace, tokenizer: Tokenizer) -> ChatSettings | None:
    """Return the choices of --chat, or None without it. Raises ConfigError, DataError."""
    from llmscale.data.prepare.chat import ChatSettings, describe_template, find_template
    from llmscale.untrusted.documents import CONFIG_MAX_BYTES
    from llmscale.untrusted.paths import read_regular, unreadable_as

    if args.packing == ("stream" if args.chat else "pad"):
        if args.chat:
            legal = "best-fit and pad"
        else:
            legal = "stream and best-fit; pad needs --chat"
        raise ConfigError(
            f"--packing {args.packing} is for {'text' if args.chat else 'conversations'}. Legal: {legal}."
        )
    if not args.chat:
        return None
    source = None
    if args.chat_template is not None:
        with unreadable_as(ConfigError, f"--chat-template {args.chat_template}"):
            source = read_regular(args.chat_template, CONFIG_MAX_BYTES).decode(errors="replace")
    template = find_template(tokenizer, source, args.end_of_turn or "")
    for line in describe_template(tokenizer, template):
        print_visible(line, file=sys.stderr)
    return ChatSettings(template, args.train_on, args.truncate, args.packing != "pad")


def _check_out(args: argparse.Namespace) -> Path | str:
    """Return --out as a folder or a URL. Raises DataError before anything is opened."""
    from llmscale.data.storage.schemes import check_not_forgotten, check_out_url, is_url

    if is_url(args.out):
        if args.work_dir is not None:
            check_output_folder("--work-dir", args.work_dir)
        return check_out_url(args.out)
    check_not_forgotten(args.out, "--out")
    check_output_folder("--out", Path(args.out))
    return Path(args.out)


def _open_destination(args: argparse.Namespace) -> Destination:
    """Open the destination. Raises DataError for missing credentials or an unknown bucket."""
    from llmscale.data.prepare.output_folder import LocalFolder
    from llmscale.data.prepare.remote_set import DEFAULT_WORK_DIR, RemoteSet

    if isinstance(args.out, str):
        return RemoteSet(args.out, work_dir=args.work_dir or DEFAULT_WORK_DIR, overwrite=args.overwrite)
    return LocalFolder(args.out, overwrite=args.overwrite)


def _describe_choices(
    prepared: Prepared, passed_over: set[PassedOver], beside: Path, val_fraction: float
) -> Iterator[str]:
    """Yield notes on decisions that the user did not ask for."""
    from llmscale.data.prepare.prepare_set import describe_reading

    yield from describe_reading(passed_over, beside, prepared.num_rejected, prepared.num_cut)
    splits = prepared.manifest.splits
    num_tokens = sum(split.num_tokens for split in splits.values())
    if (val := splits.get("val")) is None:
        window = prepared.manifest.seq_len + 1
        why = f"the text is too short, {num_tokens:,} tokens: training and validation need a window of {window:,} each"
        yield f"No validation split: {why if val_fraction else '--val-fraction is 0'}."
    elif prepared.note:
        yield prepared.note
    elif val.num_tokens > max(2 * val_fraction, val_fraction + 0.02) * num_tokens:
        num_documents = sum(split.num_documents for split in splits.values())
        yield (
            f"Validation has {val.num_tokens / num_tokens:.0%} of the tokens, not {val_fraction:.0%}: "
            f"{val.num_documents:,} of {num_documents:,} documents, which stay complete. Another --seed chooses others."
        )


def _train_tokenizer(args: argparse.Namespace) -> int:
    from llmscale.data.tokenizers.train_tokenizer import train_tokenizer

    check_output_folder("--out", args.out)
    tokenizer = train_tokenizer(open_source_of(args), args.out, args.vocab_size)
    print_visible(f"Trained {tokenizer.vocab_size:,} tokens into {args.out} (sha256 {tokenizer.sha256[:12]}).")
    return 0


def print_manifest(manifest: Manifest, folder: str) -> None:
    """Print a dataset's manifest in a few lines."""
    from llmscale.data.prepare.prepare_set import describe_left_out

    print_visible_fitting(
        f"{folder}: {manifest.source}, tokenizer {manifest.tokenizer} ({manifest.vocab_size:,} tokens), "
        f"seq_len {manifest.seq_len}, {manifest.dtype}, fingerprint {manifest.fingerprint[:12]}"
    )
    for name, split in manifest.splits.items():
        share = split.cropped_tokens / split.num_tokens
        if manifest.is_best_fit:
            cropped = f"{split.cropped_tokens:,} tokens cropped, {share:.1%} "
        else:
            cropped = ""
        if manifest.chat is not None:
            targets = manifest.chat.num_targets.get(name, 0)
            places = split.num_samples * (manifest.seq_len + 1)
            print_visible_fitting(
                f"  {name:5} {split.num_documents:,} conversations, {split.num_tokens:,} tokens, of them {targets:,} "
                f"targets ({targets / split.num_tokens:.0%}), {split.num_samples:,} rows "
                f"({1 - split.num_tokens / places:.0%} padding), {len(split.shards)} shards{_entropy(manifest, name)}"
            )
            continue
        print_visible_fitting(
            f"  {name:5} {split.num_documents:,} documents, {split.num_tokens:,} tokens, {split.num_samples:,} "
            f"samples ({cropped}+ {split.tail_tokens:,} tail tokens), {len(split.shards)} shards, "
            f"{split.bytes_per_token:.2f} bytes/token{_entropy(manifest, name)}"
        )
    if manifest.unigram_entropy("train") is not None:
        of = "" if manifest.chat is None else " of the targets"
        print(f"  unigram entropy: the loss that word frequencies{of} alone would give")
    if not manifest.is_shuffled:
        print("  training windows in the order of the text")
    if manifest.is_best_fit and manifest.chat is None:
        print("  rows start at a document; ends of documents that fit into no row are left out")
    for line in describe_left_out(manifest.chat.left_out) if manifest.chat else ():
        print_visible_fitting(f"  {line}")
    if manifest.note_on_bytes:
        print_visible_fitting(f"  {manifest.note_on_bytes}")
    if manifest.skipped_documents or manifest.empty_documents:
        print_visible(
            f"  left out: {count_nouns(manifest.skipped_documents, 'malformed record')}, "
            f"{count_nouns(manifest.empty_documents, 'empty document')}"
        )


def _entropy(manifest: Manifest, split: str) -> str:
    """Return the end of a line with a split's unigram entropy, if that is known."""
    entropy = manifest.unigram_entropy(split)
    return "" if entropy is None else f", unigram entropy {entropy:.3f} nats"


def print_visible_fitting(line: str) -> None:
    """Print a line with untrusted text, wrapped to the width of stdout."""
    for part in wrap_line(line, output_width()):
        print_visible(part)
